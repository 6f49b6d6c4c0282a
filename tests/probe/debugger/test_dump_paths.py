"""Where a dump may go: odd names, links, files in the way, places that cannot be written."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
from debug_model import Net, config, names, steps, written, x

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.output_paths import check_directory
from msprobe_engine.find.detect import Run
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def run(path: Path, root: Path | str) -> PrecisionDebugger:
    debugger = PrecisionDebugger(path, dump_path=str(root))
    net = Net()
    debugger.start(net)
    net(x()).sum().backward()
    debugger.stop()
    debugger.step()
    debugger.run.files.wait()
    return debugger


def refused(path: Path, root: Path | str) -> str:
    """What is said of a place that cannot be written; the debugger does nothing there, and a strict one raises."""
    strict = {"output_dir": str(path.parent), "dump": {"level": "L0", "dump_path": str(root)}, "strict": True}
    with pytest.raises(SettingsError, match=r"dump_path: .* cannot be used"):
        PrecisionDebugger(strict)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msprobe_engine.core.guard._log.error", lambda text, *values: said.append(text % values))
        debugger = PrecisionDebugger(path, dump_path=str(root))
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        for _ in range(2):
            debugger.start(model)
            model(torch.ones(1, 2)).sum().backward()
            debugger.stop()
            debugger.step()
    debugger.run.at_exit()
    PrecisionDebugger._instance = None
    (message,) = said
    assert "the training goes on without it" in message
    return message


@pytest.mark.parametrize("name", ["with space", "a+b", "größe/深い", "tab\there", "quote'\"", "-dash", "*", "line\nbreak"])
def test_odd_characters(tmp_path: Path, name: str) -> None:
    """Every name that the file system takes works (the existing tool allows letters, digits and a few signs), in the header of a
    dump with tensors too."""
    debugger = run(config(tmp_path, "L0", "tensor"), tmp_path / name)
    dump = open_dump(tmp_path / name)
    assert dump.steps == [0]
    loaded = dump.load(0)
    assert "Module.a.Linear.forward.0" in loaded.entries
    assert str(debugger.run.files.tally.steps) == "0"


def test_relative_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is below the working directory of the first step, and missing directories are made, with mode 0750, files 0640."""
    monkeypatch.chdir(tmp_path)
    old = os.umask(0)
    try:
        run(config(tmp_path, "L0"), "some/where/else")
    finally:
        os.umask(old)
    (rank,) = (tmp_path / "some/where/else/step0").iterdir()
    assert {stat.S_IMODE(p.stat().st_mode) for p in (rank, rank.parent, rank.parent.parent, tmp_path / "some")} == {0o750}
    assert {stat.S_IMODE(p.stat().st_mode) for p in rank.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("keys", "rank", "steps", "expected"),
    [
        ({}, None, 2, "step0/proc"),
        ({"step": [1]}, None, 3, "step1/proc"),
        ({"rank": [3, 5]}, 3, 2, "step0/rank3"),
        ({"rank": [3, 5]}, 5, 2, ""),
        ({}, 1, 1, ""),
    ],
)
def test_what_the_run_was_started_with(keys: dict[str, list[int]], rank: int | None, steps: int, expected: str, tmp_path: Path) -> None:
    """Below a dump_path every name is a step or a rank to the existing tool, so the pack lies with the files of a rank: of the first that
    dumps, in its first step. A second run replaces it. Whoever names any part of the dump has it."""
    for _ in range(2):
        debugger = PrecisionDebugger(config(tmp_path, "L0", **keys))
        net = Net()
        for _ in range(steps):
            debugger.start(net, rank_id=rank)
            net(x()).sum().backward()
            debugger.stop()
            debugger.step()
        debugger.run.at_exit()
        PrecisionDebugger._instance = None
    packs = list(tmp_path.rglob("*.zip"))
    assert [re.sub(r"proc\d+", "proc", str(path.parent.relative_to(tmp_path / "dump"))) for path in packs] == [expected] * bool(expected)
    for pack in packs:
        assert read_pack(pack).ours
        for place in (tmp_path / "dump", pack.parent.parent, pack.parent, pack.parent / "dump.json"):
            assert Run(place).config == pack


def test_link_to_the_root(tmp_path: Path) -> None:
    """A link to a directory is followed at the root: clusters link their disks. The existing tool refuses it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run(config(tmp_path, "L0"), tmp_path / "link")
    assert open_dump(tmp_path / "disk").steps == [0]


@pytest.mark.parametrize(("place", "there"), [("step0", True), ("step0", False), ("step0/rank3", True)])
def test_links_below_the_root(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, there: bool) -> None:
    """A link in the place of a step or rank directory is not followed: nothing is written or removed behind it, one line says so, and
    the training and later steps go on."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "dump.json").write_text("theirs")
    if there:
        (target / "rank3").mkdir()
        (target / "rank3" / "dump.json").write_text("theirs")
    before = {p: p.read_text() for p in target.rglob("*.json")}
    link = tmp_path / "dump" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    for _ in range(2):
        debugger.start(net, rank_id=3)
        net(x())
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    assert {p: p.read_text() for p in target.rglob("*") if p.is_file()} == before
    assert (target / "rank3").exists() == there
    said = capsys.readouterr().err
    assert said.count("a link is where a directory belongs") == 1
    assert "msprobe ends, but not everything is there. 1 step (1)" in said
    assert open_dump(tmp_path / "dump").load(1, 3).complete


def test_link_in_the_place_of_a_file(tmp_path: Path) -> None:
    """A link in the place of dump.json is replaced by the file, and what it pointed to stays as it was."""
    (tmp_path / "precious").write_text("theirs")
    place = tmp_path / "dump" / "step0" / f"proc{os.getpid()}"
    place.mkdir(parents=True)
    for name in ("dump.json", "stack.json"):
        (place / name).symlink_to(tmp_path / "precious")
    run(config(tmp_path, "L0"), tmp_path / "dump")
    assert (tmp_path / "precious").read_text() == "theirs"
    assert not (place / "dump.json").is_symlink()
    assert "Module.a.Linear.forward.0" in names(tmp_path)


def test_directory_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that are written again are replaced, tensors too; other steps and other people's files stay; said once."""
    place = tmp_path / "dump" / "step0" / f"proc{os.getpid()}"
    (place / "dump_tensor_data").mkdir(parents=True)
    for name in ("dump.json", "construct.json", "dump_tensor_data/old.pt", "notes.txt"):
        (place / name).write_text("old")
    other = tmp_path / "dump" / "step7" / place.name
    other.mkdir(parents=True)
    (other / "dump.json").write_text("old")
    debugger = run(config(tmp_path, "L0"), tmp_path / "dump")
    assert written(tmp_path).complete
    assert not (place / "dump_tensor_data").exists()
    assert (place / "notes.txt").read_text() == (other / "dump.json").read_text() == "old"
    assert capsys.readouterr().err.count("holds a dump of an earlier run") == 1
    debugger.run.at_exit()


def test_file_in_the_way(tmp_path: Path) -> None:
    """dump_path that is a file, or lies below one, is refused at once with the file's name."""
    (tmp_path / "file").write_text("x")
    path = config(tmp_path)
    for root in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        message = refused(path, root)
        assert f"{path}: dump_path: '{root}' cannot be used: {tmp_path / 'file'} is a file; remove it" in message


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    """A link without a target and one to itself are named."""
    (tmp_path / "loose").symlink_to("nothing")
    (tmp_path / "circle").symlink_to("circle")
    assert "is a link that leads nowhere" in refused(config(tmp_path), tmp_path / "loose")
    assert "is a link that leads to itself" in refused(config(tmp_path), tmp_path / "circle" / "x")


def test_too_long(tmp_path: Path) -> None:
    """A path or a part of it that is too long for the system."""
    assert "a part of the path is too long; give a shorter dump_path" in refused(config(tmp_path), tmp_path / ("a" * 300))
    assert "the path is too long" in refused(config(tmp_path), tmp_path / "/".join(["a" * 200] * 25))


@pytest.fixture
def read_only(tmpfs: Callable[[str], Path]) -> Path:
    """A file system that cannot be written."""
    return tmpfs("ro")


def test_read_only(tmp_path: Path, read_only: Path) -> None:
    """A read-only file system is refused at once."""
    assert f"the file system of {read_only} is read-only; give a dump_path on another one" in refused(config(tmp_path), read_only / "out")


def test_no_rights(tmp_path: Path) -> None:
    """A directory that this user may not write is refused at once."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    place = tmp_path / "mine"
    place.mkdir(mode=0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(SettingsError, match=r"c\.json: dump_path: .* (may not write in|Permission denied)"):
            check_directory(place / "out", "c.json", "dump_path")
        with pytest.raises(SettingsError, match=r"this user may not write in /; change its owner or mode, or give another dump_path"):
            check_directory("/out", "c.json", "dump_path")
    finally:
        os.seteuid(0)


def lose_the_root(path: Path, root: Path) -> dict[str, int]:
    debugger = PrecisionDebugger(str(path))
    net = Net()
    for step in range(3):
        if step == 1:  # in the middle of the run the place goes away
            root.rename(root.with_name("moved"))
            root.write_text("a file")
        debugger.start(net)
        net(x()).sum().backward()
        debugger.stop()
        debugger.step()
        debugger.run.files.wait()
    debugger.run.at_exit()
    return dict(debugger.writer.lost)


def test_place_that_goes_away(tmp_path: Path) -> None:
    """A place that cannot be written any more costs the steps, not the training: one line at first, the loss in the last line."""
    done = pr.run(lose_the_root, config(tmp_path, "L0"), tmp_path / "dump", directory=tmp_path)[0]
    assert done.value == {"dump": 2}
    assert len(done.lines("sink dump lost data", "training goes on", "a regular file is where a directory belongs")) == 1
    assert done.lines("msprobe ends, but not everything is there. 1 step (0)", "frames of sink dump 2")
    assert open_dump(tmp_path / "moved").load(0).complete


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    """Construction and steps that are not wanted leave no directory."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=[5]))
    debugger.start(Net())
    debugger.stop()
    debugger.step()
    assert not (tmp_path / "dump").exists()
    assert steps(tmp_path) == []


def test_a_program_that_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative dump_path is relative to where the run began, whatever the program does to its working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    debugger = PrecisionDebugger(config(tmp_path, "L0", dump_path="out"))
    net = Net()
    for number in range(3):
        debugger.start(net)
        net(x()).sum().backward()
        debugger.stop()
        debugger.step()
        if number == 0:
            os.chdir("elsewhere")
    debugger.run.at_exit()
    assert open_dump(tmp_path / "out").steps == [0, 1, 2]
    assert all(open_dump(tmp_path / "out").load(step).complete for step in range(3))
    assert list((tmp_path / "elsewhere").iterdir()) == []
