"""Megatron's ``torch`` checkpoints: one file for each model-parallel rank.

Layout and contents: `megatron_ranks`, `megatron_file`, `megatron_states`; cuts over tensor-parallel ranks: `megatron_cuts`; numbers of
layers and experts: `megatron_numbers`. What is needed of a rank that has no file is a problem, named; the rest is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.megatron.arguments import bucket_sizes, facts_of
from msprobe_engine.formats.checkpoint.megatron.file import RankFile, read_rank, values_of
from msprobe_engine.formats.checkpoint.megatron.merge import Merging
from msprobe_engine.formats.checkpoint.megatron.ranks import DISTRIBUTED, WEIGHTS, Rank, Sizes, directories, in_words, rank_of, sizes_of
from msprobe_engine.formats.checkpoint.megatron.states import Key, distributed_states, states_of
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, OTHER, RANDOM, Checkpoint, StoredTensor, whole
from msprobe_engine.formats.tensors.torch_file import UnknownNameError, read_torch
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

_SAME_EVERYWHERE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
)
_HEADS = ("output_layer.weight", "language_model.output_layer.weight", "word_embeddings_for_head.weight")


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """What an iteration's directory of a Megatron ``torch`` checkpoint holds.

    Args:
        path: ``iter_0000005`` or ``release``, with the directories ``mp_rank_*``.
        trust: names (``module.Class``) that the files may hold beyond the known ones.

    Raises:
        DumpFormatError: there is no rank's file that can be read, one holds something that is not known, or they do not tell the layout.
    """
    found = directories(path)
    checkpoint = Checkpoint(path, "Megatron torch", naming="megatron")
    trees: dict[str, RankFile] = {}
    for name, numbers in found.items():
        file = path / name / WEIGHTS
        try:
            trees[name] = read_rank(file, Rank(*numbers[:3]), trust)
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            checkpoint.problems.append(str(error))
    if not trees:
        raise DumpFormatError(f"{path}: no rank's {WEIGHTS} can be read. {checkpoint.problems[0]}")
    args = next((tree.args for tree in trees.values() if tree.args), {})
    sizes = sizes_of(path, args, found, _has_pipeline_stages(trees))
    ranks = {rank_of(found[name], sizes): tree for name, tree in trees.items()}
    for rank, tree in ranks.items():
        tree.rank = rank
    _check(path, sizes, found, ranks, checkpoint)
    for tree in ranks.values():
        _states(tree, sizes, trust, checkpoint)
    merging = Merging(path, sizes, ranks, args)
    for tensor in merging.tensors():
        checkpoint.add(tensor)
    checkpoint.problems += merging.problems
    checkpoint.notes += merging.notes
    _merge_tied_embedding(checkpoint, args)
    _values(checkpoint, sizes, ranks, args)
    return checkpoint


def _has_pipeline_stages(trees: Mapping[str, RankFile]) -> bool | None:
    """Whether files of ranks with other second numbers hold other stages of a pipeline; None: they do not tell."""
    begin = [any("word_embeddings" in name for name in tree.chunks[0]) for tree in trees.values()]
    end = [any("final_layernorm" in name or "final_norm" in name for name in tree.chunks[-1]) for tree in trees.values()]
    if all(begin) and all(end):
        return False
    return True if any(begin) and any(end) else None


def _check(path: Path, sizes: Sizes, found: Mapping[str, tuple[int, ...]], ranks: Mapping[Rank, RankFile], checkpoint: Checkpoint) -> None:
    """Files that are missing, too many, or of another run."""
    expected = {sizes.directory(rank): rank for rank in sizes.list_writing_ranks()}
    missing = [name for name in expected if name not in found]
    if missing:
        checkpoint.problems.append(f"{path}: {in_words(missing)} missing; the run's args say {sizes}")
    surplus = [name for name in found if name not in expected and rank_of(found[name], sizes) not in expected.values()]
    if surplus:
        checkpoint.problems.append(
            f"{path}: {in_words(surplus)} should not be there with {sizes}; not read. Files of two runs are mixed up"
        )
    if sizes.etp > sizes.tp:
        checkpoint.problems.append(
            f"{path}: experts are cut over {sizes.etp} tensor-parallel ranks and the rest over {sizes.tp}: ranks of this layout write over "
            "each other's files, and the pieces of some experts are lost"
        )
    first = next(iter(ranks.values()))
    for tree in ranks.values():
        for name in _SAME_EVERYWHERE:
            if tree.args and first.args and tree.args.get(name) != first.args.get(name):
                raise DumpFormatError(
                    f"{tree.path}: its args say {name} {tree.args.get(name)!r}, those of {first.path.parent.name} "
                    f"{first.args.get(name)!r}; files of two runs are mixed up"
                )
        if tree.tree.get("iteration") != first.tree.get("iteration"):
            checkpoint.problems.append(
                f"{tree.path}: is of iteration {tree.tree.get('iteration')}, {first.path.parent.name} of {first.tree.get('iteration')}: "
                "a rank's file is stale"
            )
        if len(tree.chunks) != len(first.chunks):
            raise DumpFormatError(
                f"{tree.path}: holds {len(tree.chunks)} model chunks, {first.path.parent.name} {len(first.chunks)}; files of two runs are "
                "mixed up"
            )


def _states(tree: RankFile, sizes: Sizes, trust: Collection[str], checkpoint: Checkpoint) -> None:
    """The optimizer's states of a rank."""
    checkpoint.files.append(tree.path)
    if "optimizer" in tree.tree:
        tree.states = states_of(tree.path, tree.tree["optimizer"], tree.chunks)
    flat = tree.path.with_name(DISTRIBUTED)
    others = sorted(file.name for file in tree.path.parent.iterdir() if file.name not in (WEIGHTS, DISTRIBUTED))
    if others:
        what = ": states of a layer-wise optimizer" if any(name.startswith("layer_wise_optimizer_") for name in others) else ""
        checkpoint.notes.append(f"{tree.path.parent}: {in_words(others)} passed over{what}")
    if flat.exists():
        try:
            buffers = read_torch(flat, trust).tree
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            checkpoint.problems.append(str(error))
        else:
            checkpoint.files.append(flat)
            elements = max(sum(tensor.numel for tensor in chunk.values()) for chunk in tree.chunks)
            tried = bucket_sizes(tree.args, elements)
            distributed_states(flat, buffers, tree.chunks, _alone(tree, sizes), tried, tree.states)
    elif tree.args.get("use_distributed_optimizer") and "optimizer" in tree.tree and tree.rank.ep == 0:
        checkpoint.problems.append(f"{flat}: is missing; the optimizer's states of this rank are in it")
    checkpoint.problems += tree.states.problems


def _alone(tree: RankFile, sizes: Sizes) -> list[Key]:
    """Embeddings that the first and the last stage of a pipeline share."""
    if sizes.pp == 1 or tree.args.get("untie_embeddings_and_output_weights") is True:
        return []
    last = len(tree.chunks) - 1
    found: list[Key] = []
    if tree.rank.pp == 0:
        found = [(0, name) for name in tree.chunks[0] if name.endswith("word_embeddings.weight")]
    elif tree.rank.pp == sizes.pp - 1:
        found = [(last, name) for name in tree.chunks[last] if name in _HEADS or name.endswith("word_embeddings.weight")]
    return found


def _merge_tied_embedding(checkpoint: Checkpoint, args: Mapping[str, Any]) -> None:
    """The last stage's own embedding of a tied model is a copy of the first stage's."""
    if args.get("untie_embeddings_and_output_weights") is not False:
        return
    heads = [key for key, tensor in checkpoint.tensors.items() if tensor.name in _HEADS]
    for key in heads:
        head = checkpoint.tensors[key]
        table = next(
            (t for t in checkpoint.tensors.values() if t.name.endswith("embedding.word_embeddings.weight") and t.state == head.state), None
        )
        if table is None or (table.shape, table.dtype) != (head.shape, head.dtype):
            continue
        del checkpoint.tensors[key]
        checkpoint.tensors[table.key] = StoredTensor(
            table.name,
            table.shape,
            table.dtype,
            table.boxes,
            (*table.copies, *head.boxes, *head.copies),
            table.state,
            table.group,
            padding=table.padding,
        )
    if heads:
        checkpoint.notes.append("the output layer is tied to the embedding: the last stage's own table is taken for a copy of it")


def _values(checkpoint: Checkpoint, sizes: Sizes, ranks: Mapping[Rank, RankFile], args: Mapping[str, Any]) -> None:
    """Arguments, settings, random states: of the first rank, but for random states, which each rank has."""
    checkpoint.facts = facts_of(args)
    first = next(iter(ranks.values()))
    checkpoint.values = values_of(args)
    rest = {key: value for key, value in first.tree.items() if key not in ("optimizer", "rng_state")}
    tensors, values = plain(rest)
    checkpoint.values |= values
    for tree in ranks.values():
        checkpoint.values |= {f"optimizer.{key}": value for key, value in tree.states.values.items()}
        _add(checkpoint, {f"optimizer.{key}": value for key, value in tree.states.extra.items()}, OPTIMIZER)
        place = f"tp{tree.rank.tp}.pp{tree.rank.pp}" + (f".ep{tree.rank.ep}" if sizes.ep > 1 else "")
        tensors_of_rank, values_of_rank = plain(tree.tree.get("rng_state"), f"rng_state.{place}")
        checkpoint.values |= {key: value for key, value in values_of_rank.items() if value is not None}
        _add(checkpoint, tensors_of_rank, RANDOM)
    _add(checkpoint, tensors, OTHER)
    skipped = sum(len(tree.skipped) for tree in ranks.values())
    if skipped:
        checkpoint.notes.append(f"{skipped} tensors called _extra_state were passed over: states of low-precision recipes")


def _add(checkpoint: Checkpoint, tensors: Mapping[str, FileTensor], group: str) -> None:
    for name, tensor in tensors.items():
        if name not in checkpoint.tensors:
            boxes = whole(tensor.shape, tensor.file, tensor.start, tensor.strides)
            checkpoint.add(StoredTensor(name, tensor.shape, tensor.dtype, boxes, group=group))
