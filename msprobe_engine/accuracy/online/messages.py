"""What a training tells the benchmark host of its calls. Framework-free; the transport below it knows nothing of this.

Header (JSON), and payload, by ``header["kind"]``::

    run    {"kind", "version", "rank", "world", "framework"}: no payload; the first message of a training
    calls  {"kind", "rank", "step", "number", "open", "calls": n}
           ``open``: the oldest step that is not over (calls of the next one may come before the last ones of a step); absent: this one;
           n bytes of JSON {"calls": {record name: record as in dump.json}, "names": {data name: key},
           "sources": {record name: "file:line in function"}}, then a safetensors file with the contents that were not sent before
           in this step (none: nothing), by key
    step   {"kind", "rank", "step", "complete", "files": {name: bytes}}
           the files dump.json, stack.json, construct.json, not_saved.json (when there is something in it) and ``names.json``
           ({data name: key} of the whole step) one behind the other

Records of ``calls`` have no statistics (Max, Min, Mean, Norm are null): they are known when the step is over, and dump.json has them.
A record's saved tensors are found by their ``data_name``; a content that is seen under many names is sent once, under the first (its
key). ``dump_data_dir`` of dump.json is ``""``: only the receiver knows where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.dump import layout

VERSION = 1
RUN, CALLS, STEP = "run", "calls", "step"
NAMES = "names.json"
STEP_FILES = (layout.STACK, layout.CONSTRUCT, layout.NOT_SAVED, NAMES, layout.DUMP)
"""What a message ``step`` may hold."""
NO_DIRECTORY = b'"dump_data_dir": ""'
"""In the header of dump.json, see above."""

_LARGEST_STEP = 10**18
_LAST_NUMBER = 10**9 - 1  # it is in the name of a shard


class Run(NamedTuple):
    """Who sends: the first message of a training."""

    rank: int
    world: int
    framework: str


class Calls(NamedTuple):
    """Finished calls.

    Attributes:
        number: of the message within its step, from 0; a message that comes again has the same.
        open: the oldest step of the training of which more may come.
        records: by record name (with direction).
        names: key of the content of each data name in them.
        shard: a safetensors file; empty when no content is new.
    """

    rank: int
    step: int
    number: int
    open: int
    records: Mapping[str, Mapping[str, Any]]
    names: Mapping[str, str]
    text: memoryview
    shard: memoryview


class Step(NamedTuple):
    """A step is over.

    Attributes:
        files: content by name, see `STEP_FILES`.
    """

    rank: int
    step: int
    complete: bool
    files: Mapping[str, memoryview]


def parse_message(header: Mapping[str, Any], payload: memoryview) -> Run | Calls | Step:
    """The message. Only its own form is checked; the safetensors file in it is not looked into.

    Raises:
        DumpFormatError: this is no such message.
    """
    kind = header.get("kind")
    if kind == RUN:
        if header.get("version") != VERSION:
            raise DumpFormatError(
                f"the training sends version {header.get('version')!r} of the calls, this is {VERSION}: use the same msprobe"
            )
        framework = header.get("framework")
        return Run(_number(header, "rank"), _number(header, "world"), framework if isinstance(framework, str) else "pytorch")
    if kind == CALLS:
        return _calls(header, payload)
    if kind == STEP:
        return _step(header, payload)
    raise DumpFormatError(
        f"a message of kind {str(kind)[:40]!r}; allowed: {RUN}, {CALLS}, {STEP}. Use the same version of msprobe on both sides"
    )


MAX_DEPTH = 950
"""Levels of nesting in a message, near the most that Python's parser takes: a record that is nested too deep costs its own row only."""


def _calls(header: Mapping[str, Any], payload: memoryview) -> Calls:
    size = _number(header, "calls")
    if size > len(payload):
        raise DumpFormatError("a message of calls is shorter than it says")
    document = _json(payload[:size])
    records, data, sources = (document.get(key) for key in ("calls", "names", "sources"))
    if not isinstance(records, dict) or not isinstance(data, dict) or not isinstance(sources, dict):
        raise DumpFormatError("a message of calls must have the objects 'calls', 'names' and 'sources'")
    for name, record in records.items():
        if not isinstance(record, dict) or names.direction(name) is None:
            raise DumpFormatError(f"a message of calls has a record '{name[:120]}' that is none")
    number = _number(header, "number")
    if number > _LAST_NUMBER:
        raise DumpFormatError(f"a message of calls has number {number}; allowed: up to {_LAST_NUMBER}")
    step = _number(header, "step")
    oldest = min(step, _number(header, "open")) if "open" in header else step
    return Calls(_number(header, "rank"), step, number, oldest, records, _check_data_names(data), payload[:size], payload[size:])


def _step(header: Mapping[str, Any], payload: memoryview) -> Step:
    sizes = header.get("files")
    if not isinstance(sizes, Mapping) or not set(sizes) <= set(STEP_FILES):
        raise DumpFormatError(f"a message of a step must say how long its files are; allowed: {', '.join(STEP_FILES)}")
    files, at = {}, 0
    for name in sizes:
        size = _number(sizes, name)
        files[str(name)] = payload[at : at + size]
        at += size
    if at != len(payload):
        raise DumpFormatError("the files in a message of a step are not as long as it says")
    return Step(_number(header, "rank"), _number(header, "step"), header.get("complete") is True, files)


def data_names(text: memoryview) -> dict[str, str]:
    """Content of ``names.json``.

    Raises:
        DumpFormatError: it is damaged.
    """
    return _check_data_names(_json(text))


def _check_data_names(data: Mapping[str, Any]) -> dict[str, str]:
    for name, key in data.items():
        if not isinstance(key, str):
            raise DumpFormatError(f"a message names '{name[:120]}' without a key")
    names.check_file_names({*data, *data.values()}, "a message")
    return dict(data)


def _json(text: memoryview) -> dict[str, Any]:
    try:
        document = parse_json(bytes(text), levels=MAX_DEPTH)
    except ValueError as error:
        raise DumpFormatError(f"a message is no JSON ({type(error).__name__}: {str(error)[:120]})") from None
    if not isinstance(document, dict):
        raise DumpFormatError("a message is no JSON object")
    return document


def _number(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value <= _LARGEST_STEP:
        raise DumpFormatError(f"a message says {key}: {str(value)[:40]!r}; allowed: an integer from 0")
    return value
