"""The first NaN/Inf over ranks: hand-made steps whose truth is known."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from msprobe_engine.find.nonfinite.first_over_ranks import Verdict, analyse
from msprobe_engine.find.nonfinite.report import describe_lost_numbers


def run(*ranks: Any) -> Verdict:
    return analyse({i: r.trace(i) for i, r in enumerate(ranks)})


def named(verdict: Verdict) -> list[tuple[int, str, str]]:
    return [(o.rank, o.call.name, o.cause) for o in verdict.suspects]


STEPS_OF_ONE_RANK: dict[str, tuple[str, str, str, str]] = {
    "a step without NaN or Inf": ("Functional.linear: ok ok -> ok; Functional.relu: ok -> ok", "", "", ""),
    "the innermost module with clean inputs and a bad output": (
        "block.fc1.Linear@block.Block: ok -> ok; block.fc2.Linear@block.Block: ok -> nan; "
        "block.Block: ok -> nan", "Module.block.fc2.Linear.forward.0", "module", "",
    ),
    "a bad input inside of clean ones is an operation of the parent that was not recorded": (
        "block.fc1.Linear@block.Block: ok -> ok; block.fc2.Linear@block.Block: nan -> nan; block.Block: ok -> nan",
        "Module.block.Block.forward.0", "unrecorded",
        "Module.block.fc2.Linear.forward.0",
    ),
    "a bad input of the outermost module": (
        "Functional.linear@net.Net: nan ok -> nan; net.Net: nan -> nan",
        "Functional.linear.0.forward", "data", "",
    ),
    "a mask made by full and triu is followed through its addition": (
        "Torch.full: -> -inf; Torch.triu: -inf -> -inf; Tensor.__add__: ok -inf -> -inf; "
        "Functional.softmax: -inf -> ok; Functional.gelu: ok -> nan",
        "Functional.gelu.0.forward", "operator", "",
    ),
    "softmax that makes NaN of a mask": (
        "Tensor.masked_fill: ok -> -inf; Functional.softmax: -inf -> nan", "Functional.softmax.0.forward", "operator", "mask",
    ),
    "a mask that is not swallowed and makes the loss infinite": (
        "Tensor.masked_fill: ok -> -inf; Tensor.sum: -inf -> -inf()", "Tensor.masked_fill.0.forward", "operator", "",
    ),
    "an infinity that was computed, with masks about, and turns into NaN": (
        "Tensor.masked_fill: ok -> -inf; Functional.softmax: -inf -> ok; Torch.matmul: ok ok -> inf; Functional.softmax: inf -> nan",
        "Torch.matmul.0.forward", "operator", "",
    ),
    "a NaN that `where` has thrown away before another one": (
        "Torch.div: ok ok -> nan; Torch.where: ok nan ok -> ok; Functional.linear: ok -> ok; Torch.sqrt: ok -> nan; "
        "Functional.linear: nan -> nan",
        "Torch.sqrt.0.forward", "operator", "",
    ),
    "memory of torch.empty that nothing uses": ("Torch.empty: -> nan; Functional.linear: ok -> ok", "", "", ""),
    "inputs without statistics, which do not count as bad": (
        "Functional.linear: unknown -> nan", "Functional.linear.0.forward", "operator", "no statistics",
    ),
    "an operation in place, whose input was read after it": (
        "Functional.linear: ok -> ok; Tensor.div_: nan -> nan", "Tensor.div_.0.forward", "unrecorded", "",
    ),
    "without modules the call behind an operation that was not recorded": (
        "Functional.linear: ok -> ok; Functional.softmax: ok -> ok; "
        "Tensor.__matmul__: nan ok -> nan", "Tensor.__matmul__.0.forward", "unrecorded", "",
    ),
    "log(0) that exp swallows": ("Torch.log: ok -> -inf; Torch.exp: -inf -> ok; "
        "Functional.linear: ok -> ok", "", "Torch.log.0.forward", ""),
}  # fmt: skip
"""Calls in order (name: inputs -> output; `@module` inside of that one; `()` for a number without dimensions), the call that is named, its
cause (where none is named: the call that was harmless), and what its note says."""


def write_call(r: Any, call: str) -> None:
    name, parent, given, out = re.fullmatch(r"([^:@]+)@?([^:]*): ?(.*?) ?-> (\S+)", call.strip()).groups()  # type: ignore[union-attr]
    inside = f"Module.{parent}.forward.0" if parent else None
    output = r.number(out[:-2]) if out.endswith("()") else out
    write = r.api if name.startswith(("Functional.", "Tensor.", "Torch.")) else r.module
    write(name, given.split(), [output], parent=inside)


def test_steps_of_one_rank(rank_dump: Any) -> None:
    """What is named, or nothing."""
    for case, (calls, call, cause, note) in STEPS_OF_ONE_RANK.items():
        r = rank_dump()
        for line in calls.split(";"):
            write_call(r, line)
        verdict = run(r)
        assert named(verdict) == ([(0, call, cause)] if call else []), case
        assert [o.call.name for o in verdict.harmless] == ([cause] if cause and not call else []) or call, case
        assert not note or note in verdict.suspects[0].notes[0], case


def test_finest_operator_inside_module(rank_dump: Any) -> None:
    """Of a module and the API call inside it, both with clean inputs and bad outputs, the API call is named."""
    r = rank_dump()
    m = "Module.block.Block.forward.0"
    r.api("Functional.linear", ["ok"], ["ok"], parent=m)
    r.api("Functional.softmax", ["ok"], ["nan"], parent=m)
    r.api("Functional.dropout", ["nan"], ["nan"], parent=m)
    r.module("block.Block", ["ok"], ["nan"])
    verdict = run(r)
    assert named(verdict) == [(0, "Functional.softmax.0.forward", "operator")]
    assert [call.name for _, call in verdict.spread[0]] == ["Functional.dropout.0.forward", m]


def test_parameter(rank_dump: Any) -> None:
    """A bad parameter is named as such, at module level and behind the API call that used it."""
    r = rank_dump()
    r.api("Functional.linear", ["ok", "nan"], ["nan"], parent="Module.fc.Linear.forward.0")
    r.module("fc.Linear", ["ok"], ["nan"], params={"weight": "nan"})
    assert named(run(r)) == [(0, "Module.fc.Linear.forward.0", "parameter")]
    r = rank_dump()
    r.module("fc.Linear", ["ok"], ["nan"], params={"weight": "nan"})
    verdict = run(r)
    assert named(verdict) == [(0, "Module.fc.Linear.forward.0", "parameter")]
    assert verdict.suspects[0].facts[0].place == "parameters.weight"


def test_mask_is_no_fault(rank_dump: Any) -> None:
    """-inf written by a mask and swallowed by softmax is neither an origin nor does it hide a later one."""

    def body(r: Any, end: str) -> None:
        m = "Module.attn.Attn.forward.0"
        r.api("Tensor.masked_fill", ["ok", "ok", float("-inf")], ["-inf"], parent=m)
        r.api("Functional.softmax", ["-inf"], ["ok"], parent=m)
        r.module("attn.Attn", ["ok"], ["ok"])
        r.api("Functional.linear", ["ok"], [end])

    clean, bad = rank_dump(), rank_dump()
    body(clean, "ok")
    body(bad, "nan")
    assert named(run(clean)) == []
    assert named(run(bad)) == [(0, "Functional.linear.0.forward", "operator")]


@pytest.mark.parametrize(
    ("call", "dtype", "said"),
    [("Tensor.pow", "torch.float16", True), ("Tensor.pow", "torch.float32", False), ("Torch.exp", "torch.float16", False)],
)
def test_a_square_that_outgrows_float16_and_is_divided_by(call: str, dtype: str, said: bool, rank_dump: Any) -> None:
    """A norm that is made of it is zero and finite: no NaN comes of it, and that nothing was lost is not said."""
    r = rank_dump()
    r.api(call, ["ok"], [{**rank_dump.number("inf"), "dtype": dtype}])
    r.api("Torch.rsqrt", ["inf"], ["ok"])
    verdict = run(r)
    assert named(verdict) == []
    assert bool(describe_lost_numbers(verdict)) == said


@pytest.mark.parametrize(
    ("given", "weight", "taken", "shapes", "functions", "said"),
    [
        (0.0, 1.0, 1.0, ([2, 4], [4]), False, True),
        (0.0, 1.0, 1.0, ([2, 3, 4], [4]), False, True),  # of another shape than what it takes in
        (0.5, 1.0, 1.0, ([2, 4], [4]), False, False),
        (0.0, 0.0, 1.0, ([2, 4], [4]), False, False),  # a scale that begins at zero
        (0.0, 1.0, 0.0, ([2, 4], [4]), False, False),
        (0.0, 1.0, 1.0, ([2, 4], [4, 4]), False, False),  # a matrix may make numbers of one sign, of which a relu makes zeros
        (0.0, 1.0, -1.0, ([2, 4], [4]), False, False),  # numbers of one sign
        (0.0, 1.0, 1.0, ([2, 4], [4]), True, False),  # its calls tell
    ],
)
def test_a_module_of_which_only_zeros_come(
    given: float, weight: float, taken: float, shapes: tuple[list[int], list[int]], functions: bool, said: bool, rank_dump: Any
) -> None:
    """Where modules alone were recorded, the zeros that a lost Inf leaves are all there is to see. A negative size: of that sign alone."""

    def tensor(size: float, shape: list[int]) -> dict[str, Any]:
        largest, least = (size / 2, size) if size < 0.0 else (size, -size)
        return {**rank_dump.number("ok"), "shape": shape, "Max": largest, "Min": least, "Mean": 0.1 * size, "Norm": 2 * abs(size)}

    r = rank_dump()
    if functions:
        r.api("Torch.rsqrt", ["ok"], ["ok"])
    r.module("norm.RMSNorm", [tensor(taken, shapes[0])], [tensor(given, [2, 4])], params={"weight": tensor(weight, shapes[1])})
    verdict = run(r)
    assert named(verdict) == []
    assert bool(describe_lost_numbers(verdict)) == said


def test_nested_output(rank_dump: Any) -> None:
    """A NaN in a nested output is seen."""
    r = rank_dump()
    r.api("Torch.split", ["ok"], [["ok", ["nan"]]])
    verdict = run(r)
    assert verdict.suspects[0].facts[0].place == "output.0.1.0"


def test_backward_birth(rank_dump: Any) -> None:
    """A gradient that turns bad in a backward call is named there, not at the parameter gradient."""
    r = rank_dump()
    r.module("a.Linear", ["ok"], ["ok"], parent=None)
    r.grads("a.Linear", weight="nan")  # 8.1.1 puts the placeholder here
    r.module("b.Softmax", ["ok"], ["ok"])
    r.module("b.Softmax", ["ok"], ["nan"], direction="backward")
    r.module("a.Linear", ["nan"], ["nan"], direction="backward")
    assert named(run(r)) == [(0, "Module.b.Softmax.backward.0", "module")]


def test_weight_gradient_birth(rank_dump: Any) -> None:
    """A weight gradient that is bad while the module's backward got and gave clean gradients is its own origin."""
    r = rank_dump()
    r.module("a.Linear", ["ok"], ["ok"])
    r.module("a.Linear", ["ok"], ["ok"], direction="backward")
    r.grads("a.Linear", weight="inf", bias="ok")
    assert named(run(r)) == [(0, "Module.a.Linear.parameters_grad.0", "gradient")]


def test_collective_chain_over_four_ranks(rank_dump: Any) -> None:
    """A NaN of rank 3 that reaches rank 0 by two groups is followed back to rank 3."""
    ranks = [rank_dump() for _ in range(4)]
    for i, r in enumerate(ranks):
        r.api("Functional.linear", ["ok"], ["nan" if i == 3 else "ok"])
        first = [0, 1] if i < 2 else [2, 3]
        r.comm("all_reduce", ["nan" if i == 3 else "ok"], ["nan" if i >= 2 else "ok"], group=first)
        second = [0, 2] if i % 2 == 0 else [1, 3]
        r.comm("all_reduce", ["nan" if i >= 2 else "ok"], ["nan"], group=second)
        r.api("Functional.relu", ["nan"], ["nan"])
    verdict = run(*ranks)
    assert named(verdict) == [(3, "Functional.linear.0.forward", "operator")]
    assert {rank for rank, _ in verdict.spread[0]} == {0, 1, 2, 3}


def test_collective_inside_module(rank_dump: Any) -> None:
    """A module whose inner all_reduce brought the NaN is explained by the peer."""
    a, b = rank_dump(), rank_dump()
    for r, own in ((a, "ok"), (b, "nan")):
        m = "Module.row.RowParallelLinear.forward.0"
        r.api("Functional.linear", ["ok"], [own], parent=m)
        r.comm("all_reduce", [own], ["nan"])
        r.construct["Distributed.all_reduce.0.forward"] = m
        r.module("row.RowParallelLinear", ["ok"], ["nan"])
    assert named(run(a, b)) == [(1, "Functional.linear.0.forward", "operator")]


def test_birth_in_the_collective(rank_dump: Any) -> None:
    """A collective with clean inputs on all ranks and a bad output is itself the origin, on all of them."""
    ranks = [rank_dump(), rank_dump()]
    for r in ranks:
        r.comm("all_reduce", ["ok"], ["inf"])
        r.api("Functional.softmax", ["inf"], ["nan"])
    verdict = run(*ranks)
    assert named(verdict) == [(0, "Distributed.all_reduce.0.forward", "collective"), (1, "Distributed.all_reduce.0.forward", "collective")]


def test_pipeline(rank_dump: Any) -> None:
    """A NaN that a pipeline stage received is followed to the sender; write-only receive buffers are no input."""
    a, b = rank_dump(), rank_dump()
    a.api("Functional.gelu", ["ok"], ["nan"])
    a.comm("send", ["nan"], ["nan"], dst=1)
    b.comm("recv", ["nan"], ["nan"], src=0)
    b.module("layer.Layer", ["nan"], ["nan"])
    assert named(run(a, b)) == [(0, "Functional.gelu.0.forward", "operator")]


def test_pipeline_batched(rank_dump: Any) -> None:
    """batch_isend_irecv pairs by the P2POp objects; the gradient coming back orders the other way."""
    a, b = rank_dump(), rank_dump()

    def p2p(op: str, peer: int, kind: str) -> dict[str, Any]:
        from copy import deepcopy

        r = rank_dump()
        r.api("x.y", [kind])
        return {
            "class_type": "torch.distributed.P2POp",
            "tensor": deepcopy(r.data["x.y.0.forward"]["input_args"][0]),
            "op": op,
            "peer": peer,
            "tag": 0,
        }

    a.comm("batch_isend_irecv", [[p2p("isend", 1, "ok")]], [[p2p("isend", 1, "ok")]])
    b.comm("batch_isend_irecv", [[p2p("irecv", 0, "ok")]], [[p2p("irecv", 0, "ok")]])
    b.api("Functional.cross_entropy", ["ok"], ["ok"])
    b.api("Functional.cross_entropy", ["ok"], ["nan"], direction="backward")
    b.comm("batch_isend_irecv", [[p2p("isend", 0, "nan")]], [[p2p("isend", 0, "nan")]])
    a.comm("batch_isend_irecv", [[p2p("irecv", 1, "ok")]], [[p2p("irecv", 1, "nan")]])
    a.module("layer.Layer", ["nan"], ["nan"], direction="backward")
    assert named(run(a, b)) == [(1, "Functional.cross_entropy.0.backward", "operator")]


def test_missing_rank(rank_dump: Any) -> None:
    """When the group holds a rank without a dump, the suspect says that the value may come from there."""
    r = rank_dump()
    r.comm("all_reduce", ["ok"], ["nan"], group=[0, 1])
    verdict = run(r)
    assert named(verdict) == [(0, "Distributed.all_reduce.0.forward", "missing")]
    assert "1" in verdict.suspects[0].notes[0]


def test_concurrent_births_are_both_suspects(rank_dump: Any) -> None:
    """Births on two ranks with nothing between them are both reported."""
    a, b = rank_dump(), rank_dump()
    for r in (a, b):
        r.api("Functional.linear", ["ok"], ["nan"])
        r.comm("all_reduce", ["nan"], ["nan"])
    verdict = run(a, b)
    assert [rank for rank, _, _ in named(verdict)] == [0, 1]
    assert not verdict.ordered


def test_two_groups_of_the_existing_tools_failure(rank_dump: Any) -> None:
    """Two process groups, birth between them on rank 3: rank 3's operator, not the world all_reduce of rank 0."""
    ranks = [rank_dump() for _ in range(4)]
    for i, r in enumerate(ranks):
        r.comm("all_reduce", ["ok"], ["ok"], group=[0, 1] if i < 2 else [2, 3])
        r.api("Torch.sqrt", ["ok"], ["nan" if i == 3 else "ok"])
        r.comm("all_reduce", ["nan" if i == 3 else "ok"], ["nan"])
    assert named(run(*ranks)) == [(3, "Torch.sqrt.0.forward", "operator")]


def test_side_branch(rank_dump: Any) -> None:
    """A NaN in a branch that feeds no collective is still found."""
    ranks = [rank_dump(), rank_dump()]
    for i, r in enumerate(ranks):
        r.api("Functional.linear", ["ok"], ["nan" if i else "ok"])
        r.comm("all_reduce", ["ok"], ["ok"])
    assert named(run(*ranks)) == [(1, "Functional.linear.0.forward", "operator")]


def test_pipeline_without_recorded_communication(rank_dump: Any) -> None:
    """At L0 the second stage's bad input gives way to the first stage's birth."""
    a, b = rank_dump(), rank_dump()
    a.module("s0.Layer", ["ok"], ["nan"])
    b.module("s1.Layer", ["nan"], ["nan"])
    assert named(run(a, b)) == [(0, "Module.s0.Layer.forward.0", "module")]


def test_replicas_without_recorded_communication(rank_dump: Any) -> None:
    """At L0, ranks that ran the same calls are compared by position: bad data of rank 1 comes before the module that a hidden
    all_reduce made bad on rank 0."""
    a, b = rank_dump(), rank_dump()
    for r, own in ((a, "ok"), (b, "nan")):
        r.module("row.fc.Linear", [own], [own], parent="Module.row.Row.forward.0")
        r.module("row.Row", [own], ["nan"])
    verdict = run(a, b)
    assert named(verdict)[0] == (1, "Module.row.fc.Linear.forward.0", "data")
    assert not verdict.ordered


def test_gradient_that_a_norm_replaces(rank_dump: Any) -> None:
    """What reached the gradients of parameters counts, also where a framework takes NaN out of their norm and puts an Inf there that
    says so (ZeRO); the ranks it was reduced to have made nothing. In a clean step the same Inf is no fault."""

    def norm(r: Any, kind: str, end: str) -> None:
        r.api("Torch.vector_norm", [kind], [rank_dump.number(kind)])
        r.api("Tensor.masked_fill_", [rank_dump.number(kind), 0.0], [rank_dump.number("ok")])
        r.api("Torch.full_like", [rank_dump.number("ok"), math.inf], [rank_dump.number("inf")])
        r.api("Torch.where", ["ok", rank_dump.number("inf"), rank_dump.number("ok")], [rank_dump.number(end)])

    def rank(faulty: bool, reduced: str) -> Any:
        r = rank_dump()
        own = "nan" if faulty else "ok"
        r.api("Torch.acos", ["ok"], [rank_dump.number("ok")])
        r.api("Torch.acos", [rank_dump.number("ok")], ["-inf" if faulty else "ok"], direction="backward")
        r.api("Tensor.__mul__", ["-inf" if faulty else "ok"], [own, own], direction="backward")
        r.comm("all_reduce", [own], [reduced])
        norm(r, reduced, "inf" if reduced == "nan" else "ok")
        return r

    assert named(run(rank(True, "nan"), rank(False, "nan"))) == [(0, "Torch.acos.0.backward", "operator")]
    assert named(run(rank(False, "ok"), rank(False, "ok"))) == []


def test_gradient_that_the_training_mends(rank_dump: Any) -> None:
    """A NaN that `nan_to_num_` takes out of the gradients is no fault, nor is the Inf by which a framework marks a norm afterwards."""
    r = rank_dump()
    r.api("Tensor.sqrt", ["ok"], [rank_dump.number("ok")])
    r.api("Tensor.sqrt", [rank_dump.number("ok")], ["nan"], direction="backward")
    r.api("Tensor.nan_to_num_", ["nan"], ["ok"])
    r.api("Torch.full_like", [rank_dump.number("ok"), math.inf], [rank_dump.number("inf")])
    r.api("Torch.where", ["ok", rank_dump.number("inf"), rank_dump.number("ok")], [rank_dump.number("ok")])
    verdict = run(r)
    assert named(verdict) == []
    assert [origin.call.name for origin in verdict.harmless] == ["Tensor.sqrt.0.backward"]


def test_infinite_loss_before_an_infinite_gradient(rank_dump: Any) -> None:
    """The number that backward starts from counts, although the gradients begin with 1 and the next Inf is born of finite numbers;
    an infinite number beside it, of which no gradient is taken, does not."""

    def step(loss: str, beside: str) -> Any:
        r = rank_dump()
        r.api("Functional.mse_loss", ["ok", "ok"], [rank_dump.number(loss)])
        r.api("Torch.exp", [rank_dump.number("ok")], [rank_dump.number(beside)])
        r.api("Functional.mse_loss", [rank_dump.number("ok")], ["ok"], direction="backward")
        r.api("Functional.linear", ["ok"], ["inf"], direction="backward")
        return r

    assert named(run(step("inf", "ok"))) == [(0, "Functional.mse_loss.0.forward", "operator")]
    assert named(run(step("ok", "inf"))) == [(0, "Functional.linear.0.backward", "operator")]
