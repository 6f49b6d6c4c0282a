"""The interactive tool of ``msprobe -f pytorch parse`` (8.1.1): its commands, their options and what they write.

What went wrong in a command is said, and the next one can be typed; the end of the input, ``exit`` and Ctrl+C end it.
"""

from __future__ import annotations

import argparse
import cmd
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from msprobe_engine.core.errors import ProbeError, SinkError, UsageError
from msprobe_engine.core.io.output_files import guard_writing, write_file, write_plain
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.log import printable
from msprobe_engine.formats.legacy.parse import ascend, elements
from msprobe_engine.formats.legacy.parse.elements import summary
from msprobe_engine.formats.tensors.decoding import Array
from msprobe_engine.formats.tensors.reader import load_numpy

ROOT = Path("parse_data")
CONVERTED, COMPARED = ROOT / "dump_convert", ROOT / "compare_result"
BATCH_CONVERTED, BATCH_COMPARED = ROOT / "batch_dump_convert", ROOT / "batch_compare_result"
_SHOWN, _PER_LINE, _DEEPEST = 128, 8, 5
_HELP = {
    "cad": "convert a directory of kernel dumps to npy, sorted by operator and time",
    "vc": "compare two directories: of kernel dumps, or of what cad wrote",
    "dc": "convert a kernel dump, or a directory of them, to npy",
    "pt": "print an array",
    "cn": "compare two arrays element by element",
    "pk": "the pkl files of old versions; not supported",
}


class _Parser(argparse.ArgumentParser):
    """Wrong arguments end the command and not the session."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


class Session(cmd.Cmd):
    """Reads commands until the input ends.

    Args:
        stdin, stdout: default: those of the process.
    """

    prompt = "Parse >>> "
    intro = "Commands: cad, vc, dc, pt, cn; help lists them, pt -h says what one takes, exit ends."

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self.failed = 0

    def onecmd(self, line: str) -> bool:
        """Run one command. True ends the session."""
        name, _, rest = line.strip().partition(" ")
        if name in ("EOF", "exit", "quit"):
            self._print_text("")
            return True
        if not name:
            return False
        try:
            self._run(name, shlex.split(rest))
        except (ProbeError, ValueError) as error:
            self.failed += 1
            self._print_text(f"{name}: {error}")
        return False

    def _run(self, name: str, given: Sequence[str]) -> None:
        if name in ("help", "?"):
            if given and given[0] in _HELP:
                self._parser(given[0]).print_help(self.stdout)
                return
            for word, text in _HELP.items():
                self._print_text(f"  {word:5} {text}")
            return
        if name not in _HELP:
            raise UsageError(f"no such command; commands: {', '.join(_HELP)}, help, exit")
        given = list(given[1:] if given[:1] == [name] else given)
        if "-h" in given or "--help" in given:
            self._parser(name).print_help(self.stdout)
            return
        args = self._parser(name).parse_args(given)
        if name == "pk":
            raise UsageError("pkl files of old versions are not supported; dump again, and msprobe compare reads the dump.json")
        action: Callable[[argparse.Namespace], None] = getattr(self, f"_{name}")
        action(args)

    def _parser(self, name: str) -> argparse.ArgumentParser:
        parser = _Parser(prog=name, description=_HELP[name], add_help=False, allow_abbrev=False)
        add: Any = parser.add_argument
        if name in ("cad", "vc", "cn"):
            add("-m", "--my_dump_path", required=True, metavar="PATH", help="the data in question")
        if name in ("vc", "cn"):
            add("-g", "--golden_dump_path", required=True, metavar="PATH", help="the data it is compared with")
        if name in ("dc", "pt"):
            add("-n", "--name", dest="path", required=True, metavar="PATH", help="a file" + (" or directory" if name == "dc" else ""))
        if name == "dc":
            add("-f", "--format", metavar="FORMAT", help="another layout: NCHW, NHWC, ND, ...")
        if name in ("cad", "vc", "dc"):
            add("-out", "--output_path", metavar="DIR", help="where the result goes (default: below parse_data)")
            short = "-asc" if name == "cad" else "-cmp_path"
            add(short, "--msaccucmp_path", metavar="FILE", help=f"{ascend.SCRIPT} of CANN (default: that of the installed one)")
        if name == "cn":
            add("-p", "--print", dest="count", type=_positive(int), default=20, metavar="N", help="elements to list (default: 20)")
            add("-s", "--save", action="store_true", help="write both arrays as text, too")
            add("-al", "--atol", type=_positive(float), default=0.001, metavar="X", help="absolute tolerance (default: 0.001)")
            add("-rl", "--rtol", type=_positive(float), default=0.001, metavar="X", help="relative tolerance (default: 0.001)")
        if name == "pk":
            add("-f", "--file", dest="file_name", metavar="FILE")
            add("-n", "--name", dest="api_name", metavar="NAME")
        return parser

    def _print_text(self, text: str) -> None:
        self.stdout.write("\n".join(map(printable, text.split("\n"))) + "\n")

    def _pt(self, args: argparse.Namespace) -> None:
        array = _array(args.path)
        flat = array.reshape(-1)[:_SHOWN]
        self._print_text(f"{_spec(array)}\nPath: {args.path}\nTextFile: {args.path}.txt\n{'Index':>8}  Data")
        for at in range(0, len(flat), _PER_LINE):
            self._print_text(f"{at:8}  {' '.join(map(str, flat[at : at + _PER_LINE]))}")
        self._text(array, args.path)

    def _cn(self, args: argparse.Namespace) -> None:
        target, golden = _array(args.my_dump_path), _array(args.golden_dump_path)
        if args.save:
            self._text(target, args.my_dump_path)
            self._text(golden, args.golden_dump_path)
        compared = elements.compare(target, golden, args.atol, args.rtol, args.count)
        for title, lines in (("Error Item Table", compared.errors), ("Top Item Table", compared.top)):
            self._print_text(f"{title}\n{'Index':>10}  {'Left':>16}  {'Right':>16}  {'Diff':>16}")
            for index, target_value, golden_value, difference in lines:
                self._print_text(f"{index:10}  {target_value!s:>16}  {golden_value!s:>16}  {difference!s:>16}")
        if compared.note:
            self._print_text(f"warning: {compared.note}")
        for word, path, array in (("Left", args.my_dump_path, target), ("Right", args.golden_dump_path, golden)):
            self._print_text(
                f"{word}:\n  NpyFile: {path}" + (f"\n  TxtFile: {path}.txt" if args.save else "") + f"\n  NpySpec: {_spec(array)}"
            )
        cosine = "a side is all zeros" if compared.cosine is None else compared.cosine
        self._print_text(f"NumCnt:   {compared.total}\nAllClose: {compared.wrong == 0}\nCosSim:   {cosine}")
        self._print_text(f"ErrorPer: {compared.share}  (rl= {args.rtol}, al= {args.atol})")

    def _cad(self, args: argparse.Namespace) -> None:
        source, script = _there(args.my_dump_path), ascend.find_script(args.msaccucmp_path)
        output = Path(args.output_path) if args.output_path else BATCH_CONVERTED / time.strftime("%Y%m%d%H%M%S")
        found = 0
        for path in _files(source):
            parts = path.name.split(".")
            if len(parts) >= 5 and parts[1] and parts[-1]:
                ascend.convert(path, _make_directory(output / parts[1] / parts[-1]), script)
                found += 1
        if not found:
            raise UsageError(f"{source}: holds no kernel dump (type.name.task.stream.time)")
        self._print_text(f"{found} files converted: {output}")

    def _dc(self, args: argparse.Namespace) -> None:
        source, script = _there(args.path), ascend.find_script(args.msaccucmp_path)
        output = _make_directory(Path(args.output_path) if args.output_path else CONVERTED)
        ascend.convert(source, output, script, data_format=args.format)
        self._print_text(f"SrcFile: {source}")
        for path in sorted(output.iterdir()):
            if path.suffix == ".npy" and (source.is_dir() or path.name.startswith(source.name)):
                self._print_text(f" - {path.name}")
        self._print_text(f"Result: {output}")

    def _vc(self, args: argparse.Namespace) -> None:
        target, golden = _there(args.my_dump_path), _there(args.golden_dump_path)
        if not target.is_dir() or not golden.is_dir():
            raise UsageError("-m and -g are two directories; cn compares two files")
        if all(path.suffix == ".npy" for side in (target, golden) for path in _files(side)):
            if target.resolve() == golden.resolve():
                raise UsageError("-m and -g are the same directory")
            output = _make_directory(Path(args.output_path) if args.output_path else BATCH_COMPARED)
            path, problems = compare_directories(target, golden, output)
            for problem in problems:
                self._print_text(f"warning: {problem}")
            self._print_text(f"Result: {path}")
            return
        script = ascend.find_script(args.msaccucmp_path)
        output = _make_directory(Path(args.output_path) if args.output_path else COMPARED)
        ascend.compare(target, golden, output, script)
        self._print_text(f"Result: {output}")

    def _text(self, array: Array, path: str) -> None:
        target = f"{path}.txt"
        if os.path.lexists(target):
            self._print_text(f"{target} is there already and stays")
            return
        rows = array.reshape(-1, array.shape[-1]) if array.ndim and array.size else array.reshape(-1, 1)
        with guard_writing(target, "name another place"):
            write_plain(target, [b"".join(" ".join(f"{number:g}" for number in row).encode() + b"\n" for row in rows.tolist())])


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    number.__name__ = "number"
    return number


def _there(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise UsageError(f"{path}: there is no such file or directory")
    if found.is_dir() and not any(found.iterdir()):
        raise UsageError(f"{path}: is empty")
    return found


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for directory, directories, files in os.walk(root):
        directories.sort()
        if len(Path(directory).relative_to(root).parts) >= _DEEPEST:
            directories.clear()
        yield from (Path(directory) / name for name in sorted(files))


def _make_directory(path: Path) -> Path:
    try:
        make_directories(str(path))
    except OSError as error:
        raise SinkError(f"cannot create {path}: {error.strerror or error}; name another directory with -out") from error
    return path


def _array(path: str) -> Array:
    found = _there(path)
    if found.suffix not in (".npy", ".pt"):
        raise UsageError(f"{path}: a .npy or .pt file is needed")
    array = load_numpy(found)
    elements.check_numbers(array)
    return array


def _spec(array: Array) -> str:
    if not array.size:
        return f"[Shape: {array.shape}] [Dtype: {array.dtype}] [empty]"
    with np.errstate(all="ignore"):
        high, low, mean = array.max(), array.min(), array.mean(dtype=None if array.dtype.kind == "c" else np.float64)
    return f"[Shape: {array.shape}] [Dtype: {array.dtype}] [Max: {high}] [Min: {low}] [Mean: {mean}]"


COLUMNS = ("NPU File Name", "Bench File Name", "Mean", "Bench Mean", "Md5 Consistency", "Max Abs Error", "Max Relative Error")
_NUMBER = re.compile(r"([0-9]+)")


def compare_directories(target: Path, golden: Path, output: Path) -> tuple[Path, list[str]]:
    """Write ``{output}/batch_compare_{unix time}.csv``.

    Operators belong together by name, times and files by their order. What has no partner or cannot be compared is a row with empty
    numbers and a problem; the rest is compared all the same.

    Returns:
        The table, and what could not be compared.

    Raises:
        SinkError: the table cannot be written.
    """
    problems: list[str] = []
    lines = [",".join(COLUMNS)]
    for target_file, golden_file in _pairs(target, golden, problems):
        cells: list[str] = [target_file.name if target_file else "", golden_file.name if golden_file else "", *[""] * 5]
        if target_file and golden_file:
            try:
                cells[2:] = map(str, summary(load_numpy(target_file), load_numpy(golden_file)))
            except ProbeError as error:
                problems.append(f"{target_file} and {golden_file}: {error}")
        else:
            problems.append(f"{target_file or golden_file}: the other side has no such file")
        lines.append(",".join(map(safe_cell, cells)))
    path = output / f"batch_compare_{int(time.time())}.csv"
    with guard_writing(path, "name another directory with -out"):
        write_file(path, ["\n".join(lines).encode() + b"\n"])
    return path, problems


def _pairs(target: Path, golden: Path, problems: list[str]) -> Iterator[tuple[Path | None, Path | None]]:
    targets, goldens = ({path.name: path for path in _list_paths(root, Path.is_dir)} for root in (target, golden))
    for name in sorted(targets.keys() | goldens.keys(), key=_natural):
        if name not in targets or name not in goldens:
            problems.append(f"operator {name}: only on {'the golden' if name in goldens else 'this'} side")
            continue
        for target_time, golden_time in zip_longest(_list_paths(targets[name], Path.is_dir), _list_paths(goldens[name], Path.is_dir)):
            if target_time is None or golden_time is None:
                problems.append(f"{target_time or golden_time}: the other side has fewer times of this operator")
                continue
            yield from zip_longest(_list_paths(target_time, Path.is_file), _list_paths(golden_time, Path.is_file))


def _list_paths(root: Path, kind: Callable[[Path], bool]) -> list[Path]:
    return sorted((path for path in root.iterdir() if kind(path) and not path.is_symlink()), key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers by their size: ``input.10`` comes after ``input.2``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
