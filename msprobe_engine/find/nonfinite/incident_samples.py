"""Monitor samples of an incident directory (``samples_rank{R}.jsonl``): what is known of steps whose calls were not recorded.

A rank may have written its samples again when it knew more, each time behind each other; a line of what it says ends a block of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.nonfinite.first_over_ranks import Verdict
from msprobe_engine.find.nonfinite.flags import NONFINITE, Call, Trace, row_flags
from msprobe_engine.find.nonfinite.scan import NonFiniteOrigin
from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable
from msprobe_engine.formats.dump.rank_files import MOST_BYTES
from msprobe_engine.formats.dump.record_rows import RowReader

_PHASES = (
    *("param_origin", "actv", "loss", "actv_grad", "grad_unreduced", "grad_reduced", "other"),
    *("update", "ratio", "param_updated", "exp_avg", "exp_avg_sq", "opt_state", "after"),
)
"""Families in the order in which a step makes them; what comes first is closer to the origin. ``other`` and ``after``: its numbers."""
_AFTER = ("update_norm", "param_norm", "params_norm")
"""Numbers that follow from the update."""
_WITHOUT_CALLS = _PHASES[_PHASES.index("grad_reduced") :]
"""No call of a step makes these."""
_DOCUMENT, _MOST_RANKS = "incident.json", 1 << 31
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def document(directory: Path) -> dict[str, Any]:
    """``incident.json`` of an incident; empty where there is none or it cannot be read."""
    try:
        content = parse_json(read_input(directory / _DOCUMENT, MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def ranks_without_a_word(directory: Path) -> list[str]:
    """Which ranks of the job wrote nothing of an incident, or did not finish: what they saw is not known. So it is where that is not told,
    because the document is damaged."""
    content = document(directory)
    if not content and (directory / _DOCUMENT).is_file():
        return [Sentence("{0} cannot be read: it is not known whether all ranks of the job wrote of this incident", _DOCUMENT)]
    sentences: list[str] = []
    for key, text in (
        ("ranks_missing", Sentence("wrote nothing of this incident (dead, hanging, or not told): what they saw is not known")),
        ("ranks_writing", Sentence("did not finish writing (killed? disk full?)")),
    ):
        ranks = content.get(key, [])
        if not (isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in ranks)):
            sentences.append(Sentence("{0} is damaged: {1} is no list of ranks, and which ones it stands for is not known", _DOCUMENT, key))
        elif ranks:
            sentences.append(Sentence("ranks {0}: {1}", in_short(set(ranks)), text))
    return sentences


def load(files: Iterable[Path], problems: list[str]) -> dict[int, dict[int, Trace]]:
    """Step to rank to trace of the files of an incident; every sample is a call with an output only. `problems`: gets what cannot be
    read."""
    out: dict[int, dict[int, Trace]] = {}
    for path in files:
        rank = int(path.stem.removeprefix("samples_rank"))
        for line in _last_samples(path, problems):
            step = line["step"]
            trace = out.setdefault(step, {}).setdefault(rank, Trace(step, rank, [], DumpTable(path), path=str(path)))
            for family, name, item in _items(line):
                reader = RowReader(trace.dump)
                reader.at = len(trace.dump.ops)
                trace.dump.ops.append(f"{family}/{name}")
                reader.walk(f"{family}/{name}", item, OUTPUT, 0, False)
                trace.dump.offsets.append(len(trace.dump))
    for ranks in out.values():
        for trace in ranks.values():
            trace.calls += _calls(trace.dump)
    return dict(sorted(out.items()))


def _calls(dump: DumpTable) -> Iterator[Call]:
    """Of each sample one."""
    flags = row_flags(dump)
    for record, name in enumerate(dump.ops):
        family, rows = name.partition("/")[0], dump.rows(record)
        direction = "optimizer" if family in _WITHOUT_CALLS[2:] else "backward" if "grad" in family else "forward"
        of_rows = int(np.bitwise_or.reduce(flags[rows.start : rows.stop]))
        yield Call(record, record, name, "sample", direction, family, (), (), rows, 0, 0, of_rows, None, dump, flags)


def _last_samples(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Of the last block that is whole, else what there is of the only one."""
    block: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    unread = before = 0  # in the block, and in the last whole one
    for text in _lines(path, problems):
        try:
            line = parse_json(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            unread += 1
        elif "state" in line:
            if block:
                whole, before, unread = block, unread, 0
            block = []
        elif isinstance(line.get("step"), int):
            block.append(line)
    if unread := unread + before:
        problems.append(Sentence("{0}: lines that cannot be read, and were left out: {1}", one_line(str(path)), f"{unread:,}"))
    return whole or block


def _lines(path: Path, problems: list[str]) -> list[str]:
    try:
        return read_input(path, MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        problems.append(Sentence("{0}: cannot be read ({1}); looked at without it", one_line(str(path)), error.strerror or error))
        return []


def _items(line: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    if isinstance(line.get("scalars"), dict):
        return [
            (_family_of(name), str(name), _tensor("float", [], {"max": value, "min": value})) for name, value in line["scalars"].items()
        ]
    statistics = line.get("statistics")
    if not isinstance(statistics, dict):
        return []
    return [(str(line.get("family")), str(line.get("name")), _tensor(str(line.get("dtype")), line.get("shape") or [], statistics))]


def _family_of(name: str) -> str:
    return "loss" if "loss" in name else "after" if name in _AFTER else "other"


def _tensor(dtype: str, shape: Any, s: Mapping[str, Any]) -> dict[str, Any]:
    item = {"type": "torch.Tensor", "dtype": dtype, "shape": shape}
    item |= {key: _WORDS.get(str(s.get(k)), s.get(k)) for key, k in (("Max", "max"), ("Min", "min"), ("Mean", "mean"), ("Norm", "norm"))}
    return item | {"nan_count": s.get("nans"), "inf_count": s.get("infs")}


def analyse(traces: Mapping[int, Trace], *, recorded: bool = False) -> Verdict:
    """The samples of the earliest phase that is bad, first one per rank. `recorded`: the calls of the step are known, and clean."""
    verdict = Verdict(next(iter(traces.values())).step, traces)
    origins: list[tuple[int, NonFiniteOrigin]] = []
    for rank, trace in traces.items():
        bad = [call for call in trace.calls if call.out_flags & NONFINITE]
        if not bad:
            continue
        first = min(bad, key=lambda call: (_phase(call), call.index))
        same = sum(_phase(call) == _phase(first) for call in bad)
        of = sum(_phase(call) == _phase(first) for call in trace.calls)
        facts = [fact for fact in first.outputs() if fact.flags & NONFINITE]
        note = f"{same} of {of} samples of the family {first.op} are bad on this rank"
        cause = "update" if recorded and first.op in _WITHOUT_CALLS else "sample"
        origins.append((_phase(first), NonFiniteOrigin(rank, first.index, cause, first, first.out_flags & NONFINITE, facts, [note])))
    earliest = min((phase for phase, _ in origins), default=0)
    verdict.suspects = [origin for phase, origin in origins if phase == earliest]
    verdict.ordered = len(verdict.suspects) <= 1
    verdict.spread = [[] for _ in verdict.suspects]
    return verdict


def _phase(call: Call) -> int:
    return _PHASES.index(call.op) if call.op in _PHASES else _PHASES.index("other")
