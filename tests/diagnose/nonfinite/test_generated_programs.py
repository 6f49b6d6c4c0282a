"""Generated programs over several ranks: a planted birth must be found, and programs without one are clean."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.find.nonfinite.first_over_ranks import analyse


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[tuple[Any, ...]], int | None]:
    """(ranks, instructions, index of the local operation that is faulty or None)."""
    ranks = draw(st.integers(1, 4))
    kinds = ["op", "op", "op", "mask", "module"] + (["all", "send", "broadcast"] if ranks > 1 else [])
    instructions: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(kinds))
        if kind in ("op", "mask", "module"):
            instructions.append((kind, draw(st.integers(0, ranks - 1)), draw(st.lists(st.integers(0, 5), max_size=2))))
        elif kind == "all":
            op = draw(st.sampled_from(["all_reduce", "all_gather_into_tensor", "all_to_all_single"]))
            group = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2)))
            instructions.append((kind, op, group, draw(st.integers(0, 5))))
        elif kind == "broadcast":
            instructions.append((kind, draw(st.integers(0, ranks - 1)), draw(st.integers(0, 5))))
        else:
            a = draw(st.integers(0, ranks - 1))
            b = (a + draw(st.integers(1, ranks - 1))) % ranks
            instructions.append((kind, a, b, draw(st.integers(0, 5))))
    local = [i for i, ins in enumerate(instructions) if ins[0] in ("op", "module")]
    return ranks, instructions, draw(st.sampled_from(local)) if local and draw(st.booleans()) else None


def execute(
    rank_dump: Any, ranks: int, instructions: list[tuple[Any, ...]], faulty: int | None
) -> tuple[list[Any], tuple[int, str] | None]:
    """Run the program; every value is "ok" or "nan". A faulty operation with a bad input is no birth: then there is none."""
    dumps = [rank_dump() for _ in range(ranks)]
    values: list[list[str]] = [["ok"] for _ in range(ranks)]
    truth: tuple[int, str] | None = None
    born = False

    def pick(rank: int, which: int) -> str:
        return values[rank][-1 - which % len(values[rank])]

    for i, (kind, *rest) in enumerate(instructions):
        if kind in ("op", "mask", "module"):
            rank, which = rest
            ins = [pick(rank, w) for w in which] or ["ok"]
            out = "nan" if "nan" in ins else "ok"
            here = i == faulty and not born
            if here and out == "ok":
                out, born = "nan", True
            r = dumps[rank]
            if kind == "op":
                name = r.api("Functional.linear", ins, [out])
            elif kind == "mask":
                r.api("Tensor.masked_fill", [*ins, float("-inf")], ["nan" if out == "nan" else "-inf"])
                r.api("Functional.softmax", ["nan" if out == "nan" else "-inf"], [out])
            else:
                m = f"Module.m{i}.Layer.forward.0"
                name = r.api("Torch.matmul", ins, [out], parent=m)
                r.module(f"m{i}.Layer", ins, [out])
            if born and truth is None:
                truth = (rank, name)
            values[rank].append(out)
        elif kind == "all":
            op, group, which = rest
            ins = {rank: pick(rank, which) for rank in group}
            out = "nan" if "nan" in ins.values() else "ok"
            for rank in group:
                args = [ins[rank]] if op == "all_reduce" else ["nan", ins[rank]]  # an uninitialised output buffer
                dumps[rank].comm(op, args, [out], group=group)
                values[rank].append(out)
        elif kind == "broadcast":
            source, which = rest
            out = pick(source, which)
            for rank in range(ranks):
                dumps[rank].comm("broadcast", [out if rank == source else "nan"], [out], src=source)
                values[rank].append(out)
        else:
            a, b, which = rest
            out = pick(a, which)
            dumps[a].comm("send", [out], [out], dst=b)
            dumps[b].comm("recv", ["nan"], [out], src=a)
            values[b].append(out)
    return dumps, truth


@settings(max_examples=4 * settings().max_examples)
@given(program=programs())
def test_planted_birth_is_found(rank_dump: Any, program: tuple[int, list[tuple[Any, ...]], int | None]) -> None:
    """The one planted birth is the only suspect, whatever collectives, messages and masks surround it."""
    dumps, truth = execute(rank_dump, *program)
    verdict = analyse({rank: dump.trace(rank) for rank, dump in enumerate(dumps)})
    assert [(origin.rank, origin.call.name) for origin in verdict.suspects] == ([truth] if truth else [])
