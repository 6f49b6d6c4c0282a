"""One call of a dump checked, and what is kept of one that does not pass; the same in every framework."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.accuracy.precheck.options import Work
from msprobe_engine.accuracy.results import CallResult, build_skipped_result, not_judged
from msprobe_engine.core import names
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.formats.dump import layout
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun, RecordedArguments

_LONGEST = 200
"""Characters of a file name that come from a dump; file systems take 255 bytes."""


class Checked(NamedTuple):
    """What came of a call.

    Attributes:
        data: tensors (on the CPU) and other values of both sides, by the part of a file name that follows the name of the call:
            ``forward.input.0``, ``forward.output.bench.0``, ``forward.output.device.0``, ``backward.input.0``,
            ``backward.output.bench.0``, ``backward.output.device.0``.
    """

    result: CallResult
    data: Mapping[str, Any]


def check_call(name: str, arguments: RecordedArguments, check: Callable[[], tuple[CallResult, Mapping[str, Any]]]) -> Checked:
    """What `check` says of a call. Never raises: what cannot be run is skipped, with the reason as message."""
    start = time.perf_counter()
    data: Mapping[str, Any] = {}
    try:
        result, data = check()
    except (CannotRun, ProbeError) as error:  # the latter: of a damaged record
        result = build_skipped_result(name, str(error))
    except Exception as error:  # what operators raise is a `CannotRun` by now
        result = not_judged(name, error)
    return Checked(replace(arguments.add_unreadable(result), seconds=time.perf_counter() - start), data)


def is_saved(items: Any) -> bool:
    """Does a record name the files of its results?"""
    if isinstance(items, list):
        return any(map(is_saved, items))
    return isinstance(items, Mapping) and items.get("data_name") not in (None, "", "-1")


def keep_failures(
    check: Callable[..., Checked], work: Work, file_of: Callable[[Any], tuple[str, bytes] | None]
) -> Callable[..., CallResult]:
    """`check`, and the tensors of each call that does not pass are written as ``{call}.{part}{ending}`` where `work` asks for them.

    Args:
        file_of: None of what is no tensor: it has a number among them and no file.
    """

    def check_call(name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> CallResult:
        checked = check(name, record, backward)
        if work.error_data and not checked.result.passed:
            _save(Path(work.error_data), name, ((part, file_of(value)) for part, value in checked.data.items()))
        return checked.result

    return check_call


def _save(directory: Path, call: str, files: Iterable[tuple[str, tuple[str, bytes] | None]]) -> None:
    if len(call) > _LONGEST:
        call = f"{call[:_LONGEST]}_{zlib.crc32(call.encode()):08x}"
    for part, file in files:
        if file is not None:
            path = directory / names.check_file_name(f"{call}.{part}{file[0]}", str(directory))
            try:
                make_directories(str(directory))
                write_file(path, [file[1]])
            except OSError as error:
                raise layout.DumpWriteError(error, os.fspath(path)) from error
