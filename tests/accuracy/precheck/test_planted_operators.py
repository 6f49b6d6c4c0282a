"""Operators: planted faults are found, right ones of torch's own samples pass, and what torch does not list is run too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from call_records import Memory, check
from planted import RIGHT, WRONG, Made

from msprobe_engine.accuracy.precheck.options import Options
from msprobe_engine.accuracy.precheck.run import check_dump
from msprobe_engine.accuracy.result_files import read_results
from msprobe_engine.accuracy.result_forms import bare_api
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, CallResult
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_integrations.torch.op_tools.accuracy.checker import Checker

# Wrong operators are found, right ones that compute in another way are not.

ROUNDED_INSIDE = frozenset(
    name for name in WRONG if ("computed in bfloat16" in name or "composite" in name or "rounded down" in name or "small values" in name)
)
"""Results that hang on nothing but the type of intermediate values, or are wrong where they are small: warnings."""


def judged(made: Made) -> CallResult:
    """The verdict of the pre-check."""
    memory = Memory()
    record = memory.record(made.args, made.kwargs, made.outputs)
    backward = memory.backward(*made.incoming, output=made.gradients) if made.gradients else None
    outputs = made.outputs if isinstance(made.outputs, tuple) else (made.outputs,)
    return Checker(memory).check(f"{made.api}.0", record, backward, list(outputs), list(made.gradients) or None).result


@pytest.mark.slow
def test_wrong_operators_are_found() -> None:
    """Each fault of the list is an error, or a warning where it is the type of intermediate results."""
    for name, make in WRONG.items():
        result = judged(make())
        allowed = {ERROR, WARNING} if name in ROUNDED_INSIDE else {ERROR}
        assert {result.forward, result.backward} & allowed, (name, result)
        assert not result.passed, name


def test_right_operators_pass() -> None:
    """Another order of sums, another library, float32 inside of 16 bit kernels: no finding."""
    for name, make in RIGHT.items():
        result = judged(make())
        assert result.passed, (name, result)
        assert not result.skipped, (name, result)


# More than 300 operators of torch, forward and backward in three types, from a dump: right kernels pass.

REALLY_WRONG = frozenset(("matrix_exp", "soft_margin_loss", "pow", "__rpow__", "polygamma", "normalize"))
"""Of torch 2.13 on the CPU: their 16 bit results are NaN or Inf where the right ones are numbers, as intermediate results overflow."""
FALSE_ALARMS = 0.01


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_operators_with_samples_of_torch_pass(tmp_path: Path) -> None:
    """Fewer than one call in a hundred is an error or a warning without being one; what is skipped says why."""
    program = Path(__file__).parents[1] / "sweep_program.py"
    ran = subprocess.run([sys.executable, str(program), str(tmp_path / "dump")], capture_output=True, text=True, check=True, timeout=600)
    assert json.loads(ran.stdout.splitlines()[0])["operators"] > 500
    (dump,) = (tmp_path / "dump").glob("step0/*/dump.json")
    outcome = check_dump(dump, PrecheckSettings(), Options(devices=("cpu",), processes=1), tmp_path / "out")
    results = list(read_results(outcome.result_path, outcome.details_path))
    checked = [result for result in results if not result.skipped]
    assert len({bare_api(result.name) for result in checked}) > 300
    assert len(checked) > 1500
    assert all(result.message for result in results if result.skipped)
    found = [result for result in checked if not result.passed]
    right = [result for result in found if bare_api(result.name) not in REALLY_WRONG]
    assert len(right) < FALSE_ALARMS * len(checked), [(result.name, result.message) for result in right]
    assert {"matrix_exp"} <= {bare_api(result.name) for result in found}


# Functions of torch that torch's own list of operations does not have, in the pre-check.


def test_functions_that_torch_does_not_list() -> None:
    """Functions that torch has, and has not in its list of operations, are run; those that draw numbers, take files, or are no operations
    are not. A layout, of which a dump says no more than that it is one, is the usual one."""
    x, ones = torch.randn(4, 6, requires_grad=True), torch.ones(3, 2)
    strided = check("Torch.as_strided.0", x, (3, 2), (6, 1), 1, grad=ones)
    lengths = check("Torch.segment_reduce.0", x, "sum", lengths=torch.tensor([1, 3]), grad=torch.ones(2, 6))
    assert {(r.forward, r.backward) for r in (strided, lengths)} == {(PASS, PASS)}
    assert {check(f"Torch.{name}.0", torch.randn(5)).forward for name in ("zero_", "relu_", "exp_")} == {PASS}
    memory = Memory()
    record = memory.record((torch.randn(3),), {}, torch.zeros(3))
    record["input_kwargs"] = {"layout": {"type": "torch.layout", "value": None}}
    assert Checker(memory).check("Torch.zeros_like.0", record, None).result.forward == PASS
    for name in ("rrelu_", "dropout_", "from_file", "set_printoptions", "cudnn_is_acceptable", "resize_as_sparse_"):
        assert check(f"Torch.{name}.0", torch.randn(5)).forward == SKIP, name
