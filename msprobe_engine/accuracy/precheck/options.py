"""What the command line says of a pre-check, besides its settings file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.results import CallResult
from msprobe_engine.accuracy.settings import PrecheckSettings

BENCHES = ("float64", "raised")
"""Precision of the bench: always float64, or one step above the recorded type, as the existing tool has it."""

ONLY_ACCELERATOR = "?"
"""See `Work.second`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How calls are checked.

    Attributes:
        devices: what is tested: ``auto`` (the accelerator, or the CPU where there is none), ``auto:1``, ``cpu``, ``cuda``, ``npu:1``;
            processes are spread over several.
        dtype: all floating inputs are rounded to this type first (``bfloat16``); None: the recorded types.
        compiled: the tested side goes through the framework's compiler.
        bench_dtype: one of `BENCHES`.
        jit_compile: compile mode of an NPU.
        seed: of drawn inputs and random operators.
        processes: how many at a time; 0: one per core, at most 8, fewer for few calls.
        timeout: seconds that one call may take.
        operators: Python files or modules that register operators which the framework does not know; each process loads them.
        compat: calls are checked as this version of the existing tool does, and result files are as its own; None: as we do.
        filter_api: leave repeated calls out.
        save_error_data: save inputs and results of calls that do not pass.
        condition: measure how much operators make of round-off (our verdict uses it).
    """

    devices: tuple[str, ...] = ("auto",)
    dtype: str | None = None
    compiled: bool = False
    bench: str = "cpu"
    bench_dtype: str = "float64"
    jit_compile: bool = False
    seed: int = 1234
    processes: int = 0
    timeout: float = 600.0
    operators: tuple[str, ...] = ()
    compat: str | None = None
    filter_api: bool = False
    save_error_data: bool = False
    condition: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process that checks calls has to know; travels to it as JSON.

    Attributes:
        framework: of the dump: which backend checks.
        directory: of the dump's rank: where its saved tensors are.
        device: one of `Options.devices`.
        compat: as in `Options`; empty: as we do.
        error_data: directory for inputs and results of calls that do not pass; empty: none are saved.
        quantized: APIs whose integer results may differ by 1.
        threads: of one process, for the CPU's kernels. The same for every number of processes: sums are then made in the same order.
        operators: as in `Options`.
        received: results of calls come from a training that runs; they are judged and not made again.
        second: with `received`: a device here whose results are the second opinion; empty: there is none. With `ONLY_ACCELERATOR` in
            front: not if it is the CPU.
    """

    framework: str
    directory: str
    device: str
    dtype: str | None
    compiled: bool
    bench: str
    bench_dtype: str
    jit_compile: bool
    seed: int
    condition: bool
    compat: str
    error_data: str
    quantized: tuple[str, ...]
    threads: int
    operators: tuple[str, ...] = ()
    received: bool = False
    second: str = ""

    @classmethod
    def of(cls, options: Options, settings: PrecheckSettings, **own: Any) -> Work:
        """What all processes of a pre-check have to know; `own`: what is not as `options` say, and what they do not say."""
        names = ("dtype", "compiled", "bench", "bench_dtype", "jit_compile", "seed", "condition", "operators")
        given = {name: getattr(options, name) for name in names}
        given |= {
            "device": "",
            "directory": "",
            "error_data": "",
            "compat": options.compat or "",
            "quantized": settings.quantization_api_list,
        }
        return cls(**{**given, "threads": int(os.environ.get("OMP_NUM_THREADS") or 1), **own})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Work:
        """The reverse of `dataclasses.asdict` after a trip as JSON."""
        return cls(**{**values, "quantized": tuple(values["quantized"]), "operators": tuple(values["operators"])})

    def sides(self, versions: str) -> str:
        """How the device's results are made, and what they are compared with, for `About`."""
        types = f"rounded to {self.dtype}" if self.dtype else "in the recorded types"
        compiled = ", compiled," if self.compiled else ""
        bench = "in float64" if self.bench_dtype == "float64" else "one type wider"
        rules = f", by the rules of {self.compat}" if self.compat else ""
        return f"{types}{compiled} against {self.bench} {bench}{rules} ({versions})"

    @property
    def rank_directory(self) -> Path:
        """`directory` as a path."""
        return Path(self.directory)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a process that checks calls says of itself before the first; travels as JSON.

    Attributes:
        device: what is tested, ``"cpu"``, ``"cuda:1"``.
        sides: how, and against what (`Work.sides`).
        remark: what the user should know of the device; empty else.
        operators: names that the files of `Work.operators` have registered.
    """

    device: str
    sides: str
    remark: str = ""
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """What checks calls.

    Attributes:
        check: ``name``, ``record`` and ``backward`` (forward and backward record) of a call to its result; with `Work.received`
            ``directory`` and ``tensors`` too. Never raises for what an operator does.
        about: what is compared with what; None: it says nothing of itself.
    """

    check: Callable[..., CallResult]
    about: About | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> CallResult:
        return self.check(*args, **kwargs)
