"""Every parallel layout of torch under every part of the probe, against the same training in one process and in float64."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix_layouts as ml
import matrix_runs as mr
import numpy as np
import pytest
from forkpool import run_ranks
from matrix_truth import Part, Truth, assert_parts, truth

from msprobe_engine.dump.reader import open_dump

pytestmark = pytest.mark.framework
LAYOUTS = {layout.name: layout for layout in ml.LAYOUTS}
EVERY = os.environ.get("MSPROBE_TABLE") or os.environ.get("MSPROBE_EVERY_CELL") == "1"
CHOSEN = [layout for layout in ml.LAYOUTS if EVERY or "4 ranks" not in layout.name or layout.name.startswith("FSDP2 x")]
"""HSDP, the other layout of four ranks, is FSDP2 and DDP at once, and has tests of its own in tests/replicas and tests/monitor_torch."""


def modules(layout: ml.Layout) -> dict[str, str]:
    """Module as the probe calls it, to its name in the reference."""
    return {"": "head"} if layout.hidden else {name: name for name in truth()[0].outputs}


def check_monitor(layout: ml.Layout, ranks: list[mr.Result]) -> None:
    """Activations and their gradients, reduced gradients, parameters before and after, moments: every step, every name."""
    for number, whole in enumerate(truth()):
        seen = [result.steps[number] for result in ranks]

        def parts(*key: str, seen: list[mr.Samples] = seen) -> list[Part]:
            return [part for samples in seen for part in samples.get(key, [])]  # type: ignore[call-overload]

        for name, reference in modules(layout).items():
            assert_parts(parts("actv", f"{name}.output", ""), whole.outputs[reference], (number, name))
            assert_parts(parts("actv_grad", f"{name}.output", ""), whole.output_gradients[reference], (number, name), layout.gradient)
        for family, detail, tensors in families(layout, whole):
            for name, tensor in tensors.items():
                found = parts(family, name, detail)
                assert_parts(found, tensor, (number, family, name))
                assert all(part.count == tensor.size for part in found), (number, family, name)
        for samples in seen:
            assert {name for family, name, _ in samples if family == "grad_reduced"} <= set(whole.gradients)


def families(layout: ml.Layout, whole: Truth) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        ("grad_reduced", layout.phase, whole.gradients),
        ("param_origin", "", whole.before),
        ("param_updated", "", whole.after),
        ("exp_avg", "", whole.exp_avg),
        ("exp_avg_sq", "", whole.exp_avg_sq),
    ]


def collected(ranks: list[mr.Result], level: str, fits: Callable[[str], bool], place: str) -> list[Part]:
    """Tensors at this place of all records that fit, of all ranks."""
    found = []
    for result in ranks:
        for name, record in result.dumps[level].items():
            if fits(ml.plain(name)):
                found += [
                    Part(math.prod(t["shape"]), t["Norm"], t["Min"], t["Max"], t["Mean"])
                    for t in record[place]
                    if isinstance(t, dict) and "Norm" in t
                ]
    return found


def check_modules(layout: ml.Layout, ranks: list[mr.Result], level: str) -> None:
    """Outputs of modules and gradients of these outputs, as dumped."""
    for name, reference in modules(layout).items():
        start = f"Module.{name}." if name else "Module.Net."
        for place, kind, tensors, factor in (
            ("output", "forward", truth()[1].outputs, 1.0),
            ("input", "backward", truth()[1].output_gradients, layout.gradient),
        ):
            found = collected(ranks, level, lambda n: n.startswith(start) and f".{kind}." in n, place)  # noqa: B023
            assert_parts(found, tensors[reference], (level, name, kind), factor)


def check_calls(layout: ml.Layout, ranks: list[mr.Result], level: str) -> None:
    """Calls of functions: tanh in both directions, the square of the loss, and how many linear layers ran."""
    whole = truth()[1]
    output = whole.outputs["head"]
    assert_parts(collected(ranks, level, lambda n: n.startswith("Tensor.square.") and "forward" in n, "output"), output**2, level)
    if layout.hidden:
        return
    for place, kind, tensors, factor in (
        ("output", "forward", whole.outputs, 1.0),
        ("input", "backward", whole.output_gradients, layout.gradient),
    ):
        both = np.concatenate([tensors[f"{block}.act"] for block in ("first", "second")])
        found = collected(ranks, level, lambda n: n.startswith("Torch.tanh.") and n.endswith(kind), place)  # noqa: B023
        assert_parts(found, both, (level, kind), factor)
    samples = sum(
        part.count for part in collected(ranks, level, lambda n: n.startswith("Functional.layer_norm.") and "forward" in n, "output")
    )
    assert samples % (2 * ml.BATCH * ml.WIDTH) == 0
    assert collected(ranks, level, lambda n: n.startswith("Functional.linear.") and "forward" in n, "output")


def check_grad_probe(ranks: list[mr.Result]) -> None:
    """Norm, largest and smallest gradient of every parameter; parts of the ranks come together as the whole."""
    found: dict[str, list[Part]] = {}
    for result in ranks:
        for row in (row for row in result.gradients if row["max"]):  # a rank may hold nothing of a parameter
            part = Part(math.prod(json.loads(row["shape"])), float(row["norm"]), float(row["min"]), float(row["max"]))
            found.setdefault(ml.plain(row["param_name"]), []).append(part)
    assert set(found) == set(truth()[1].gradients)
    for name, gradient in truth()[1].gradients.items():
        assert_parts(found[name], gradient, name)


def check_collectives(layout: ml.Layout, ranks: list[mr.Result]) -> None:
    """What a layout's collectives give: reduced gradients add up to those of the reference, tensors between ranks are its activations."""
    whole = truth()[1]

    def outputs(rank: int, name: str) -> list[Part]:
        return [p for key, parts in ranks[rank].steps[1].items() if key[0] == "other" and name in key[1] for p in parts]

    if layout.name.startswith("TP"):
        for rank in range(2):
            first, second, *_ = outputs(rank, "functional_all_reduce")
            assert_parts([first], whole.outputs["first.down"], rank)
            assert_parts([second], whole.outputs["second.down"], rank)
    elif layout.name.startswith("PP"):
        assert_parts(outputs(1, "irecv"), whole.outputs["first.norm"], "stage 1")
        assert_parts(outputs(0, "irecv"), whole.output_gradients["first.norm"], "stage 0", layout.gradient)
    else:
        name = "reduce_scatter" if "FSDP" in layout.name else "all_reduce"
        divided = {"up.weight", "up.bias", "down.weight"} if "TP" in layout.name else set(whole.gradients)
        total = 0.0
        for parameter, gradient in whole.gradients.items():
            held = 2 if "TP" in layout.name and parameter.partition(".")[2] not in divided else 1
            total += held * float((gradient**2).sum())
        copies = {"DDP": 2, "HSDP": 2}.get(layout.name.split()[0].rstrip(","), 1)
        got = sum(part.norm**2 for rank in range(layout.ranks) for part in outputs(rank, name))
        assert got == pytest.approx(copies * total, rel=1e-4)


def check_replicas(layout: ml.Layout, ranks: list[mr.Result]) -> None:
    """Nothing is said of the healthy training; a parameter that one rank changed after its first update is named by a rank that has it."""
    assert {said for result in ranks for said in result.planted} == {(step, layout.copies[0]) for step in (1,)}


def check_incident(layout: ml.Layout, place: Path) -> None:
    """A NaN in the input of step 1: one incident directory, all ranks in it, with that step complete and the one before."""
    (directory,) = (p for p in (place / "incident" / "incidents").iterdir() if p.name.startswith("step"))
    assert directory.name.startswith(f"step{ml.NAN_STEP}-nan_inf")
    assert json.loads((directory / "incident.json").read_text())["ranks_complete"] == list(range(layout.ranks))
    dump = open_dump(directory)
    assert {ml.NAN_STEP - 1, ml.NAN_STEP} <= set(dump.steps)
    assert dump.ranks(ml.NAN_STEP) == list(range(layout.ranks))
    assert all(dump.load(ml.NAN_STEP, rank).complete for rank in range(layout.ranks))


@pytest.mark.parametrize("name", [layout.name for layout in CHOSEN])
def test_layout(name: str, tmp_path: Path) -> None:
    """Everything that the probe says of a layout is what the reference says, put together from the ranks; the training ends with the
    same bits under every part of the probe as without, and no name or hook stays behind."""
    layout = LAYOUTS[name]
    if layout.missing:
        pytest.skip(layout.missing)
    ranks = run_ranks(layout.ranks, mr.everything, layout, str(tmp_path), timeout=200)
    check_monitor(layout, ranks)
    for level in ("L0", "mix"):
        check_modules(layout, ranks, level)
    for level in ("L1", "mix"):
        check_calls(layout, ranks, level)
    check_grad_probe(ranks)
    proven = [
        "dump L0", "dump L1", "dump mix", "monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer",
        "grad probe", "incident capture", "same bits", "detach",
    ]  # fmt: skip
    assert [result.alerts for result in ranks] == [[]] * layout.ranks
    if layout.copies:
        check_replicas(layout, ranks)
        proven.append("replica check")
    if layout.ranks > 1:
        check_collectives(layout, ranks)
        proven.append("collectives")
    check_incident(layout, tmp_path)
    assert all(all(result.same.values()) for result in ranks), [result.same for result in ranks]
    assert [result.left for result in ranks] == [[]] * layout.ranks
