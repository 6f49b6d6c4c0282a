"""What a torch process computes with: devices, versions of its libraries, and the switches that change results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.core.guard import raise_of_training, suppress_faults
from msprobe_integrations.torch.tensors.devices import modules

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
    found: dict[str, Any] = {}

    def note(name: str, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except Exception as error:  # not in this version, or two ways to set it were mixed, which torch refuses to read
            raise_of_training(error)
            return
        if not callable(value):
            found[name] = value if isinstance(value, (bool, int, float, str, type(None))) else str(value)

    note("deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
    note("deterministic_warn_only", torch.is_deterministic_algorithms_warn_only_enabled)
    note("fill_uninitialized_memory", lambda: vars(torch.utils)["deterministic"].fill_uninitialized_memory)
    note("float32_matmul_precision", torch.get_float32_matmul_precision)
    note("default_dtype", torch.get_default_dtype)
    note("autocast.cpu", lambda: torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    note("autocast.cuda", lambda: torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None)
    note("threads", torch.get_num_threads)
    note("interop_threads", torch.get_num_interop_threads)
    note("anomaly_detection", torch.is_anomaly_enabled)
    for name, path in _BACKENDS.items():
        note(name, functools.partial(functools.reduce, getattr, path, torch.backends))
    for name in _SDP:
        note(f"sdp.{name}", lambda name=name: getattr(torch.backends.cuda, name)())  # type: ignore[misc]
    npu = getattr(torch, "npu", None)
    for name, path in _NPU.items() if npu is not None else ():
        note(name, functools.partial(functools.reduce, getattr, path, npu))
    return found


def versions() -> dict[str, Any]:
    """Libraries that torch was built with or has loaded."""
    found: dict[str, Any] = {"torch": torch.__version__, "git": torch.version.git_version, "debug_build": torch.version.debug}
    for name in ("cuda", "hip", "xpu"):
        if value := getattr(torch.version, name, None):
            found[name] = str(value)
    if torch.backends.cudnn.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
    if found.get("cuda") and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with suppress_faults():  # a build without it
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    found["mkl"] = torch.backends.mkl.is_available()
    return found


def devices() -> dict[str, Any]:
    """Accelerators that this process sees; with names where it uses them already."""
    found: dict[str, Any] = {}
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
        found[kind] = about
    return found
