"""docs/operator-accuracy.md: its program, operators, settings and commands run as they stand there, and find what the page shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from call_records import Memory

from msprobe_engine.accuracy.result_forms import DETAILS_COLUMNS, OUR_DETAILS_COLUMNS, OUR_RESULT_COLUMNS, RESULT_COLUMNS
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.cli.main import main
from msprobe_engine.settings.tree import keys_of
from msprobe_integrations.torch.accuracy.references import FORMULAS

PAGE = (Path(__file__).parents[2] / "docs" / "operator-accuracy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_find_the_wrong_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first command prints what the page shows; the others take the files that it names."""
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        Path(code.partition("\n")[0].removeprefix("# ")).write_text(code)
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    (Path("config.json")).write_text(blocks("json")[0])
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith(("msprobe acc_check", "msprobe -f"))]
    commands = [line for line in commands if "npu_dump" not in line]  # see the next test
    check, listed, resumed, compat = commands[:4]
    assert main([*shlex.split(check)[1:], "-d", "cpu"]) == 1
    out = capsys.readouterr().out
    for line in blocks("text")[0].splitlines():
        assert _without_numbers(line.replace("train.py", str(tmp_path / "train.py"))) in _without_numbers(out)
    (result,) = Path("output").glob("accuracy_checking_result_*.csv")
    header = result.read_text(encoding="utf-8-sig").splitlines()[0]
    assert header == ",".join((*RESULT_COLUMNS, *OUR_RESULT_COLUMNS))
    stamp = result.stem.rpartition("_")[2]
    assert main([*shlex.split(resumed.replace("<time>", stamp))[1:], "-d", "cpu"]) == 1
    assert "7 calls, 7 checked: 1 error" in capsys.readouterr().out
    assert main([*shlex.split(listed)[1:], "-d", "cpu"]) == 0
    assert "is not in white_list" in capsys.readouterr().out
    assert main([*shlex.split(compat)[1:], "-d", "cpu"]) == 0


def test_the_formulas_of_the_page_judge_an_npus_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The YAML file, its functions and the command as they stand on the page: a right result, a wrong one, and an unknown argument."""
    monkeypatch.chdir(tmp_path)
    for code in (*blocks("python"), *blocks("yaml")):
        Path(code.partition("\n")[0].removeprefix("# ")).write_text(code)
    memory, x = Memory(), torch.randn(3, 4)
    calls = ((x, {"scale": 2.0}, 3 * x), (x, {"scale": 2.0}, 3.1 * x), (x, {"rounding": "up"}, 2 * x))
    records = {f"NPU.npu_scaled_add.{n}.forward": memory.record((x, y), kwargs, out) for n, (y, kwargs, out) in enumerate(calls)}
    (tmp_path / "npu_dump" / "dump_tensor_data").mkdir(parents=True)
    for name, tensor in memory.tensors.items():
        torch.save(tensor, tmp_path / "npu_dump" / "dump_tensor_data" / name)
    dump = {"task": "tensor", "level": "L1", "framework": "pytorch", "data": records}
    (tmp_path / "npu_dump" / "dump.json").write_text(json.dumps(dump))
    (command,) = (line for block in blocks("bash") for line in block.splitlines() if "npu_operators.yaml" in line)
    assert main([*shlex.split(command)[1:], "-d", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "3 calls, 2 checked: 1 error, 1 pass, 1 skipped forward" in out
    assert "1  not checked: argument rounding is not known to the formula of npu_scaled_add" in out


def test_the_page_names_every_formula() -> None:
    """All operators with a formula stand in the table, backward ones by their forward."""
    for name in FORMULAS:
        api = name.rpartition(".")[2]
        forward = re.sub(r"(_backward|_grad)(_v[23])?$", "", api) if api != "matmul_backward" else api
        base = re.sub(r"(_with_routing_map|_cast|_v[23])$", "", forward)
        assert f"`{forward}`" in PAGE or f"`{base}`" in PAGE or api == "fast_gelu", name


def _without_numbers(text: str) -> str:
    """Errors differ in their last digits from one processor to the next; builds of torch have more than a number."""
    return re.sub(r"[0-9]+\.?[0-9]*(e[+-][0-9]+)?", "N", re.sub(r"(torch [0-9.]+)[a-z+][\w.+]*", r"\1", text))


def test_the_tables_have_every_key_and_column() -> None:
    """Settings (those of the online pre-check have a page of their own), and columns."""
    offline = [key.name for key in keys_of(PrecheckSettings) if not key.help.startswith("online")]
    missing = [name for name in (*offline, "is_online") if f"`{name}`" not in PAGE]
    assert not missing
    for column in (*RESULT_COLUMNS, *OUR_RESULT_COLUMNS, *OUR_DETAILS_COLUMNS):
        assert column in PAGE
    assert DETAILS_COLUMNS[0] == "API Name"
