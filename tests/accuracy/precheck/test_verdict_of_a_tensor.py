"""The verdict of one tensor: what is never held against a device, what always is, and large tensors by blocks."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msprobe_engine.accuracy.precheck import memory
from msprobe_engine.accuracy.precheck.calls import Call
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, CallResult, TensorResult, build_skipped_result, worst
from msprobe_engine.accuracy.verdict import condition, metrics, standards
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_engine.accuracy.verdict.rounding import round_to
from msprobe_engine.core.dtypes import float_type
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.accuracy import types

# The verdict of one tensor: what is never held against a device, and what always is.

INF, NAN = math.inf, math.nan
TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def verdict(bench: Any, device: Any, dtype: str = "float32", api: str = "exp", way: str = "forward", **kwargs: Any) -> TensorResult:
    """Of values that are of these types already."""
    return judge(api, f"Torch.{api}.0.{way}.output.0", np.asarray(bench), np.asarray(device), "torch.float64", f"torch.{dtype}", **kwargs)


def rounded(values: Any, dtype: str) -> Any:
    """As a device of that type has them."""
    kind = float_type(dtype)
    assert kind is not None
    exact = round_to(np.asarray(values, np.float64), kind)
    return exact if dtype == "float64" else exact.astype(np.float16 if dtype == "float16" else np.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_the_output_is_no_error(dtype: str) -> None:
    """Whatever the type, and with all that is not finite, subnormal or zero in it."""
    values = np.concatenate([np.linspace(-3, 3, 200), [INF, -INF, NAN, 0.0, -0.0, 1e-7, 1e-42]])
    found = verdict(values, rounded(values, dtype), dtype)
    assert (found.status, found.units, found.message) == (PASS, 0.0, "")


@pytest.mark.parametrize("dtype", TYPES[:4])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-30, 1e30])
def test_a_wrong_scale_never_passes(dtype: str, scale: float) -> None:
    """However small the values are, as far as the type has them."""
    if dtype == "float16" and scale not in (1.0,):
        scale = 1e-3
    values = np.linspace(0.5, 3, 100) * scale
    for factor in (1.05, 0.95, 10.0, 0.1, -1.0, 0.0):
        assert verdict(values, rounded(values * factor, dtype), dtype).status == ERROR, factor


@pytest.mark.parametrize(
    ("bench", "device", "dtype", "status"),
    [
        ([1.0, NAN], [1.0, NAN], "float32", PASS),
        ([1.0, 2.0], [1.0, NAN], "float32", ERROR),
        ([1.0, NAN], [1.0, 2.0], "float32", ERROR),
        ([-INF, 1.0], [-INF, 1.0], "bfloat16", PASS),
        ([-INF, 1.0], [INF, 1.0], "float32", ERROR),
        ([-INF, 1.0], [-3e38, 1.0], "float32", ERROR),
        ([7e4, 1.0], [INF, 1.0], "float16", PASS),
        ([7e4, 1.0], [65504.0, 1.0], "float16", WARNING),
        ([65530.0, 1.0], [65504.0, 1.0], "float16", PASS),
        ([1e39, 1.0], [3.4028234e38, 1.0], "float32", WARNING),
        ([65510.0, 1.0], [INF, 1.0], "float16", PASS),
        ([6e4, 1.0], [INF, 1.0], "float16", ERROR),
        ([1e30, 1.0], [-INF, 1.0], "float16", ERROR),
        ([600.0, 1.0], [448.0, 1.0], "float8_e4m3fn", PASS),
        ([600.0, 1.0], [NAN, 1.0], "float8_e4m3fn", PASS),
        ([1e39, 1.0], [INF, 1.0], "float32", PASS),
        ([1e-45, 1.0], [0.0, 1.0], "float32", PASS),
    ],
)
def test_what_is_not_finite(bench: list[float], device: list[float], dtype: str, status: str) -> None:
    """NaN and Inf stand where the bench has them, or where the type cannot hold the value."""
    found = verdict(np.array(bench), np.array(device, np.float32), dtype)
    assert found.status == status
    assert bool(found.message) == (status != PASS)


def test_where_round_off_decides_what_is_finite() -> None:
    """Inputs that are changed give a number there: a warning."""
    bench = np.array([1.0, INF])
    found = verdict(bench, np.array([1.0, 1e30], np.float32), changed=[np.array([1.0, 1e30])])
    assert found.status == WARNING


def test_where_round_off_decides_which_integer_it_is() -> None:
    """Of an operator that computes before it decides, a difference is right where changed inputs make the same one; as many others may
    stand beside those, which came out alike by chance."""
    bench, device = np.arange(6), np.array([1, 2, 3, 3, 4, 5])  # the first three differ
    for api, moved, status in (
        ("bucketize", [1, 2, 3, 3, 4, 5], PASS),
        ("bucketize", [1, 2, 2, 3, 4, 5], PASS),
        ("bucketize", [1, 1, 2, 3, 4, 5], ERROR),  # two are not explained, and one is
        ("bucketize", [7, 7, 7, 3, 4, 5], ERROR),  # they move, never to what the device has
        ("bucketize", [0, 1, 2, 4, 5, 6], ERROR),  # others move
        ("sort", [1, 2, 3, 3, 4, 5], ERROR),
    ):
        assert verdict(bench, device, "int64", api, changed=[np.array(moved)]).status == status, (api, moved)


def test_the_condition_is_what_an_error_is_held_against() -> None:
    """The same error is right where inputs that are changed by a bit move the result as far, and wrong where they do not."""
    bench = np.linspace(1, 2, 50)
    device = (bench * (1 + 1e-4)).astype(np.float32)
    assert verdict(bench, device, changed=[bench * (1 + 5e-5), bench * (1 - 5e-5)]).status == PASS
    assert verdict(bench, device, changed=[bench * (1 + 6e-8)]).status == ERROR


def test_a_bias_of_many_elements() -> None:
    """Results that are all 1 % too large are found in an operator of no list, of some hundred elements on; what is rounded right is not,
    nor is a factor that the kernel rounds, nor intermediate values that are all alike and so are rounded in one direction."""
    random = np.random.default_rng(0)
    for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        values = rounded(random.standard_normal(4096), dtype).astype(np.float64)
        changed = [values * (1 + unit * random.choice((-1, 1), values.size)) for _ in range(2)]
        for count in (1024, 4096):
            near, part = [other[:count] for other in changed], values[:count]
            for factor, status in ((1.01, ERROR), (0.99, ERROR), (1.0, PASS), (1 + unit / 2, PASS)):
                found = verdict(part, rounded(part * factor, dtype), dtype, "own_operator", changed=near)
                assert found.status == status, (dtype, count, factor, found)
        kept = 0.995 + 0.001 * random.random(4096)
        steps = [1 - np.square(kept * (1 + unit * random.choice((-1, 1), kept.size))) for _ in range(2)]
        alike = rounded(1 - np.square(rounded(kept, dtype).astype(np.float64)), dtype)
        assert verdict(1 - np.square(kept), alike, dtype, "own_operator", changed=steps).status == PASS


def test_sixteen_bits_of_subnormal_numbers() -> None:
    """Below the smallest normal number all roundings are alike: an operator of several kernels may err by a few of them, a single kernel
    by one, and neither may flush to zero what float16 holds."""
    step = 2.0**-24
    bench = np.arange(3, 500) * step
    off = np.where(np.arange(bench.size) % 2, step, -step)
    near = [bench * (1 + 2.0**-11), bench * (1 - 2.0**-11)]
    for api, steps, status in (("my_kernel", 2, PASS), ("my_kernel", 40, ERROR), ("mul", 0, PASS), ("mul", 3, ERROR)):
        assert verdict(bench, bench + steps * off, "float16", api, changed=near).status == status, (api, steps)
    for api in ("my_kernel", "mul"):
        assert verdict(bench, 0 * bench, "float16", api, changed=near).status == ERROR


def test_sixteen_bits_inside() -> None:
    """A kernel of the list that rounds to 16 bits on the way has a warning, an operator of several kernels none."""
    generator = np.random.default_rng(1)
    bench = generator.uniform(1, 2, 500)
    twice = rounded(rounded(bench, "bfloat16") * (1 + generator.choice([-1, 1], 500) * 2.0**-8), "bfloat16")
    changed = [bench * (1 + 2.0**-8), bench * (1 - 2.0**-8)]
    assert verdict(bench, twice, "bfloat16", api="softmax", changed=changed).status == WARNING
    assert verdict(bench, twice, "bfloat16", api="my_kernel", changed=changed).status == PASS
    assert verdict(bench, twice, "bfloat16", api="softmax", changed=changed, input_dtype="torch.float32").status == PASS


def test_a_second_implementation_excuses_what_it_does_as_well() -> None:
    """As long as it errs alike."""
    bench = np.linspace(1, 2, 50)
    device, alike, better = ((bench * (1 + e)).astype(np.float32) for e in (1e-4, 0.8e-4, 1e-6))
    assert verdict(bench, device, second=alike).status == PASS
    assert verdict(bench, device, second=better).status == ERROR


def test_operators_that_move_values_change_none() -> None:
    """One unit in the last place is an error of relu, and none of exp."""
    bench = np.linspace(1, 2, 50)
    device = np.nextafter(bench.astype(np.float32), np.float32(3))
    assert verdict(bench.astype(np.float32).astype(float), device, api="relu").status == ERROR
    assert verdict(bench.astype(np.float32).astype(float), device, api="relu", way="backward").status == PASS
    assert verdict(bench, device).status == PASS


def test_integers_and_other_types() -> None:
    """They are equal; another type, another shape and another kind of value are errors; nothing is right when both have none."""
    numbers = np.arange(5)
    assert verdict(numbers, numbers, "int64").status == PASS
    assert "1 of 5" in verdict(numbers, [0, 1, 2, 3, 5], "int64").message
    assert verdict(numbers > 2, numbers > 2, "bool").status == PASS
    assert verdict(numbers, numbers.astype(float)).status == ERROR
    assert "shape" in verdict(np.zeros((2, 3)), np.zeros((3, 2), np.float32)).message
    assert verdict(np.zeros(0), np.zeros(0, np.float32)).status == PASS
    for bench, device, status in ((1.5, 1.5, PASS), (NAN, NAN, PASS), (1, 2, ERROR), (1, 1.0, ERROR), (None, 1, SKIP), (True, True, PASS)):
        assert judge("item", "Tensor.item.0.forward.output.0", bench, device, type(bench).__name__, type(device).__name__).status == status


def test_complex_numbers_and_vectors_without_a_sign() -> None:
    """Errors of complex numbers are lengths; vectors of another sign are right."""
    bench = np.exp(1j * np.linspace(0, 6, 40)).reshape(8, 5)
    device = bench.astype(np.complex64)
    assert verdict(bench, device, "complex64").status == PASS
    assert verdict(bench, device * np.complex64(1j), "complex64").status == ERROR
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    turned = (vectors * np.array([1, -1, 1, -1, -1, 1])).astype(np.float32)
    assert verdict(vectors, turned, api="linalg.eigh").status == PASS
    assert verdict(vectors, turned, api="exp").status == ERROR


def test_results_travel() -> None:
    """As JSON and between processes; what is none of them is refused."""
    tensor = verdict(np.linspace(0, 1, 5), np.linspace(0, 1, 5).astype(np.float32))
    call = CallResult("Torch.exp.0", worst([tensor]), tensors=(tensor,), seconds=0.5)
    assert CallResult.from_json(call.to_json()) == call == pickle.loads(pickle.dumps(call))
    assert call.passed
    assert build_skipped_result("Torch.rand.0", "random").skipped
    with pytest.raises(UsageError, match="no result of a call"):
        CallResult.from_json({"name": "x"})
    with pytest.raises(UsageError, match="no result of a tensor"):
        TensorResult.from_json({"name": "x", "shape": [], "odd": 1})


# Large tensors are looked at in blocks: what comes of it is what the whole tensor gives.

MEANS = ("cosine", "rmse", "mean_rel", "mean_ulp")
APIS = {"add": standards.ABSOLUTE, "matmul": standards.ULP, "abs": standards.BINARY, "conv1d": standards.THOUSANDTH}


def _sides(kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    bench = rng.standard_normal((50, 101)) * 10.0 ** rng.integers(-8, 3, (50, 101))
    device = (bench * (1 + rng.standard_normal((50, 101)) * 1e-6)).astype(np.float16 if kind == "float16" else np.float32)
    bench[3, 4], device[3, 4], bench[7, 7], device[9, 9] = np.inf, np.inf, np.nan, np.inf
    return bench, device


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("api", APIS)
def test_metrics_of_blocks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, api: str, kind: str) -> None:
    """Counts, shares and extremes are the same numbers; means differ by round-off; so does our verdict not."""
    bench, device = _sides(kind)
    for b, d in (
        (bench, device),
        (np.nan_to_num(bench, posinf=1.0), np.nan_to_num(device, posinf=1.0)),
        (np.zeros((50, 101)), np.zeros_like(device)),
    ):
        monkeypatch.setattr(metrics, "BLOCK", 1 << 20)
        monkeypatch.setattr(condition, "AT_ONCE", 1 << 17)
        whole = judge(api, f"Torch.{api}.0.forward.output.0", b, d, "torch.float64", f"torch.{kind}", changed=[b * (1 + 1e-7)])
        monkeypatch.setattr(metrics, "BLOCK", 700)
        monkeypatch.setattr(condition, "AT_ONCE", 2000)
        parts = judge(api, f"Torch.{api}.0.forward.output.0", b, d, "torch.float64", f"torch.{kind}", changed=[b * (1 + 1e-7)])
        assert whole.metrics.keys() == parts.metrics.keys()
        for key, value in whole.metrics.items():
            if key in MEANS and value is not None:
                assert parts.metrics[key] == pytest.approx(value, rel=1e-5, nan_ok=True), key
            else:
                np.testing.assert_equal(parts.metrics[key], value, err_msg=key)
        assert (whole.status, whole.old_status) == (parts.status, parts.old_status)
        if whole.units is not None and whole.status == "pass":
            assert parts.units == pytest.approx(whole.units, rel=0.5)


def test_changes_of_blocks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are moved in the same direction whatever the size of a block."""

    def moved() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        values = torch.linspace(-1, 2, 999).reshape(27, 37)
        return types.nudge_tensor(
            values, torch.bfloat16, lambda shape: torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1
        )

    whole = moved()
    monkeypatch.setattr(types, "BLOCK", 100)
    assert torch.equal(moved(), whole)


def _call(name: str, *shape: int) -> Call:
    tensor = {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": list(shape)}
    return Call(name, {"input_args": [tensor], "input_kwargs": {}, "output": [tensor]}, {"input": [tensor], "output": [tensor]})


def test_calls_share_the_memory_there_is() -> None:
    """Small calls are checked by all processes, large ones by as many as fit, one that cannot fit has a reason."""
    small, large, huge = _call("Torch.exp.0", 10), _call("Torch.exp.1", 1 << 26), _call("Torch.exp.2", 1 << 40)
    assert memory.bytes_of(large) == 4 * 8 << 26
    plan = memory.plan([small, large, huge], 8, 20 << 30)
    assert (plan.together, plan.large, plan.processes) == ([small], [large], 2)
    assert [call.name for call, _ in plan.refused] == ["Torch.exp.2"]
    assert "too large for this machine" in plan.refused[0][1]
    assert memory.plan([small, large, huge], 8, None).together == [small, large, huge]
    assert memory.plan([small], 8, 1 << 20).together == [small]
    if Path("/proc/meminfo").exists():
        assert (memory.free_memory() or 0) > 0
