"""A pipe, a directory or a device in the place of every file that a command reads: it is named, nothing is waited for, and the exit code
is not that of a whole answer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from attack import Attack
from targets import TARGETS, Target

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "directory": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
}
SLOW = ("acc_check-run",)
NOT_READ = (
    ("diagnose-one", "b/*"), ("nan_analyze", "b/*"), ("trends-dump", "b/*"), ("estimate*", "b/*"), ("op_generate", "b/*"),
    ("ckpt-show", "b/*"), ("ckpt-digest", "b/*"), ("show-dump", "b/*"), ("op_generate", "*/stack.json"),
    ("op_generate", "*/construct.json"), ("compare*", "b/*/stack.json"), ("diagnose-two", "b/*/stack.json"), ("ckpt-*", "*.index.json"),
    ("*-incident", "*/incident.json"), ("*-incident", "*/samples/*"), ("analyze-csv", "*.csv"), ("diagnose-monitor", "*.csv"),
    ("trends-csv", "*/alerts.jsonl"), ("csv2tb", "*/scalars*"), ("show*", "*"), ("config_check-*scripts", "train.py"),
    ("ckpt-show-trainer", "b/*"), ("data2db-dump", "b/*"), ("graph-merge", "b/*"),
    ("trends-dump", "*/stack.json"), ("data2db-dump", "*/stack.json"), ("step-mark", "*/stack.json"),
    ("ckpt-deepspeed", "*/latest"), ("git-state", "*"), ("resumed-csv", "*"), ("incident-pieces", "*"),
    ("nan_analyze-run", "*/incident.json"), ("nan_analyze-run", "*/samples/*"), ("step-mark", "*"),
    ("run-losses", "*"), ("run-note", "*"), ("frame-log*", "*"), ("compare-kernels", "*"), ("ckpt-mindspore-ranks", "*"),
)  # fmt: skip
"""Pairs of a target and files in its sample that it does not need for its answer, or without which it says what is not there. ``show``
lists."""
ONLY_SAID = ("csv2tb", "config_check-scripts", "config_check-more-scripts")
"""What ends with 0 all the same, as the existing tool's converter does, or because the user is told in the pack, too."""


@pytest.mark.parametrize("target", [target for target in TARGETS if target.name not in SLOW], ids=lambda target: target.name)
def test_what_is_no_regular_file(target: Target, tmp_path: Path) -> None:
    """See the module. The pipe stands in the place of each file, the others in that of one."""
    attack = Attack(target, tmp_path)
    for number, name in enumerate(attack.files):
        for kind in KINDS if number == 0 else ("pipe",):
            place = attack.source / name
            place.unlink()
            KINDS[kind](place)
            try:
                assert attack._run() == "", (kind, name)
            finally:
                shutil.rmtree(place) if kind == "directory" else place.unlink()
                place.write_bytes(attack.files[name])
                shutil.rmtree(attack.out)
                attack.out.mkdir()
            if kind == "directory" and target.name == "parse":  # which looks into it
                continue
            if any(fnmatch(target.name, of) and fnmatch(name, pattern) for of, pattern in NOT_READ):
                continue
            assert Path(name).name in attack.said, (kind, name, attack.said)
            assert attack.code != 0 or target.name in ONLY_SAID, (kind, name, attack.said)


@pytest.mark.parametrize(
    "name",
    [
        "compare-data-mapping", "compare-post-mapping", "merge_result", "check-config", "config_check-ranks", "api_precision_compare",
        "estimate", "data2db-mapping", "parse", "op_generate",
    ],
)  # fmt: skip
def test_a_pipe_that_the_user_names(name: str, tmp_path: Path) -> None:
    """Exit code 3: something could not be read."""
    target = next(target for target in TARGETS if target.name == name)
    attack = Attack(target, tmp_path)
    named = next(file for file in attack.files if any(word.endswith(file) for word in target.argv) or file.endswith(("dump.json", "a.npy")))
    (attack.source / named).unlink()
    os.mkfifo(attack.source / named)
    assert attack._run() == ""
    assert attack.code == (1 if name == "parse" else 3), attack.said  # parse: 1 is some of the files
    assert Path(named).name in attack.said
