"""`msprobe acc_check` and `msprobe op_generate` of dumps of MindSpore: real dumps, real kernels, the bench in float64."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ms_programs
import numpy as np
import pytest

from msprobe_engine.accuracy.results import CallResult
from msprobe_engine.accuracy.verdict.mindspore_form import DETAILS_COLUMNS, existing_metrics, existing_status
from msprobe_engine.cli.main import main
from msprobe_engine.formats.tensors.reader import TensorFiles

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("precheck") / "dump"
    ms_programs.run(HERE / "precheck_program.py", "tensor", place, check=True)
    return next(place.glob("step0/*/dump.json"))


def records(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["data"]
    return found


def checked(file: Path, names: list[str] | None = None, **options: Any) -> dict[str, CallResult]:
    """Results of a checker in this process; option ``files``: whether saved tensors are read, ``planted``: functions in place of APIs."""
    from msprobe_integrations.mindspore.op_tools.accuracy.checker import Checker

    files, planted = options.pop("files", True), options.pop("planted", {})
    checker = Checker(TensorFiles(file.parent) if files else None, **options)
    for base, function in planted.items():
        checker._apis[base] = checker._apis[base]._replace(function=function)
    data = records(file)
    calls = names or [name.removesuffix(".forward") for name in data if name.endswith(".forward")]
    return {name: checker.check(name, data[f"{name}.forward"], data.get(f"{name}.backward")).result for name in calls}


@pytest.fixture(scope="module")
def results(dump: Path) -> dict[str, CallResult]:
    return checked(dump)


@pytest.mark.slow
def test_what_mindspore_computes_passes(results: Mapping[str, CallResult]) -> None:
    """Forward and backward of every operator pass against float64, -inf masks and bfloat16 too; random ones are skipped."""
    wrong = {name: result.message for name, result in results.items() if not result.passed}
    assert not wrong
    assert results["Functional.rand.0"].message == "draws random numbers"
    assert sum(result.forward == "pass" for result in results.values()) == len(results) - 1
    assert sum(result.backward == "pass" for result in results.values()) > 20
    tensors = [tensor for result in results.values() for tensor in result.tensors]
    exact = {"Functional.masked_fill", "Mint.add", "Functional.cast", "Mint.ones", "Tensor.__add__"}
    assert {t.bench_dtype for t in tensors if t.device_dtype == "Float32" and t.name.rsplit(".", 4)[0] not in exact} == {"Float64"}


@pytest.mark.slow
def test_drawn_inputs_do_not_depend_on_order(dump: Path, results: Mapping[str, CallResult]) -> None:
    """Without tensors inputs are drawn by name of the call and place: tensors of one shape differ, and any order gives the same bits."""
    names = ["Mint.matmul.0", "Functional.softmax.0", "Functional.topk.0", "Functional.cross_entropy.0", "Mint.add.0"]
    one, other = checked(dump, names, files=False, seed=5), checked(dump, names[::-1], files=False, seed=5)
    for name in names:
        assert one[name].passed, one[name].message
        assert [t.to_json() for t in one[name].tensors] == [t.to_json() for t in other[name].tensors]
    from msprobe_integrations.mindspore.op_tools.accuracy.arguments import Arguments

    args, _ = Arguments(None, 5).of("Mint.add.0", records(dump)["Mint.add.0.forward"])
    assert not np.array_equal(args[0].asnumpy(), args[1].asnumpy())
    assert results["Mint.add.0"].passed


def test_wrong_operators_are_errors(dump: Path) -> None:
    """Planted faults in the types that are tested, not in the bench's: scale, NaN, another place, a wrong gradient."""
    import mindspore
    from mindspore import mint, ops

    def only_narrow(right: Any, fault: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            return found if str(args[0].dtype) == "Float64" else fault(found)

        return function

    def with_nan(out: Any) -> Any:
        values = out.asnumpy().copy()
        values.reshape(-1)[0] = np.nan
        return mindspore.Tensor(values)

    faults = {
        "Mint.exp": only_narrow(mint.exp, lambda out: out * 1.01),
        "Mint.matmul": only_narrow(mint.matmul, lambda out: out + 1e-5),
        "Functional.tanh": only_narrow(ops.tanh, with_nan),
        "Functional.softmax": only_narrow(ops.softmax, lambda out: ops.flip(out, (0,))),
    }
    found = checked(dump, [f"{base}.0" for base in faults], planted=faults)
    assert [result.forward for result in found.values()] == ["error"] * 4
    assert found["Mint.exp.0"].backward == "error"
    assert found["Mint.matmul.0"].backward == "pass"


def test_recorded_results_are_judged(dump: Path, tmp_path: Path) -> None:
    """What the device gave when it was recorded is judged without a run; a result that was wrong then is found here."""
    import shutil

    copy = tmp_path / "rank0"
    shutil.copytree(dump.parent, copy)
    file = copy / "dump_tensor_data" / "Mint.exp.0.forward.output.0.npy"
    values = np.load(file)
    np.save(file, values * 1.001)
    found = checked(copy / "dump.json", ["Mint.exp.0", "Mint.matmul.0"], recorded=True)
    assert (found["Mint.exp.0"].forward, found["Mint.exp.0"].backward) == ("error", "pass")
    assert found["Mint.matmul.0"].passed


def test_saved_tensors_that_cannot_be_read_are_told(dump: Path, tmp_path: Path) -> None:
    """Inputs are drawn instead, results are computed; the message says which file, and why."""
    import shutil

    copy = tmp_path / "rank0"
    shutil.copytree(dump.parent, copy)
    for what in ("input", "output"):
        (copy / "dump_tensor_data" / f"Mint.exp.0.forward.{what}.0.npy").write_bytes(b"cut")
    found = checked(copy / "dump.json", ["Mint.exp.0", "Mint.matmul.0"], recorded=True)
    lines = found["Mint.exp.0"].message.splitlines()
    assert found["Mint.exp.0"].forward == "pass"
    assert any(line.startswith("input 0: the saved tensor cannot be read") and line.endswith("statistics instead") for line in lines)
    assert any(line.startswith("recorded result") and "forward.output.0.npy" in line for line in lines)
    assert not found["Mint.matmul.0"].message


@pytest.mark.parametrize(("names", "off", "status"), [((), 1, "error"), (("mul",), 1, "pass"), (("mul",), 2, "error")])
def test_integers_of_quantizing_operators_may_differ_by_one(names: tuple[str, ...], off: int, status: str) -> None:
    """An API of `quantization_api_list` may give the integer beside the right one, and no further one; other APIs may not."""
    from msprobe_integrations.mindspore.op_tools.accuracy.checker import Checker

    calls = []

    def mul(x: Any, y: Any) -> Any:
        calls.append(1)
        return x * y + (off if len(calls) == 1 else 0)  # the first is the call under test

    checker = Checker(None, quantized=names)
    checker._apis["Mint.mul"] = checker._apis["Mint.mul"]._replace(function=mul)
    tensor = {"type": "mindspore.Tensor", "dtype": "Int32", "shape": [2], "Max": 3, "Min": 3, "Mean": 3, "Norm": 4.24}
    record = {"input_args": [tensor, tensor], "input_kwargs": {}, "output": []}
    assert checker.check("Mint.mul.0", record, None).result.forward == status


def test_what_cannot_be_run_has_a_row() -> None:
    """An unknown API, one without a kernel, damaged arguments: skipped with the reason, and the calls behind it are not touched by it."""
    from msprobe_integrations.mindspore.op_tools.accuracy.checker import Checker

    checker = Checker(None)
    tensor = {"type": "mindspore.Tensor", "dtype": "Float32", "shape": [4, 6], "Max": 1.0, "Min": -1.0, "Mean": 0.0, "Norm": 2.0}

    def run(name: str, *args: Any) -> CallResult:
        return checker.check(name, {"input_args": list(args), "input_kwargs": {}, "output": []}, None).result

    for name, args, words in (
        ("Mint.nothing_at_all.0", (tensor,), "no function of the installed MindSpore"),
        ("Primitive.matmul.MatMul.0", (tensor,), "does not have its attributes"),
        ("Functional.all_reduce.0", (tensor,), "no function"),
        ("Mint.cumsum.0", (tensor, {"type": "int", "value": 0}), "Cumsum"),
        ("Mint.exp.0", ({**tensor, "dtype": "Float31"},), "Float31"),
        ("Mint.exp.0", ({"type": "builtins.object", "value": None},), "cannot be made from a dump"),
        ("Mint.exp.0", ({**tensor, "shape": [1 << 40]},), "too large"),
        ("Tensor.to_coo.0", (tensor,), "COOTensor"),
    ):
        result = run(name, *args)
        assert (result.forward, words in result.message) == ("SKIP", True), (name, result.message)
        assert run("Mint.exp.1", tensor).forward == "pass"


@pytest.mark.slow
def test_the_command_and_its_resume(dump: Path, tmp_path: Path) -> None:
    """The existing command lines work; a check that is cut goes on: no call twice, none missing, the same rows."""
    command = ["-f", "mindspore", "run_ut", "-api_info", str(dump), "-o", str(tmp_path), "-d", "cpu", "-n", "1"]
    assert main(command) == 0
    (result,) = tmp_path.glob("accuracy_checking_result_*.csv")
    whole = result.read_bytes()
    (details,) = tmp_path.glob("accuracy_checking_details_*.csv")
    rows = details.read_bytes()
    result.write_bytes(whole[: len(whole) // 2])
    assert main(["-f", "mindspore", "multi_run_ut", *command[3:5], "-csv_path", str(result), "-d", "cpu"]) == 0
    assert result.read_bytes() == whole
    assert details.read_bytes() == rows
    names = [row["API name"] for row in csv.DictReader(result.read_text("utf-8-sig").splitlines())]
    assert sorted(names) == sorted(name.removesuffix(".forward") for name in records(dump) if name.endswith(".forward"))


@pytest.mark.slow
def test_existing_columns(dump: Path, tmp_path: Path) -> None:
    """--compat: the columns of the existing tool for MindSpore, its three numbers and its verdict (a -inf mask is an error there)."""
    assert main(["-f", "mindspore", "run_ut", "-api_info", str(dump), "-o", str(tmp_path), "--compat", "-save_error_data"]) == 0
    (details,) = tmp_path.glob("accuracy_checking_details_*.csv")
    rows = list(csv.DictReader(details.read_text("utf-8-sig").splitlines()))
    assert tuple(rows[0]) == DETAILS_COLUMNS
    by_name = {row["API Name"]: row for row in rows}
    assert by_name["Functional.masked_fill.0.forward.output.0"]["Status"] == "error"
    assert float(by_name["Mint.matmul.0.forward.output.0"]["MaxAbsErr"]) < 1e-5
    assert os.stat(details).st_mode & 0o777 == 0o640


def test_existing_numbers() -> None:
    """The formulas of the existing tool, at their edges."""
    one = np.array([1.0, 0.0, -2.0])
    assert existing_status(existing_metrics(one, one)) == "pass"
    assert existing_metrics(one, np.array([1.0, 1e-9, -2.0]))["max_rel"] == pytest.approx(0.1)
    assert existing_metrics(np.zeros(3), np.zeros(3)) == {"cosine": 1.0, "max_abs": 0.0, "max_rel": 0.0}
    assert existing_status(existing_metrics(one, one + 0.001)) == "error"
    assert existing_status(existing_metrics(one, np.array([np.nan, 0.0, -2.0]))) == "error"
    assert existing_status(existing_metrics(one, one[:2])) == "error"


@pytest.mark.slow
def test_scripts_repeat_the_recorded_bits(dump: Path, tmp_path: Path) -> None:
    """A script of every call but the random one, run without this package: forward and backward as recorded, bit for bit, and they pass."""
    calls = [name.removesuffix(".forward") for name in records(dump) if name.endswith(".forward")]
    words = [word for call in calls for word in ("--api", call)]
    assert main(["op_generate", "--dump", str(dump), "-o", str(tmp_path / "scripts"), *words]) == 1
    done = subprocess.run(
        [sys.executable, HERE.parent / "accuracy" / "bare_scripts.py", "torch", tmp_path / "scripts", "--exact"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    assert len(found) == len(calls) - 1
    assert not {name: text for name, (status, text) in found.items() if status}
    assert sum("gradient of input" in text for _, text in found.values()) > 20


def test_scripts_have_the_limits_of_the_pre_check() -> None:
    """The numbers of the verdict stand in scripts as they stand in `judge`."""
    from msprobe_engine.accuracy.verdict import judge
    from msprobe_integrations.mindspore.op_tools.accuracy.scripts import support as script_support

    for name in ("UNITS", "INSIDE", "COARSE_INSIDE", "COARSE", "HIDDEN", "LONG_SUMS"):
        assert getattr(script_support, name) == getattr(judge, name)


def test_a_script_says_what_is_wrong(dump: Path, tmp_path: Path) -> None:
    """A fault in the types that are tested is an error of the script; drawn inputs work without the tensors."""
    options = ["--dump", str(dump), "--api", "Mint.matmul.0", "-o", str(tmp_path), "--random", "--iterations", "2"]
    assert main(["op_generate", *options]) == 0
    file = tmp_path / "Mint.matmul.0.py"
    ms_programs.run(file, cwd=tmp_path, check=True)
    wrong = "    return mindspore.mint.matmul(input_0, input_1) * (1 if dtype(mindspore.float32) is mindspore.float64 else 1.001)"
    text = file.read_text().replace("    return mindspore.mint.matmul(input_0, input_1)", wrong)
    file.write_text(text)
    done = ms_programs.run(file, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("Mint.matmul.0: error") == 2
    named = re.findall(r"^(\w.*?)  +Float32  Float64  .*  error +\S+ times round-off and condition", done.stdout, re.MULTILINE)
    assert named == 2 * ["output.0", "gradient of input_0", "gradient of input_1"], done.stdout
