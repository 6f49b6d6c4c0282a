"""The pages about MindSpore: their programs and settings run as they stand and write what the pages say."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import mindspore as ms
import mindspore.dataset as ds
import monitor_programs as programs
import ms_programs
import numpy as np
import pytest
import warm
from existing_environment import existing_tool
from mindspore import mint, nn

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.tensors.kernel_files import kernel_directories, kernel_files
from msprobe_engine.report.code_mapping.ir import read_nodes
from msprobe_integrations.common.parameters.update_pairs import COMPUTED
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.parameters import optimizers
from msprobe_integrations.mindspore.tensors import npy
from msprobe_integrations.mindspore.tensors.memory import KERNEL, WITHOUT_KERNEL

ROOT = Path(__file__).parents[3]
CODE_MAPPING = "docs/guide/compare-static-graphs.md"


def page_block(language: str) -> str:
    """The one block in this language of the section on source lines."""
    text = (ROOT / CODE_MAPPING).read_text(encoding="utf-8").partition("\n## From kernels")[2]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the page's program after it ran, in a process of its own: the dump is asked for by the environment."""
    where = tmp_path_factory.mktemp("page")
    config = page_block("json").replace("/absolute/path/out", str(where / "out"))
    (where / "dump_config.json").write_text(json.dumps(json.loads(config)))
    (where / "net.py").write_text(page_block("python"))
    ms_programs.run(where / "net.py", cwd=where, check=True)
    return where


def rows(path: Path) -> list[dict[str, str]]:
    """Of a csv file, by column."""
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_the_commands_of_the_page(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operator of the dump is in the graph; forward and backward of fc2 lead to its line in the program."""
    monkeypatch.chdir(trained)
    for line in page_block("bash").splitlines():
        assert main(shlex.split(line)[1:]) == 0
    assert "not in the graph" not in capsys.readouterr().out
    found = rows(sorted((trained / "mapped").glob("code_mapping_*.csv"))[-1])
    (directory,) = kernel_directories(trained / "out")
    assert [Path(row["File Path"]).name for row in found] == [file.path.name for file in kernel_files(directory)[0]]
    at = next(number for number, text in enumerate(page_block("python").splitlines(), 1) if "self.fc2(self.relu" in text)
    for scope, first in (("_backbone-Net/fc2-Dense/MatMul-op0", "In file"), ("fc2-Dense/Grad_MatMul/MatMul-op0", "Corresponding forward")):
        stacks = {row["Code Stack"] for row in found if row["Scope Name"].endswith(scope)}
        assert len(stacks) == 1, scope
        stack = stacks.pop()
        assert stack.startswith(first)
        assert re.search(rf"net\.py:{at}\b", stack)


@pytest.mark.slow
def test_every_stage_of_the_compiler_is_read(trained: Path) -> None:
    """Whatever save_graphs=2 writes as text has nodes with scopes; only the first file is from before there are lines."""
    files = sorted((trained / "graphs").glob("*.ir")) + sorted((trained / "graphs").glob("trace_code_graph_*"))
    assert len(files) > 50
    for path in files:
        nodes = read_nodes(path)
        assert all(node.scope for node in nodes), path
        assert "bootstrap" in path.name or sum(node.has_source for node in nodes) >= len(nodes) / 2, path


@pytest.mark.existing_tool
def test_the_same_cells_as_the_existing_tool(trained: Path, tmp_path: Path) -> None:
    """Where 8.1.1 has source lines, ours are the same, cell for cell."""
    existing = existing_tool("8.1.1", "mindspore")
    (graph,) = (trained / "graphs").glob("trace_code_graph_*")
    (directory,) = kernel_directories(trained / "out")
    asked = ["--ir", str(graph), "--dump_data", str(directory), "--output"]
    existing.run("msprobe", "-f", "mindspore", "code_mapping", *asked, tmp_path / "theirs", cwd=tmp_path)
    assert main(["code_mapping", *asked, str(tmp_path / "ours")]) == 0
    ours, theirs = ({row["File Path"]: row for row in rows(next((tmp_path / name).glob("*.csv")))} for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    with_lines = [path for path, row in theirs.items() if "In file" in row["Code Stack"]]
    assert len(with_lines) > 40
    assert [ours[path] for path in with_lines] == [theirs[path] for path in with_lines]


DUMP_PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "mindspore.md"


def dump_section() -> str:
    """The text of the section."""
    return DUMP_PAGE.read_text(encoding="utf-8").partition("\n## Dump\n")[2].partition("\n## ")[0]


def dump_blocks(language: str) -> Iterator[str]:
    """Its code blocks in one language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", dump_section(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_programs(tmp_path: Path) -> None:
    """The loop, a variable saved by hand, and Model.train."""
    (config,) = dump_blocks("json")
    (tmp_path / "config.json").write_text(config)
    namespace: dict[str, Any] = {"__name__": "page"}
    seen: list[list[str]] = []
    for code, (out, step) in zip(dump_blocks("python"), [("out", 1), ("saved", 0), ("model_out", 1)], strict=True):
        PrecisionDebugger._instance = None
        exec(compile(code, str(DUMP_PAGE), "exec"), namespace)
        namespace["debugger"].run.at_exit()
        dump = open_dump(tmp_path / out)
        seen.append(list(dump.load(step).entries))
        assert dump.steps == ([0, 1] if out == "model_out" else [step])
    loop, saved, model = seen
    assert {"Cell.up.Dense.forward.0", "Cell.up.Dense.backward.0", "Cell.up.Dense.parameters_grad.0"} <= set(loop)
    assert "Functional.softmax.0.forward" in loop
    assert saved == ["hidden.0.debug", "hidden_grad.0.debug"]
    (document,) = (tmp_path / "saved").glob("step0/*/debug.json")
    assert json.loads(document.read_text())["data"]["hidden_grad.0.debug"]["shape"] == [2, 16]
    assert "Cell.down.Dense.backward.0" in model


def test_what_is_refused() -> None:
    """The keys that the page calls PyTorch's own are those that are refused."""
    from msprobe_integrations.mindspore.dump.checks import _ABSENT

    (line,) = re.findall(r"The keys (.*?) work with PyTorch only", dump_section(), re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", line)) == sorted(_ABSENT)


MINDSPORE_PAGE = "docs/frameworks/mindspore.md"


def section(title: str) -> str:
    """The text of one section."""
    return (ROOT / MINDSPORE_PAGE).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_program_of_msadapter(tmp_path: Path) -> None:
    """Run with torch's names over MindSpore, the program writes what the page says."""
    (program,) = re.findall(r"^```python\n(.*?)^```", section("MSAdapter"), re.DOTALL | re.MULTILINE)
    stand_in = str(Path(__file__).parents[1] / "stand_in")
    code = f"import sys\nsys.path.insert(0, {stand_in!r})\n{program}"
    assert warm.run(code, cwd=tmp_path).returncode == 0
    (dump,) = (tmp_path / "msadapter_dump" / "step0").iterdir()
    document = json.loads((dump / "dump.json").read_text())
    assert document["framework"] == "mindtorch"
    assert {name.partition(".")[0] for name in document["data"]} == {"Functional", "Tensor", "Torch"}
    (tensor, *_) = document["data"]["Functional.linear.0.forward"]["input_args"]
    assert (tensor["type"], tensor["dtype"]) == ("mindspore.Tensor", "Float32")


def test_the_table_of_types_is_complete() -> None:
    """Every type is in the table, with the type that its file has."""
    table = section("Tensors and their statistics")
    for name in ("Float64", "Float16", "Int64", "UInt8", "Bool", "Complex64", "BFloat16", "Float8E4M3FN", "Float8E5M2", "Int4", "HiFloat8"):
        assert f"`{name}`" in table
        assert name in KERNEL or name in WITHOUT_KERNEL
    files = {"BFloat16": "float32", "Float8E5M2": "float32", "Int4": "int8", "HiFloat8": "uint8", "Complex64": "complex64"}
    for name, kind in files.items():
        size = 8 if name == "Complex64" else 2 if name == "BFloat16" else 1
        assert npy.array_of(npy.from_bytes(bytes(2 * size), name, (2,))).dtype == kind


def test_only_copies_count_a_version() -> None:
    """The page tells why every look reads the tensor."""
    tensor = mindspore.Tensor(np.zeros(2, np.float32))
    tensor[0] = 1.0
    mindspore.ops.assign(tensor, mindspore.Tensor(np.ones(2, np.float32)))
    assert tensor._version == 0
    tensor.copy_(mindspore.Tensor(np.ones(2, np.float32)))
    tensor.asnumpy()
    assert tensor._version == 1


STATIC_GRAPH_PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "mindspore-static-graph.md"


KERNELS = '"level": "L2"'


def graph_blocks() -> list[str]:
    """The examples."""
    return re.findall(r"```python\n(.*?)```", STATIC_GRAPH_PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path: Path) -> None:
    """They leave what the page says."""
    settings = {"task": "statistics", "level": "L0", "dump_path": "dump", "step": [0]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    program = tmp_path / "program.py"
    program.write_text("\n".join(block for block in graph_blocks() if KERNELS not in block))
    runpy.run_path(str(program))
    names = json.loads(next((tmp_path / "dump").glob("step0/*/dump.json")).read_text())["data"]
    assert {"Cell.fc1.Dense.forward.0", "Cell.fc2.Dense.backward.0", "Cell.fc1.Dense.parameters_grad.0"} <= set(names)
    assert sorted(p.name for p in (tmp_path / "saved" / "step0" / "rank0").iterdir()) == ["y_float32_0.npy", "y_grad_float32_1.npy"]


@pytest.mark.slow
def test_the_kernels(tmp_path: Path) -> None:
    """The example of level L2, in a process of its own, dumps the chosen kernels under the names that the page has."""
    (block,) = (block for block in graph_blocks() if KERNELS in block)
    (tmp_path / "program.py").write_text(block)
    ms_programs.run(tmp_path / "program.py", cwd=tmp_path, check=True)
    names = json.loads(next((tmp_path / "kernels").glob("step1/*/dump.json")).read_text())["data"]
    assert next(iter(names)) == "MatMul.Default_0-Dense_MatMul-op0.0.forward"
    assert {name.split(".")[0] for name in names} == {"MatMul", "BiasAdd"}


ROOT = Path(__file__).parents[3]
PAGE = "docs/frameworks/mindspore-monitor.md"
LOOP = "A loop of your own"


def block(title: str, language: str) -> str:
    """The only block of a language in a section."""
    section = (ROOT / PAGE).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text(block(LOOP, "yaml"))


@pytest.mark.slow
def test_loop_and_trainer_mon() -> None:
    """The loop writes every family that its settings name; TrainerMon goes on with the same network."""
    Path("train.py").write_text(block(LOOP, "python") + block("TrainerMon", "python"))
    Path("monitor_config.json").write_text('{"targets": {}, "wg_distribution": true}')
    runpy.run_path("train.py")
    (csv,) = Path("runs/a/monitor").glob("*-rank0-*")
    families = {path.name.rpartition("_")[0] for path in csv.glob("*.csv")}
    expected = {"actv", "actv_grad", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "scalars"}
    assert families == expected
    assert list(Path("runs/a/tensorboard").rglob("events.*"))
    assert list(Path("monitor_output").rglob("grad_reduced_2-2.csv"))


def test_model_train() -> None:
    """The callback writes the same files."""
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    numbers = np.random.RandomState(0).randn(8, 6).astype(np.float32)
    dataset = ds.NumpySlicesDataset((numbers, np.zeros((8, 3), np.float32)), ["a", "b"], shuffle=False).batch(4)
    exec(block("Model.train", "python"), {"net": net, "optimizer": optimizer, "loss_fn": nn.MSELoss(), "dataset": dataset})
    (table,) = Path("runs/a/monitor").glob("*-rank0-*/grad_reduced_0-99.csv")
    assert "second.bias,3," in table.read_text()


def test_gradient_probe() -> None:
    """The probe of the gradients writes its tables."""
    PrecisionDebugger._instance = None
    settings = (ROOT / "docs/guide/grad-probe.md").read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0]
    Path("config.json").write_text(settings)
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    names: dict[str, Any] = {"optimizer": optimizer}
    exec(block("The gradient probe", "python"), names)
    programs.train(net, optimizer, None, 2)
    names["debugger"].stop()
    PrecisionDebugger._instance = None
    assert sorted(path.name for path in Path("run_a/rank0").glob("*.csv")) == ["grad_summary_0.csv", "grad_summary_1.csv"]


def test_settings_of_several_ranks() -> None:
    """They are settings."""
    Path("ranks.yaml").write_text(block("Several ranks", "yaml"))
    monitor = load_settings("ranks.yaml").monitor
    assert monitor is not None
    assert monitor.replica_check.interval == 100


def test_the_message_of_weights_that_do_not_move() -> None:
    """It is the one on the page."""
    shown = block("An optimizer that moves no weight", "").replace("\n", " ").strip()
    alerts: list[Any] = []
    net = nn.SequentialCell(nn.Dense(4, 4))
    optimizer = mint.optim.Adam(net.trainable_params(), 1e-2)
    probe = MindSporeProbe(programs.settings())
    probe.pipeline.listeners.append(lambda _, found: alerts.extend(found))
    probe.attach(net, optimizer)
    for step in range(2):
        probe.begin_step(step)
        optimizer(tuple(ms.ops.ones_like(p) for p in optimizer.parameters))
        probe.end_step()
    probe.close()
    said = alerts[0].message
    assert said.partition("(")[0] in shown
    assert said.partition("first): ")[2] in shown


def test_optimizers_with_updates() -> None:
    """The table names those whose update is known."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `update`")]
    for name, algorithm in optimizers._ALGORITHMS.items():
        assert name in row
        assert algorithm in COMPUTED
