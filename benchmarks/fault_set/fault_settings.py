"""The fault set at every level and task: which cases there are, their dumps, and what is true about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fault_cases import CASES, HARMLESS, Case, Harmless
from fault_dumps import directory_name, dump
from fault_levels import MODULES
from fault_mixture import DEFECTS, Defect
from fault_mixture import dump as dump_mixture

AnyCase = Case | Defect | Harmless


@dataclass(frozen=True)
class Setting:
    """How the trainings are dumped.

    Attributes:
        name: of the setting, and of the directory of its dumps.
        level: ``mix``, ``L0`` or ``L1``.
        task: ``statistics``, ``tensor``, ``md5`` or ``digest`` (statistics with that checksum).
        dtype: of the GPT, where a case does not ask for one.
    """

    name: str
    level: str = "mix"
    task: str = "statistics"
    dtype: torch.dtype = torch.float32

    @property
    def text(self) -> str:
        """For a reader."""
        return f"{self.level}, {self.task}" + ("" if self.dtype == torch.float32 else f", {str(self.dtype)[6:]} model")


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("mix"),
        Setting("L0", level="L0"),
        Setting("L1", level="L1"),
        Setting("md5", task="md5"),
        Setting("digest", task="digest"),
        Setting("tensor", task="tensor"),
        Setting("bf16", dtype=torch.bfloat16),
    )
}

NO_DEFECT_IN_BF16 = ("one product accumulated in bf16", "softmax in bf16")
"""What a bfloat16 model does anyway."""


@dataclass(frozen=True)
class Truth:
    """What is true about a defect: patterns of right records, what it may be called, the step and the ranks (empty: any)."""

    records: tuple[str, ...]
    findings: tuple[str, ...]
    step: int
    ranks: tuple[int, ...] = ()


def cases(setting: Setting) -> list[AnyCase]:
    """All that has a meaning in a setting. A bfloat16 model has neither float16 cases nor TF32, and the other network stays as it is."""
    if setting.dtype == torch.float32:
        return [*CASES, *DEFECTS, *HARMLESS]
    wide: list[AnyCase] = [c for c in CASES if c.shape.dtype == torch.float32 and c.name not in NO_DEFECT_IN_BF16]
    return wide + [h for h in HARMLESS if h.shape.dtype == torch.float32 and "tf32" not in h.name]


def dumps(root: Path, setting: Setting, case: AnyCase) -> tuple[Path, Path]:
    """Dumps of the case and of the right training beside it, made if they are not there."""
    root = root / setting.name
    if isinstance(case, Defect):
        target, golden = root / f"mixture-{directory_name(case.name)}", root / "golden-mixture"
        dump_mixture(golden, lambda _: None, setting.level, setting.task)
        dump_mixture(target, case.plant, setting.level, setting.task)
        return target, golden
    shape, right = case.shape, case.golden if isinstance(case, Harmless) else case.shape
    if setting.dtype != torch.float32:
        shape, right = replace(shape, dtype=setting.dtype), replace(right, dtype=setting.dtype)
    target, golden = root / directory_name(case.name), root / f"golden-{directory_name(repr(right))}"[:180]
    dump(golden, right, lambda _: None, setting.level, setting.task)
    dump(target, shape, case.plant, setting.level, setting.task)
    return target, golden


def truth(setting: Setting, case: Case | Defect) -> Truth:
    """What is true about a defect where it is dumped like that."""
    found = (
        Truth((case.truth,), (case.finding,), case.step)
        if isinstance(case, Defect)
        else Truth(case.truth, case.finding, case.step, case.ranks)
    )
    if setting.level != "L0":
        return found
    record, step = MODULES[case.name]
    return replace(found, records=(record,), step=step)
