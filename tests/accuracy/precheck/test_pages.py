"""The examples of the pages on accuracy run as they stand there, and find what the pages say."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from call_records import Memory
from online_ends import CLI, free_port, wait_until

from msprobe_engine.accuracy.online.certificates.certificate import read_revocations
from msprobe_engine.accuracy.rl.causes import TEMPERATURE
from msprobe_engine.accuracy.scripts.request import KEYS
from msprobe_engine.accuracy.settings import load_precheck_settings
from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.slow, pytest.mark.framework]
DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The examples of a page in a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def write_programs(page: str, *languages: str) -> None:
    """Each example that names its file in its first line, in the working directory."""
    for language in languages or ("python",):
        for code in blocks(page, language):
            Path(code.partition("\n")[0].removeprefix("# ")).write_text(code)


def run_examples(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all Python examples in one module; its names."""
    module = ModuleType("example_of_a_page")  # one that can be imported: torch.compile looks for what its code names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for n, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page}, block {n}", "exec"), vars(module))
    return vars(module)


@pytest.fixture(autouse=True)
def _directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)


def test_dispatch_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that adds up in bfloat16 is the one failure, and what is printed is what the page shows."""
    (tmp_path / "out").mkdir()
    printed = run_examples("guide/dispatch-compare.md", monkeypatch)["dispatch"].tables.text()
    assert re.sub(r"\(/.*\)", "(...)", printed).strip() == blocks("guide/dispatch-compare.md", "")[0].strip()


def test_compile_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second block is where it begins, and dynamo is the layer."""
    run_examples("guide/compile-accuracy.md", monkeypatch)
    printed = capsys.readouterr().out
    assert blocks("guide/compile-accuracy.md", "")[0].strip() in printed
    assert printed.rstrip().endswith("eager")
    assert (tmp_path / "compile.csv").exists()


def test_free_benchmark(tmp_path: Path) -> None:
    """The example for PyTorch finds what the page says it does."""
    (program,) = (code for code in blocks("guide/free-benchmark.md", "python") if code.startswith("# PyTorch"))
    Path("config.json").write_text(blocks("guide/free-benchmark.md", "json")[0])
    Path("program.py").write_text(program)
    runpy.run_path("program.py")
    files = sorted((tmp_path / "out").glob("step*/*/free_benchmark.csv"))
    found = [row["api_name"] for path in files for row in csv.DictReader(path.open(newline=""))]
    assert found[0] == "Torch.exp.0.forward"
    assert "Torch.softmax.0.forward" not in found


def test_log_probabilities(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop finds the fault that the page says it has, and the comparison of two runs runs."""
    loop, saving, comparing = blocks("guide/rl.md", "python")
    for run in (loop, saving, saving.replace('"first", 5', '"second", 7'), comparing):
        monkeypatch.setattr("msprobe_integrations.common.dump.single_save.SingleSave._instance", None)
        Path("program.py").write_text(run)
        runpy.run_path("program.py")
    monkeypatch.setattr("msprobe_integrations.common.dump.single_save.SingleSave._instance", None)
    with Path("rl_out/logprob_mismatch_rank0.csv").open(newline="") as file:
        assert {row["cause"] for row in csv.DictReader(file)} == {TEMPERATURE}
    assert "2 of 3 keys differ" in capsys.readouterr().err
    with Path("compared/log_probs.csv").open(newline="", encoding="utf-8-sig") as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["same"]


def check_online(command: str) -> str:
    """Run the benchmark host by a command of the page and ``train.py``; what the host said. It finds an error."""
    server, client = (json.loads(block) for block in blocks("guide/online-accuracy.md", "json")[:2])
    server["run_ut"]["port"] = client["tensor"]["port"] = free_port()
    Path("server.json").write_text(json.dumps(server))
    Path("config.json").write_text(json.dumps(client))
    log = Path("bench.log")
    with log.open("w") as file:
        bench = subprocess.Popen([*CLI, *command.split()[1:], "-n", "1"], stdout=file, stderr=file)
    wait_until(lambda: "waiting for trainings" in log.read_text())
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    assert bench.wait(120) == 1
    return log.read_text()


def test_online_accuracy() -> None:
    """With a device whose gelu is wrong that is the call that does not pass; every settings example is accepted."""
    write_programs("guide/online-accuracy.md")
    said = check_online(blocks("guide/online-accuracy.md", "bash")[0])
    for line in blocks("guide/online-accuracy.md", "text")[0].splitlines():
        assert re.sub(r"[0-9.e+]{4,}.*", "", line) in said  # numbers of another processor are others
    for step in (0, 1):
        assert len(list(Path(f"output/step{step}").glob("accuracy_checking_*_rank0.csv"))) == 2
    assert not Path("output/online_spool").exists()
    for block in blocks("guide/online-accuracy.md", "json"):
        node = json.loads(block)
        (load_precheck_settings if "run_ut" in node else load_settings)(node)


CUSTOM = """
import torch
import my_kernels
from msprobe.pytorch import PrecisionDebugger

debugger = PrecisionDebugger("config.json")
model = torch.nn.Linear(16, 16)
for _ in range(2):
    debugger.start(model)
    my_kernels.rms_norm(0.1 * model(torch.randn(8, 16)).detach(), torch.ones(16))
    debugger.stop()
    debugger.step()
"""


def test_operators_of_ones_own_online() -> None:
    """What `register_operator` says on the benchmark host holds for calls of a training: the wrong epsilon of the offline page is found."""
    write_programs("guide/operator-accuracy.md")
    Path("train.py").write_text(CUSTOM)
    (command,) = (block for block in blocks("guide/online-accuracy.md", "bash") if "--operators" in block)
    said = check_online(command)
    for step in (0, 1):
        assert f"step{step}/my_kernels.rms_norm.0: forward error" in said


def test_online_transport() -> None:
    """Every line of every shell block on certificates works, in their order."""
    found = [block for block in blocks("guide/online-accuracy.md", "bash") if "msprobe certs" in block]
    lines = "".join(found).splitlines()
    for line in lines:
        program, *words = shlex.split(line)
        if program == "msprobe":
            assert main(words) == 0, line
        else:
            assert program == "cp"
            shutil.copy(*words)
    assert len(lines) == 6
    assert len(read_revocations(Path("bench_tls/crl.pem")).revoked) == 1


def _without_numbers(text: str) -> str:
    """Errors differ in their last digits from one processor to the next; builds of torch have more than a number."""
    return re.sub(r"[0-9]+\.?[0-9]*(e[+-][0-9]+)?", "N", re.sub(r"(torch [0-9.]+)[a-z+][\w.+]*", r"\1", text))


def test_operator_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first command finds the wrong epsilon and prints what the page shows; the others take the files that it names."""
    page = "guide/operator-accuracy.md"
    write_programs(page)
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    Path("config.json").write_text(blocks(page, "json")[0])
    lines = [line for line in "".join(blocks(page, "bash")).splitlines() if line.startswith(("msprobe acc_check", "msprobe -f"))]
    check, listed, resumed, compat = [line for line in lines if "npu_dump" not in line][:4]
    assert main([*shlex.split(check)[1:], "-d", "cpu"]) == 1
    out = capsys.readouterr().out
    for line in blocks(page, "text")[0].splitlines():
        assert _without_numbers(line.replace("train.py", str(tmp_path / "train.py"))) in _without_numbers(out)
    (result,) = Path("output").glob("accuracy_checking_result_*.csv")
    stamp = result.stem.rpartition("_")[2]
    assert main([*shlex.split(resumed.replace("<time>", stamp))[1:], "-d", "cpu"]) == 1
    assert "7 calls, 7 checked: 1 error" in capsys.readouterr().out
    assert main([*shlex.split(listed)[1:], "-d", "cpu"]) == 0
    assert "is not in white_list" in capsys.readouterr().out
    assert main([*shlex.split(compat)[1:], "-d", "cpu"]) == 0


def test_formulas_judge_results_of_an_npu(capsys: pytest.CaptureFixture[str]) -> None:
    """The YAML file, its functions and the command as they stand on the page: a right result, a wrong one, and an unknown argument."""
    page = "guide/operator-accuracy.md"
    write_programs(page, "python", "yaml")
    memory, x = Memory(), torch.randn(3, 4)
    calls = ((x, {"scale": 2.0}, 3 * x), (x, {"scale": 2.0}, 3.1 * x), (x, {"rounding": "up"}, 2 * x))
    records = {f"NPU.npu_scaled_add.{n}.forward": memory.record((x, y), kwargs, out) for n, (y, kwargs, out) in enumerate(calls)}
    folder = Path("npu_dump/dump_tensor_data")
    folder.mkdir(parents=True)
    for name, tensor in memory.tensors.items():
        torch.save(tensor, folder / name)
    dump = {"task": "tensor", "level": "L1", "framework": "pytorch", "data": records}
    Path("npu_dump/dump.json").write_text(json.dumps(dump))
    (command,) = (line for line in "".join(blocks(page, "bash")).splitlines() if "npu_operators.yaml" in line)
    assert main([*shlex.split(command)[1:], "-d", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "3 calls, 2 checked: 1 error, 1 pass, 1 skipped forward" in out
    assert "1  not checked: argument rounding is not known to the formula of npu_scaled_add" in out


def test_operator_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command works as shown, and what is shown of the output is in it."""
    page = "guide/operator-scripts.md"
    (program,), (settings,), (shown,) = (blocks(page, language) for language in ("python", "json", "text"))
    Path("train.py").write_text(program)
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    assert tuple(json.loads(settings)) == KEYS
    Path("config_op.json").write_text(settings)
    for line in "".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line)
        if words[0] == "msprobe":
            assert main(words[1:]) == 0, line
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(words[1], run_name="__main__")
            assert ended.value.code == 0, line
    said = re.sub(r" +", " ", capsys.readouterr().out)
    for line in shown.splitlines():
        assert re.sub(r" +", " ", line) in said, line
    for made in ("scripts/Torch.softmax.0.backward.py", "softmax.json", "results/Functional.linear.0.0.pt"):
        assert Path(made).exists()
