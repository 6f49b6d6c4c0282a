"""Python argument files, YAML, JSON and TOML as flat settings; options of launchers as the launchers themselves parse them."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.launch_scripts import tree_files
from msprobe_engine.config.launch_scripts.launchers import FLAGS
from msprobe_engine.config.launch_scripts.static import collect_static
from msprobe_engine.core.errors import DumpFormatError

PYTHON = """
import os
from dataclasses import dataclass, field

MICRO = 4
seq_length = 4 * 1024
global_batch = MICRO * 8
lr = 1e-4
betas = (0.9, 0.95)
name = f"llama_{MICRO}" + "_x"
bf16 = not False
dtype = torch.bfloat16
big = 2 ** 70
huge = 10 ** 10 ** 10
long = "a" * 10 ** 9
workers = os.cpu_count()
optimizer = dict(type="AdamW", lr=lr, params=dict(eps=1e-8))
model = {"hidden": 4096, "layers": [{"kind": "a"}, {"kind": "b"}], **other}
args = TrainingArguments(learning_rate=2e-5, per_device_train_batch_size=MICRO, output_dir=os.environ["X"])
cfg.train.steps = 100
cfg["seed"] = 7
if os.environ.get("DEBUG"):
    lr = 1e-3
seq_length += 1


@dataclass
class Options:
    weight_decay: float = 0.1
    clip: float = field(default=1.0)
    names: list = field(default_factory=list)


def get_args(parser):
    parser.add_argument("--warmup-steps", "-w", type=int, default=-1 * 5)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--data", required=True)
    secret = 1
    os.system("touch mark")
"""


def test_python_files_are_read_from_their_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain values, simple arithmetic, nested calls and dictionaries, defaults of parsers and dataclasses; nothing runs."""
    monkeypatch.chdir(tmp_path)
    Path("args.py").write_text(PYTHON)
    found = collect_static(["args.py"])
    known = {key: one.value for key, one in found.values.items() if one.known}
    assert known == {
        "MICRO": 4,
        "global_batch": 32,
        "betas": [0.9, 0.95],
        "name": "llama_4_x",
        "bf16": True,
        "dtype": "torch.bfloat16",
        "big": 2**70,
        "optimizer.type": "AdamW",
        "optimizer.lr": 1e-4,
        "optimizer.params.eps": 1e-8,
        "model.hidden": 4096,
        "model.layers.0.kind": "a",
        "model.layers.1.kind": "b",
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 4,
        "cfg.train.steps": 100,
        "cfg.seed": 7,
        "weight_decay": 0.1,
        "clip": 1.0,
        "warmup-steps": -5,
        "fp16": False,
    }
    unknown = {key: one for key, one in found.values.items() if not one.known}
    assert unknown.keys() == {"huge", "long", "workers", "output_dir", "lr", "seq_length"}
    assert unknown["workers"].value == "os.cpu_count()"
    assert unknown["lr"].value == 1e-4
    assert "line 23" in unknown["lr"].why
    assert found.values["MICRO"].line == 5
    assert any("workers (line 16)" in note for note in found.notes)
    assert not Path("mark").exists()


_TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc -:#'\"é", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcd_", min_size=1, max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abcd_", min_size=1, max_size=4), _TREES, max_size=4))
def test_yaml_and_json_of_the_same_tree_are_the_same_settings(tree: dict[str, Any]) -> None:
    """The same data in both formats gives the same keys and values, with all numbers, and every plain value is there once."""
    by_json = tree_files.flat(tree_files.parse(json.dumps(tree), "json", "a.json"), "a.json")
    by_yaml = tree_files.flat(tree_files.parse(yaml.safe_dump(tree, allow_unicode=True), "yaml", "a.yaml"), "a.yaml")
    assert by_json == by_yaml
    assert by_json == tree_files.flat(tree, "tree")


def test_several_documents_tags_and_merges_of_yaml() -> None:
    """Merged mappings are filled in, documents are numbered, tags of applications leave their text."""
    text = (
        "base: &b {lr: 0.1, seed: 1}\nuse: {<<: *b, seed: 2}\npath: !include other.yaml\ntime: 2024-01-02\nsize: 1_000\nscientific: 1e-5\n"
    )
    flat = tree_files.flat(tree_files.parse(text, "yaml", "a"), "a")
    assert (flat["use.lr"], flat["use.seed"], flat["path"]) == (0.1, 2, "!include other.yaml")
    assert (flat["time"], flat["size"], flat["scientific"]) == ("2024-01-02", 1000, "1e-5")
    assert tree_files.flat(tree_files.parse("a: 1\n---\nb: 2\n", "yaml", "a"), "a") == {"0.a": 1, "1.b": 2}
    assert tree_files.flat(tree_files.parse("", "yaml", "a"), "a") == {}
    with pytest.raises(DumpFormatError, match=r"a\.yaml: not valid YAML"):
        tree_files.parse("a: [1", "yaml", "a.yaml")


def _options(package: str, file: str) -> dict[str, bool]:
    """Option -> takes a value, of the ``add_argument`` calls in a file of an installed package; importing some takes half a minute."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    found: dict[str, bool] = {}
    for node in ast.walk(ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            action = next((keyword.value for keyword in node.keywords if keyword.arg == "action"), None)
            name = action.value if isinstance(action, ast.Constant) else action.id if isinstance(action, ast.Name) else ""
            value = name not in ("store_true", "store_false", "help", "check_env")  # the last is torchrun's own
            for option in (arg.value for arg in node.args if isinstance(arg, ast.Constant)):
                if str(option).startswith("-"):
                    found[str(option).lstrip("-").replace("_", "-")] = value
    return found


@pytest.mark.parametrize(
    ("name", "package", "file"),
    [
        ("torchrun", "torch", "distributed/run.py"),
        ("accelerate", "accelerate", "commands/launch.py"),
        ("deepspeed", "deepspeed", "launcher/runner.py"),
    ],
)
def test_options_of_launchers_without_a_value(name: str, package: str, file: str) -> None:
    """The table has every option without a value that the installed launcher knows, and none that takes a value there."""
    options = _options(package, file)
    assert len(options) > 15
    assert {option for option, value in options.items() if not value} <= FLAGS[name]
    assert not {option for option, value in options.items() if value} & FLAGS[name] - {"elastic-training"}
