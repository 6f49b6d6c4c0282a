"""docs/code-mapping.md on a graph that MindSpore compiled and kernels that it dumped."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import ms_programs
import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.code_mapping.ir import read_nodes
from msprobe_engine.dump.kernel_files import kernel_directories, kernel_files

ROOT = Path(__file__).parents[2]
PAGE = "docs/code-mapping.md"


def page_block(language: str) -> str:
    """The one block in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / PAGE).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
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


def test_every_stage_of_the_compiler_is_read(trained: Path) -> None:
    """Whatever save_graphs=2 writes as text has nodes with scopes; only the first file is from before there are lines."""
    files = sorted((trained / "graphs").glob("*.ir")) + sorted((trained / "graphs").glob("trace_code_graph_*"))
    assert len(files) > 50
    for path in files:
        nodes = read_nodes(path)
        assert all(node.scope for node in nodes), path
        assert "bootstrap" in path.name or sum(node.has_source for node in nodes) >= len(nodes) / 2, path


def test_the_same_cells_as_the_existing_tool(trained: Path, tmp_path: Path) -> None:
    """Where 8.1.1 has source lines, ours are the same, cell for cell."""
    other = os.environ.get("MSPROBE_EXISTING_MS_81")
    if not other:
        pytest.skip("MSPROBE_EXISTING_MS_81 names no environment with MindSpore and the existing tool")
    (graph,) = (trained / "graphs").glob("trace_code_graph_*")
    (directory,) = kernel_directories(trained / "out")
    asked = ["--ir", str(graph), "--dump_data", str(directory), "--output"]
    program = [f"{other}/bin/msprobe", "-f", "mindspore", "code_mapping"]
    subprocess.run([*program, *asked, str(tmp_path / "theirs")], check=True, timeout=240, capture_output=True)
    assert main(["code_mapping", *asked, str(tmp_path / "ours")]) == 0
    ours, theirs = ({row["File Path"]: row for row in rows(next((tmp_path / name).glob("*.csv")))} for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    with_lines = [path for path, row in theirs.items() if "In file" in row["Code Stack"]]
    assert len(with_lines) > 40
    assert [ours[path] for path in with_lines] == [theirs[path] for path in with_lines]
