"""Console messages; long work says how far it is, on the standard error, whoever reads that."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

import pytest

from msprobe_engine.core import log
from msprobe_engine.core.io import progress


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    log.forget_warnings()
    yield
    log.set_rank(None)
    log.set_level("info")


def test_a_line_has_time_process_level_and_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a distributed run a line is `YYYY-mm-dd HH:MM:SS (pid) [LEVEL] message` on stderr."""
    monkeypatch.delenv("RANK", raising=False)
    log.info("100 % done")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \({os.getpid()}\) \[INFO\] 100 % done\n", err)


def test_the_rank_stands_in_distributed_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is that of `set_rank`, else that of a launcher with more than one process."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    log.error("a")
    monkeypatch.setenv("WORLD_SIZE", "8")
    log.error("b")
    log.set_rank(5)
    log.error("c")
    assert [line.partition(") ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "[ERROR] a",
        "[rank 3] [ERROR] b",
        "[rank 5] [ERROR] c",
    ]


def test_levels_filter(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages below the level are not written; silent writes nothing at all."""
    log.set_level("warning")
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.set_level("silent")
    log.error("e")
    assert capsys.readouterr().err.splitlines()[0].endswith("[WARNING] w")


def test_warn_once_speaks_once_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    """The first warning of a key is written, later ones are not."""
    assert [log.warn_once("k", "first"), log.warn_once("k", "second"), log.warn_once("other", "third")] == [True, False, True]
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == ["first", "third"]


def test_the_root_logger_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """No handler is put on the root logger, and its handlers do not print our lines again."""
    before = list(logging.getLogger().handlers)
    log.info("x")
    assert logging.getLogger().handlers == before
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "level"), [("0", "debug"), ("1", "info"), ("2", "warning"), ("3", "error"), ("4", "silent"), ("x", "info")]
)
def test_the_environment_gives_the_level(value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MSPROBE_LOG_LEVEL 0..4 is debug, info, warning, error, nothing; anything else is info."""
    monkeypatch.setenv("MSPROBE_LOG_LEVEL", value)
    assert log.level_from_environment() == level


@pytest.mark.parametrize(("seconds", "lines"), [(4.0, ["reading: 3 of 6 (c)", "reading: 6 of 6 (f)"]), (0.1, [])])
def test_in_a_log(seconds: float, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a line every ten seconds; what is done by then says nothing."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.bar("reading", 6) as advance:
        for text in "abcdef":
            now[0] += seconds
            advance(text)
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_work_whose_size_is_not_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in progress.progress(iter("ab"), "looking"):
        now[0] += 11
    assert capsys.readouterr().err == "looking: 1\nlooking: 2\n"
