"""docs/guide/compare.md: its commands run as they stand there, what it says of files is so, and its mapping files make runs equal whose
names differ, in compare and in diagnose."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_dumps import dump, tensor

from msprobe_engine.cli.main import main
from msprobe_engine.report.table_files.reading import read_table

torch = pytest.importorskip("torch")
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "compare.md"


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands of the page, in their order, on two small runs; the first prints the line that the page shows."""
    monkeypatch.chdir(tmp_path)
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "x"}
    for rank in range(2):
        reduce = {"input_args": [tensor(2.0)], "input_kwargs": {"group": group}, "output": [tensor(4.0)]}
        extra = {"Distributed.all_reduce.0.forward": reduce}
        dump(Path("out/dump/step0") / f"rank{rank}", wrong=3 if rank else None, extra=extra)
        dump(Path("golden/dump/step0") / f"rank{rank}", extra=extra)
        dump(Path("moved/dump/step0") / f"rank{rank}", extra=extra)
    Path("compare.json").write_text(
        json.dumps({"npu_path": "out/dump/step0/rank1/dump.json", "bench_path": "golden/dump/step0/rank1/dump.json"})
    )
    Path("merge.yaml").write_text(_blocks("yaml")[0])
    codes = []
    for block in _blocks("bash")[:4]:
        codes.append(main(shlex.split(block)[1:]))
    assert codes == [1, 1, 0, 1]
    shown = capsys.readouterr().out
    assert shown.startswith(_blocks("text")[0].split("\n")[0].replace("train.py:12 forward", "train.py:1 f"))  # the line of these runs
    assert len(list(Path("merged").glob("multi_ranks_compare_merge_*.xlsx"))) == 1
    assert len(list(Path("output").glob("advisor_*.txt"))) == 1
    assert "times what round-off explains" in next(Path("measured").glob("compare_result_rank1_*.csv")).read_text()


def _tensors(root: Path, turned: Any) -> None:
    """A dump with saved outputs: of the first call multiplied by a rotation, of the second with another sign in one place."""
    rank = dump(root / "step0/rank0", calls=2)
    document = json.loads((rank / "dump.json").read_text()) | {"task": "tensor"}
    (rank / "dump_tensor_data").mkdir()
    for call, values in enumerate((turned, np.arange(1.0, 17.0, dtype=np.float32).reshape(4, 4))):
        name = f"Functional.linear.{call}.forward.output.0.pt"
        document["data"][f"Functional.linear.{call}.forward"]["output"][0]["data_name"] = name
        torch.save(torch.from_numpy(values), rank / "dump_tensor_data" / name)
    (rank / "dump.json").write_text(json.dumps(document, indent=1))


def test_metrics_and_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric of the page makes its column; its matrices bring tensors together that were rotated, and only those that are named."""
    monkeypatch.chdir(tmp_path)
    values = np.arange(16.0, dtype=np.float32).reshape(4, 4) - 7.5
    rotation = -np.eye(4, dtype=np.float32)[::-1]
    _tensors(Path("out/tensors"), values @ rotation)
    _tensors(Path("golden/tensors"), values)
    np.save("rotation.npy", rotation)
    np.save("left.npy", np.eye(4, dtype=np.float32))
    Path("alg_sign_flips.py").write_text(_blocks("python")[1])
    Path("matrices.yaml").write_text(_blocks("yaml")[1])
    bash = _blocks("bash")
    assert main(shlex.split(bash[4])[1:]) == 1
    header, first, second = _outputs(Path("metrics"))
    assert header.index("Sign Flips") == header.index("Five Thousandths Err Ratio") + 1
    assert (first["Sign Flips"], second["Sign Flips"]) == ("16", "0")
    assert float(first["MaxAbsErr"]) == 12.0
    assert float(second["MaxAbsErr"]) == 0.0
    main(shlex.split(bash[5])[1:])
    _, first, second = _outputs(Path("turned"))
    assert float(first["MaxAbsErr"]) == 0.0
    assert float(second["MaxAbsErr"]) > 0.0


def _outputs(directory: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    header, *rows = read_table(next(directory.glob("compare_result_*.csv")))
    named = {row[0]: dict(zip(header, row)) for row in rows}
    return header, named["Functional.linear.0.forward.output.0"], named["Functional.linear.1.forward.output.0"]


@pytest.mark.parametrize(("flag", "text"), [("--metrics", "return 1"), ("--config", "nonsense: 1")])
def test_what_cannot_be_used_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, text: str) -> None:
    """Also for dumps of statistics, which have no use for either; those that can be used are said to be of no use."""
    for root in ("out", "golden"):
        dump(tmp_path / root / "step0/rank0")
    file = tmp_path / ("alg_x.py" if flag == "--metrics" else "x.yaml")
    file.write_text(text)
    command = ["compare", "-tp", str(tmp_path / "out"), "-gp", str(tmp_path / "golden"), "-o", str(tmp_path / "o"), flag, str(file)]
    assert main(command) == 2
    assert str(file) in capsys.readouterr().err
    file.write_text(_blocks("python")[1] if flag == "--metrics" else "left_matmul: {}")
    assert main(command) == 3
    assert "for saved tensors" in capsys.readouterr().out


@pytest.mark.skipif(not _blocks("python"), reason="the page has no Python")
def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the table of 8.1.1."""
    monkeypatch.chdir(tmp_path)
    for root in ("out", "golden"):
        dump(Path(root) / "dump/step0/rank0")
    exec(compile(_blocks("python")[0], str(PAGE), "exec"), {})
    assert len(list(Path("output").glob("compare_result_*.xlsx"))) == 1


PAGE = Path(__file__).parents[3] / "docs" / "guide" / "compare.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## Names that differ")[1]
YAML = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
BASH = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
FILES = ("cell.yaml", "layer.yaml", "data.yaml", "api.yaml")


def _write(root: Path, records: dict[str, tuple[str | None, list[float]]]) -> None:
    """One rank; record -> its parent, and the numbers of its inputs."""
    data: dict[str, Any] = {
        name: {"input_args": [tensor(value) for value in values], "input_kwargs": {}, "output": [tensor(values[-1] + 1)]}
        for name, (_, values) in records.items()
    }
    place = root / "step0/rank0"
    place.mkdir(parents=True)
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps(header | {"data": data}))
    (place / "construct.json").write_text(json.dumps({name: parent for name, (parent, _) in records.items()}))
    (place / "stack.json").write_text(json.dumps({"0": [list(records), ["File train.py, line 1, in f, x"]]}))


def _renamed(root: Path, inner: str) -> None:
    module, block = f"Module.layers.0.{inner}.forward.0", "Module.layers.0.Block.forward.0"
    _write(root, {"Functional.linear.0.forward": (module, [1.0]), module: (block, [1.0]), block: (None, [1.0])})


def _functions(root: Path, name: str, inputs: list[float]) -> None:
    _write(root, {"Functional.linear.0.forward": (None, [1.0]), f"Functional.{name}.0.forward": (None, inputs)})


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs and the files of the page, in the working directory."""
    monkeypatch.chdir(tmp_path)
    _renamed(Path("out/renamed"), "attn.SelfAttention")
    _renamed(Path("golden/renamed"), "attention.Attention")
    _functions(Path("out/functions"), "scaled_gelu", [3.0, 2.0])
    _functions(Path("golden/functions"), "gelu", [2.0])
    for name, text in zip(FILES, YAML, strict=True):
        Path(name).write_text(text)


@pytest.mark.parametrize("example", range(4), ids=["cell", "layer", "data", "api"])
def test_an_example(example: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the mapping records are on one side only, which is said; with it none is."""
    words = shlex.split(BASH[example])[1:]
    at = next(at for at, word in enumerate(words) if word in ("-cm", "-lm", "-dm", "-am"))
    main([*words[:at], *words[at + 2 :]])
    assert capsys.readouterr().out.count("\n  only in ") == 2
    code = main(words)
    out = capsys.readouterr().out
    partly = 3 if words[at] == "-am" else 0  # one of the functions takes an argument more, which is said
    assert out.startswith("No difference in what could be compared; 1 warning" if partly else "No difference beyond round-off"), out
    assert "\n  only in " not in out
    assert code == partly, out
    assert main(["diagnose", words[2], words[4], *words[at : at + 2], "-o", "page"]) == partly
