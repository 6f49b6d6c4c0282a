"""The comparison functions of versions 8.1.1 and 26.2.0, with their arguments. `msprobe` exports them; nothing is imported before a call.

They print the summary and return it; the existing tool returns None. `compat=True` gives that version's verdicts and rows exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.report.table.summary import Comparison

_NEW_ONLY = frozenset(("xlsx", "diff_analyze", "first_diff_analyze", "consistent_check", "backend", "config"))
"""Arguments that 8.1.1 has not."""
_KNOWN = _NEW_ONLY | {"stack_mode", "auto_analyze", "fuzzy_match", "data_mapping", "cell_mapping", "api_mapping", "layer_mapping"}
_KNOWN |= {"is_print_compare_log", "suffix", "compat"}


def compare(
    input_param: Mapping[str, Any],
    output_path: str | Path,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    data_mapping: str | Path | Mapping[str, str] | None = None,
    suffix: str = "",
    **kwargs: Any,
) -> Comparison:
    """Version 8.1.1: compare two files; columns of that version, as xlsx.

    Args:
        input_param: ``npu_json_path`` and ``bench_json_path`` (also ``npu_path``, ``bench_path``): dump.json or debug.json; optional
            ``stack_json_path``, ``is_print_compare_log``.
        output_path: directory of the results.
        stack_mode: with ``stack_json_path``: show call stacks. Without it they are shown when stack.json lies beside the dump.
        auto_analyze: write the advice file.
        fuzzy_match: leave call numbers out of names.
        data_mapping: target row name -> golden row name, or a yaml with that.
        suffix: at the end of the file names.
        kwargs: ``cell_mapping``, ``api_mapping``, ``layer_mapping``, ``compat``.

    Raises:
        UsageError: an argument is unknown or of the wrong type.
        ProbeError: as `msprobe_engine.report.table.api.compare_dumps`.
    """
    target, golden, stack, log = _input(input_param)
    given = {"fuzzy_match": fuzzy_match, "data_mapping": data_mapping, "auto_analyze": auto_analyze, "is_print_compare_log": log, **kwargs}
    show = None if stack is None else stack_mode
    return _run(target, golden, output_path, given, old=True, stack=stack if stack_mode else None, show=show, suffix=suffix)


def compare_distributed(npu_dump_dir: str | Path, bench_dump_dir: str | Path, output_path: str | Path, **kwargs: Any) -> Comparison:
    """Both versions: compare all ranks of two step directories. Columns and format are those of 8.1.1, unless an argument that only
    26.2.0 has is among `kwargs`.

    Raises:
        UsageError: an argument is unknown, or ``suffix`` is given.
        ProbeError: as `msprobe_engine.report.table.api.compare_dumps`.
    """
    from msprobe_engine.core.errors import UsageError

    if kwargs.get("suffix"):
        raise UsageError("compare_distributed: 'suffix' is not possible, the ranks are the suffixes; leave it out")
    show = None if not kwargs.get("stack_mode") else True
    return _run(npu_dump_dir, bench_dump_dir, output_path, kwargs, old=not _NEW_ONLY & kwargs.keys(), stack=None, show=show)


def pt_compare(input_param: Mapping[str, Any], output_path: str | Path, **kwargs: Any) -> Comparison:
    """Version 26.2.0: compare two files (``npu_path``, ``bench_path``); columns of that version, csv or with ``xlsx=True`` xlsx.

    Raises:
        UsageError: an argument is unknown or of the wrong type.
        ProbeError: as `msprobe_engine.report.table.api.compare_dumps`.
    """
    target, golden, stack, log = _input(input_param)
    kwargs.setdefault("is_print_compare_log", log and "is_print_compare_log" in input_param)
    suffix = kwargs.pop("suffix", "")
    return _run(target, golden, output_path, kwargs, old=False, stack=stack, show=None, suffix=suffix)


def _input(given: Any) -> tuple[str, str, str | None, bool]:
    from msprobe_engine.core.errors import UsageError

    if not isinstance(given, Mapping):
        raise UsageError(f"input_param is a {type(given).__name__}; a dict with npu_json_path and bench_json_path is needed")
    paths = []
    for names in (("npu_json_path", "npu_path"), ("bench_json_path", "bench_path")):
        path = next((given[name] for name in names if given.get(name)), None)
        if not isinstance(path, str | Path):
            raise UsageError(f"input_param[{names[0]!r}] is {path!r}; the path of a dump.json or debug.json is needed")
        paths.append(str(path))
    stack = given.get("stack_json_path") or given.get("stack_path") or None
    log = given.get("is_print_compare_log", True)
    if not isinstance(log, bool):
        raise UsageError(f"input_param['is_print_compare_log'] is {log!r}; True or False is allowed")
    return paths[0], paths[1], str(stack) if stack else None, log


def _run(
    target: str | Path,
    golden: str | Path,
    output: str | Path,
    given: Mapping[str, Any],
    *,
    old: bool,
    stack: str | None,
    show: bool | None,
    suffix: str = "",
) -> Comparison:
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.measure.options import NEW, OLD, CompareOptions
    from msprobe_engine.report.table.api import compare_dumps
    from msprobe_engine.report.table_files import workbook_or_csv

    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise UsageError(f"compare: argument {unknown[0]!r} is not known; known are {', '.join(sorted(_KNOWN))}")
    if given.get("first_diff_analyze") or given.get("diff_analyze"):
        raise UsageError(
            "compare: for the first difference call msprobe_engine.report.table.diff_analyze.first_differences, or msprobe compare -da"
        )
    options = CompareOptions(
        columns=OLD if old else NEW,
        compat=bool(given.get("compat")),
        fuzzy=bool(given.get("fuzzy_match")),
        data_mapping=given.get("data_mapping") or None,
        cell_mapping=given.get("cell_mapping") or None,
        api_mapping=given.get("api_mapping") or None,
        layer_mapping=given.get("layer_mapping") or None,
        stack=show,
        advisor=old and bool(given.get("auto_analyze", True)),
        formats=("xlsx",) if given.get("xlsx") else (workbook_or_csv() if old else "csv",),
        tensor_log=bool(given.get("is_print_compare_log", old)),
        postprocess=given.get("config") or None,
        consistent_check=bool(given.get("consistent_check")),
        backend=given.get("backend") or None,
    )
    comparison = compare_dumps(target, golden, output, options, stack=stack, suffix=suffix)
    print(comparison.text())
    return comparison
