"""What is collected once, when a run starts: environment, packages, system, resolved settings."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.config.collect import job, packages, resolved, system
from msprobe_engine.config.environment.variables import Environment
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.guard import raise_of_training, suppress_faults
from msprobe_engine.core.log import debug
from msprobe_engine.formats.pack import entries
from msprobe_integrations.torch.config import sources as config_sources
from msprobe_integrations.torch.tensors.devices import modules

_KEY = "msprobe/config_check/run"


def ranks() -> tuple[int, int]:
    """(rank, world size): of the process group, else as the launcher's environment says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return job.rank(), job.world_size()


def run_token() -> str | None:
    """Equal on all ranks of this run, and on no other: made by whoever asks first, shared over the job's key-value store. No collective.
    None: there is none."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            token: bytes = store.compare_set(_KEY, "", uuid.uuid4().hex)
            return token.decode()
        except Exception as error:  # a store that cannot compare, or none
            raise_of_training(error)
            debug(f"config check: no common name for the run ({type(error).__name__}: {error})")
    return None


def pack_writer(path: Any, step_unit: str = "forward pass", *, keep_previous: bool = False) -> PackWriter:
    """A writer for this rank of this run; errors as `PackWriter` has them."""
    rank, world_size = ranks()
    return PackWriter(
        path,
        rank=rank,
        world_size=world_size,
        framework="pytorch",
        step_unit=step_unit,
        run=run_token(),
        keep_previous=keep_previous,
    )


class Start:
    """What is known now is taken now; what takes long and does not change is left to `entries`, which another thread may call.

    Args:
        environment: as it may be written.
        models, optimizers: of the training, as far as they are there.
        frame: where the calls in progress begin, for finding Trainers and engines.
    """

    def __init__(
        self, rank: int, environment: Environment, models: list[Any], optimizers: Any = None, frame: FrameType | None = None
    ) -> None:
        self.rank = rank
        with torch.no_grad():
            self.settings = config_sources.collect(config_sources.Reach.of(models, optimizers, frame))
        self._environment = environment
        self._system = collect()

    def entries(self) -> dict[str, Any]:
        """For the pack: of every rank its own; of rank 0 those of the existing tool as well."""
        about = {**system.collect(), **self._system}
        content: dict[str, Any] = {
            entries.of_rank("env", self.rank): self._environment.values,
            entries.of_rank("withheld", self.rank): self._environment.entry(),
            entries.of_rank("system", self.rank): about,
            **self.of_settings(),
        }
        if self.rank == 0:
            content[entries.ENV] = self._environment.values
            content[entries.PIP] = packages.text()
        return content

    def of_settings(self) -> dict[str, Any]:
        """The resolved settings alone; empty when there are none."""
        if not self.settings:
            return {}
        found = {entries.of_rank("hyperparameters", self.rank): resolved.entry(self.settings)}
        if self.rank == 0:
            found[entries.DYNAMIC] = resolved.to_existing_format(self.settings)
        return found


_BACKENDS = {
    "cudnn.enabled": ("cudnn", "enabled"),
    "cudnn.deterministic": ("cudnn", "deterministic"),
    "cudnn.benchmark": ("cudnn", "benchmark"),
    "cudnn.allow_tf32": ("cudnn", "allow_tf32"),
    "matmul.allow_tf32": ("cuda", "matmul", "allow_tf32"),
    "matmul.allow_fp16_reduced_precision_reduction": ("cuda", "matmul", "allow_fp16_reduced_precision_reduction"),
    "matmul.allow_bf16_reduced_precision_reduction": ("cuda", "matmul", "allow_bf16_reduced_precision_reduction"),
    "matmul.allow_fp16_accumulation": ("cuda", "matmul", "allow_fp16_accumulation"),
    "mkldnn.enabled": ("mkldnn", "enabled"),
    "mkldnn.deterministic": ("mkldnn", "deterministic"),
}
"""Flag to attributes below ``torch.backends``."""
_SDP = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_NPU = {"npu.matmul.allow_hf32": ("matmul", "allow_hf32"), "npu.conv.allow_hf32": ("conv", "allow_hf32")}


def collect() -> dict[str, Any]:
    """``flags``, ``versions``, ``devices`` as nested dicts. No device is started for it: what is not in use is only counted."""
    return {"flags": flags(), "versions": versions(), "devices": devices()}


def flags() -> dict[str, Any]:
    """Switches by name; those that this version of torch does not have are missing."""
    values: dict[str, Any] = {}

    def add_flag(name: str, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except Exception as error:  # not in this version, or two ways to set it were mixed, which torch refuses to read
            raise_of_training(error)
            return
        if not callable(value):
            values[name] = value if isinstance(value, (bool, int, float, str, type(None))) else str(value)

    add_flag("deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
    add_flag("deterministic_warn_only", torch.is_deterministic_algorithms_warn_only_enabled)
    add_flag("fill_uninitialized_memory", lambda: vars(torch.utils)["deterministic"].fill_uninitialized_memory)
    add_flag("float32_matmul_precision", torch.get_float32_matmul_precision)
    add_flag("default_dtype", torch.get_default_dtype)
    add_flag("autocast.cpu", lambda: torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    add_flag("autocast.cuda", lambda: torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None)
    add_flag("threads", torch.get_num_threads)
    add_flag("interop_threads", torch.get_num_interop_threads)
    add_flag("anomaly_detection", torch.is_anomaly_enabled)
    for name, path in _BACKENDS.items():
        add_flag(name, functools.partial(functools.reduce, getattr, path, torch.backends))
    for name in _SDP:
        add_flag(f"sdp.{name}", lambda name=name: getattr(torch.backends.cuda, name)())  # type: ignore[misc]
    npu = getattr(torch, "npu", None)
    for name, path in _NPU.items() if npu is not None else ():
        add_flag(name, functools.partial(functools.reduce, getattr, path, npu))
    return values


def versions() -> dict[str, Any]:
    """Libraries that torch was built with or has loaded."""
    known: dict[str, Any] = {"torch": torch.__version__, "git": torch.version.git_version, "debug_build": torch.version.debug}
    for name in ("cuda", "hip", "xpu"):
        if value := getattr(torch.version, name, None):
            known[name] = str(value)
    if torch.backends.cudnn.is_available():
        known["cudnn"] = torch.backends.cudnn.version()
    if known.get("cuda") and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with suppress_faults():  # a build without it
            known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    known["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    known["mkl"] = torch.backends.mkl.is_available()
    return known


def devices() -> dict[str, Any]:
    """Accelerators that this process sees; with names where it uses them already."""
    by_kind: dict[str, Any] = {}
    for kind, module in modules():
        if not getattr(module, "is_available", lambda: False)():
            continue
        about: dict[str, Any] = {"count": module.device_count()}
        if getattr(module, "is_initialized", lambda: False)():
            current = module.current_device()
            about["name"] = module.get_device_name(current)
            capability = module.get_device_capability(current) if hasattr(module, "get_device_capability") else None  # an NPU has none
            if capability is not None:
                about["capability"] = str(capability)
        by_kind[kind] = about
    return by_kind
