"""Puts the flat partitions of ZeRO's ranks together: float32 weights and states of every parameter, as boxes in the ranks' files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msprobe_engine.formats.checkpoint.deepspeed.zero_partitions import Slot, in_a_row, in_pieces, of_partitions, of_pieces, partition_size
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import RankFile, scalar
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, Box, Index, StoredTensor
from msprobe_engine.formats.tensors.torch_file import FileTensor

MASTER = "master"


@dataclass(frozen=True)
class Team:
    """The ranks that share the parameters of a group.

    Attributes:
        shapes: of the parameters, in their order in the flat vector; names as of the whole model.
        ranks: the files that are there, by number of the partition.
        size: how many there should be.
        group: number of the group in the files.
    """

    shapes: Mapping[str, Index]
    ranks: Mapping[int, RankFile]
    size: int
    group: int


def states_of(team: Team, problems: list[str]) -> Iterator[StoredTensor]:
    """The float32 weights (`MASTER`) and the other states of the parameters of a group.

    Args:
        team: who has them.
        problems: what does not fit together is put there.
    """
    group, some = team.group, next(iter(team.ranks.values()))
    masters = {rank: file.masters[group] for rank, file in team.ranks.items() if group < len(file.masters)}
    boxes_of = _stage_3(team, masters, problems) if some.stage == 3 else _stages_1_2(team, masters, problems)
    if boxes_of is None:
        return
    slots, boxes = boxes_of
    for slot in slots:
        yield _state(slot, MASTER, next(iter(masters.values())).dtype, boxes(slot, masters))
    for name, parts in _tensors(team).items():
        first = next(iter(parts.values()))
        if first.numel == 1 and not first.shape:  # counters of the group: every parameter has it
            for slot in slots:
                yield _state(Slot(slot.name, (), 0), name, first.dtype, (Box((), (), first.file, first.start, ()),))
        elif all(part.numel >= masters[rank].numel and part.strides == (1,) for rank, part in parts.items() if rank in masters):
            for slot in slots:
                yield _state(slot, name, first.dtype, boxes(slot, parts))
        else:
            problems.append(
                f"{some.file}: state {name!r} of group {group} has {first.numel} elements in shape {list(first.shape)}, and the flat "
                f"weights have {masters[min(masters)].numel}; it is not compared"
            )


def _state(slot: Slot, state: str, dtype: str, boxes: tuple[Box, ...]) -> StoredTensor:
    return StoredTensor(slot.name, slot.shape, dtype, boxes, state=state, group=OPTIMIZER)


def _tensors(team: Team) -> dict[str, dict[int, FileTensor]]:
    found: dict[str, dict[int, FileTensor]] = {}
    for rank, file in sorted(team.ranks.items()):
        for name, value in file.states[team.group].items() if team.group < len(file.states) else ():
            if isinstance(value, FileTensor):
                found.setdefault(name, {})[rank] = value
    return found


def _stages_1_2(team: Team, masters: Mapping[int, FileTensor], problems: list[str]) -> Any:
    some = next(iter(team.ranks.values()))
    gaps = some.gaps[team.group] if team.group < len(some.gaps) else []
    slots, total = in_a_row(team.shapes, gaps)
    lengths = {rank: part.numel for rank, part in masters.items()}
    paddings = {rank: file.paddings[team.group] if team.group < len(file.paddings) else 0 for rank, file in team.ranks.items()}
    size = partition_size(lengths, paddings)
    if size is None or size * team.size < total:
        shown = ", ".join(f"rank {rank} {length}" for rank, length in sorted(lengths.items())[:8])
        problems.append(
            f"{some.file.parent}: group {team.group} of the optimizer has {total} elements in {len(slots)} parameters, and the ranks' flat "
            f"vectors have {shown} of {team.size} ranks; the files do not belong together, so its states are not compared"
        )
        return None
    return slots, partial(of_partitions, size=size)


def _stage_3(team: Team, masters: Mapping[int, FileTensor], problems: list[str]) -> Any:
    slots, length = in_pieces(team.shapes, team.size)
    fit = {rank: part for rank, part in masters.items() if part.numel == length}
    for rank, part in sorted(masters.items()):
        if rank not in fit:
            problems.append(
                f"{part.file}: has {part.numel} elements in group {team.group} of the optimizer, and the parameters take {length} of each "
                f"of {team.size} ranks; it belongs to a run of other sizes, or its states were offloaded elsewhere"
            )
    if not fit:
        return None

    def boxes(slot: Slot, parts: Mapping[int, FileTensor]) -> tuple[Box, ...]:
        return of_pieces(slot, {rank: part for rank, part in parts.items() if rank in fit}, team.size)

    return slots, boxes


def disagreements(files: Sequence[RankFile], expected: int | None) -> list[str]:
    """Files whose counters or settings are not those of the others: left over from another step or another run.

    Args:
        files: of all ranks.
        expected: steps that the optimizer has made, where the model's file says so.
    """
    found: list[str] = []
    odd: dict[int, list[str]] = {}
    tables = [{**file.values, **_counters(file)} for file in files]
    keys = dict.fromkeys(key for table in tables for key in table)
    for key in sorted(keys, key=lambda key: not key.endswith(".step")):  # steps tell which side is stale
        seen = {number: table[key] for number, table in enumerate(tables) if key in table}
        if len(set(map(repr, seen.values()))) < 2:
            continue
        sound = Counter(repr(value) for number, value in seen.items() if number not in odd) or Counter(map(repr, seen.values()))
        usual, most = sound.most_common(1)[0]
        if key.endswith(".step") and repr(expected) in sound:
            usual = repr(expected)
        elif list(sound.values()).count(most) > 1:
            shown = ", ".join(f"{files[number].file.name} {value!r}" for number, value in list(seen.items())[:4])
            found.append(f"{files[0].file.parent}: the ranks' files disagree in {key}: {shown}; some are of another step or run")
            continue
        for number, value in seen.items():
            if repr(value) != usual:
                odd.setdefault(number, []).append(f"{key} {value!r} (other ranks: {usual})")
    for number, texts in sorted(odd.items()):
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        found.append(f"{files[number].file}: is stale, left over from another step or another run: it has {', '.join(texts[:3])}{more}")
    return found


def _counters(file: RankFile) -> dict[str, Any]:
    """Plain numbers among the states, and those in tensors of one element."""
    found: dict[str, Any] = {}
    for group, state in enumerate(file.states):
        for name, value in state.items():
            if isinstance(value, FileTensor):
                value = scalar(value) if not value.shape else None
            if isinstance(value, (bool, int, float)):
                found[f"optimizer.state.{group}.{name}"] = value
    return found


def counters(file: RankFile) -> dict[str, Any]:
    """Plain numbers among the states (``optimizer.state.0.step``), of optimizers that keep them as such."""
    tensors = {
        f"optimizer.state.{g}.{name}"
        for g, state in enumerate(file.states)
        for name, value in state.items()
        if isinstance(value, FileTensor)
    }
    return {key: value for key, value in _counters(file).items() if key not in tensors}
