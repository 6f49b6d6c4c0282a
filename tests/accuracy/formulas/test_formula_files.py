"""Formulas by YAML: the existing tool's form, functions of files that were named, nothing run or imported by the file itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from call_records import Memory

from msprobe_engine.accuracy.results import ERROR, PASS, SKIP
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.accuracy.checker import Checker
from msprobe_integrations.torch.op_tools.accuracy.operators import custom

FUNCTIONS = """
import torch

def npu_scaled_add(x, y, scale=1.0):
    return x + scale * y

def npu_scaled_add_backward(grad, scale=1.0):
    return grad, scale * grad

NUMBER = 3
"""
YAML = """
operators:
  npu_scaled_add:
    forward: npu_scaled_add
    backward: npu_scaled_add_backward
    description: "a sum"
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_registered", "_formulas", "_modules"):
        monkeypatch.setattr(custom, name, {})
    return


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "operators.yaml").write_text(YAML)
    return tmp_path


def load(files: Path, *names: str) -> None:
    custom.load_operators(*(str(files / name) for name in names))


def recorded(name: str, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The verdict on a result that an NPU had, here."""
    memory = Memory()
    return Checker(memory).check(name, memory.record(args, kwargs, output), None).result


@pytest.mark.parametrize("order", [("operators.yaml", "functions.py"), ("functions.py", "operators.yaml")])
def test_results_are_judged_by_the_named_functions(files: Path, order: tuple[str, str]) -> None:
    """By the last part of the recorded name, under each prefix; the backward operator by its own. An argument that the function does not
    know is told, and nothing is compared."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert recorded("NPU.npu_scaled_add.0", x + y, x, y).forward == SKIP
    load(files, *order)
    for name in ("NPU.npu_scaled_add.0", "Aten.npu_scaled_add.0", "MindSpeed.npu_scaled_add.3"):
        assert recorded(name, x + 2 * y, x, y, scale=2.0).forward == PASS
        assert recorded(name, x + 2.1 * y, x, y, scale=2.0).forward == ERROR
    memory = Memory()
    back = Checker(memory).check("Aten.npu_scaled_add_backward.0", memory.record((x, 2.0), {}, [x, 2 * x]), None).result
    assert (back.forward, len(back.tensors)) == (PASS, 2)
    told = recorded("NPU.npu_scaled_add.0", x + y, x, y, rounding="up")
    assert (told.forward, told.message) == (SKIP, "not checked: argument rounding is not known to the formula of npu_scaled_add")


def test_the_existing_tools_own_entries_are_ours(files: Path) -> None:
    """Functions that the existing file names are formulas here: of all 16 operators, backward ones too. A whole recorded name is one
    operator of one library, and keeps the function that a Python file has registered for it."""
    both = ("npu_fusion_attention", "npu_fast_gelu", "npu_swiglu", "npu_rms_norm", "npu_rotary_mul", "npu_scaled_masked_softmax")
    names = [*both, "npu_linear", "npu_confusion_transpose"]
    last = {"npu_fusion_attention": "npu_fusion_attention_grad"}
    entries: dict[str, Any] = {n: {"forward": n, "backward": last.get(n, f"{n}_backward"), "description": "."} for n in names}
    forward = ("npu_apply_adam", "npu_apply_adam_w", "npu_layer_norm_eval", "npu_group_norm_silu", "npu_mish")
    entries |= {n: {"forward": n} for n in (*forward, "npu_moe_gating_top_k_softmax", "npu_sort_v2")}
    entries["matmul_backward"] = {"backward": "matmul_backward"}
    (files / "operators.yaml").write_text(json.dumps({"operators": entries}))
    load(files, "operators.yaml")
    assert len(entries) == 16
    assert set(custom._formulas) == {*entries, *(entry["backward"] for entry in entries.values() if "backward" in entry)}
    text = "operators: {my.sum: {forward: 'functions:npu_scaled_add'}}"
    (files / "operators.yaml").write_text(text)
    (files / "mine.py").write_text("from msprobe.pytorch import register_operator\nregister_operator('my.sum', lambda x, y: x + y)")
    load(files, "operators.yaml", "mine.py", "functions.py")
    found = custom.custom("my.sum")
    assert found is not None
    assert found.function is not None
    assert found.reference is not None
    assert found.reference.__name__ == "npu_scaled_add"


WRONG = {
    "no mapping": ("[]", "no mapping 'operators'"),
    "no operators": ("operator: {}", "no mapping 'operators'"),
    "no function": ("operators: {npu_a: {description: x}}", "npu_a: has neither forward nor backward"),
    "another key": ("operators: {npu_a: {forwards: x}}", "npu_a: must have texts by the keys forward, backward, description"),
    "no text": ("operators: {npu_a: {forward: 3}}", "must have texts"),
    "no name": ("operators: {'a b': {forward: npu_a}}", "is no name of an operator"),
    "unknown function": ("operators: {npu_a: {forward: nothing_like_it}}", "no function 'nothing_like_it'"),
    "no function but a number": ("operators: {npu_a: {forward: NUMBER}}", "no function 'NUMBER'"),
    "module that was not named": ("operators: {npu_a: {forward: 'os.system'}}", "os is not among --operators"),
    "module that was not loaded": ("operators: {npu_a: {forward: never_imported.function}}", "never_imported is not among --operators"),
    "expression": ("operators: {npu_a: {forward: '__import__(\"os\").abort()'}}", "is not among --operators"),
    "object": ("operators: {npu_a: {forward: !!python/name:os.system ''}}", "could not determine a constructor"),
    "twice": ("operators: {npu_a: {forward: npu_swiglu}, npu_a: {forward: npu_mish}}", "appears twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_is_data(files: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """What is wrong is named with the file. Nothing is imported because a file names it, though it could be."""
    text, message = WRONG[case]
    (files / "never_imported.py").write_text("raise SystemExit('was imported')")
    monkeypatch.syspath_prepend(str(files))
    (files / "operators.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"operators\.yaml") as error:
        load(files, "functions.py", "operators.yaml")
    assert message in str(error.value)
    assert "never_imported" not in sys.modules


@pytest.mark.slow
def test_the_command(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A dump of an NPU's operator is checked by a file of formulas; an argument without a formula is counted before all other reasons; the
    help names the files."""
    monkeypatch.chdir(files)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    memory = Memory()
    data = {
        "NPU.npu_scaled_add.0.forward": memory.record((x, y), {}, x + y),
        "NPU.npu_scaled_add.1.forward": memory.record((x, y), {"rounding": "up"}, x + y),
        **{f"Torch.rand.{n}.forward": memory.record(((3,),), {}, x) for n in range(2)},
    }
    (files / "rank0" / "dump_tensor_data").mkdir(parents=True)
    for name, tensor in memory.tensors.items():
        torch.save(tensor, files / "rank0" / "dump_tensor_data" / name)
    (files / "rank0" / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "framework": "pytorch", "data": data}))
    (files / "operators.yaml").write_text(YAML + "  npu_of_no_call: {forward: npu_scaled_add}\n")
    assert main(["acc_check", "rank0", "-o", "out", "-d", "cpu", "-n", "1", "--operators", "functions.py", "operators.yaml"]) == 0
    out = capsys.readouterr()
    assert "4 calls, 1 checked: 1 pass, 3 skipped forward" in out.out
    first = out.out.split("skipped:\n")[1].splitlines()[0]
    assert first.split(maxsplit=1) == ["1", "not checked: argument rounding is not known to the formula of npu_scaled_add"]
    with pytest.raises(SystemExit):
        main(["acc_check", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--operators formulas.py ops.yaml" in told
    assert "YAML files that say which formula is whose" in told
