"""Write the script of one call of a dump, and its data beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.accuracy.scripts.literals import CannotWrite
from msprobe_engine.accuracy.scripts.source import BOTH, Dialect, Options, Recorded, Script, script
from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import warn_of_earlier_runs
from msprobe_engine.formats.dump.find_dumps import nearby
from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.tensors.reader import Loader, TensorFiles

_LONGEST_STEM = 180


class Source(NamedTuple):
    """One rank of a dump, as its dump.json has it.

    Attributes:
        file: where it was read from.
        framework: ``pytorch``, ``mindspore``, ``mindtorch``; empty when the file does not say.
        origin: step and rank in words.
        files: the saved tensors.
    """

    file: Path
    data: Mapping[str, Any]
    framework: str
    origin: str
    files: TensorFiles


class Written(NamedTuple):
    """A script that was written.

    Attributes:
        files: how many data files lie beside it.
        drawn: inputs whose values the dump does not have, so the script draws them.
    """

    path: Path
    files: int
    drawn: tuple[str, ...]


def read_source(path: str | Path, step: int | None = None, rank: int | None = None) -> Source:
    """Read one rank of a dump: a dump.json, or any directory of a dump.

    Raises:
        DumpFormatError: it is none, or damaged.
        UsageError: it holds several steps or ranks, and none was chosen.
    """
    file = Path(path)
    if file.is_dir():
        dump = open_dump(file)
        warn_of_earlier_runs(dump)
        if step is None and len(dump.steps) > 1:
            raise UsageError(f"{file}: has steps {', '.join(map(str, dump.steps[:12]))}; choose one with --step")
        file = dump.path(dump.steps[0] if step is None else step, rank) / layout.DUMP
    try:
        document = parse_json(read_bytes(file), file)
    except FileNotFoundError:
        raise DumpFormatError(f"{file}: is not there{nearby(file)}") from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise DumpFormatError(f"{file}: no object 'data'; this is no dump file")
    place = file.resolve().parent
    of_step, of_rank = layout.step_of(place.parent.name), layout.rank_of(place.name)
    origin = ", ".join([*([f"step {of_step}"] if of_step is not None else []), *([f"rank {of_rank}"] if of_rank is not None else [])])
    framework = document.get("framework")
    return Source(file, data, framework if isinstance(framework, str) else "", origin or "a dump", TensorFiles(file.parent))


def find_call(source: Source, wanted: str) -> Recorded:
    """The call of a name: ``Torch.matmul.0``, or that of its forward or backward record.

    Raises:
        UsageError: there is no such call.
    """
    title = wanted.removesuffix(".forward").removesuffix(".backward")
    forward, backward = source.data.get(f"{title}.forward"), source.data.get(f"{title}.backward")
    name = _name(f"{title}.forward")
    if name is None or not isinstance(forward, dict):
        raise UsageError(f"{source.file}: has no API call '{one_line(title)[:120]}'{_near(source, title)}")
    return Recorded(name, forward, backward if isinstance(backward, dict) else None, source.origin)


def _name(record: str) -> names.ApiName | None:
    try:
        found = names.parse(record)
    except (DumpFormatError, UsageError):
        return None
    return found if isinstance(found, names.ApiName) else None


def calls_of(source: Source, given: str) -> list[str]:
    """The calls that a user means: the call of this name (``Torch.matmul.0``), else all of an API, by its full name (``Torch.matmul``)
    or the last part of it (``matmul``); the given name itself where there is none."""
    if f"{given.removesuffix('.forward').removesuffix('.backward')}.forward" in source.data:
        return [given]
    calls = [key.removesuffix(".forward") for key in source.data if key.endswith(".forward")]
    return [name for name in calls if given in (_api(name), _api(name).rpartition(".")[2])] or [given]


def _api(call: str) -> str:
    """``Torch.matmul`` of ``Torch.matmul.0``."""
    return call.rpartition(".")[0]


def _near(source: Source, title: str) -> str:
    import difflib

    known = [key.removesuffix(".forward") for key in source.data if key.endswith(".forward")]
    apis = {api.rpartition(".")[2].lower(): api for api in map(_api, known)} | {api.lower(): api for api in map(_api, known)}
    number = f".{last}" if (last := title.rpartition(".")[2]).isdecimal() else ""
    plain = title.removesuffix(number)
    meant = difflib.get_close_matches(plain.lower(), list(apis), n=1, cutoff=0.7)
    if meant and (api := apis[meant[0]]) != plain:
        return f"; did you mean {one_line(f'{api}{number}' if f'{api}{number}' in known else api)}?"
    close = difflib.get_close_matches(title, known, n=3) or [key for key in known if title.lower() in key.lower()][:3] or known[:3]
    return f"; there are {len(known)}, as {', '.join(map(one_line, close))}" if close else "; it has none (level L1 records them)"


def extract(call: Recorded, source: Source) -> dict[str, Any]:
    """The records of one call as the existing tool keeps them in a file of their own: names of saved tensors with their directory."""
    directory = source.files.directory.resolve()

    def prefix_data_names(value: Any) -> Any:
        if isinstance(value, list):
            return [prefix_data_names(child) for child in value]
        if isinstance(value, dict):
            found = {key: prefix_data_names(child) for key, child in value.items()}
            if isinstance(found.get("data_name"), str):
                found["data_name"] = os.path.join(directory, found["data_name"])
            return found
        return value

    records = {str(call.name): call.forward}
    if call.backward is not None:
        records[f"{str(call.name).removesuffix(names.FORWARD)}{names.BACKWARD}"] = call.backward
    return {key: prefix_data_names(record) for key, record in records.items()}


def read_extracted(file: Path) -> Source:
    """Read what `extract` made, or the existing tool.

    Raises:
        DumpFormatError: it is damaged, or holds something else.
    """
    try:
        document = parse_json(read_bytes(file), file)
    except FileNotFoundError:
        raise DumpFormatError(f"{file}: is not there; give dump_json_path, and it is made of the dump") from None
    if not isinstance(document, dict) or not 1 <= len(document) <= 2:
        raise DumpFormatError(f"{file}: must hold the forward record of one API call, and may hold its backward record")
    directories: set[Path] = set()

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(child) for child in value]
        if isinstance(value, dict):
            found = {key: plain(child) for key, child in value.items()}
            name = found.get("data_name")
            if isinstance(name, str) and os.path.isabs(name):
                directories.add(Path(name).parent.parent)
                found["data_name"] = Path(name).name
            return found
        return value

    data = {key: plain(record) for key, record in document.items()}
    if len(directories) > 1:
        raise DumpFormatError(f"{file}: its tensors lie in {len(directories)} directories; they must be those of one rank of one step")
    return Source(file, data, "", "a dump", TensorFiles(directories.pop() if directories else file.parent))


def generate(source: Source, call: Recorded, dialect: Dialect, loader: Loader, options: Options, directory: Path) -> Written:
    """Write the script of a call into `directory`: ``{name}.py`` (``{name}.forward.py`` of one direction), and its tensors into
    ``{name}.data``.

    Raises:
        CannotWrite: the call cannot be repeated.
        DumpFormatError: a tensor is damaged.
        UsageError: the directory cannot be written to.
    """
    title = str(call.name).removesuffix(f".{names.FORWARD}")
    stem = title if options.direction == BOTH else f"{title}.{options.direction}"
    if len(stem) > _LONGEST_STEM:
        raise CannotWrite(f"{one_line(title)[:80]}...: its name is too long for a file")
    saved = set(source.files.names()) if options.recorded else set()
    try:
        made = script(call, dialect, options, stem, saved)
    except CannotWrite as error:
        raise CannotWrite(f"{one_line(title)}: {one_line(str(error))}") from None
    place = directory / f"{stem}.data"
    try:
        make_directories(os.fspath(directory))
        if made.files:
            make_directories(os.fspath(place))
        for name, data_name in made.files.items():
            write_file(place / name, [dialect.data(source.files.load(data_name, loader))])
        write_file(directory / f"{stem}.py", [made.text.encode("ascii")])
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written to ({error.strerror or error}); choose another directory") from None
    return Written(directory / f"{stem}.py", len(made.files), _find_drawn_inputs(made))


def _find_drawn_inputs(made: Script) -> tuple[str, ...]:
    read = set(made.files.values())
    parts = {**made.parts["inputs"], **made.parts.get("incoming", {})}
    return tuple(name for name, spec in parts.items() if spec.data_name is None or spec.data_name not in read)


def write_extracted(file: Path, call: Recorded, source: Source) -> None:
    """Raises:
    UsageError: the file cannot be written.
    """
    try:
        make_directories(os.fspath(file.resolve().parent))
        write_file(file, [json.dumps(extract(call, source), indent=4).encode("ascii")])
    except OSError as error:
        raise UsageError(f"extract_api_path: cannot write {file} ({error.strerror or error}); name another file") from None
