"""What must be true of every case: one set of checks, for all frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.case import TrainingCase
from harness.faults import STEP
from harness.models import Key, local_gradients, reference
from harness.run import LEVELS, Row, Watched, drifting_of, framework_of, model_of, plain, watch_case
from msprobe_engine.core.records import BATCH_DIGEST
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze

LOW_PRECISION = 2e-2
"""Relative error of norms of gradients in bfloat16 against whole ones, gathered in bfloat16, too."""


def check_case(case: TrainingCase, folder: Path, *ops: str, levels: Sequence[str] = LEVELS) -> list[Watched]:
    """Dumps of these levels (one is ``mix``), monitor, gradient probe, collectives, replica check, incident, bits, and what is left behind.

    Args:
        ops: collectives whose arithmetic there must have been to check.
    """
    run = watch_case(case, folder, levels)
    for one in run:
        assert {level: seen.bits == one.bits for level, seen in one.seen.items()} == dict.fromkeys(levels, True), "same bits"
        assert not one.left, one.left
        for seen in one.seen.values():
            assert seen.steps == [(step, True) for step in range(case.steps)]
    hidden = "compile" in case.features  # what is compiled is seen at its border
    if not hidden:
        check_dump(run, "interleaved" not in case.features)
        check_activations(run)
    expected = reference(case) if not run[0].spy["whole"] else {key: norm for one in run for key, norm in one.spy["whole"].items()}
    check_monitor(case, run, expected)
    check_scalars(case, run, expected)
    if case.framework == "torch_loop" and {"dp", "fsdp1"} & case.parallelism.keys() and len(case.parallelism) == 1:
        check_unreduced(case, run)
    gradients = [{key[2]: norm for key, norm in expected.items() if key[:2] == ("grad_reduced", step)} for step in range(case.steps)]
    if case.model != "moe":  # an expert has one owner, and what is gathered is bfloat16
        for level in levels:
            check_grad_probe([one.seen[level].gradients for one in run], gradients, case.clip)
    if case.ranks > 1:
        check_sent(run)
        for level in set(levels) - {"L0"}:
            check_collectives([shared(one.seen[level].calls, case.ranks) for one in run], *ops)
    if not hidden:
        chunk = "1." if "interleaved" in case.features else ""  # the second stage of its rank
        check_incident(folder / "fault", case.ranks - 1, chunk + model_of(case).failing)
    if case.replicated:
        check_drift([one.said for one in run], drifting_of(case))
    return run


def check_dump(run: Sequence[Watched], in_order: bool = True) -> None:
    """Outputs of the modules and calls, and gradients of these outputs, are what the spy saw, in every step and rank; a level has what
    belongs to it and nothing else. `in_order`: forward passes are, too; two stages of one rank are dumped one after the other."""
    order = list if in_order else sorted
    for level in run[0].seen:
        wanted = {"L0": {"module"}, "L1": {"operator"}, "mix": {"module", "operator"}}[level]
        for one in run:
            for norms, expected in zip(one.seen[level].dump, one.spy["steps"], strict=True):
                assert {kind for kind, _ in norms} == wanted, level
                for kind in wanted:
                    assert order(norms[kind, "forward"]) == pytest.approx(order(expected[kind, "forward"]), rel=1e-5), level
                    assert sorted(norms[kind, "backward"]) == pytest.approx(sorted(expected[kind, "backward"]), rel=1e-5), level


def check_activations(run: Sequence[Watched]) -> None:
    """Outputs of the modules are what the spy saw, in every step, micro batch and rank."""
    for one in run:
        for outputs, expected in zip(one.seen["mix"].outputs, one.spy["modules"], strict=True):
            assert expected
            for name, norms in expected.items():
                assert outputs[plain(name)] == pytest.approx(norms, rel=1e-5), name


def check_monitor(case: TrainingCase, run: Sequence[Watched], expected: Mapping[Key, float]) -> None:
    """Gradients before they are clipped, parameters before and after, and moments have the norms of the whole tensors; a parameter that a
    rank does not have is on another one."""
    exact = case.precision == "fp32" and "hpz" not in case.features
    everywhere = "pp" not in case.parallelism and "ep" not in case.parallelism
    found: set[Key] = set()
    for one in run:
        norms = one.seen["mix"].norms
        if everywhere:
            compare(norms, expected, *(() if exact else (LOW_PRECISION, ["grad_reduced"])))
        else:
            mine = {key: norm for key, norm in (one.spy["whole"] or expected).items() if key in norms}
            compare(norms, mine, 2e-4 if exact else LOW_PRECISION)
            found |= mine.keys()
    assert everywhere or found == expected.keys(), sorted(expected.keys() - found)


def check_unreduced(case: TrainingCase, run: Sequence[Watched]) -> None:
    """Gradients before they are reduced are those of a rank's own batches (DDP), and every parameter has its update."""
    for number, one in enumerate(run):
        norms = one.seen["mix"].norms
        families = {family for family, _, _ in norms}
        assert {"grad_unreduced", "update"} <= families, families
        if "dp" in case.parallelism:
            compare(norms, {("grad_unreduced", 0, name): norm for name, norm in local_gradients(case, number).items()})


def check_scalars(case: TrainingCase, run: Sequence[Watched], expected: Mapping[Key, float]) -> None:
    """Every step has the scalars that its framework has (on one stage of a pipeline); a gradient norm is that of all gradients before they
    are clipped, and clipped ones are smaller by what that takes. Where the model is given tokens, each step has the digest of its batch."""
    wanted = set(framework_of(case).SCALARS)
    if case.model in ("gpt_tiny", "llama_tiny"):
        for one in run:
            assert len({float(scalars[BATCH_DIGEST]) for scalars in one.seen["mix"].scalars}) == case.steps
    for step in range(case.steps):
        scalars = [one.seen["mix"].scalars[step] for one in run]
        assert any(wanted <= each.keys() for each in scalars), scalars
        total = math.hypot(*(norm for key, norm in expected.items() if key[:2] == ("grad_reduced", step)))
        for one, each in zip(run, scalars):
            if case.clip and case.precision == "fp32" and "grad_norm" in each:
                assert float(each["grad_norm"]) == pytest.approx(total, rel=1e-3)
            for (family, at, name), norm in one.seen["mix"].norms.items():
                if (family, at) == ("grad_clipped", step) and case.clip:
                    by = min(1.0, case.clip / (total + 1e-6))
                    assert norm == pytest.approx(by * expected["grad_reduced", step, name], rel=2e-3, abs=1e-8), name


def compare(norms: Mapping[Key, float], expected: Mapping[Key, float], tolerance: float = 2e-4, families: Sequence[str] = ()) -> int:
    """Every number of `expected` was seen and agrees; returns how many were compared."""
    count = 0
    for key, norm in expected.items():
        if families and key[0] not in families:
            continue
        assert key in norms, f"{key} was not seen; seen of it: {sorted(k for k in norms if k[:2] == key[:2])[:5]}"
        assert abs(norms[key] - norm) <= tolerance * abs(norm) + 1e-8, (key, norms[key], norm)
        count += 1
    assert count
    return count


def check_grad_probe(run: Sequence[Sequence[Mapping[str, Row]]], gradients: Sequence[Mapping[str, float]], clip: float = 0) -> None:
    """Norms are those of the whole gradients, clipped; the ranges of the ranks make up the whole.

    Args:
        run: of all ranks, by step.
        gradients: by step, parameter -> norm before it was clipped.
        clip: largest norm of all together.
    """
    for step, whole in enumerate(gradients):
        total = math.hypot(*whole.values())
        by = min(1.0, clip / (total + 1e-6)) if clip else 1.0
        assert {name for steps in run for name in steps[step]} == set(whole)
        for name, norm in whole.items():
            rows = [steps[step][name] for steps in run if name in steps[step]]
            parts = sorted({(row.low, row.high): row for row in rows if row.low < row.high}.values(), key=lambda row: row.low)
            assert [row.low for row in parts] == [0, *(row.high for row in parts[:-1])], name
            assert parts[-1].high == parts[-1].size, name
            assert math.hypot(*(row.norm for row in parts)) == pytest.approx(norm * by, rel=2e-4, abs=1e-8), name


def check_sent(run: Sequence[Watched]) -> None:
    """Every call of a collective that the spy saw in a step has a record at the levels that have calls."""
    for one in run:
        for level in one.seen.keys() - {"L0"}:
            for sent, calls in zip(one.spy["sent"], one.seen[level].calls, strict=True):
                names = [call["op"] for call in calls]
                for name, count in sent.items():
                    assert sum(matches(name, op) for op in names) >= count, (level, name, count, names)


def matches(function: str, op: str) -> bool:
    """Is a record of `op` one of a call that ends in this function of torch.distributed?"""
    short = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
    return short.get(function, function) in op


def shared(calls: Sequence[Sequence[dict[str, Any]]], size: int) -> list[list[dict[str, Any]]]:
    """By step, calls in which all ranks take part."""
    return [[call for call in step if call["ranks"] == list(range(size)) and call["op"] not in POINT_TO_POINT] for step in calls]


POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def check_collectives(run: Sequence[Sequence[Sequence[dict[str, Any]]]], *ops: str) -> None:
    """What came out of sums, gathered and scattered tensors is what the ranks of the group put in; each of `ops` has been seen.

    Args:
        run: of all ranks, by step.
    """
    checked = dict.fromkeys(ops, 0)
    for steps in zip(*run, strict=True):
        for calls in zip(*steps, strict=True):
            assert len({(call["op"], call["reduce"]) for call in calls}) == 1
            if not all("output" in call and ("input" in call or "kwargs" in call) for call in calls):
                continue
            inputs = [(call.get("input") or call["kwargs"])[0] for call in calls]
            outputs = [call["output"][0] for call in calls]
            by = len(calls) if calls[0]["reduce"] == "avg" else 1
            slack = 1e-5 * sum(norm for _, _, norm in inputs)
            if "all_reduce" in calls[0]["op"] and calls[0]["reduce"] in ("sum", "avg"):
                total = sum(mean for _, mean, _ in inputs) / by
                assert [mean for _, mean, _ in outputs] == [pytest.approx(total, rel=1e-5, abs=slack)] * len(calls)
            elif "reduce_scatter" in calls[0]["op"]:
                total = sum(count * mean for count, mean, _ in inputs) / by
                assert sum(count * mean for count, mean, _ in outputs) == pytest.approx(total, rel=1e-5, abs=slack)
            elif "all_gather" in calls[0]["op"]:
                whole = math.hypot(*(norm for _, _, norm in inputs))
                parts = len(calls) if calls[0]["op"] == "all_gather" else 1  # a list of parts, or one tensor
                gathered = [math.hypot(*(norm for _, _, norm in call["output"][:parts])) for call in calls]
                assert gathered == [pytest.approx(whole, rel=1e-5)] * len(calls), calls
            elif "all_to_all" in calls[0]["op"]:
                given, got = (sum(count * mean for count, mean, _ in each) for each in (inputs, outputs))
                assert got == pytest.approx(given, rel=1e-3, abs=1e-3)
            else:
                continue
            for op in ops:
                checked[op] += op in calls[0]["op"]
    assert all(checked.values()), checked


def check_incident(folder: Path, where: int, module: str) -> None:
    """`nan_analyze` names step, rank and module of the planted fault."""
    (incident, *_) = sorted((folder / "probe" / "incidents").glob("step*"))
    first = nan_analyze(incident).findings[0]
    assert (first["step"], first["rank"], plain(first["module"])) == (STEP, where, module)


def check_drift(said: Sequence[Sequence[tuple[str, int, str]]], name: str) -> None:
    """Silent until the parameter has drifted; then it is named, and nothing else is in that step."""
    found = [(step, what) for alerts in said for rule, step, what in alerts if rule == "replica_mismatch"]
    assert found
    assert min(found) == (STEP, name)
    assert {what for step, what in found if step == STEP} == {name}
