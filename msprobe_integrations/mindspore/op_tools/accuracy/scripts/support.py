"""What every generated operator script of MindSpore ends with (`msprobe_engine.accuracy.scripts`): runs the call, compares, prints.

Needs mindspore and numpy. Scripts get the text below the line of dashes as it stands, and in front of it the texts of
`msprobe_engine.core.dtypes` and, of `msprobe_engine.accuracy.verdict`, `rounding` and `condition`: their errors are measured by the same
code as in the pre-check.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.verdict.condition import Measured, internal, measure
from msprobe_engine.accuracy.verdict.rounding import Array, round_to
from msprobe_engine.core.dtypes import FloatType, float_type

USED = (math, NamedTuple, Sequence, dataclass, lru_cache, npt)
"""For the texts in front."""
CASE: dict[str, Any] = {"mode": "recorded", "seed": 0}


def call(**arguments: Any) -> Any:
    """In a script, `CASE` and `call` are those of the recorded call."""


# ----------------------------------------------------------------------------------------------------------------------
# From here on the script is the same for every call. It runs the call in the recorded types and on the bench in float64
# (where MindSpore has such a kernel), each with copies of the same inputs, and compares outputs and gradients.

PASS, WARNING, ERROR = "pass", "Warning", "error"
UNITS, INSIDE, COARSE_INSIDE, COARSE, HIDDEN, LONG_SUMS = 32.0, 1 / 32, 2.0, 8.0, 8.0, 8.0
"""Limits of the verdict (`msprobe_engine.accuracy.verdict.judge`): of kernels that compute in their type, of narrow ones that compute in
float32, these with one rounded intermediate result, and of several kernels; how much more hidden values may cost."""
FLOAT_NAMES = ("Float64", "Float32", "Float16", "BFloat16")
BENCHES = ("float64", "float32", "")
"""Types of the bench, tried in this order; the last is the recorded one."""


def generator(case: dict[str, Any], name: str, seed: int) -> np.random.Generator:
    """Random numbers that depend on the call, the tensor and the seed, and on nothing else."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(f"{case['name']} {name} {seed}".encode())))


def draw_values(spec: dict[str, Any], random: np.random.Generator) -> Array:
    """Values with the recorded extremes, mean, spread, and numbers of NaN and Inf, as far as they are known."""
    kind, count = str(spec["dtype"]), int(np.prod(spec["shape"]))
    low, high = float(spec.get("min", -1)), float(spec.get("max", 1))
    infinite = [bound for bound in (low, high) if math.isinf(bound)] or [math.inf]
    odd = int(spec.get("inf", low in infinite or high in infinite))
    bad = [math.nan] * int(spec.get("nan", low != low)) + [infinite[n % len(infinite)] for n in range(odd)]
    high = high if math.isfinite(high) else max(low, 0.0) if math.isfinite(low) else 0.0
    low = low if math.isfinite(low) else min(high, 0.0)
    values: Array
    if kind == "Bool":
        values = random.random(count) < (low + high) / 2
    elif kind in FLOAT_NAMES:
        values = low + (high - low) * spread(count, low, high, spec, random)
    else:
        values = random.integers(int(low), int(high), count, endpoint=True).astype(np.float64)
    order = random.permutation(count)
    values[order[:1]], values[order[-1:]] = low, high
    if kind in FLOAT_NAMES:
        values[order[: len(bad)]] = bad[:count]
    result: Array = values.reshape(spec["shape"])
    return result


def spread(count: int, low: float, high: float, spec: dict[str, Any], random: np.random.Generator) -> Any:
    """Numbers between 0 and 1 that, stretched to low ... high, have the recorded mean and norm (beta distribution); else uniform ones."""
    mean, norm = float(spec.get("mean", math.nan)), float(spec.get("norm", math.nan))
    if high > low and math.isfinite(mean) and math.isfinite(norm):
        center, variance = (mean - low) / (high - low), (norm * norm / count - mean * mean) / (high - low) ** 2
        if 0 < center < 1 and 0 < variance < center * (1 - center):
            concentration = center * (1 - center) / variance - 1
            return random.beta(max(center * concentration, 1e-3), max((1 - center) * concentration, 1e-3), count)
    return random.random(count)


def make_tensors(case: dict[str, Any], specs: dict[str, Any], data: str, seed: int) -> dict[str, Any]:
    """The tensors of a part of the call: saved ones are read (nothing in a file is executed), others drawn."""
    found = {}
    for name, spec in specs.items():
        if data == "recorded" and "file" in spec:
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), case["data"], spec["file"])
            values = np.load(path, allow_pickle=False)
        else:
            values = draw_values(spec, generator(case, name, seed))
        found[name] = mindspore.Tensor(values, spec["dtype"])
    return found


def array_of(value: Any) -> Any:
    """A tensor as an array, bfloat16 as float32; other values as they are."""
    if not isinstance(value, mindspore.Tensor):
        return value
    return (value.astype(mindspore.float32) if str(value.dtype) == "BFloat16" else value).asnumpy()


def leaves(value: Any) -> list[Any]:
    """The values in lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for child in value for leaf in leaves(child)]
    return [value]


def run(
    case: dict[str, Any],
    call: Callable[..., Any],
    inputs: dict[str, Any],
    incoming: dict[str, Any],
    wide: str,
    change: int | None = None,
    unit: float = 0.0,
) -> dict[str, Any]:
    """The call on one side, on copies of its inputs: results by the name of the tensor. `wide`: type of the bench, or empty."""

    def dtype(kind: Any) -> Any:
        return getattr(mindspore, wide) if wide and str(kind) in FLOAT_NAMES else kind

    def copy_tensor(name: str, tensor: Any) -> Any:
        values = array_of(tensor)
        if change is not None and str(tensor.dtype) in FLOAT_NAMES:
            signs = generator(case, name, change).integers(0, 2, values.shape) * 2 - 1
            values = values.astype(np.float64) * (1 + signs * unit)
        return mindspore.Tensor(np.array(values), dtype(tensor.dtype))

    executor = mindspore.common.api._pynative_executor
    recorded = executor.grad_flag()
    try:
        arguments = {name: copy_tensor(name, tensor) for name, tensor in inputs.items()}
        for name in case["wanted"]:
            arguments[name]._requires_grad = True
        executor.set_grad_flag(bool(case["wanted"]))
        mindspore.set_seed(case["seed"])
        result = call(**arguments, dtype=dtype, device=None)
        outputs = leaves(result if result is not None else next(iter(arguments.values())))
        results = {f"output.{n}": leaf for n, leaf in enumerate(outputs) if leaf is not None}
        if case["wanted"]:
            roots = [leaf for leaf in outputs if isinstance(leaf, mindspore.Tensor) and str(leaf.dtype) in FLOAT_NAMES]
            ones = {n: mindspore.Tensor(np.ones(root.shape, np.float32), root.dtype) for n, root in enumerate(roots)}
            given = {int(name.rpartition(".")[2]): copy_tensor(name, gradient) for name, gradient in incoming.items()} or ones
            heads = {n: given[n].astype(roots[n].dtype) if given[n].shape == roots[n].shape else ones[n] for n in given}
            sources = tuple(arguments[name] for name in case["wanted"])
            passed = (tuple(roots[n] for n in heads), tuple(heads.values()), False, False, sources, True)
            gradients = mindspore._c_expression.run_backward(*passed, accumulate_grad=False)
            results.update({f"gradient of {name}": g for name, g in zip(case["wanted"], gradients) if g is not None})
        for leaf in results.values():
            array_of(leaf)
        executor.sync()
        return results
    finally:
        executor.set_grad_flag(recorded)


def on_bench(
    case: dict[str, Any], call: Callable[..., Any], inputs: dict[str, Any], incoming: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """`run` in the widest type that MindSpore has kernels for, and that type."""
    for wide in BENCHES:
        try:
            return run(case, call, inputs, incoming, wide), wide
        except Exception:
            clear_failures()
            if not wide:
                raise
    raise AssertionError


def clear_failures() -> None:
    """MindSpore tells a failure again to later calls, until somebody has waited for all of them."""
    for _ in range(100):
        try:
            mindspore.common.api._pynative_executor.sync()
        except Exception:
            continue
        return


def judge_result(
    device: Any, bench: Any, near: list[Any], unit: float, case: dict[str, Any], direction: str
) -> tuple[str, str, dict[str, float]]:
    """Status, reason and measures of one result."""
    if not (isinstance(device, mindspore.Tensor) and isinstance(bench, mindspore.Tensor)):
        same = device == bench or (device != device and bench != bench)
        return (PASS, "", {}) if same else (ERROR, f"{device!r}, the bench has {bench!r}", {})
    kind = float_type(str(device.dtype))
    target, golden = array_of(device), array_of(bench)
    if target.shape != golden.shape:
        return ERROR, f"the bench's result has the shape {golden.shape}", {}
    if kind is None or not target.size:
        count = int((target != golden).sum())
        return (ERROR, f"{count} of {target.size} elements differ", {}) if count else (PASS, "", {})
    wide_golden, wide_target = golden.astype(np.float64), target.astype(np.float64)
    held = round_to(wide_golden, kind)
    finite = np.isfinite(held) & np.isfinite(wide_target)
    wrong = ~finite & ~((held == wide_target) | (np.isnan(held) & np.isnan(wide_target)))
    if wrong.any():
        position = int(wrong.reshape(-1).argmax())
        return ERROR, f"NaN and Inf: {int(wrong.sum())} elements disagree, the first at {position}", {}
    size = np.where(finite, np.abs(wide_golden), 0.0)
    error = np.abs(np.where(finite, wide_target - wide_golden, 0.0))
    measures = {"max abs": float(error.max()), "max rel": float((error / np.maximum(size, kind.normal)).max())}
    if case["standard"] == "binary_consistency" and direction == "forward":
        count = int((finite & (held != wide_target)).sum())
        return (ERROR, f"{count} elements differ; this API moves values, and changes none", measures) if count else (PASS, "", measures)
    changed = [array_of(each).astype(np.float64) for each in near if isinstance(each, mindspore.Tensor) and each.shape == bench.shape]
    measured = measure(wide_golden, wide_target, kind, changed, max(unit or kind.round_off, 2.0**-52), finite)
    measures["units"] = measured.units
    return (*by_condition(measured, kind, unit, case, direction), measures)


def by_condition(measured: Measured, kind: FloatType, unit: float, case: dict[str, Any], direction: str) -> tuple[str, str]:
    """Status and reason."""
    own, loose = kind.round_off / internal(kind).round_off, HIDDEN if case["hidden"] or case["signs"] else 1.0
    loose = LONG_SUMS if kind.name == "float32" and direction == "backward" and case.get("long_sums") else loose
    good, bearable, strict = UNITS * loose, UNITS * loose, False
    if case.get("casts"):
        good, bearable, strict = INSIDE * own, INSIDE * own, own > 1
    elif own > 1 and unit >= kind.round_off and direction in case["inside"]:
        good, bearable, strict = INSIDE * own, COARSE_INSIDE * own, True
    elif own > 1:
        good, bearable = COARSE * loose * own, COARSE * own if loose == 1 else math.inf
    bias, most = measured.bias if strict else measured.drift, measured.most if strict or own == 1 else 0.0
    if abs(bias) > 1 and bearable < math.inf:
        return ERROR, f"all results are too {'large' if bias > 0 else 'small'}"
    if max(measured.units, most) <= good:
        return PASS, ""
    status = ERROR if measured.units > bearable else WARNING
    return status, f"{max(measured.units, most):.3g} times round-off and condition, at element {measured.at}; up to {good:.3g} is right"


COLUMNS = ("tensor", "dtype", "bench", "shape", "recorded", "max abs", "max rel", "units", "verdict", "why")


def check(case: dict[str, Any], call: Callable[..., Any], data: str, seed: int, save: str | None = None) -> list[dict[str, str]]:
    """Run the call on both sides once: a row of the table for each result."""
    inputs, incoming = make_tensors(case, case["inputs"], data, seed), make_tensors(case, case.get("incoming", {}), data, seed)
    known = {**case["outputs"], **case.get("gradients", {})} if data == "recorded" else {}
    recorded = make_tensors(case, {name: spec for name, spec in known.items() if "file" in spec}, data, seed)
    results = run(case, call, inputs, incoming, "")
    bench, wide = on_bench(case, call, inputs, incoming)
    kinds = [kind.round_off for tensor in inputs.values() if (kind := float_type(str(tensor.dtype))) is not None]
    unit = max(kinds, default=0.0)
    near = [run(case, call, inputs, incoming, wide, n, unit) for n in range(2)] if wide and unit else []
    rows = []
    for name, result in results.items():
        direction = "backward" if name.startswith("gradient of ") else "forward"
        if direction not in case["directions"]:
            continue
        status, why, measures = judge_result(result, bench.get(name), [other.get(name) for other in near], unit, case, direction)
        row = {key: f"{value:.3g}" for key, value in measures.items()}
        tensor = isinstance(result, mindspore.Tensor)
        row.update(tensor=name, dtype=str(result.dtype) if tensor else type(result).__name__, shape=str(result.shape) if tensor else "")
        row.update(bench=str(bench[name].dtype) if tensor else "", verdict=status, why=why)
        row["recorded"] = recorded_text(array_of(result), array_of(recorded[name])) if name in recorded else "-"
        rows.append(row)
    if save:
        os.makedirs(save, exist_ok=True)
        sides = {"input": inputs, "incoming": incoming, "device": results, "bench": bench}
        arrays = {f"{part}.{name}": array_of(tensor) for part, tensors in sides.items() for name, tensor in tensors.items()}
        np.savez(os.path.join(save, f"{case['name']}.{seed}.npz"), **arrays)
    return rows


def recorded_text(found: Any, recorded: Any) -> str:
    """How a result compares with the one in the dump."""
    if found.dtype != recorded.dtype or found.shape != recorded.shape:
        return f"{recorded.dtype} {recorded.shape}"
    same = (found == recorded) & (np.signbit(found) == np.signbit(recorded)) if found.dtype.kind == "f" else found == recorded
    if found.dtype.kind == "f":
        same |= np.isnan(found) & np.isnan(recorded)
    return "same bits" if same.all() else f"{int((~same).sum())} of {found.size} differ"


def table(rows: list[dict[str, str]]) -> str:
    """The rows as text, columns without a value left out."""
    columns = [column for column in COLUMNS if any(row.get(column) for row in rows)]
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def test_call() -> None:
    """For pytest: the verdict on the device that MindSpore uses by itself."""
    rows = check(CASE, call, CASE["mode"], CASE["seed"])
    assert all(row["verdict"] == PASS for row in rows), "\n" + table(rows)


def main(case: dict[str, Any], call: Callable[..., Any]) -> int:
    """The command line of the script; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Run {case['name']} once more and compare it with a bench in higher precision.")
    parser.add_argument("--device", choices=("CPU", "GPU", "Ascend"), help="what is tested (default: what MindSpore uses by itself)")
    parser.add_argument("--data", choices=("recorded", "random"), default=case["mode"], help="inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=case["seed"], help="of random inputs (default: %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=case["iterations"], help="runs, each with a seed of its own (default: %(default)s)"
    )
    parser.add_argument("--exact", action="store_true", help="fail, too, where a result is not the recorded one, bit for bit")
    parser.add_argument("--save", metavar="DIR", help="write inputs and the results of both sides there")
    args = parser.parse_args()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, **({"device_target": args.device} if args.device else {}))
    wrong = False
    for seed in range(args.seed, args.seed + (args.iterations if args.data == "random" else 1)):
        try:
            rows = check(case, call, args.data, seed, args.save)
        except (RuntimeError, TypeError, ValueError, IndexError, OSError, AttributeError) as error:
            print(f"{case['name']}: cannot run: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", file=sys.stderr)
            return 2
        inexact = args.exact and any(row["recorded"] not in ("same bits", "-") for row in rows)
        verdict = max((row["verdict"] for row in rows), key=(PASS, WARNING, ERROR).index, default=PASS)
        print(f"{case['name']}, mindspore {mindspore.__version__}, {args.data} inputs, seed {seed}; standard: {case['standard']}")
        print(table(rows))
        print(f"{case['name']}: {verdict}{', but not what was recorded' if inexact else ''}")
        wrong = wrong or inexact or verdict != PASS
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(CASE, call))
