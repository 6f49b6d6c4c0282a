"""Commands that are proposed have the launch line of the run, where its pack knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.process.variables import LAUNCH_LINE
from msprobe_engine.find.launch_line import GOLDEN, UNKNOWN, again_both, with_launch_lines
from msprobe_engine.formats.pack.entries import of_rank

RUN, BOTH = f"msprobe run -- {UNKNOWN}", [f"a -- {UNKNOWN}", f"b -- {GOLDEN}", "c"]
CASES = [
    ([RUN], "torchrun train.py --name 'a b'", None, ["msprobe run -- torchrun train.py --name 'a b'"]),
    ([RUN], None, None, [RUN]),
    ([RUN], "", None, [RUN]),
    (BOTH, "python x.py", "python y.py", ["a -- python x.py", "b -- python y.py", "c"]),
    (BOTH, "python x.py", None, ["a -- python x.py", f"b -- {GOLDEN}", "c"]),
    (BOTH, None, "python y.py", [f"a -- {UNKNOWN}", "b -- python y.py", "c"]),
    ([RUN], "python x.py; rm -rf ~ $(touch y)", None, ["msprobe run -- python 'x.py;' rm -rf '~' '$(touch' 'y)'"]),
    ([RUN], "python 'x.py", None, [RUN]),
]


@pytest.mark.parametrize(("commands", "target", "golden", "expected"), CASES)
def test_commands(commands: list[str], target: str | None, golden: str | None, expected: list[str], tmp_path: Path) -> None:
    """What is not known stays a word to fill in; what a pack holds is words, and never a command of a shell."""
    packs = []
    for name, line in (("target", target), ("golden", golden)):
        writer = PackWriter(tmp_path / name / "pack.zip", rank=0, world_size=1)
        writer.add({of_rank("env", 0): {"HOME": "/"} | ({} if line is None else {LAUNCH_LINE: line})})
        packs.append(tmp_path / name / "pack.zip")
    assert with_launch_lines(commands, *packs) == expected
    assert with_launch_lines(commands, None, None) == commands


def test_both_trainings_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden one first, because the end of the second run names the one before it; in directories that are new."""
    monkeypatch.chdir(tmp_path)
    for name, ending in (("", ""), ("again", "_2"), ("again_golden_2", "_3")):
        if name:
            (tmp_path / name).mkdir()
        assert again_both("-x") == [
            f"msprobe run -x --output-dir again_golden{ending} -- {GOLDEN}",
            f"msprobe run -x --output-dir again{ending} -- {UNKNOWN}",
            f"msprobe diagnose again{ending} again_golden{ending}",
        ]
