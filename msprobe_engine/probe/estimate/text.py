"""An estimate as a table for people and as plain data for scripts."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.log import one_line
from msprobe_engine.core.settings.tree import to_tree
from msprobe_engine.core.text.words import size
from msprobe_engine.probe.estimate.cost import Range
from msprobe_engine.probe.estimate.forecast import Estimate, size_range

_SETTINGS = ("task", "level", "summary_mode", "tensor_format")
_WHEN_SET = ("list", "scope", "tensor_list", "data_mode", "risk_level", "slice", "extra_info", "max_disk_gb")
_DEFAULTS = {"data_mode": ["all"], "risk_level": "ALL", "extra_info": True}


def as_text(e: Estimate) -> str:
    """The table that ``msprobe estimate`` prints."""
    one = f"{e.steps} step{'s' * (e.steps != 1)}, {e.ranks} rank{'s' * (e.ranks != 1)}"
    costs = list(e.per_rank.values())
    rows = [
        ("records", f"{e.mean(lambda c: c.records):,.0f}"),
        ("tensors", f"{e.mean(lambda c: c.tensors):,.0f}"),
        *((name, size(_mean_json(e, name))) for name in costs[0].json_bytes),
    ]
    if any(c.saved for c in costs):
        rows.append(("tensor files", f"{size_range(e.mean_range(lambda c: c.tensor_bytes))} for {e.mean(lambda c: c.saved):,.0f} tensors"))
    rows.append(("a step gets longer by", seconds_range(e.step_seconds)))
    total = [
        ("on disk", f"{size_range(e.total_bytes)} in {e.total_files:,.0f} files"),
        ("free", f"{size(e.space.free)} on {e.space.path}"),
        ("writing a step", f"{seconds_range(e.write_seconds)} in the background"),
    ]
    if e.wait_seconds.high:
        total.append(("waiting for the disk", f"{seconds_range(e.wait_seconds)} per step: a step is larger than memory_budget_mb"))
    lines = [
        f"{e.source}: step {e.source_step}, {e.source_ranks} rank{'s' * (e.source_ranks != 1)}",
        f"settings: {_settings(e)}",
        "",
        f"one step of one rank{f' (mean of {len(costs)})' if len(costs) > 1 else ''}",
        *(f"  {name:<24}{value}" for name, value in rows),
        f"{one}, all files",
        *(f"  {name:<24}{value}" for name, value in total),
        "",
        "fits" if e.fits else "DOES NOT FIT",
        *(f"  {problem}" for problem in e.problems),
    ]
    if e.changes:
        lines += ["this would fit", *(f"  {change.settings:<34}{size_range(change.nbytes)}" for change in e.changes)]
    lines += ["assumptions", *(f"  {note}" for note in e.notes)]
    return "\n".join(one_line(line) for line in lines)


def _mean_json(e: Estimate, name: str) -> float:
    return e.mean(lambda cost: cost.json_bytes.get(name, 0))


def _settings(e: Estimate) -> str:
    tree = to_tree(e.dump)
    shown = [*_SETTINGS, *(key for key in _WHEN_SET if tree[key] != _DEFAULTS.get(key, type(tree[key])()))]
    if not any(c.saved for c in e.per_rank.values()):
        shown.remove("tensor_format")
    return ", ".join(f"{key} {tree[key]}" for key in shown)


def seconds_range(value: Range) -> str:
    """``12 to 40 ms``, or one time where both ends look the same."""
    low, high = _seconds(value.low), _seconds(value.high)
    if low == high:
        return high
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"


def _seconds(value: float) -> str:
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            number = value / scale
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
    return f"{value * 1e6:.0f} us" if value else "0 s"


def as_json(e: Estimate) -> dict[str, Any]:
    """Plain data: sizes in bytes, times in seconds, ranges as ``[low, high]``."""
    tree = to_tree(e.dump)
    return {
        "source": {"path": str(e.source), "step": e.source_step, "ranks": e.source_ranks},
        "settings": {key: tree[key] for key in (*_SETTINGS, *_WHEN_SET)},
        "steps": e.steps,
        "ranks": e.ranks,
        "one_step_of_one_rank": {
            "records": e.mean(lambda c: c.records),
            "tensors": e.mean(lambda c: c.tensors),
            "saved_tensors": e.mean(lambda c: c.saved),
            "files": e.mean(lambda c: c.files),
            "json_bytes": {name: _mean_json(e, name) for name in next(iter(e.per_rank.values())).json_bytes},
            "tensor_bytes": list(e.mean_range(lambda c: c.tensor_bytes)),
            "disk_bytes": list(e.mean_range(lambda c: c.disk_bytes)),
        },
        "added_seconds_per_step": list(e.step_seconds),
        "write_seconds_per_step": list(e.write_seconds),
        "wait_seconds_per_step": list(e.wait_seconds),
        "total": {"disk_bytes": list(e.total_bytes), "tensor_bytes": list(e.tensor_bytes), "files": e.total_files},
        "disk": {"path": str(e.space.path), "free_bytes": e.space.free, **e.speed._asdict()},
        "fits": e.fits,
        "problems": list(e.problems),
        "changes": [{"settings": change.settings, "disk_bytes": list(change.nbytes)} for change in e.changes],
        "notes": list(e.notes),
    }
