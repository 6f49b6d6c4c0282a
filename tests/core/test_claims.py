"""Who may write in an output directory: real processes, killed and alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.process.processes import Process, parse_process, start_time, this_process

CLAIMANT = Path(__file__).with_name("claimant.py")
ROOT = Path(__file__).parents[2]
JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
OTHER = {**JOB, "MASTER_PORT": "29600"}


class Claimant:
    """A process with a claim, see claimant.py."""

    def __init__(self, root: Path, rank: str, variables: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLAIMANT), str(root), rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables, **({} if rank == "-" else {"RANK": rank})},
        )
        first = self.answer()
        self.pid, self.path, self.owner = int(first["pid"]), Path(first["path"]), first["owner"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> str:
        """What it has said on stderr."""
        return self.process.communicate("end\n", timeout=240)[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    begun: list[Claimant] = []

    def start(rank: str = "0", variables: dict[str, str] = JOB, root: Path | None = None) -> Claimant:
        begun.append(Claimant(root or tmp_path / "out", rank, variables))
        return begun[-1]

    yield start
    for claimant in begun:
        if claimant.process.poll() is None:
            claimant.kill()


def test_ranks_of_one_launch_share_a_directory_and_leave_nothing(start: Any, tmp_path: Path) -> None:
    ranks = [start(str(rank)) for rank in range(3)]
    assert {rank.path for rank in ranks} == {tmp_path / "out"}
    assert [rank.end() for rank in ranks] == ["", "", ""]
    assert not os.path.exists(tmp_path / "out") or not os.listdir(tmp_path / "out")


def test_a_second_launch_goes_elsewhere_with_all_its_ranks(start: Any, tmp_path: Path) -> None:
    """Also its rank 1, whose place in the directory is free."""
    first = start("0")
    second = [start(rank, OTHER) for rank in "10"]
    assert first.path == tmp_path / "out"
    assert [rank.path for rank in second] == [tmp_path / "out" / "run-2"] * 2
    said = second[0].end()
    assert f"process {first.pid} on " in said
    assert "run-2" in said
    third = start("0", {**JOB, "MASTER_PORT": "29700"})
    assert third.path == tmp_path / "out" / "run-3"


def test_when_the_first_has_ended_its_place_is_free(start: Any, tmp_path: Path) -> None:
    first, second = start(), start("0", OTHER)
    first.end()
    assert start("0", {**JOB, "MASTER_PORT": "29700"}).path == tmp_path / "out"
    second.end()


@pytest.mark.parametrize("again", [JOB, OTHER], ids=["the same launch, as an elastic restart", "another launch"])
def test_a_killed_owner_owns_nothing(start: Any, tmp_path: Path, again: dict[str, str]) -> None:
    for rank in (first := [start("0"), start("1")]):
        rank.kill()
    assert len(first) == 2
    assert [start(rank, again).path for rank in "01"] == [tmp_path / "out"] * 2


def test_a_restarted_rank_joins_the_ranks_that_still_run(start: Any, tmp_path: Path) -> None:
    first, other = start("0"), start("1")
    first.kill()
    assert start("0").path == other.path == tmp_path / "out"


def test_the_same_rank_twice_is_two_runs(start: Any, tmp_path: Path) -> None:
    """Launchers that give every launch the same variables (a pod's environment)."""
    one, two = start("0"), start("0")
    assert (one.path, two.path) == (tmp_path / "out", tmp_path / "out" / "run-2")
    assert start("1").path == tmp_path / "out"


def test_a_child_of_an_owner_goes_elsewhere(start: Any, tmp_path: Path) -> None:
    parent = start()
    assert parent.owner.startswith("0:")
    assert parent.ask("child")["path"] == str(tmp_path / "out" / "run-2")
    assert parent.ask("python fork")["path"] == str(tmp_path / "out" / "run-2")
    assert parent.ask("release") == {"owner": None}
    assert parent.ask("child")["path"] == str(tmp_path / "out")
    parent.end()
    assert not os.path.exists(tmp_path / "out") or not os.listdir(tmp_path / "out")


def test_further_places_are_of_one_run_each(start: Any, tmp_path: Path) -> None:
    """Two children one after the other, as evaluations of a training: what the first has left there is not gone on with. A process that
    gives its place back and takes one again gets the same."""
    parent, out = start(), tmp_path / "out"
    places = []
    for _ in range(3):
        child = start("0", {**JOB, "MSPROBE_OWNER": parent.owner})
        assert child.path.parent == out
        child.path.mkdir()
        (child.path / "numbers").write_text("")
        child.ask("release")
        assert child.ask("claim")["path"] == str(child.path)
        said = child.end()
        places.append(child.path.name)
        assert said.endswith(f"this one writes in {child.path.name} (claimant.py, process {child.pid})\n")
    assert places == ["run-2", "run-3", "run-4"]


def test_a_launch_that_is_started_again_goes_on_in_its_further_place(start: Any, tmp_path: Path) -> None:
    """Also when all its ranks have ended by themselves, as after an exception; another launch does not."""
    first, again = start(), {"TORCHELASTIC_RESTART_COUNT": "1"}
    second = [start(rank, OTHER) for rank in "01"]
    second[0].path.mkdir()
    (second[0].path / "numbers").write_text("")
    for rank in second:
        rank.end()
    third = start("0", OTHER)
    assert third.path == tmp_path / "out" / "run-3"
    third.end()
    assert [start(rank, OTHER | again).path for rank in "10"] == [tmp_path / "out" / "run-2"] * 2
    assert first.path == tmp_path / "out"


@pytest.mark.parametrize("in_the_way", ["file", "link to nothing"])
def test_what_is_in_the_way_of_a_further_place_is_left_alone(start: Any, tmp_path: Path, in_the_way: str) -> None:
    """See `test_further_places_are_of_one_run_each`."""
    parent, place = start(), tmp_path / "out" / "run-2"
    place.write_text("") if in_the_way == "file" else place.symlink_to("nothing")
    assert parent.ask("child")["path"] == str(tmp_path / "out" / "run-3")


def test_processes_without_ranks_of_one_parent_share_a_directory(start: Any, tmp_path: Path) -> None:
    """Their files are named by their process (``proc{pid}``)."""
    assert [start("-", {}).path for _ in range(2)] == [tmp_path / "out"] * 2


def test_a_lock_in_a_child_forked_behind_pythons_back_keeps_nobody_out(start: Any, tmp_path: Path) -> None:
    first = start()
    first.ask("fork")
    first.kill()
    assert start("0", OTHER).path == tmp_path / "out"


def test_a_claim_of_another_host_counts_as_long_as_its_lock_is_held(start: Any, tmp_path: Path) -> None:
    import fcntl

    first = start()
    (mark,) = (tmp_path / "out" / ".owners").glob("1-*/rank0")
    first.kill()
    mark.write_text(f"{Process('node7', 'elsewhere', 1, '5')}\n")
    with open(mark, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = start("0", OTHER)
        assert second.path == tmp_path / "out" / "run-2"
        assert "process 1 on node7" in second.end()
    assert start("0", OTHER).path == tmp_path / "out"


def test_an_id_that_is_used_again_is_another_process(start: Any, tmp_path: Path) -> None:
    first = start()
    (mark,) = (tmp_path / "out" / ".owners").glob("1-*/rank0")
    first.kill()
    mark.write_text(f"{this_process()._replace(start='1')}\n")
    assert start("0", OTHER).path == tmp_path / "out"


@pytest.mark.parametrize("content", ["", "nonsense", "a:b:c:d\n", "x" * 5000, ":::"])
def test_whatever_is_in_a_file_that_nobody_holds_keeps_nobody_out(start: Any, tmp_path: Path, content: str) -> None:
    first = start()
    (mark,) = (tmp_path / "out" / ".owners").glob("1-*/rank0")
    first.kill()
    mark.write_text(content)
    assert start("0", OTHER).path == start("1", OTHER).path == tmp_path / "out"


def test_an_odd_file_in_the_way_stops_nobody(start: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".owners").write_text("")
    first = start()
    assert first.path == tmp_path / "out"
    assert "whether another run writes here cannot be seen" in first.end()


def test_many_at_once_all_find_a_place(tmp_path: Path) -> None:
    """Two launches of three ranks that begin together: each is in one place, and they are not in the same."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(CLAIMANT), str(tmp_path / "out"), rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables, "RANK": rank},
        )
        for rank in "012"
        for variables in (JOB, OTHER)
    ]
    places = []
    for process in processes:
        assert process.stdout is not None
        places.append(json.loads(process.stdout.readline())["path"])
    for process in processes:
        process.communicate("end\n", timeout=240)
    assert len(set(places[::2])) == len(set(places[1::2])) == 1
    assert {Path(places[0]), Path(places[1])} == {tmp_path / "out", tmp_path / "out" / "run-2"}
    assert not os.path.exists(tmp_path / "out") or not os.listdir(tmp_path / "out")


def test_names_of_processes() -> None:
    me = this_process()
    assert parse_process(str(me)) == me
    assert me.runs() is True
    assert me._replace(start="1").runs() is False
    assert me._replace(machine="elsewhere").runs() is None
    assert start_time(2**30) is None
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_time(pid) is None  # it has ended, though nobody has asked for its exit code yet
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("told", "rank", "place"),
    [
        ("?0:{parent}", "0", "run-2"),
        ("?0:{parent}", "1", "run-2"),  # a launch of its own within the rank
        ("?-:{parent}", "-", "run-2"),
        ("?-:{parent}", "1", "."),  # a launcher of ranks
        ("?0:{ended}", "0", "."),
        ("0?:{parent}", "0", "."),  # nobody says this
    ],
)
def test_a_child_leaves_the_place_to_a_parent_that_may_train(start: Any, tmp_path: Path, told: str, rank: str, place: str) -> None:
    """Also when it comes first, and when it has ended before the parent begins."""
    here = this_process()
    told = told.format(parent=here, ended=here._replace(start="1"))
    child = start(rank, {"MSPROBE_OWNER": told})
    assert child.path == tmp_path / "out" / place
    said = child.end()
    assert ("which has started this one and may train, too" in said) == (place != ".")
