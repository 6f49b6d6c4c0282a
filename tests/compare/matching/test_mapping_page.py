"""docs/guide/compare.md, "Names that differ": its mapping files make runs equal whose names differ, in compare and in diagnose."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import tensor

from msprobe_engine.cli.main import main

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
