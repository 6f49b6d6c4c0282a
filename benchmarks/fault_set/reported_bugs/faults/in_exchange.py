"""Faults in what ranks of megatron-core exchange: messages of stages, and tokens of experts where the golden run brings them by other
collectives."""

from __future__ import annotations

from typing import Any

from reported_bugs.case import Fault, Healthy
from reported_bugs.faults.in_megatron import TWO
from reported_bugs.run_megatron import of

MOE = "--experts 4 --untie"
EXCHANGE = r"layers\.1\.mlp(?!\.router)|mul|cat|zeros"


def messages_in_a_batch(chunks: list[Any]) -> None:
    """Of two stages with two chunks each, both neighbours are one rank: what goes forward and what goes back is exchanged in one batch, and
    each takes the other for its own."""
    for chunk in chunks:
        chunk.config.overlap_p2p_comm, chunk.config.batch_p2p_comm = False, True


def tokens_lost(chunks: list[Any]) -> None:
    """The first tokens that come to the experts of a rank are empty."""
    import torch

    dispatcher = chunks[0].decoder.layers[1].mlp.token_dispatcher
    own = dispatcher.dispatch_postprocess

    def lost(*args: Any) -> Any:
        tokens, *others = own(*args)
        return torch.cat((torch.zeros_like(tokens[:4]), tokens[4:])), *others

    dispatcher.dispatch_postprocess = lost


def weaker(chunks: list[Any]) -> None:
    """What comes back from experts is weighted once more."""
    dispatcher = chunks[0].decoder.layers[1].mlp.token_dispatcher
    own = dispatcher.combine_postprocess
    dispatcher.combine_postprocess = lambda tokens: own(tokens) * 0.9


def by_gather(name: str, plant: Any) -> Fault:
    other = of(f"--ep 2 {MOE} --allgather --bf16")
    return Fault(f"mcore: {name}, all-gather for all-to-all, bf16", of(f"--ep 2 {MOE} --bf16"), plant, EXCHANGE, levels=TWO, other=other)


def pair(name: str, form: str, other: str) -> Healthy:
    return Healthy(f"mcore: {name}", of(form), of(other), levels=TWO)


CASES = (
    Fault(
        "mcore: messages of virtual stages exchanged, bf16",
        of("--layers 4 --nmb 4 --bf16"),
        messages_in_a_batch,
        r"batch_isend_irecv|decoder(\.layers\.[12])?\.Transformer\w+|layers\.[12]\b",
        "validation of Megatron's arguments: virtual stages without overlap need more than two ranks",
        TWO,
        other=of("--layers 4 --pp 2 --vpp 2 --nmb 4 --bf16"),
    ),
    by_gather("tokens lost", tokens_lost),
    by_gather("weaker experts", weaker),
)
HEALTHY = (
    pair("all-gather for all-to-all", f"--ep 2 {MOE}", f"--ep 2 {MOE} --allgather"),
    pair("all-to-all for all-gather, sp 2, bf16", f"--tp 2 --sp --ep 2 {MOE} --allgather --bf16", f"--tp 2 --sp --ep 2 {MOE} --bf16"),
    pair("experts under sp for one process", MOE, f"--tp 2 --sp --ep 2 {MOE}"),
)
