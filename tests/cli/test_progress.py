"""Long work says how far it is, on the standard error, whoever reads that."""

from __future__ import annotations

import pytest

from msprobe_engine.core.io import progress


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
