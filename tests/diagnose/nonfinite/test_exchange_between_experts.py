"""The first NaN where ranks exchange tokens (experts): what one rank has sent away comes back by the others."""

from __future__ import annotations

from typing import Any

from msprobe_engine.find.nonfinite.first_over_ranks import analyse


def exchange(r: Any, before: str, after: str) -> None:
    """An all-to-all inside of a function of the framework, which is recorded after it."""
    outer = f"Autograd._AllToAll.{sum(name.startswith('Autograd') for name in r.data)}.forward"
    inner = r.comm("all_to_all_single", [None, before], [after], group=[0, 1])
    r.construct[inner] = outer
    assert r.api("Autograd._AllToAll", [before], [after]) == outer


def test_a_value_that_was_sent_away(rank_dump: Any) -> None:
    """Rank 0 makes a NaN and sends it to rank 1, which works on it and sends it back: rank 0's operator is named, and neither the exchange
    nor the function around it."""
    zero, one = rank_dump(), rank_dump()
    zero.api("Torch.exp", ["ok"], ["nan"])
    zero.api("Tensor.index_select", ["nan"], ["nan"])
    exchange(zero, "nan", "ok")
    zero.api("Functional.linear", ["ok"], ["ok"])
    exchange(zero, "ok", "nan")
    zero.api("Tensor.mean", ["nan"], ["nan"])
    one.api("Torch.exp", ["ok"], ["ok"])
    one.api("Tensor.index_select", ["ok"], ["ok"])
    exchange(one, "ok", "nan")
    one.api("Functional.linear", ["nan"], ["nan"])
    exchange(one, "nan", "ok")
    one.api("Tensor.mean", ["ok"], ["ok"])
    verdict = analyse({0: zero.trace(0), 1: one.trace(1)})
    assert [(o.rank, o.call.name, o.swallowed) for o in verdict.suspects] == [(0, "Torch.exp.0.forward", False)]
    assert (1, "Distributed.all_to_all_single.0.forward") in [(rank, call.name) for rank, call in verdict.spread[0]]


def test_tokens_that_the_rank_itself_does_not_choose(rank_dump: Any) -> None:
    """Rank 0 makes a NaN, all ranks gather all tokens, and only rank 1 chooses the spoiled ones."""
    dumps = [rank_dump(), rank_dump()]
    for rank, r in enumerate(dumps):
        mine, chosen = ("ok", "nan") if rank else ("nan", "ok")
        r.api("Torch.exp", ["ok"], [mine])
        r.comm("all_gather_into_tensor", [None, mine], ["nan"], group=[0, 1])
        r.api("Tensor.index_select", ["nan"], [chosen])
        r.comm("reduce_scatter_tensor", [None, chosen], ["ok" if rank else "nan"], group=[0, 1])
        r.api("Tensor.mean", ["ok" if rank else "nan"], ["ok" if rank else "nan"])
    verdict = analyse({rank: r.trace(rank) for rank, r in enumerate(dumps)})
    assert [(o.rank, o.call.name) for o in verdict.suspects] == [(0, "Torch.exp.0.forward")]


def test_a_function_that_made_it_after_an_exchange(rank_dump: Any) -> None:
    """A function around an exchange of clean values that gives NaN is named itself."""
    dumps = [rank_dump(), rank_dump()]
    for rank, r in enumerate(dumps):
        inner = r.comm("all_to_all_single", [None, "ok"], ["ok"], group=[0, 1])
        r.construct[inner] = "Autograd._AllToAll.0.forward"
        r.api("Autograd._AllToAll", ["ok"], ["nan" if rank else "ok"])
    verdict = analyse({rank: r.trace(rank) for rank, r in enumerate(dumps)})
    assert [(o.rank, o.call.name) for o in verdict.suspects] == [(1, "Autograd._AllToAll.0.forward")]
