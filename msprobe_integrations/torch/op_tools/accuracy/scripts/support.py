"""What every generated operator script of torch ends with (`msprobe_engine.accuracy.scripts`): runs the call, compares, prints.

Needs torch and nothing else, neither numpy nor this package: the text below the line of dashes is put into the script as it stands.
The rules of the verdict are those of `msprobe_engine.accuracy.verdict.judge`; a test holds the two together.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # which is not needed here
import torch  # noqa: E402

from msprobe_integrations.torch.op_tools.accuracy.scripts.verdict import ERROR, PASS, WARNING, judge_result  # noqa: E402

CASE: dict[str, Any] = {"mode": "recorded", "seed": 0}


def call(**arguments: Any) -> Any:
    """In a script, `CASE` and `call` are those of the recorded call."""


# ----------------------------------------------------------------------------------------------------------------------
# From here on the script is the same for every call. It runs the call on the device in the recorded types, and on the
# bench in float64, each with copies of the same inputs, and compares outputs and gradients.

LAYOUTS = 100
"""How many layouts of the inputs are tried, at most, to get the recorded bits."""
WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}
WIDE.update({t: torch.float64 for n in dir(torch) if n.startswith("float8") and isinstance(t := getattr(torch, n), torch.dtype)})


def generator(case: dict[str, Any], name: str, seed: int) -> torch.Generator:
    """Random numbers that depend on the call, the tensor and the seed, and on nothing else."""
    return torch.Generator().manual_seed(zlib.crc32(f"{case['name']} {name} {seed}".encode()))


def draw_tensor(spec: dict[str, Any], random: torch.Generator) -> torch.Tensor:
    """A tensor with the recorded extremes, mean, spread, and numbers of NaN and Inf, as far as they are known."""
    dtype, shape = spec["dtype"], spec["shape"]
    count = math.prod(shape)
    low, high = float(spec.get("min", -1)), float(spec.get("max", 1))
    mean, norm = float(spec.get("mean", math.nan)), float(spec.get("norm", math.nan))
    infinite = [bound for bound in (low, high) if math.isinf(bound)] or [math.inf]
    odd = int(spec.get("inf", low in infinite or high in infinite))
    bad = [math.nan] * int(spec.get("nan", low != low)) + [infinite[n % len(infinite)] for n in range(odd)]
    high = high if math.isfinite(high) else max(low, 0.0) if math.isfinite(low) else 0.0
    low = low if math.isfinite(low) else min(high, 0.0)
    if dtype is torch.bool:
        share = mean if math.isfinite(mean) else (low + high) / 2
        return (torch.rand(count, generator=random) < share).view(shape)
    if dtype.is_floating_point or dtype.is_complex:
        values = low + (high - low) * spread(count, low, high, mean, norm, random)
    else:
        values = torch.randint(int(low), int(high) + 1, (count,), generator=random)
    order = torch.randperm(count, generator=random)
    values[order[:1]], values[order[-1:]] = values.new_tensor(low), values.new_tensor(high)
    if values.is_floating_point():
        values[order[: len(bad)]] = torch.tensor(bad[:count], dtype=values.dtype)
    return values.view(shape).to(dtype)


def spread(count: int, low: float, high: float, mean: float, norm: float, random: torch.Generator) -> torch.Tensor:
    """Numbers between 0 and 1 that, stretched to low ... high, have this mean and norm (beta distribution); else uniform ones."""
    if high > low and math.isfinite(mean) and math.isfinite(norm):
        center, variance = (mean - low) / (high - low), (norm * norm / count - mean * mean) / (high - low) ** 2
        if 0 < center < 1 and 0 < variance < center * (1 - center):
            concentration = center * (1 - center) / variance - 1
            shares = torch.tensor([center * concentration, (1 - center) * concentration], dtype=torch.float64).clamp(1e-3, 1e6)
            return torch._sample_dirichlet(shares.expand(count, 2), random)[:, 0]
    return torch.rand(count, generator=random, dtype=torch.float64)


def build_tensors(case: dict[str, Any], specs: dict[str, Any], data: str, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a part of the call, on the CPU: saved ones are read (nothing in a file is executed), others drawn."""
    found = {}
    for name, spec in specs.items():
        if data == "recorded" and "file" in spec:
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), case["data"], spec["file"])
            found[name] = torch.load(path, weights_only=True, map_location="cpu")
        else:
            found[name] = draw_tensor(spec, generator(case, name, seed))
    return found


def nudge_tensors(case: dict[str, Any], tensors: dict[str, torch.Tensor], seed: int, unit: float) -> dict[str, torch.Tensor]:
    """The tensors, each element moved up or down by the round-off `unit`, or that of its type: what comes of it is the condition."""
    found = {}
    for name, tensor in tensors.items():
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if parts.is_floating_point():
            signs = torch.randint(0, 2, parts.shape, generator=generator(case, name, seed)).double() * 2 - 1
            parts = parts.double() * (1 + signs * max(unit, torch.finfo(parts.dtype).eps / 2))
            tensor = torch.view_as_complex(parts) if tensor.is_complex() else parts
        found[name] = tensor
    return found


def round_off(tensors: dict[str, torch.Tensor]) -> float:
    """Of the coarsest floating type among the tensors; 0 where there is none."""
    return max((torch.finfo(t.dtype).eps / 2 for t in tensors.values() if t.is_floating_point() or t.is_complex()), default=0.0)


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
    inputs: dict[str, torch.Tensor],
    incoming: dict[str, torch.Tensor],
    device: torch.device,
    wide: bool,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """The call on one side, on copies of its inputs: results by the name of the tensor, on the CPU."""

    def dtype(kind: torch.dtype) -> torch.dtype:
        return WIDE.get(kind, kind) if wide else kind

    sources, arguments = {}, {}
    for name, tensor in inputs.items():
        tensor = tensor.to(device, dtype(tensor.dtype), copy=True)
        if name in case["wanted"]:
            sources[name] = tensor.requires_grad_()
            tensor = tensor.clone()  # no leaf: the call may write into it
        arguments[name] = tensor
    versions = {name: tensor._version for name, tensor in arguments.items()}
    torch.manual_seed(case["seed"])
    with torch.set_grad_enabled(bool(sources)), torch.autocast(device.type, autocast, enabled=autocast is not None):
        result = leaves(call(**arguments, dtype=dtype, device=device))
    returned = {id(leaf) for leaf in result}
    written = [(n, t) for n, t in arguments.items() if t._version != versions[n] and id(t) not in returned]
    results = {f"output.{n}": leaf for n, leaf in enumerate(result) if leaf is not None}
    results.update((f"{name} (written)", tensor) for name, tensor in written)
    if sources:
        results.update(backward([leaf for leaf in results.values() if torch.is_tensor(leaf)], sources, incoming))
    return {name: leaf.detach().cpu() if torch.is_tensor(leaf) else leaf for name, leaf in results.items()}


def backward(outputs: list[torch.Tensor], sources: dict[str, torch.Tensor], incoming: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the inputs, given those of the outputs; ones, where none of them is known."""
    roots = [out for out in outputs if out.requires_grad]
    if not roots:
        raise RuntimeError("no output depends on an input that has a gradient")
    given = {int(name.rpartition(".")[2]): gradient for name, gradient in incoming.items()} or dict(enumerate(map(torch.ones_like, roots)))
    if max(given) >= len(roots):
        raise RuntimeError(f"there is a gradient of output {max(given)}, and {len(roots)} outputs have one")
    heads = [roots[n] for n in given]
    for n, root in zip(given, heads):  # of drawn inputs another number of elements may come out (masked_select)
        given[n] = given[n] if given[n].shape == root.shape else torch.ones_like(root)
    tails = [given[n].to(root.device, root.dtype) for n, root in zip(given, heads)]
    gradients = torch.autograd.grad(heads, list(sources.values()), tails, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(sources, gradients) if gradient is not None}


def on_device(
    case: dict[str, Any],
    call: Callable[..., Any],
    inputs: dict[str, torch.Tensor],
    incoming: dict[str, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """`run` in the recorded types; under autocast where the recorded types of the outputs show that the program was."""
    outputs = [spec["dtype"] for spec in case["outputs"].values()]
    low = next((kind for kind in outputs if kind in (torch.float16, torch.bfloat16)), None)
    try:
        results = run(case, call, inputs, incoming, device, False)
        if low is None or [t.dtype for n, t in results.items() if n in case["outputs"] and torch.is_tensor(t)] == outputs:
            return results
    except RuntimeError:
        if low is None:
            raise
    return run(case, call, inputs, incoming, device, False, low)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, real, in float64 (integers stay)."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (tensor.double() if tensor.is_floating_point() else tensor).reshape(-1)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same type, shape and bits; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    nan = one.isnan() & other.isnan() if one.is_floating_point() or one.is_complex() else None
    if nan is not None and bool(nan.any()):
        one, other = one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def recorded_text(found: torch.Tensor, recorded: torch.Tensor | None) -> str:
    """How a result compares with the one in the dump."""
    if recorded is None:
        return "-"
    if same_bits(found, recorded):
        return "same bits"
    if found.shape != recorded.shape or found.dtype != recorded.dtype:
        return f"{recorded.dtype} {tuple(recorded.shape)}".replace("torch.", "")
    return f"{int((values(found) != values(recorded)).sum())} of {found.numel()} differ"


def layouts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The same values in other places of the memory: each order of the dimensions, and one value for all elements."""
    found = []
    if tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all()):
        found.append(("one value", tensor.reshape(-1)[0].expand(tensor.shape)))
    if 2 <= tensor.dim() <= 4 and tensor.numel():
        for order in list(itertools.permutations(range(tensor.dim())))[1:]:
            back = [order.index(n) for n in range(tensor.dim())]
            found.append((str(order), tensor.permute(order).contiguous().permute(back)))
    return found


def relaid(parts: list[dict[str, torch.Tensor]]) -> list[tuple[str, list[dict[str, torch.Tensor]]]]:
    """Inputs and incoming gradients in other layouts: one tensor at a time, then all of as many dimensions alike."""
    found = []
    alike: dict[tuple[int, str], list[dict[str, torch.Tensor]]] = {}
    for n, tensors in enumerate(parts):
        for name, tensor in tensors.items():
            for text, other in layouts(tensor):
                found.append((f"{name} {text}", [{**each, name: other} if n == i else each for i, each in enumerate(parts)]))
                group = alike.setdefault((tensor.dim(), text), [dict(each) for each in parts])
                group[n][name] = other
    return found + [(f"all of {dim} dimensions {text}", group) for (dim, text), group in alike.items()]


def count_different_results(found: dict[str, Any], recorded: dict[str, torch.Tensor]) -> int:
    """How many results are not the recorded ones, bit for bit."""
    return sum(torch.is_tensor(leaf) and name in recorded and not same_bits(leaf, recorded[name]) for name, leaf in found.items())


def as_recorded(
    case: dict[str, Any],
    call: Callable[..., Any],
    inputs: dict[str, torch.Tensor],
    incoming: dict[str, torch.Tensor],
    recorded: dict[str, torch.Tensor],
    device: torch.device,
) -> tuple[dict[str, Any], str]:
    """The results on the device. A dump does not say how tensors lie in memory, and kernels sum in another order when they lie otherwise:
    where results are not the recorded ones, layouts are tried. Also returns the layout that gave them."""
    results, layout = on_device(case, call, inputs, incoming, device), ""
    different = count_different_results(results, recorded)
    for text, (other, gradients) in relaid([inputs, incoming])[:LAYOUTS] if different else []:
        attempt = on_device(case, call, other, gradients, device)
        if count_different_results(attempt, recorded) < different:
            results, layout, different = attempt, text, count_different_results(attempt, recorded)
        if not different:
            break
    return results, layout


def on_bench(
    case: dict[str, Any], call: Callable[..., Any], inputs: dict[str, torch.Tensor], incoming: dict[str, torch.Tensor], unit: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results of the bench, and those on inputs that were moved; where there is no kernel in float64, of the recorded types alone."""
    cpu = torch.device("cpu")
    try:
        bench = run(case, call, inputs, incoming, cpu, True)
    except (RuntimeError, TypeError):
        return run(case, call, inputs, incoming, cpu, False), []
    try:
        return bench, [
            run(case, call, nudge_tensors(case, inputs, n, unit), nudge_tensors(case, incoming, n, unit), cpu, True) for n in range(2)
        ]
    except (RuntimeError, TypeError, ValueError):  # inputs that were moved may be outside of what the operator takes
        return bench, []


COLUMNS = ("tensor", "dtype", "shape", "recorded", "max abs", "max rel", "mean ulp", "max ulp", "units", "verdict", "why")


def check(
    case: dict[str, Any],
    call: Callable[..., Any],
    device: torch.device,
    data: str,
    seed: int,
    save: str | None = None,
    compiled: bool = False,
) -> list[dict[str, str]]:
    """Run the call on both sides once: a row of the table for each result."""
    inputs, incoming = build_tensors(case, case["inputs"], data, seed), build_tensors(case, case.get("incoming", {}), data, seed)
    known = {**case["outputs"], **case.get("gradients", {})} if data == "recorded" else {}
    recorded = build_tensors(case, {name: spec for name, spec in known.items() if "file" in spec}, data, seed)
    unit = round_off(inputs)
    results, layout = as_recorded(case, torch.compile(call) if compiled else call, inputs, incoming, recorded, device)
    bench, near = on_bench(case, call, inputs, incoming, unit)
    rows = []
    for name, result in results.items():
        direction = "backward" if name.startswith("gradient of ") else "forward"
        if direction not in case["directions"]:
            continue
        near_it = [other.get(name) for other in near]
        status, why, measures = judge_result(result, bench.get(name), near_it, unit, case, direction)
        row = {key: f"{value:.3g}" for key, value in measures.items()}
        kind = str(result.dtype).replace("torch.", "") if torch.is_tensor(result) else type(result).__name__
        row.update(tensor=name, dtype=kind, shape=str(tuple(result.shape)) if torch.is_tensor(result) else "", verdict=status, why=why)
        row["recorded"] = recorded_text(result, recorded.get(name)) if torch.is_tensor(result) else ""
        if layout and row["recorded"] == "same bits":
            row["recorded"] += f" ({layout})"
        rows.append(row)
    if save:
        os.makedirs(save, exist_ok=True)
        parts: dict[str, Any] = {"input": inputs, "incoming": incoming, "device": results, "bench": bench}
        torch.save(parts, os.path.join(save, f"{case['name']}.{seed}.pt"))
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """The rows as text, columns without a value left out."""
    columns = [column for column in COLUMNS if any(row.get(column) for row in rows)]
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def test_call() -> None:
    """For pytest: the verdict on the device that the environment variable OP_DEVICE names (the CPU without it)."""
    rows = check(CASE, call, torch.device(os.environ.get("OP_DEVICE", "cpu")), CASE["mode"], CASE["seed"])
    assert all(row["verdict"] == PASS for row in rows), "\n" + table(rows)


def why_no_device(name: str) -> str:
    """Why nothing can be run on a device here, in one line; empty: it can."""
    try:
        if name.startswith("npu"):
            import torch_npu  # noqa: F401
        torch.ones(1, device=name).add_(1)
    except Exception as error:  # torch raises AssertionError, RuntimeError, ImportError, ...
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def main(case: dict[str, Any], call: Callable[..., Any]) -> int:
    """The command line of the script; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Run {case['name']} once more and compare it with a bench in float64 on the CPU.")
    parser.add_argument("--device", default="cpu", help="what is tested: cpu, cuda, cuda:1, npu, ... (default: cpu)")
    parser.add_argument("--data", choices=("recorded", "random"), default=case["mode"], help="inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=case["seed"], help="of random inputs (default: %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=case["iterations"], help="runs, each with a seed of its own (default: %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="test the call under torch.compile")
    parser.add_argument("--exact", action="store_true", help="fail, too, where a result is not the recorded one, bit for bit")
    parser.add_argument("--save", metavar="DIR", help="write inputs and the results of both sides there")
    args = parser.parse_args()
    if reason := why_no_device(args.device):
        print(f"{case['name']}: --device {args.device}: there is no such device here ({reason}); cpu works everywhere", file=sys.stderr)
        return 2
    wrong = False
    for seed in range(args.seed, args.seed + (args.iterations if args.data == "random" else 1)):
        try:
            rows = check(case, call, torch.device(args.device), args.data, seed, args.save, args.compile)
        except (RuntimeError, TypeError, ValueError, IndexError, OSError, NotImplementedError) as error:
            print(f"{case['name']}: cannot run on {args.device}: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        inexact = args.exact and any(row["recorded"] not in ("-", "") and not row["recorded"].startswith("same bits") for row in rows)
        verdict = max((row["verdict"] for row in rows), key=(PASS, WARNING, ERROR).index, default=PASS)
        print(f"{case['name']} on {args.device}, torch {torch.__version__}, {args.data} inputs, seed {seed}; standard: {case['standard']}")
        print(table(rows))
        print(f"{case['name']}: {verdict}{', but not what was recorded' if inexact else ''}")
        wrong = wrong or inexact or verdict != PASS
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(CASE, call))
