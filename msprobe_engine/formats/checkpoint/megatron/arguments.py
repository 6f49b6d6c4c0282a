"""What a Megatron run's arguments say of its model, in the words of `Checkpoint.facts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TABLES_OF_TOKENS = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")


def facts_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, sizes, and whether the model is gated or tied; without what the arguments do not say.

    Args:
        args: of Megatron's ``argparse.Namespace`` by name (megatron/training/arguments.py).
    """
    heads, hidden = number(args, "num_attention_heads"), number(args, "hidden_size")
    grouped = args.get("group_query_attention")
    groups = number(args, "num_query_groups") if grouped is not False else None
    size = number(args, "kv_channels")
    found: dict[str, Any] = {
        "heads": heads,
        "kv_heads": (groups or heads) if heads else None,
        "head_dim": size or (hidden // heads if heads and hidden else None),
        "hidden": hidden,
        "layers": number(args, "num_layers"),
        "experts": number(args, "num_experts"),
        "vocab": vocabulary(args),
        "gated": args.get("swiglu") if isinstance(args.get("swiglu"), bool) else None,
        "tied": not args["untie_embeddings_and_output_weights"]
        if isinstance(args.get("untie_embeddings_and_output_weights"), bool)
        else None,
    }
    if args.get("multi_latent_attention"):
        found["kv_heads"] = heads
        found["head_dim"] = None
    return {name: value for name, value in found.items() if value is not None}


def vocabulary(args: Mapping[str, Any]) -> int | None:
    """Rows of the vocabulary that are used; None: the arguments do not say. The null tokenizer of some versions has one more than given."""
    return None if "Null" in str(args.get("tokenizer_type")) else number(args, "vocab_size")


def find_padding_row(args: Mapping[str, Any], name: str, shape: Sequence[int]) -> int | None:
    """The row of a vocabulary's table from which on rows only fill it up; None: of another parameter, or not known to be so."""
    used = vocabulary(args)
    return used if used is not None and name.endswith(TABLES_OF_TOKENS) and shape and used < shape[0] else None


def number(args: Mapping[str, Any], name: str) -> int | None:
    """A whole number above 0 of the arguments."""
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def bucket_sizes(args: Mapping[str, Any], elements: int) -> list[int | None]:
    """Sizes that the buckets of the distributed optimizer may have, the likeliest first.

    Args:
        elements: of all parameters of a model chunk.

    Source: ``DistributedDataParallel.__init__`` (core/distributed/distributed_data_parallel.py) and ``get_model`` of Megatron-LM.
    """
    found: list[int | None] = []
    if args.get("overlap_grad_reduce") is not False:
        given, count = number(args, "ddp_bucket_size"), number(args, "ddp_num_buckets")
        if count:
            found.append(elements // count)
        ranks = (number(args, "data_parallel_size") or 1) * (number(args, "context_parallel_size") or 1)
        found += [given] if given else [max(40_000_000, 1_000_000 * ranks)]
    return [*found, None]
