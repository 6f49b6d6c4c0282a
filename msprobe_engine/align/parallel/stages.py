"""The ranks of a pipeline as one rank that holds the whole model.

Each stage counts its layers, its calls and its micro batches for itself, and runs them in an order of its own. Here the layers get the
numbers of the whole, the records stand in the order of one process (all stages forward, all stages backward, micro batch after micro
batch, then the update), a module that lies across stages (the block that holds the layers) is one record with the inputs of its first
stage and the outputs of its last, and calls are numbered anew. Every record keeps its rank and its name there: `merge_records.origin_of`.

Which ranks make a pipeline follows from the places that the header has (``parallel``), else from their messages, else from the modules:
ranks that share out those of the other run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel import micro_batches, parameter_owner, pipeline_schedule, tied_embeddings
from msprobe_engine.align.parallel.merge_records import RecordMerger, Source
from msprobe_engine.align.parallel.pipeline_schedule import BACKWARD, TAIL, Segment
from msprobe_engine.align.parameters.prefixes import strip_wrappers
from msprobe_engine.core import names
from msprobe_engine.formats.dump.collective_record import RECEIVES, SENDS, Groups, told_by
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable
from msprobe_engine.formats.dump.world import parallel_of

BLIND: Segment = (-1, 0, 0)
"""Passes that are no training."""

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass
class Stage:
    """One chunk of the model on one rank.

    Attributes:
        chunk: number of the chunk, which module paths begin with; -1: the rank has one chunk, and paths do not say so.
        offsets: container of layers -> number of the first layer; of containers whose layers are counted from 0 on each stage.
    """

    rank: int
    chunk: int
    tree: Tree
    segment: Sequence[Segment]
    offsets: dict[str, int] = field(default_factory=dict)

    @cached_property
    def passes(self) -> dict[Segment, list[int]]:
        """The records of each segment, in their order. What is of no chunk (the update) is with the first."""
        passes: dict[Segment, list[int]] = {}
        for op, segment in enumerate(self.segment):
            if segment == BLIND:
                continue
            if self.chunk < 0 or segment[2] == self.chunk or (segment == TAIL and self.chunk == 0):
                passes.setdefault(segment, []).append(op)
        return passes

    def path(self, path: str) -> str:
        """A module's path in the whole model."""
        if self.chunk >= 0:
            path = path.partition(".")[2]
        match = _NUMBER.search(path)
        if match and path[: match.start()] in self.offsets:
            path = f"{path[: match.start()]}{int(match[1]) + self.offsets[path[: match.start()]]}{path[match.end() :]}"
        return path


def pipelines(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable]) -> list[list[int]]:
    """The ranks of each pipeline from its first stage to its last, by their first ranks; empty when there is none. `other`: the run it is
    compared with."""
    places = {rank: _place(side) for rank, side in sides.items()}
    if all(place is not None for place in places.values()):
        groups: dict[Any, list[int]] = {}
        for rank, (_, other_places) in sorted((rank, place) for rank, place in places.items() if place is not None):
            groups.setdefault(other_places, []).append(rank)
        chains = [sorted(some, key=lambda rank: (places[rank] or (0, ()))[0]) for some in groups.values()]
    else:
        chains = _by_messages(sides) or _by_modules(sides, other)
    return sorted(some for some in chains if len(some) > 1)


def signature(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable]) -> list[tuple[int, ...]]:
    """What must agree for two runs to be cut into the same stages: the ranks of each pipeline, with the number of chunks."""
    return [(*some, chunks(sides[some[0]], other[min(other)])) for some in pipelines(sides, other)]


def chunks(side: DumpTable, other: DumpTable) -> int:
    """How many chunks of the model a rank has: a list of models was dumped, so all paths begin with a number; 1 for any other dump."""
    heads, others = _heads(side), _heads(other)
    if heads and all(head.isdecimal() for head in heads):
        size = parallel_of(side.header, "size").get("vpp")
        if size or not any(head.isdecimal() for head in others):
            return len(heads)
    return 1


def merge_pipelines(
    sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable], problems: list[str], notes: list[str]
) -> dict[int, DumpTable]:
    """Each pipeline as one side, under its lowest rank; ranks of none as they are.

    Args:
        other: the run it is compared with; it tells chunks of a model from numbers that are modules' names.
        problems: sentences about pipelines that cannot be put together are added; their ranks stay as they are.
        notes: sentences about what was left out on purpose are added.
    """
    merged = dict(sides)
    for some in pipelines(sides, other):
        stages = _stages({rank: sides[rank] for rank in some}, chunks(sides[some[0]], other[min(other)]))
        if stages is None:
            problems.append(
                f"ranks {', '.join(map(str, some))} are stages of a pipeline, and their records do not say what belongs to which"
                " micro batch; not put together. Dump modules too: level mix or L0"
            )
            continue
        _say_left_out(stages, notes)
        for rank in some:
            del merged[rank]
        merged[min(some)] = Joint(stages).side
    return dict(sorted(merged.items()))


def without_passes_for_shapes(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable], notes: list[str]) -> dict[int, DumpTable]:
    """The ranks of pipelines that are not put together, without their passes that are no training; the rest is as for `merge_pipelines`."""
    trimmed = dict(sides)
    for some in pipelines(sides, other):
        stages = _stages({rank: sides[rank] for rank in some}, 1)
        if stages and _say_left_out(stages, notes):
            for stage in stages:
                kept = [op for op, segment in enumerate(stage.segment) if segment != BLIND]
                trimmed[stage.rank] = micro_batches.subset(stage.tree.side, kept)
    return trimmed


def _say_left_out(stages: Sequence[Stage], notes: list[str]) -> int:
    left_out = sum(segment == BLIND for stage in stages for segment in stage.segment if stage.chunk <= 0)
    if left_out:
        ranks = ", ".join(map(str, dict.fromkeys(stage.rank for stage in stages)))
        notes.append(
            f"ranks {ranks}: {left_out:,} records of passes before the first message between stages are left out; they look for shapes."
        )
    return left_out


def _place(side: DumpTable) -> tuple[int, tuple[Any, ...]] | None:
    """(stage, place in all other dimensions) as the header says."""
    rank = parallel_of(side.header, "rank")
    return (rank.pop("pp"), tuple(sorted(rank.items()))) if "pp" in rank else None


def _by_messages(sides: Mapping[int, DumpTable]) -> list[list[int]]:
    """Ranks that send messages to each other, when one of them only sends in its first call: the first stage."""
    peers: dict[int, set[int]] = {}
    begins: dict[int, int] = {}
    takes: set[int] = set()
    for rank, side in sides.items():
        for op, sends, peer in _messages(side):
            peers.setdefault(rank, set()).add(peer)
            if begins.setdefault(rank, op) == op and not sends:
                takes.add(rank)
    chains: list[list[int]] = []
    remaining = set(peers)
    while remaining:
        group, reach = set(), [min(remaining)]
        while reach:
            rank = reach.pop()
            if rank not in group and rank in sides:
                group.add(rank)
                reach += peers.get(rank, ())
        remaining -= group
        first_stages = [rank for rank in sorted(group) if rank not in takes]
        if first_stages:
            chains.append([first_stages[0], *(rank for rank in sorted(group) if rank != first_stages[0])])
        elif any(head.isdecimal() for head in _heads(sides[min(group)])):
            chains.append(sorted(group))  # interleaved: the last stage sends to the first
    return chains


def _by_modules(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable]) -> list[list[int]]:
    """Ranks that share out the modules with parameters that the other run has, in its order; those that have the same modules are
    copies (data parallelism)."""
    whole = list(dict.fromkeys(path for _, side in sorted(other.items()) for path in _with_parameters(side)))
    held: dict[tuple[str, ...], list[int]] = {}
    for rank, side in sorted(sides.items()):
        held.setdefault(_with_parameters(side), []).append(rank)
    if len(held) < 2 or () in held or sorted(path for some in held for path in some) != sorted(whole):
        return []
    if len(set(map(len, held.values()))) > 1:
        return []
    in_order = [held[some] for some in sorted(held, key=lambda some: whole.index(some[0]))]
    return [list(some) for some in zip(*in_order)]


def _with_parameters(side: DumpTable) -> tuple[str, ...]:
    """Paths of the modules that show parameters, in the order of their first calls."""
    ops = dict.fromkeys(op for op, role in zip(side.op, side.role) if role == PARAMETERS)
    parsed = (names.parse(side.ops[op]) for op in ops)
    return tuple(dict.fromkeys(strip_wrappers(module.path) for module in parsed if isinstance(module, names.ModuleName)))


def _messages(side: DumpTable) -> Iterator[tuple[int, bool, int]]:
    """(record, is it sent, peer) of every message of a rank."""
    known: Groups = {}
    for op, record in side.collectives.items():
        for call in told_by(known, side.ops[op], record):
            if call.op in (*SENDS, *RECEIVES) and call.root is not None:
                yield op, call.op in SENDS, call.root


def _heads(side: DumpTable) -> set[str]:
    """First parts of the paths of all modules."""
    parsed = (names.parse(name) for name in side.ops if name.startswith(("Module.", "Cell.")))
    return {module.path.partition(".")[0] for module in parsed if isinstance(module, names.ModuleName)}


def _stages(sides: Mapping[int, DumpTable], chunks: int) -> list[Stage] | None:
    """All stages in the order of the model; None when records of one cannot be told apart."""
    stages = []
    trees = {rank: Tree(side) for rank, side in sides.items()}
    segments: dict[int, list[Segment]] = {}
    for rank, tree in trees.items():
        segment = pipeline_schedule.segments(tree, _chunk if chunks > 1 else pipeline_schedule.whole)
        if segment is None:
            return None
        segments[rank] = segment
    ranks = list(trees)
    blind = max(_blind(trees[rank].side, segments[rank]) for rank in ranks[1:])
    if not any(tree.side.collectives for tree in trees.values()):
        neighbours = pairwise((trees[rank], segments[rank]) for rank in ranks)
        blind = max(_count_passes_before_input(*before, *stage) for before, stage in neighbours)
    for chunk in range(chunks) if chunks > 1 else (-1,):
        for rank, tree in trees.items():
            stages.append(Stage(rank, chunk, tree, _without_blind(tree, segments[rank], blind)))
    for container, numbers in _layers(stages).items():
        if sum(map(len, numbers)) > len(set().union(*numbers)):
            start = 0
            for stage, some in zip(stages, numbers):
                stage.offsets[container] = start
                start += max(some, default=-1) + 1
    return stages


def _blind(side: DumpTable, segments: Sequence[Segment]) -> int:
    """How many passes a later stage makes before anything is sent to it: torch finds the shapes of what stages exchange with such passes,
    in its first step, with numbers that mean nothing."""
    for op in side.collectives:
        call = side.ops[op].split(".")[1]
        if call.endswith(("recv", "batch_isend_irecv")):
            shapes = [side.shape[row] for row in side.rows(op) if side.role[row] == OUTPUT]
            if any(isinstance(shape, list) and len(shape) > 1 for shape in shapes):
                return len({segment[0] for segment in segments[:op] if segment[1] == BACKWARD})
    return 0


def _without_blind(tree: Tree, segments: Sequence[Segment], blind: int) -> list[Segment]:
    """The segments where so many passes at the start are no training: with what goes between them and the first that is (messages that tell
    shapes), but not what stands in front of them (the batch)."""
    modules = [op for op in range(len(segments)) if any(len(tree.kinds[above]) == 4 for above in (op, *tree.above(op)))]
    first_trained = next((op for op in modules if segments[op][0] >= blind), len(segments))
    start = next((op for op in modules if segments[op][0] < blind), first_trained)
    relabelled = [BLIND if segment[0] < blind else segment for segment in segments]
    if start < first_trained < len(segments):
        relabelled[:start] = [segments[first_trained]] * start
        relabelled[start:first_trained] = [BLIND] * (first_trained - start)
    return relabelled


def _count_passes_before_input(before: Tree, before_segments: Sequence[Segment], stage: Tree, stage_segments: Sequence[Segment]) -> int:
    """Likewise, where no message is recorded: how many passes of a stage begin before one that takes in what the stage before gives out."""
    given = {mark for _, mark in _forward_marks(before, before_segments, OUTPUT)} - {None}
    return min((number for number, mark in _forward_marks(stage, stage_segments, INPUT) if mark in given), default=0)


def _forward_marks(tree: Tree, segments: Sequence[Segment], role: int) -> Iterator[tuple[int, parameter_owner.Mark | None]]:
    """The pass, and what tells the tensor from others, of all that forward calls take in or give out."""
    for op, segment in enumerate(segments):
        if segment != TAIL and segment[1] == pipeline_schedule.FORWARD:
            yield from ((segment[0], parameter_owner.mark(tree.side, row)) for row in tree.side.rows(op) if tree.side.role[row] == role)


def _chunk(path: str) -> int:
    head = path.partition(".")[0]
    return int(head) if head.isdecimal() else 0


def _layers(stages: Sequence[Stage]) -> dict[str, list[set[int]]]:
    """Container of layers -> the numbers of its layers on each stage."""
    layers: dict[str, list[set[int]]] = {}
    for number_of_stage, stage in enumerate(stages):
        for path in {kind[2] for kind in stage.tree.kinds if len(kind) == 4}:
            if stage.chunk >= 0:
                head, _, path = path.partition(".")
                if head != str(stage.chunk):
                    continue
            number = _NUMBER.search(path)
            if number:
                layers.setdefault(path[: number.start()], [set() for _ in stages])[number_of_stage].add(int(number[1]))
    return layers


class Joint:
    """Builds the side of a whole pipeline.

    Args:
        stages: in the order of the model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self._across = self._containers()
        sources = [Source(stage.rank, stage.rank, stage.tree.side, stage.path) for stage in stages]
        self._weaver = RecordMerger(sources, self._across)
        self._open: dict[str, tuple[DumpTable, int]] = {}  # name of a record across stages -> where it began
        self._around: dict[str, str] = {}  # record -> the backward call of a module across stages that goes on around it
        self._within = ""
        for number, ops in self._order():
            for op in ops:
                self._record(number, op)
        self.side = self._weaver.finish_table(lambda number, name: self._owns(self.stages[number], name), self._around)
        tied_embeddings.mark(self.side, {stage.rank for stage in stages})

    def _containers(self) -> set[str]:
        """Paths of modules that hold layers of several stages."""
        held: dict[str, set[int]] = {}
        for stage_number, stage in enumerate(self.stages):
            for kind in stage.tree.kinds:
                if len(kind) == 4 and (stage.chunk < 0 or kind[2].partition(".")[0] == str(stage.chunk)):
                    path = stage.path(kind[2])
                    number = _NUMBER.search(path)
                    parts = path[: number.start()].rstrip(".").split(".") if number and number.start() else []
                    for n in range(1, len(parts) + 1):
                        held.setdefault(".".join(parts[:n]), set()).add(stage_number)
        return {path for path, stages in held.items() if len(stages) > 1}

    def _order(self) -> Iterator[tuple[int, list[int]]]:
        """(stage, records) as one process would run them."""
        micros = sorted({segment[0] for stage in self.stages for segment in stage.passes if segment != TAIL})
        for micro in micros:
            for direction in (pipeline_schedule.FORWARD, BACKWARD):
                stages = list(enumerate(self.stages))
                for number, stage in reversed(stages) if direction == BACKWARD else stages:
                    ops = stage.passes.get((micro, direction, max(stage.chunk, 0)))
                    if ops:
                        yield number, ops
        tails = {number: stage.passes.get(TAIL, []) for number, stage in enumerate(self.stages)}
        turns = parameter_owner.in_turns([[self.stages[number].tree.kinds[op] for op in ops] for number, ops in tails.items()])
        yield from ((number, [tails[number][n] for n in places]) for number, places in turns)

    def _record(self, number: int, op: int) -> None:
        tree = self.stages[number].tree
        side, name = tree.side, self._weaver.rename_record(number, tree.side.ops[op])
        parsed = names.parse(name)
        self._keep_within(number, op, name)
        begun = (side, op)
        if isinstance(parsed, names.ModuleName) and parsed.path in self._across:
            begun = self._open.setdefault(name, begun)
            if self._goes_on(number, parsed.direction, side.ops[op], parsed.path):
                return
            if name == self._within:
                self._within = ""
        self._weaver.append_record(number, op, name, begun, self.stages[number].segment[op][1] == BACKWARD)

    def _keep_within(self, number: int, op: int, name: str) -> None:
        """The backward call of a module across stages is over for a later stage before gradients are added up that one process adds up
        inside of it. The next forward pass is outside."""
        if self.stages[number].segment[op][1] == pipeline_schedule.FORWARD and self.stages[number].segment[op] != TAIL:
            self._within = ""
            return
        tree = self.stages[number].tree
        top = next(iter(reversed(list(tree.above(op)))), op)
        kind = tree.kinds[top]
        if len(kind) != 4:
            if self._within and top == op and tree.side.parent(tree.side.ops[op]) is None:
                self._around[name] = self._within
        elif kind[0] == "backward" and self.stages[number].path(kind[2]) in self._across:
            self._within = self._weaver.rename_record(number, tree.side.ops[top])

    def _goes_on(self, number: int, direction: str, name: str, path: str) -> bool:
        """Does a later stage call this module too, for the same micro batch?"""
        pass_key = self.stages[number].segment[self.stages[number].tree.index[name]][:2]
        later = self.stages[number + 1 :] if direction == "forward" else self.stages[:number]
        for stage in later:
            for op in stage.passes.get((*pass_key, max(stage.chunk, 0)), ()):
                kind = stage.tree.kinds[op]
                if len(kind) == 4 and kind[0] == direction and stage.path(kind[2]) == path:
                    return True
        return False

    @staticmethod
    def _owns(stage: Stage, name: str) -> bool:
        op = stage.tree.index.get(name)
        if op is not None and stage.segment[op] == BLIND:
            return False
        if stage.chunk < 0:
            return True
        if op is None or stage.segment[op] == TAIL:
            return stage.chunk == 0
        return stage.segment[op][2] == stage.chunk
