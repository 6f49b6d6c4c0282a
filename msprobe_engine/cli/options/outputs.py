"""Where commands write to: never over what they read, nor one report over another; of a run's directory in its own ``analysis``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.regular_files import explain, make_directories, open_regular
from msprobe_engine.core.log import one_line

RESULTS = "analysis"
"""Directory of a run for what commands write about it."""
RESULTS_OF_RUN = "RUN/analysis/{0}-N"
"""For the help of commands."""
_MOST_RESULTS = 100_000
_OF_RUN = ("dump", "monitor", "incidents", "config_check_pack.zip", "run.json")
"""What the output directory of a run holds, at least one of it."""
_OWN = "ckpt_diff."
"""How the reports that ``-o`` names begin; they may lie in a checkpoint's directory and be written again."""
Kind = tuple[str, tuple[bytes, ...]]
"""What an option writes, and how that begins."""
JSON: Kind = ("JSON", (b"{", b"["))
_KINDS: dict[str, Kind] = {"--json": JSON, "--html": ("page", (b"<",)), "--csv": ("table of tensors", (b"name,",))}


def refuse_overwriting(
    outputs: Iterable[tuple[str, str | Path | None]], inputs: Iterable[str | Path], kinds: Mapping[str, Kind] = _KINDS
) -> None:
    """To be asked before anything is read.

    Args:
        outputs: options and the files they name; None and ``-`` (the standard output) are passed over.
        inputs: files and directories that are read.
        kinds: of options that name a file, what they write.

    Raises:
        UsageError: two options name one file; a file that is there already is one of `inputs`, lies in a directory of them, or is
            something else than what the option writes: the option takes the next word for its file, which was meant as a script.
    """
    read = [os.path.realpath(path) for path in inputs]
    taken: dict[str, str] = {}
    for option, path in outputs:
        if path is None or str(path) == "-":
            continue
        place = os.path.realpath(path)
        shown = one_line(str(path))
        if place in taken and (os.path.isfile(place) or not os.path.exists(place)):
            raise UsageError(f"{option} and {taken[place]} both name {shown}; the one would be written over the other: name another file")
        taken[place] = option
        if not os.path.isfile(place):
            continue
        for source in read:
            if _same(place, source):
                raise UsageError(f"{option}: {shown} is what is to be read and would be written over; name another file")
            if os.path.isdir(source) and place.startswith(os.path.join(source, "")) and not os.path.basename(place).startswith(_OWN):
                raise UsageError(
                    f"{option}: {shown} is there already and lies in {one_line(source)}, which is to be read; name another file, "
                    "outside of it"
                )
        kind, beginnings = kinds.get(option, ("", ()))
        if kind and not _begins_with(place, beginnings):
            raise UsageError(f"{option}: {shown} is there already and is no {kind}; it would be lost: name another file behind {option}")


def refuse_page_name(path: str | Path | None, page: str = "") -> None:
    """To be asked where ``-o`` names a directory: ``-o name.html`` would make a directory of that name.

    Args:
        path: what ``-o`` names; None is passed over.
        page: the option that names a page, where the command has one.

    Raises:
        UsageError: the name is that of a page.
    """
    if path is None or not is_page_name(path):
        return
    shown = one_line(str(path))
    other = f", or the page with {page} {shown}" if page else ""
    directory = one_line(str(Path(path).with_suffix("")))
    raise UsageError(f"-o {shown}: is the name of a page, and the page goes into a directory; name that one: -o {directory}{other}")


def write_settings_file(path: str, text: str, force: bool) -> None:
    """Write a settings file that a user asked for.

    Args:
        force: write over one that is there.

    Raises:
        UsageError: it is there already, has another kind of name, or cannot be written.
    """
    shown = one_line(path)
    if not path.lower().endswith((".yaml", ".yml")):
        raise UsageError(f"{shown}: a settings file in YAML ends in .yaml; give such a name, or - for the standard output")
    try:
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL))
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{shown} is there already and was left as it is; name another file, or write over it with --force") from None
    except OSError as error:
        raise UsageError(f"{shown} cannot be written: {explain(error)}") from error


def is_page_name(path: str | Path) -> bool:
    """Is it the name of a page? ``-o`` takes any other name for that of a directory."""
    return Path(path).suffix.lower() in (".html", ".htm")


def _begins_with(path: str, beginnings: tuple[bytes, ...]) -> bool:
    """Does a file begin with one of these, or is it empty, or cannot be read?"""
    try:
        with open_input(path) as file:
            first = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError:
        return True
    return not first or first.startswith(beginnings)


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def is_run(place: Path) -> bool:
    """Does the directory hold what a run leaves?"""
    return any((place / name).exists() for name in _OF_RUN)


def results_directory(run: str, command: str, otherwise: str) -> str:
    """A new directory ``RUN/analysis/<command>-<n>`` for what a command writes about a run, made now.

    Args:
        run: path that was given, "": none; where it is not the output directory of a run, or cannot be written, the answer is `otherwise`.
            So it is where its ``analysis`` is a link: nobody named that place, and a run that came from elsewhere would choose it.
    """
    place = Path(run)
    try:
        if not run or not place.is_dir() or not is_run(place) or (place / RESULTS).is_symlink():
            return otherwise
        make_directories(os.fspath(place / RESULTS))
        for number in range(1, _MOST_RESULTS):
            with contextlib.suppress(FileExistsError):
                directory = place / RESULTS / f"{command}-{number}"
                directory.mkdir(mode=0o750)
                return os.fspath(directory)
    except OSError:
        pass
    return otherwise
