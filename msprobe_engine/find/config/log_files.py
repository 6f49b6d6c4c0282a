"""Settings of two logs beside each other, in the files of the existing tool: ``hyper_params_compare.csv``, ``*_config.json``.

The CSV has the columns of the existing tool (26.2.0), UTF-8 with a byte order mark, values as Python writes them, ``NA`` for absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect.resolved import same
from msprobe_engine.config.launch_scripts import tree_files
from msprobe_engine.config.launch_scripts.training_logs import flat_settings, read_slime, read_verl
from msprobe_engine.config.secrets.masking import mask_setting
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.safe_cells import safe_or_number, utf8

COMPARE_COLUMNS = ("超参名称", "NPU生效值", "bench生效值", "是否一致")
VERIFY_COLUMNS = ("关键参数名称", "bench生效值", "target生效值", "是否一致")
_EQUAL, _DIFFERENT, _ABSENT = "是", "否", "NA"

ALIGNED: dict[str, Any] = {
    "trainer/balance_batch": False,
    "data/shuffle": False,
    "actor_rollout_ref/actor/shuffle": False,
    "critic/shuffle": False,
    "actor_rollout_ref/actor/use_dynamic_bsz": False,
    "critic/use_dynamic_bsz": False,
    "actor_rollout_ref/ref/log_prob_use_dynamic_bsz": False,
    "actor_rollout_ref/rollout/log_prob_use_dynamic_bsz": False,
    "actor_rollout_ref/actor/use_remove_padding": True,
    "actor_rollout_ref/model/use_remove_padding": True,
    "critic/model/use_remove_padding": True,
    "actor_rollout_ref/actor/load_weight": True,
    "actor_rollout_ref/ref/load_weight": True,
    "actor_rollout_ref/actor/override_transformer_config/calculate_per_token_loss": False,
    "actor_rollout_ref/actor/megatron/override_transformer_config/use_ascend_mc2": False,
    "algorithm/filter_groups/enable": False,
    "VLLM_ASCEND_ENABLE_NZ": 0,
}
"""What verl's settings should be when two runs are to give the same numbers; the keys and values the existing tool checks."""


@dataclass(frozen=True, slots=True)
class LogComparison:
    """Two sets of settings.

    Attributes:
        rows: key, value of either side (None with `absent`), equal.
        different: keys that both have with other values.
        only_first, only_second: keys that one side has.
        written: files.
    """

    rows: list[tuple[str, str, str, bool]]
    different: list[str]
    only_first: list[str]
    only_second: list[str]
    written: list[Path]


def compare_verl(npu_log: str | Path, bench_log: str | Path, output: str | Path = "./verl_param_compare_result") -> LogComparison:
    """The settings of two logs of verl; sections ``profiler`` and ``ray_...`` are left out of the comparison.

    Raises:
        DumpFormatError: a log has none.
        SinkError: the result cannot be written.
    """
    return _compare(read_verl, npu_log, bench_log, output, lambda key: "profiler/" in key or "ray_" in key)


def compare_slime(npu_log: str | Path, bench_log: str | Path, output: str | Path = "./slime_param_compare_result") -> LogComparison:
    """The arguments of two logs of slime; those with ``profile`` in their name are left out of the comparison.

    Raises:
        DumpFormatError: a log has none.
        SinkError: the result cannot be written.
    """
    return _compare(read_slime, npu_log, bench_log, output, lambda key: "profile" in key)


def verify_verl(log: str | Path, bench: str | Path | None = None, output: str | Path = "./verl_param_verify_result") -> LogComparison:
    """The settings of a log of verl against a YAML file of wanted ones (nested, or keys joined with ``/``), else `ALIGNED`.

    Raises:
        DumpFormatError: the log has no settings, or the YAML file cannot be read.
        SinkError: the result cannot be written.
    """
    wanted: Mapping[str, Any] = ALIGNED
    if bench is not None:
        name = str(bench)
        tree = tree_files.parse(tree_files.read_text(Path(bench), "yaml"), "yaml", name)
        if not isinstance(tree, dict):
            raise UsageError(f"{name}: a mapping of settings is expected, like 'data: {{shuffle: false}}'")
        wanted = flat_settings(tree)
    tree = read_verl(log)
    settings = flat_settings(tree)
    rows, different, missing, _ = _rows(wanted, {key: settings[key] for key in wanted if key in settings})
    written = _write(Path(output), {"tgt_config.json": tree}, "hyper_params_verify.csv", VERIFY_COLUMNS, rows)
    return LogComparison(rows, different, missing, [], written)


def _compare(
    read: Callable[[str | Path], dict[str, Any]], npu: str | Path, bench: str | Path, output: str | Path, skipped: Callable[[str], bool]
) -> LogComparison:
    trees = read(npu), read(bench)
    sides = [{key: value for key, value in flat_settings(tree).items() if not skipped(key)} for tree in trees]
    rows, different, first, second = _rows(*sides)
    names = {"NPU_config.json": trees[0], "bench_config.json": trees[1]}
    written = _write(Path(output), names, "hyper_params_compare.csv", COMPARE_COLUMNS, rows)
    return LogComparison(rows, different, first, second, written)


def _rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[tuple[str, str, str, bool]], list[str], list[str], list[str]]:
    rows = []
    different: list[str] = []
    only_first: list[str] = []
    only_second: list[str] = []
    for key in sorted({*first, *second}):
        in_both = key in first and key in second
        equal = in_both and same(first[key], second[key])
        if in_both and not equal:
            different.append(key)
        elif not in_both:
            (only_first if key in first else only_second).append(key)
        texts = [repr(mask_setting(key, side[key])) if key in side else _ABSENT for side in (first, second)]
        rows.append((key, texts[0], texts[1], equal))
    return rows, different, only_first, only_second


def _write(
    output: Path, trees: Mapping[str, Any], table: str, columns: tuple[str, ...], rows: list[tuple[str, str, str, bool]]
) -> list[Path]:
    written = []
    lines = [",".join(columns)]
    for key, first, second, equal in rows:
        cells = (safe_or_number(key), safe_or_number(first), safe_or_number(second), _EQUAL if equal else _DIFFERENT)
        lines.append(",".join(cells))
    files = {name: json.dumps(mask_setting("", tree), indent=2, ensure_ascii=False, default=str) for name, tree in trees.items()}
    files[table] = "\ufeff" + "\n".join(lines) + "\n"
    try:
        make_directories(str(output))
        for name, text in files.items():
            write_file(output / name, [utf8(text).encode()])
            written.append(output / name)
    except OSError as error:
        raise SinkError(f"{output}: the result cannot be written: {error.strerror or error}") from error
    return written
