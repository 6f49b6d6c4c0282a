"""Two sides of a comparison that are hardly meant: the same files on both, or different steps. What is found says little of a run then, so
it is said beside the finding."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MOST_FILES = 10_000
"""Files of a directory that are looked at; links to the files of another directory are found at the first of them that is none."""
_DUMP = "dump"
"""An output directory stands for the dumps in it."""


def warn_same_files(target: str | os.PathLike[str], golden: str | os.PathLike[str] | None) -> bool:
    """Say in one line that both sides are one: the same path, the same file by another name, or directories of links to the same files.
    True then."""
    from msprobe_engine.core.log import one_line

    if golden is None or not _are_same(Path(target), Path(golden)):
        return False
    print(one_line(f"warning: {target} and {golden} are the same files: that they are equal says nothing"), file=sys.stderr)
    return True


def _are_same(target: Path, golden: Path) -> bool:
    return any(_is_same(path, other_path) for path, other_path in ((target, golden), (target / _DUMP, golden), (target, golden / _DUMP)))


def _is_same(target: Path, golden: Path) -> bool:
    try:
        if not target.exists() and not golden.exists():
            return _are_kept_in_same(target, golden)
        return os.path.samefile(target, golden) or (target.is_dir() and golden.is_dir() and _holds_same(target, golden))
    except (OSError, ValueError):  # a side that is not there, or can be none, is a matter of its reader
        return False


def _are_kept_in_same(target: Path, golden: Path) -> bool:
    """Paths of steps that the rings of incidents had kept, see `formats.dump.ring_file`: no file of these names is there."""
    from msprobe_engine.formats.dump.ring_file import holders

    target_files, golden_files = holders(target), holders(golden)
    return (
        bool(target_files)
        and target_files.keys() == golden_files.keys()
        and all(os.path.samefile(file, golden_files[name]) for name, file in target_files.items())
    )


def _holds_same(target: Path, golden: Path) -> bool:
    """Is every file of a directory that of the other one with the same name, and is there one at all?"""
    count = 0
    for folder, _, names in os.walk(target, followlinks=False):
        for name in names:
            path = Path(folder, name)
            if not os.path.samefile(path, golden / path.relative_to(target)):
                return False
            count += 1
            if count >= _MOST_FILES:
                return True
    return count > 0


def say_steps(text: str, other_steps: tuple[int, int] | None) -> str:
    """The text of a result; its second line says so where the two sides are different steps, of which no option asks."""
    if other_steps is None:
        return text
    headline, *rest = text.split("\n")
    target, golden = other_steps
    said = f"Attention: step {target} is compared with step {golden} of the golden run; a difference may be that of the steps."
    return "\n".join([headline, said, *rest])
