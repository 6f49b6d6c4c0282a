"""What a case of the set of bugs from the field is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reported_bugs import models
from reported_bugs.training import Program, Setting
from torch import Tensor, nn

Plant = Callable[[Program], None]


def nothing(_program: Program) -> None:
    """No fault."""


@dataclass(frozen=True)
class Fault:
    """A reported bug, planted into a program.

    Attributes:
        name: of the case.
        setting: of the golden run, and of the run in question.
        plant: makes the fault.
        truth: what the finding must say, a pattern of the record, module, reason or source line that it names.
        seen: where it was reported.
        levels: that the runs are watched at, each a case of its own.
        step: that it shows first in; any for -1.
        alone: there is no golden run.
        other: setting of the run in question, where the fault is one of its settings.
    """

    name: str
    setting: Setting
    plant: Plant
    truth: str
    seen: str = ""
    levels: tuple[str, ...] = ("mix",)
    step: int = -1
    alone: bool = False
    other: Setting | None = None
    coarse: str = ""
    """The truth where there are modules only, or numbers of the monitor; else the same."""
    golden: Plant = nothing
    """What the golden run is changed by, where the fault is in the order of things."""

    @property
    def has_golden(self) -> bool:
        return not self.alone


@dataclass(frozen=True)
class Healthy:
    """Two trainings that differ in nothing but rounding, or in nothing; `other` is None for one run that is right."""

    name: str
    setting: Setting
    other: Setting | None
    plant: Plant = nothing
    levels: tuple[str, ...] = ("mix",)
    golden: Plant = nothing

    @property
    def has_golden(self) -> bool:
        return self.other is not None


Case = Fault | Healthy


def in_model(edit: Callable[[Any], None]) -> Plant:
    """A fault in the model, made before it is wrapped."""
    return lambda program: program.change_model.append(edit)


def when_ready(edit: Callable[[Program], None]) -> Plant:
    """A fault in the loop, made when all is built."""
    return lambda program: program.ready.append(edit)


def setting_of_model(**changes: Any) -> Plant:
    """Another entry of the model's config."""
    return lambda program: program.configure.append(lambda config: config.update(changes))


def other_function(name: str, function: Callable[..., Any]) -> Plant:
    """Another function in the program's model code."""

    def plant(_program: Program) -> None:
        setattr(models, name, function)

    return plant


def stuck(value: Tensor, index: int) -> None:
    """An element becomes 2, behind the back of torch, as a fault of the memory does it."""
    kind, bits = (ctypes.c_uint16, 0x4000) if value.element_size() == 2 else (ctypes.c_uint32, 0x40000000)
    kind.from_address(value.data_ptr() + index * value.element_size()).value = bits


def every(model: nn.Module, kind: type | str) -> list[Any]:
    """Modules of a class, or of a class of this name."""
    return [module for module in model.modules() if (type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind))]
