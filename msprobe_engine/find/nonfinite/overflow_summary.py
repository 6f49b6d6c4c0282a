"""The end of what ``run_overflow_check`` prints: the few calls among hundreds that do give NaN or Inf, the first of them first."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core import names
from msprobe_engine.find.nonfinite.overflow_table import NOT_RUN, Row
from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable
from msprobe_engine.measure.distances import nonfinite

_SHOWN = 5


def summary(rows: Sequence[Row], dump: DumpTable) -> list[str]:
    """Lines for the console.

    Args:
        rows: of the calls that were run again, in the order of the dump.
        dump: what they were recorded in.
    """
    run = [row for row in rows if row.verdict != NOT_RUN]
    again = [(row.name, row.bad_inputs) for row in run if row.overflow or row.backward_overflow]
    recorded = _find_nonfinite_calls(dump)
    calls = sum(not names.is_module(name) for name in dump.ops)
    return [
        *_list_calls(f"{len(again):,} of {len(run):,} calls that were run give NaN or Inf", again),
        *_list_calls(f"In the dump itself {len(recorded):,} of {calls:,} calls have NaN or Inf in their results", recorded),
    ]


def _find_nonfinite_calls(dump: DumpTable) -> list[tuple[str, bool]]:
    """Calls with NaN or Inf in their results, and whether there was some in what they were given; modules repeat their calls."""
    bad = nonfinite(dump, range(len(dump))).tolist()
    calls = []
    for op, name in enumerate(dump.ops):
        rows = dump.rows(op)
        if not names.is_module(name) and any(bad[row] for row in rows if dump.role[row] == OUTPUT):
            calls.append((name, any(bad[row] for row in rows if dump.role[row] != OUTPUT)))
    return calls


def _list_calls(head: str, calls: Sequence[tuple[str, bool]]) -> list[str]:
    """Calls whose inputs are finite first: there it begins."""
    if not calls:
        return [f"{head}."]
    born = sum(not given for _, given in calls)
    lines = [f"{head}, {born:,} of them from finite inputs; the first:"]
    order = sorted(calls, key=lambda call: call[1])
    lines += [f"  {name}: {'its inputs have NaN or Inf' if given else 'its inputs are finite'}" for name, given in order[:_SHOWN]]
    return lines + ([f"  and {len(calls) - _SHOWN:,} more"] if len(calls) > _SHOWN else [])
