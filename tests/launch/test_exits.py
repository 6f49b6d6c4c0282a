"""SIGTERM, and what else ends a job: the files are complete, and the process ends as it would without the probe."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import probe_ranks as pr
import pytest
import torch.distributed as dist

from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.common.shutdown import signal_shutdown
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.training.loop import LoopObserver

LAST = 3
"""The step in which the job is asked to end."""


def settings(directory: Path, **keys: object) -> ProbeSettings:
    return ProbeSettings(
        output_dir=str(directory),
        monitor=MonitorSettings(),
        dump=DumpSettings(level="mix"),
        incident=IncidentSettings(enabled=False),
        **keys,  # type: ignore[arg-type]
    )


def training(made: ProbeSettings, ended: Callable[[], None]) -> None:
    """Steps 0 to 3 of a small GPT; `ended` is called in the last, between its forward and backward pass."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests, and this program with them, were told to ignore it
    job = pr.gpt.Job(pr.TINY)
    observer = LoopObserver(made)
    observer.setup(job.model, job.optimizer)
    for step in range(LAST + 1):
        observer.begin(step)
        loss = job.forward()
        if step == LAST:
            ended()
        loss.backward()
        job.update()
        observer.end({"loss": loss})
    observer.close()


def asked(number: int = signal.SIGTERM) -> None:
    """The signal arrives while Python code of the training runs."""
    os.kill(os.getpid(), number)
    time.sleep(20)


def asked_in_a_moment(number: int = signal.SIGTERM, seconds: float = 0.2) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def held() -> None:
    """The main thread waits in native code for a lock that nobody gives back; no signal ends such a wait."""
    asked_in_a_moment()
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def complete_but_for_the_last(directory: Path, ranks: int = 1) -> None:
    """Every finished step has its gradients, and the one that was cut off says so; the CSV files have whole lines of all finished steps."""
    dump = open_dump(directory / "dump")
    assert dump.steps == list(range(LAST + 1))
    for rank in range(ranks):
        for step in range(LAST):
            one = dump.load(step, rank if ranks > 1 else None)
            assert one.complete
            assert "Module.norm.LayerNorm.backward.0" in one.entries
        last = dump.load(LAST, rank if ranks > 1 else None)
        assert not last.complete
        assert "Module.norm.LayerNorm.forward.0" in last.entries
    texts = [path.read_text() for path in (directory / "monitor").rglob("grad_reduced_0-99.csv")]
    assert len(texts) == ranks
    for text in texts:
        assert text.endswith("\n")
        assert {line.split(",")[2] for line in text.splitlines()[1:]} >= {str(step) for step in range(LAST)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_process_dies_by_the_signal_with_its_files_complete(tmp_path: Path, number: int) -> None:
    """One rank, in Python code: exit code of the signal, files as after an exception."""
    (one,) = pr.run(training, settings(tmp_path), lambda: asked(number), directory=tmp_path, fails=True)
    assert one.code == -number
    complete_but_for_the_last(tmp_path)
    assert "[ERROR]" not in one.log


def test_a_main_thread_held_in_native_code(tmp_path: Path) -> None:
    """No Python instruction is reached any more: the listener finishes the files, and the process dies by the signal."""
    (one,) = pr.run(training, settings(tmp_path), held, directory=tmp_path, fails=True)
    assert one.code == -signal.SIGTERM
    complete_but_for_the_last(tmp_path)


def endless(made: ProbeSettings, seconds: float) -> None:
    """A training that is asked to end this long after its first step (however slow the machine is, one is over); every step that it has
    finished is noted."""
    job = pr.gpt.Job(pr.TINY)
    observer = LoopObserver(made)
    observer.setup(job.model, job.optimizer)
    noted = os.open(f"{made.output_dir}/noted", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for step in range(10_000):
        observer.begin(step)
        loss = job.forward()
        loss.backward()
        job.update()
        observer.end({"loss": loss})
        os.write(noted, f"{step}\n".encode())
        if step == 0:
            asked_in_a_moment(seconds=seconds)


@pytest.mark.parametrize("seconds", [0.1, 0.21, 0.37])
def test_at_any_moment(tmp_path: Path, seconds: float) -> None:
    """Also when the signal arrives while the probe itself works: no step that was over is lost or marked, in dump and monitor."""
    (one,) = pr.run(endless, settings(tmp_path), seconds, directory=tmp_path, fails=True)
    assert one.code == -signal.SIGTERM
    assert "[ERROR]" not in one.log
    over = {int(word) for word in (tmp_path / "noted").read_text().split()}
    dump = open_dump(tmp_path / "dump")
    complete = {step for step in dump.steps if dump.load(step, None).complete}
    assert 0 in over
    assert over <= complete
    assert len(complete) >= len(dump.steps) - 1
    texts = [path.read_text() for path in (tmp_path / "monitor").rglob("grad_reduced_*.csv")]  # one for 100 steps
    assert over <= {int(line.split(",")[2]) for text in texts for line in text.splitlines()[1:]}


def peer_is_away() -> None:
    """Rank 1 never comes to the collective in which rank 0 waits."""
    if dist.get_rank() == 1:
        asked_in_a_moment(seconds=3)  # not before rank 0 is gone: its collective would fail
        time.sleep(20)
    asked_in_a_moment()
    dist.barrier()


def test_two_ranks_one_in_a_collective(tmp_path: Path) -> None:
    """Both ranks of a job die by the signal, one of them inside a collective whose peer does not come."""
    both = pr.run(training, settings(tmp_path), peer_is_away, ranks=2, directory=tmp_path, fails=True)
    assert [one.code for one in both] == [-signal.SIGTERM] * 2
    complete_but_for_the_last(tmp_path, ranks=2)


def never_ending(hold: bool) -> None:
    """Finishing takes longer than the patience."""
    signal_shutdown.at_signal(lambda: time.sleep(60), 0.5)
    if hold:
        held()
    asked()


@pytest.mark.parametrize("hold", [False, True])
def test_patience_is_an_upper_bound(tmp_path: Path, hold: bool) -> None:
    """What does not finish does not keep the process alive, wherever the main thread is."""
    (one,) = pr.run(never_ending, hold, directory=tmp_path, fails=True, timeout=50)
    assert one.code == -signal.SIGTERM


def twice() -> None:
    order: list[str] = []
    signal_shutdown.at_signal(lambda: Path("order").write_text(" ".join(order)), 5.0)

    def first() -> None:
        order.append("first")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        order.append("whole")

    signal_shutdown.at_signal(first, 5.0)
    asked()


def test_a_second_signal_does_not_cut_the_finishing_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher and a scheduler both ask: files are finished once, the newest first."""
    monkeypatch.chdir(tmp_path)
    (one,) = pr.run(twice, directory=tmp_path, fails=True)
    assert one.code == -signal.SIGTERM
    assert Path("order").read_text() == "first whole"


def ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal_shutdown._exits._handler


def with_another(when: str) -> list[str]:
    """A handler of the training's own, put in before or after the probe's."""
    seen: list[str] = []

    def theirs(number: int, frame: object) -> None:
        seen.append("theirs")
        if callable(before):
            before(number, frame)

    def finish() -> None:
        seen.append("finished")

    before: object = None
    if when == "before":
        before = signal.signal(signal.SIGTERM, theirs)
        signal_shutdown.at_signal(finish, 0.2)
    else:
        signal_shutdown.at_signal(finish, 0.2)
        assert ours()
        before = signal.signal(signal.SIGTERM, theirs)
    assert signal.getsignal(signal.SIGTERM) is theirs
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    signal_shutdown.forget(finish)
    assert signal.getsignal(signal.SIGTERM) is theirs
    return seen


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_training_wins(tmp_path: Path, when: str) -> None:
    """Whoever else handles SIGTERM does so alone: ours does nothing and ends nothing, even when theirs calls the one it found."""
    (one,) = pr.run(with_another, when, directory=tmp_path)
    assert one.value == ["theirs"]


def put_back() -> list[object]:
    def one() -> None: ...

    def two() -> None: ...

    signal_shutdown.at_signal(one, 1.0)
    signal_shutdown.at_signal(two, 1.0)
    with_both = ours()
    signal_shutdown.forget(one)
    with_one = ours()
    signal_shutdown.forget(two)
    wakeup = signal.set_wakeup_fd(-1)
    return [with_both, with_one, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, wakeup, math.isinf(signal_shutdown.get_seconds_left())]


def test_the_default_action_is_put_back(tmp_path: Path) -> None:
    """After the last probe is closed nothing of ours is left: no handler, no file descriptor for signals."""
    (one,) = pr.run(put_back, directory=tmp_path)
    assert one.value == [True, True, True, -1, True]


def not_taken(case: str) -> bool:
    def finish() -> None: ...

    ends = os.pipe()
    os.set_blocking(ends[1], False)
    if case == "somebody listens":
        signal.set_wakeup_fd(ends[1])
    elif case == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if case == "another thread":
        thread = threading.Thread(target=signal_shutdown.at_signal, args=(finish, 1.0))
        thread.start()
        thread.join()
    else:
        signal_shutdown.at_signal(finish, 0.0 if case == "switched off" else 1.0)
    if case == "somebody listens later":
        assert ours()
        signal.set_wakeup_fd(ends[1])
        signal_shutdown.check_wakeup_fd()
        assert signal.set_wakeup_fd(-1) == ends[1]
    return not ours()


@pytest.mark.parametrize("case", ["somebody listens", "somebody listens later", "ignored", "another thread", "switched off"])
def test_signals_are_left_alone(tmp_path: Path, case: str) -> None:
    """No handler where somebody else listens to signals, ignores them, builds the probe in a thread, or set the patience to 0."""
    (one,) = pr.run(not_taken, case, directory=tmp_path)
    assert one.value is True


def forks() -> list[object]:
    """Children that are ended at once, at any place of the fork; the parent hears nothing of it."""
    called: list[int] = []
    signal_shutdown.at_signal(lambda: called.append(os.getpid()), 2.0)
    codes = []
    for _ in range(30):
        pid = os.fork()
        if not pid:
            time.sleep(20)
            os._exit(9)
        os.kill(pid, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [set(codes), called, ours(), mask, math.isinf(signal_shutdown.get_seconds_left())]


@pytest.mark.slow
def test_forked_children(tmp_path: Path) -> None:
    """A child has the default action and finishes nothing; its signals are not taken for the parent's."""
    (one,) = pr.run(forks, directory=tmp_path)
    assert one.value == [{-signal.SIGTERM}, [], True, set(), True]


def with_debugger(config: Path) -> None:
    job = pr.gpt.Job(pr.TINY)
    debugger = PrecisionDebugger(str(config))
    for step in range(LAST + 1):
        debugger.start(job.model)
        loss = job.forward()
        if step == LAST:
            asked()
        loss.backward()
        job.update()
        debugger.stop()
        debugger.step()


def test_the_debugger(tmp_path: Path) -> None:
    """`PrecisionDebugger` finishes its dump too."""
    (one,) = pr.run(with_debugger, pr.write_config(tmp_path, "mix"), directory=tmp_path, fails=True)
    assert one.code == -signal.SIGTERM
    dump = open_dump(tmp_path / "dump")
    assert [dump.load(step, None).complete for step in dump.steps] == [True] * LAST + [False]
