"""Mixtures of experts in DeepSpeed's checkpoints: a file per expert, and optimizer states that only some of the ranks share.

Experts are numbered anew on every expert parallel rank in the optimizer's files; here they get the numbers of the whole model, as in the
files of the experts (``_save_moe_checkpoint`` in ``deepspeed/runtime/engine.py``). Which ranks are which follows
``_create_expert_and_data_parallel`` in ``deepspeed/utils/groups.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msprobe_engine.formats.checkpoint.deepspeed.files import Listing, Reading
from msprobe_engine.formats.checkpoint.deepspeed.model import ModelFile
from msprobe_engine.formats.checkpoint.deepspeed.unpartitioned_states import read_unpartitioned_states
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import RankFile
from msprobe_engine.formats.checkpoint.deepspeed.zero_states import Team
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.model import MODEL, Box, Index, StoredTensor
from msprobe_engine.formats.tensors.torch_file import FileTensor

_SINGLE = re.compile(r"(?P<name>.*\.experts\.w[123])\.(?P<number>\d{1,6})")
_EXPERT = re.compile(r"(?P<before>.*\.deepspeed_experts\.)(?P<number>\d{1,6})(?P<after>\..*)")


def expert_weights(files: Listing, mp: int, head: ModelFile, reading: Reading) -> list[StoredTensor]:
    """The weights of all experts, as of one model parallel rank."""
    found = []
    there: dict[int, set[int]] = {}
    for (layer, expert, rank), path in files.experts.items():
        there.setdefault(layer, set()).add(expert)
        if rank == mp and (tree := reading.tree(path)) is not None:
            found += [make_stored_tensor(str(name), tensor, MODEL) for name, tensor in tree.items() if isinstance(tensor, FileTensor)]
    counts = head.values.get("num_experts")
    in_files = bool(files.experts) or (mp, None) in files.model  # stage 3 has them in the optimizer's files
    for layer, count in enumerate(counts if isinstance(counts, list) and in_files else ()):
        gone = sorted(set(range(count)) - there.get(layer, set())) if isinstance(count, int) and 0 < count < 100_000 else []
        if gone and mp == min(rank for rank in files.mp_ranks):
            shown = ", ".join(f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt" for expert in gone[:4])
            reading.problems.append(
                f"{head.file.parent}: {shown}{' ...' if len(gone) > 4 else ''} {'is' if len(gone) == 1 else 'are'} missing; "
                f"mixture {layer} has {count} experts"
            )
    return found


def teams(
    ranks: Mapping[int, RankFile], head: ModelFile, groups: Sequence[Mapping[str, Index]], dp_size: int, reading: Reading
) -> Iterator[Team]:
    """The ranks that share each group of parameters; of a group of experts one team per expert parallel rank.

    Args:
        ranks: files of the optimizer, by data parallel rank.
        groups: shapes of each group's parameters, in the order of the flat vector.
        dp_size: data parallel ranks.
        reading: gets what does not fit.
    """
    some = next(iter(ranks.values()))
    if len(groups) != len(some.masters):
        reading.problems.append(
            f"{some.file}: has {len(some.masters)} groups of parameters, and {head.file.name} names {len(groups)}; the files do not "
            "belong together, so the optimizer is not compared"
        )
        return
    before = head.values.get("ds_config.use_data_before_expert_parallelism") is True
    for group, shapes in enumerate(groups):
        count = some.counts[group] or dp_size
        shared = {rank: place for rank, file in ranks.items() if group < len(file.places) and (place := file.places[group]) is not None}
        if shared:
            yield from _said_teams(shapes, ranks, shared, dp_size, group)
        elif count == dp_size or dp_size % count:
            yield Team(shapes, ranks, count, group)
        else:
            size = dp_size // count
            for expert_rank in range(size):
                members = {
                    (rank % count if before else rank // size): file
                    for rank, file in ranks.items()
                    if (rank // count if before else rank % size) == expert_rank
                }
                if members:
                    yield Team(_whole_model(shapes, expert_rank), members, count, group)


def _said_teams(
    shapes: Mapping[str, Index], ranks: Mapping[int, RankFile], places: Mapping[int, tuple[int, tuple[int, ...]]], dp_size: int, group: int
) -> Iterator[Team]:
    """Teams that the files themselves name (stage 3): expert parallel ranks in the order of their first member."""
    for expert_rank, members in enumerate(sorted({held for _, held in places.values()})):
        own_ranks = {number: ranks[rank] for rank, (number, held) in places.items() if held == members}
        yield Team(shapes if len(members) == dp_size else _whole_model(shapes, expert_rank), own_ranks, len(members), group)


def _whole_model(shapes: Mapping[str, Index], expert_rank: int) -> dict[str, Index]:
    """Parameters of a rank's experts with the numbers of the whole model.

    Of experts that lie in one tensor (AutoEP: ``experts.w1`` of shape [experts, ...]) each becomes one, as in the experts' files; see
    `stack_experts`.
    """
    numbers: dict[str, set[int]] = {}
    for name in shapes:
        if match := _EXPERT.fullmatch(name):
            numbers.setdefault(match["before"], set()).add(int(match["number"]))
    found: dict[str, Index] = {}
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            number = expert_rank * len(numbers[match["before"]]) + int(match["number"])
            found[f"{match['before']}{number}{match['after']}"] = shape
        elif shape:
            found |= {f"{name}.{expert_rank * shape[0] + row}": shape[1:] for row in range(shape[0])}
    return found


def expert_optimizers(files: Listing, mp: int, head: ModelFile, weights: list[StoredTensor], reading: Reading) -> list[StoredTensor]:
    """States of optimizers without ZeRO: each expert parallel rank has a file with those of its experts and of all shared parameters."""
    states: dict[str, StoredTensor] = {}
    paths: dict[int, Path] = {rank: path for (of, rank), path in sorted(files.expert_optimizer.items()) if of == mp}
    size = max(paths) + 1
    shared = [tensor for tensor in weights if tensor.name in head.weights]
    experts = [tensor for tensor in weights if tensor.name not in head.weights]
    for rank, path in paths.items():
        tree = reading.tree(path)
        if tree is None:
            continue
        own_experts = [tensor for tensor in experts if _rank_of(tensor.name, experts, size) == rank]
        for tensor in read_unpartitioned_states(
            tree.get("optimizer"), [*shared, *own_experts], head.values, reading.notes if not states else []
        ):
            if tensor.key in states:
                states[tensor.key] = replace(states[tensor.key], copies=(*states[tensor.key].copies, *tensor.boxes))
            else:
                states[tensor.key] = tensor
    return list(states.values())


def stack_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """All tensors, those of AutoEP's experts (``experts.w1.3``) put into the one that the module has of all experts (``experts.w1``)."""
    found: dict[str, StoredTensor] = {}
    pieces: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    for key, tensor in tensors.items():
        if match := _SINGLE.fullmatch(tensor.name):
            pieces.setdefault((tensor.state, match["name"]), {})[int(match["number"])] = tensor
        else:
            found[key] = tensor
    for (_, name), experts in pieces.items():
        some = next(iter(experts.values()))
        if not some.shape:  # the counter of steps
            whole = replace(some, name=name)
        else:
            fit = {number: tensor for number, tensor in experts.items() if (tensor.shape, tensor.dtype) == (some.shape, some.dtype)}
            boxes = tuple(_in_stack(box, number) for number, tensor in sorted(fit.items()) for box in tensor.boxes)
            copies = tuple(_in_stack(box, number) for number, tensor in sorted(fit.items()) for box in tensor.copies)
            whole = replace(some, name=name, shape=(max(experts) + 1, *some.shape), boxes=boxes, copies=copies)
        found[whole.key] = whole
    return found


def _in_stack(box: Box, number: int) -> Box:
    return replace(box, offsets=(number, *box.offsets), sizes=(1, *box.sizes), strides=(box.numel, *box.strides))


def _rank_of(name: str, experts: list[StoredTensor], size: int) -> int | None:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    numbers = {
        int(other["number"]) for tensor in experts if (other := _EXPERT.fullmatch(tensor.name)) and other["before"] == match["before"]
    }
    return int(match["number"]) // max(1, (max(numbers) + 1) // size)
