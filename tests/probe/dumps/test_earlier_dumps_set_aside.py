"""What another run has dumped into an output directory is set aside when a run begins there, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msprobe_engine.core.process.launch import RANK, WORLD_SIZE, number_of_processes
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.probe.earlier_run import set_aside


def dump(root: Path, ranks: int, *steps: int) -> None:
    for step in steps:
        for rank in range(ranks):
            (root / "dump" / f"step{step}" / f"rank{rank}").mkdir(parents=True)
            (root / "dump" / f"step{step}" / f"rank{rank}" / "dump.json").write_text("{}")


def dumps(root: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("dump.json"))


def begin_again(root: Path, step: int, *, ranks: int = 1, order: tuple[int, ...] = ()) -> None:
    """An hour goes by before the next launch."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            time = path.stat().st_mtime - 3600
            os.utime(path, (time, time))
    begin(root, step, ranks=ranks, order=order)


def begin(root: Path, step: int, *, ranks: int = 1, more: str = "", order: tuple[int, ...] = (), known: bool = True) -> list[str]:
    settings = load_settings(
        {"output_dir": str(root), "dump": {"step": [0], **({"dump_path": str(root / "dump")} if more == "path" else {})}}
    )
    said: list[str] = []
    for rank in order or range(ranks):
        said += set_aside(settings, rank, ranks if known else 0, step)
    return said


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


@pytest.mark.parametrize(("ranks", "age", "moved"), [(1, 0, True), (2, 10, True), (2, -10, False)])
def test_the_pack_goes_with_the_dumps(tmp_path: Path, ranks: int, age: int, moved: bool) -> None:
    """What the run was started with stands beside what it dumped; of several ranks a newer one may be of this launch already."""
    dump(tmp_path, ranks, 0)
    pack = tmp_path / "config_check_pack.zip"
    pack.write_bytes(b"PK")
    time = (tmp_path / "dump" / "step0" / "rank0").stat().st_mtime - age
    os.utime(pack, (time, time))
    begin(tmp_path, 0, ranks=ranks)
    assert (pack.exists(), (tmp_path / "earlier-1" / pack.name).exists()) == (not moved, moved)


def test_ranks_come_to_one_directory_and_runs_to_several(tmp_path: Path) -> None:
    """Rank 0 also moves those of ranks that there are no longer."""
    dump(tmp_path, 3, 0, 1)
    begin(tmp_path, 0, ranks=2)
    dump(tmp_path, 2, 0)
    begin(tmp_path, 0, ranks=2)
    first = [f"earlier-1/dump/step{step}/rank{rank}" for step in (0, 1) for rank in range(3)]
    assert dumps(tmp_path) == [*first, "earlier-2/dump/step0/rank0", "earlier-2/dump/step0/rank1"]
    assert not list((tmp_path / "dump").iterdir())


def test_runs_of_other_ranks_are_not_mixed(tmp_path: Path) -> None:
    """Whoever comes first, and although rank 1 has nothing in the first directory."""
    for first, second in ((0, 1), (1, 0)):
        root = tmp_path / str(first)
        dump(root, 1, 0)
        begin_again(root, 0, ranks=2)
        dump(root, 2, 0)
        begin_again(root, 0, ranks=2, order=(first, second))
        assert dumps(root) == [f"earlier-{place}/dump/step0/rank{rank}" for place, rank in ((1, 0), (2, 0), (2, 1))]


def test_a_launch_that_was_killed_in_the_midst(tmp_path: Path) -> None:
    """The next one puts the rest where the first part is."""
    dump(tmp_path, 2, 0, 1)
    begin_again(tmp_path, 0, ranks=2, order=(0,))
    begin_again(tmp_path, 0, ranks=2)
    assert dumps(tmp_path) == [f"earlier-1/dump/step{step}/rank{rank}" for step in (0, 1) for rank in range(2)]


@pytest.mark.parametrize("kind", ["file", "directory", "link", "link inside", "high number"])
def test_names_that_are_taken(tmp_path: Path, kind: str) -> None:
    """They are left alone; what leads out of the directory is not followed."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    dump(root, 1, 0)
    outside.mkdir()
    taken = root / ("earlier-999999" if kind == "high number" else "earlier-1")
    if kind == "file":
        taken.write_text("mine")
    elif kind == "link":
        taken.symlink_to(outside)
    else:
        taken.mkdir()
        (taken / "mine").write_text("")
        if kind == "link inside":
            (taken / "dump").symlink_to(outside)
    begin(root, 0)
    begin_again(root, 0)
    assert dumps(root) == [f"earlier-{1 if kind == 'high number' else 2}/dump/step0/rank0"]
    assert not list(outside.iterdir())


def test_links_are_left_alone(tmp_path: Path) -> None:
    """What they lead to is somebody else's, and a link that is moved may lead nowhere."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    dump(root, 1, 0)
    text = f'{{"dump_data_dir": "{root}/dump/step1/rank0/dump_tensor_data"}}'
    (outside / "dump_tensor_data").mkdir(parents=True)
    (outside / "dump.json").write_text(text)
    (root / "dump" / "step1").mkdir()
    (root / "dump" / "step2").symlink_to(outside)
    links = [root / "dump" / "step1" / "rank0", root / "dump" / "step2", root / "incidents"]
    links[0].symlink_to(outside)
    links[2].symlink_to("../outside")
    (root / "dump" / "step3").write_text("no directory")
    (outside / "step5-nan_inf").mkdir()
    said = begin(root, 0)
    assert len(said) == 2
    assert said[0].startswith(
        f"what another run has left in {root}/incidents stays beside what this one writes, because links are not moved"
    )
    assert dumps(root) == ["earlier-1/dump/step0/rank0"]
    assert all(link.is_symlink() and link.exists() for link in links)
    assert (outside / "dump.json").read_text() == text


def test_dumps_of_ranks_that_there_are_no_longer(tmp_path: Path) -> None:
    """Rank 0 has dumped nothing itself."""
    (tmp_path / "dump" / "step4" / "rank3").mkdir(parents=True)
    (tmp_path / "dump" / "step4" / "rank3" / "dump.json").write_text("{}")
    begin(tmp_path, 5, ranks=2)
    assert dumps(tmp_path) == ["dump/step4/rank3"]
    begin(tmp_path, 0, ranks=2)
    assert dumps(tmp_path) == ["earlier-1/dump/step4/rank3"]


def test_a_dump_directory_that_is_a_link(tmp_path: Path) -> None:
    """It is said, where there is anything of another run."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "dump").symlink_to(outside)
    assert begin(root, 0) == []
    (outside / "step3" / "rank0").mkdir(parents=True)
    assert begin(root, 4) == []
    assert [said.partition(" stays")[0] for said in begin(root, 3)] == [f"what another run has left in {root}/dump"]
    assert (outside / "step3" / "rank0").is_dir()
    assert [path.name for path in root.iterdir()] == ["dump"]


def test_processes_that_do_not_know_how_many_they_are(tmp_path: Path) -> None:
    """Two that were started by hand with a RANK alone: rank 0 moves its own dumps, for the others may be those of rank 1, which runs."""
    dump(tmp_path, 2, 0)
    (tmp_path / "incidents" / "step0-nan_inf").mkdir(parents=True)
    said = begin(tmp_path, 0, known=False)
    assert dumps(tmp_path) == ["dump/step0/rank1", "earlier-1/dump/step0/rank0"]
    assert (tmp_path / "incidents" / "step0-nan_inf").is_dir()
    assert "it cannot be seen whether they are of another process of this job: they stay" in said[0]


@pytest.mark.parametrize(
    ("variables", "known", "size"),
    [
        ({}, 1, 1),
        ({"RANK": "0"}, 1, 0),
        ({"RANK": "0"}, 2, 2),  # a process group is up
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, 1),
        ({"RANK": "0", "SLURM_NTASKS": "1"}, 1, 0),  # of the allocation in which somebody has set RANK
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 1, 8),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"PMI_RANK": "1"}, 1, 0),
    ],
)
def test_number_of_processes(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], known: int, size: int) -> None:
    """A framework without a process group that knows of no WORLD_SIZE says 1."""
    for name in (*RANK, *WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert number_of_processes(known) == size
