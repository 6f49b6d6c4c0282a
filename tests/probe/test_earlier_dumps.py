"""What another run has dumped into an output directory is set aside when a run begins there, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.probe.earlier_run import set_aside


def dump(root: Path, ranks: int, *steps: int) -> None:
    for step in steps:
        for rank in range(ranks):
            (root / "dump" / f"step{step}" / f"rank{rank}").mkdir(parents=True)
            (root / "dump" / f"step{step}" / f"rank{rank}" / "dump.json").write_text("{}")


def dumps(root: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("dump.json"))


def begin(root: Path, step: int, *, ranks: int = 1, more: str = "") -> None:
    settings = load_settings(
        {"output_dir": str(root), "dump": {"step": [0], **({"dump_path": str(root / "dump")} if more == "path" else {})}}
    )
    for rank in range(ranks):
        set_aside(settings, rank, ranks, step)


@pytest.mark.parametrize(
    ("step", "more", "variable", "moved"),
    [
        (0, "", "", True),
        (2, "", "", True),
        (3, "", "", False),  # it goes on
        (0, "path", "", False),  # the existing tool's place
        (0, "", "TORCHELASTIC_RESTART_COUNT", False),
        (0, "", "SLURM_RESTART_COUNT", False),
    ],
)
def test_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, more: str, variable: str, moved: bool) -> None:
    """A run that begins at or before the first step that is there, and is no restart."""
    if variable:
        monkeypatch.setenv(variable, "1")
    dump(tmp_path, 1, 2, 5)
    (tmp_path / "incidents" / "step5-nan_inf").mkdir(parents=True)
    begin(tmp_path, step, more=more)
    place = "earlier-1/" if moved else ""
    assert dumps(tmp_path) == [f"{place}dump/step2/rank0", f"{place}dump/step5/rank0"]
    assert (tmp_path / place / "incidents" / "step5-nan_inf").is_dir()


def test_ranks_come_to_one_directory_and_runs_to_several(tmp_path: Path) -> None:
    """Rank 0 also moves those of ranks that there are no longer."""
    dump(tmp_path, 3, 0, 1)
    begin(tmp_path, 0, ranks=2)
    dump(tmp_path, 2, 0)
    begin(tmp_path, 0, ranks=2)
    first = [f"earlier-1/dump/step{step}/rank{rank}" for step in (0, 1) for rank in range(3)]
    assert dumps(tmp_path) == [*first, "earlier-2/dump/step0/rank0", "earlier-2/dump/step0/rank1"]
    assert not list((tmp_path / "dump").iterdir())
