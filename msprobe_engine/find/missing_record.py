"""Why a module or a call is not in a dump: what the dump itself says, from what is certain to what can only be supposed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.operator_traits import NO_OPERATIONS
from msprobe_engine.core.text.ranges import in_short, steps_text
from msprobe_engine.formats.dump.completeness import of_earlier_runs
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.rank_files import was_cut_off
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import Rank, open_dump

_NEAR, _SHOWN = 3, 5
_SUPPOSED = (
    "it was not called in these steps, or in a branch that they did not take",
    "it was called with no tensor among its arguments and results",
    "it was called below the functions that are recorded: in a kernel of its own, in compiled code, or within another recorded call, of"
    " which only the outer one is recorded",
    "it was called by another thread, or before the step began and after it ended",
)
_UNHEARD = "it has another name: no record of this dump is called so, or like it; dump.json of each rank has the names"
_STOP = "add it to the list, or leave the key out"


@dataclass
class Absence:
    """The answer.

    Attributes:
        present: where it is: step to ranks.
        examples: names of records that it stands for, the first of `names`.
        names: how many names of records it stands for.
        reasons: why it is not in the others, what is certain.
        supposed: what may be the reason where nothing is certain.
        near: names that are like it.
        unreadable: what of the dump could not be read.
    """

    name: str
    present: dict[int, list[Rank]] = field(default_factory=dict)
    absent: dict[int, list[Rank]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    names: int = 0
    reasons: list[str] = field(default_factory=list)
    supposed: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: it is in all ranks and steps; 1: it is missing, and why is known; 3: missing, and the files do not say why, or not all of them
        could be read."""
        if self.unreadable:
            return 3
        return 0 if not self.absent else 1 if self.reasons else 3

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal."""
        shown = one_line(self.name)
        if self.present:
            said = [f"{shown} is in the dump: {_where(self.present)}"]
            said += [f"  record     {one_line(name)}" for name in self.examples[:_SHOWN]]
            said += [f"  and        {self.names - _SHOWN:,} more records"] if self.names > _SHOWN else []
            if self.absent:
                said.append(f"  and not in {_where(self.absent)}")
        else:
            said = [f"{shown} is not in the dump ({_where(self.absent)})"]
        said += [f"  because    {reason}" for reason in self.reasons]
        said += [f"  perhaps    {reason}" for reason in self.supposed]
        said += [f"  like it    {one_line(name)}" for name in self.near]
        said += [f"  unread     {one_line(problem)}" for problem in self.unreadable]
        return said


def explain_absence(path: Path, name: str) -> Absence:
    """Look for `name`, a record's name or a part of it, in all steps and ranks of a dump, and say why it is not there.

    Raises:
        UsageError: the name is empty.
        ProbeError: there is no dump.
    """
    if not name.strip(". "):
        raise UsageError("--why: no name; give that of a module or a function, Functional.softmax or layers.0.norm")
    dump = open_dump(path)
    answer = Absence(name)
    name = names.name_in_records(name)
    found: set[str] = set()
    known: dict[str, None] = {}
    reasons: dict[str, None] = {}
    answer.unreadable += of_earlier_runs(dump)
    for step in dump.steps:
        answer.unreadable += of_earlier_runs(dump, step)
        for rank in dump.ranks(step):
            try:
                table = read_side(dump.file(step, rank))
            except ProbeError as error:
                answer.unreadable.append(str(error))
                continue
            matching = [record for record in table.ops if name in record]
            (answer.present if matching else answer.absent).setdefault(step, []).append(rank)
            found.update(matching)
            answer.examples += [record for record in matching if record not in answer.examples][: _SHOWN - len(answer.examples)]
            if not matching:
                said = len(table.problems)
                reasons |= dict.fromkeys(_reasons(table, step, name))
                answer.unreadable += table.problems[said:]
                known |= dict.fromkeys(table.ops)
    answer.names = len(found)
    if not answer.absent:
        return answer
    answer.reasons = [*list(reasons)[:_SHOWN], *([f"and {len(reasons) - _SHOWN} more like these"] if len(reasons) > _SHOWN else [])]
    if answer.present:
        answer.reasons.append(f"a dump has what a step calls on a rank: it was called in {_where(answer.present)}")
    if not answer.present:
        answer.near = difflib.get_close_matches(name, known, n=_NEAR, cutoff=0.6) or _alike(name, known)
    if not answer.reasons:
        unheard = [] if answer.near or answer.present else [_UNHEARD]
        answer.supposed = [*unheard, *_SUPPOSED, f"another step has it: the dump holds {steps_text(dump.steps)} (dump.step)"]
    return answer


def _reasons(table: DumpTable, step: int, name: str) -> Iterator[str]:
    """What the files of one rank and step say about it."""
    parsed = names.parse(name)
    is_module = isinstance(parsed, (names.ModuleName, names.ParametersGradName)) or name.startswith(("Module.", "Cell.", "."))
    is_call = not is_module and (isinstance(parsed, names.ApiName) or name.startswith(names.CALLS))
    level = table.header.get("level")
    function = parsed.api if isinstance(parsed, names.ApiName) else name.rpartition(".")[2]
    if not is_module and function in NO_OPERATIONS:
        yield f"{one_line(function)} is never recorded: it is no operation on the data of a tensor"
    if was_cut_off(table.path, table.header, table.recovered):
        yield f"step {step} of {one_line(table.path.parent.name)} was cut off: what came later is not in it"
    if level == "L0" and is_call:
        yield "level L0 records modules, and this is a call of a function: dump.level mix has both, L1 calls alone"
    if level == "L1" and is_module:
        yield "level L1 records calls of functions, and this is a module: dump.level mix has both, L0 modules alone"
    if level == "debug":
        yield "level debug records what the program gives to save(), and nothing else"
    if table.task == "overflow_check":
        yield "task overflow_check records calls with NaN or Inf, and nothing else"
    yield from _left_out(table.header, name)
    if name in table.construct or any(name in node for node in table.construct):
        yield "it was called, and is a node of construct.json: a setting of the dump has left its tensors out"
    if parsed is not None:
        yield from _other_calls(table, step, parsed)


def _left_out(header: Mapping[str, Any], name: str) -> Iterator[str]:
    """By the settings that leave something out, as the dump names them."""
    chosen = header.get("selection")
    if not isinstance(chosen, dict):
        return
    elements = chosen.get("list")
    if isinstance(elements, list) and not any(isinstance(each, str) and each in name for each in elements):
        yield f"dump.list keeps only what {one_line(str(elements))} names: {_STOP}"
    if chosen.get("scope"):
        yield f"dump.scope keeps only what happens from {one_line(str(chosen['scope']))} on: is it outside of that?"
    if "risk_level" in chosen:
        yield f"dump.risk_level {one_line(str(chosen['risk_level']))} records a part of the functions: ALL records all"
    modes = chosen.get("data_mode")
    if isinstance(modes, list):
        for word in (names.FORWARD, names.BACKWARD):
            if f".{word}" in name and word not in modes and {names.FORWARD, names.BACKWARD} & set(map(str, modes)):
                yield f"dump.data_mode {one_line(str(modes))} leaves out what is {word}"
    if "request_id" in chosen:
        yield "dump.request_id keeps only the part of one request"


def _other_calls(table: DumpTable, step: int, name: names.RecordName) -> Iterator[str]:
    """The same module or function is there, with another number or direction."""
    if not isinstance(name, (names.ModuleName, names.ApiName)):
        return
    alike = [other for record in table.ops if isinstance(other := names.parse(record), type(name)) and _base(other) == _base(name)]
    same = [other for other in alike if other.direction == name.direction]
    where = f"in step {step} of {one_line(table.path.parent.name)}"
    if same:
        numbers = in_short({other.number for other in same})
        yield f"{where} it has calls {numbers} and no call {name.number} ({name.direction}): numbers count the calls of a step"
    elif alike and name.direction == names.BACKWARD:
        yield (
            f"{where} it has a forward record and no backward one: no gradient went through it (no grad mode, detached, a loss that does "
            "not depend on it, inputs without requires_grad), or its backward pass came after the step's end"
        )
    elif alike:
        yield f"{where} it has a backward record and no forward one: the forward pass was made before the step began, or was left out"


def _base(name: names.ModuleName | names.ApiName) -> tuple[str, ...]:
    return (name.kind, name.path, name.cls) if isinstance(name, names.ModuleName) else (name.prefix, name.api)


def _alike(name: str, known: Iterable[str]) -> list[str]:
    """Records that have a component of the name."""
    words = [
        word for word in name.split(".") if not word.isdecimal() and len(word) > 2 and word not in ("Module", "Cell", "forward", "backward")
    ]
    return [record for record in known if any(word.lower() in record.lower() for word in words)][:_NEAR]


def _where(places: dict[int, list[Rank]]) -> str:
    """``step 0, rank 1; steps 1-3, ranks 0-7``: steps with the same ranks together."""
    steps: dict[tuple[Rank, ...], list[int]] = {}
    for step, ranks in sorted(places.items()):
        steps.setdefault(tuple(ranks), []).append(step)
    said = [f"{steps_text(of)}, {_ranks(ranks)}" for ranks, of in steps.items()]
    return "; ".join(said[:_SHOWN]) + (f"; and {len(said) - _SHOWN} more groups of ranks" if len(said) > _SHOWN else "")


def _ranks(ranks: tuple[Rank, ...]) -> str:
    numbers = sorted(rank for rank in ranks if isinstance(rank, int))
    others = [one_line(rank) for rank in ranks if isinstance(rank, str)]
    named = [*([in_short(numbers)] if numbers else []), *others[:_SHOWN]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}"
