"""Settings out of logs of verl and slime, as these print them: verl with pprint through Ray, slime with Megatron's table."""

from __future__ import annotations

import csv
import json
import pprint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.launch_scripts.training_logs import flat_settings, read_slime, read_verl
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.config.log_files import ALIGNED, compare_slime, compare_verl, verify_verl

CONFIG: dict[str, Any] = {
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": 1e-06, "betas": [0.9, 0.95]}, "shuffle": False, "profiler": {"steps": 1}},
        "rollout": {"name": "vllm", "text": "a } ' \" [ b", "none": None, "engine_kwargs": {}},
    },
    "ray_kwargs": {"num_cpus": 8},
    "data": {"train_batch_size": 1024, "shuffle": True},
    "trainer": {"balance_batch": True},
}


def log(tree: Any, prefix: str = "\x1b[36m(TaskRunner pid=12)\x1b[0m ", form: str = "python") -> str:
    """A log of verl: other lines, the settings, lines of other processes between those of the settings."""
    text = pprint.pformat(tree, sort_dicts=False) if form == "python" else json.dumps(tree, indent=2)
    lines = [prefix + line for line in text.splitlines()]
    lines.insert(2, "(WorkerDict pid=99) loading {'weights': 1}")
    return "\n".join(["INFO start", *lines, f"{prefix}step:1 - loss:0.5 }}", ""])


def changed(path: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(CONFIG))
    *sections, key = path.split("/")
    inner = tree
    for section in sections:
        inner = inner[section]
    inner[key] = value
    return tree


@pytest.mark.parametrize(
    ("prefix", "form"), [("(main_task pid=12) ", "python"), ("\x1b[36m(T pid=1)\x1b[0m ", "python"), ("(T pid=1) ", "json")]
)
def test_settings_of_verl_are_read_from_its_log(prefix: str, form: str, tmp_path: Path) -> None:
    """The last dictionary that is printed, with colours, a process in front of each line, and lines of others between."""
    (tmp_path / "a.log").write_text(log(changed("data/shuffle", False), prefix, form) + log(CONFIG, prefix, form))
    assert read_verl(tmp_path / "a.log") == CONFIG


def test_two_logs_of_verl_give_the_files_of_the_existing_tool(tmp_path: Path) -> None:
    """Columns, marks and representation of ``hyper_params_compare.csv`` (26.2.0); sections ``profiler`` and ``ray_...`` are left out."""
    other = changed("actor_rollout_ref/actor/optim/lr", 2e-06)
    del other["trainer"]
    (tmp_path / "npu.log").write_text(log(CONFIG))
    (tmp_path / "bench.log").write_text(log(other, "(x pid=1) "))
    found = compare_verl(tmp_path / "npu.log", tmp_path / "bench.log", tmp_path / "out")
    assert (found.different, found.only_first, found.only_second) == (["actor_rollout_ref/actor/optim/lr"], ["trainer/balance_batch"], [])
    text = (tmp_path / "out" / "hyper_params_compare.csv").read_text(encoding="utf-8")
    assert text.startswith("\ufeff超参名称,NPU生效值,bench生效值,是否一致\n")
    rows = {row[0]: row[1:] for row in csv.reader(text.splitlines())}
    assert rows["actor_rollout_ref/actor/optim/lr"] == ["1e-06", "2e-06", "否"]
    assert rows["actor_rollout_ref/actor/optim/betas"] == ["[0.9, 0.95]", "[0.9, 0.95]", "是"]
    assert rows["actor_rollout_ref/rollout/name"] == ["'vllm'", "'vllm'", "是"]
    assert rows["trainer/balance_batch"] == ["True", "NA", "否"]
    assert not [key for key in rows if "profiler" in key or "ray_" in key]
    assert json.loads((tmp_path / "out" / "NPU_config.json").read_text()) == CONFIG


def test_verify_of_verl_tells_absent_from_different(tmp_path: Path) -> None:
    """Without a file the 17 keys of the existing tool are checked; with one, its own. What the log does not have is no difference."""
    (tmp_path / "a.log").write_text(log(CONFIG))
    found = verify_verl(tmp_path / "a.log", None, tmp_path / "out")
    assert len(found.rows) == len(ALIGNED) == 17
    assert found.different == ["data/shuffle", "trainer/balance_batch"]
    assert len(found.only_first) == 14
    (tmp_path / "bench.yaml").write_text("data: {shuffle: true}\ndata/train_batch_size: 512\nmissing: [1, 2]\n")
    found = verify_verl(tmp_path / "a.log", tmp_path / "bench.yaml", tmp_path / "out")
    assert (found.different, found.only_first) == (["data/train_batch_size"], ["missing"])
    assert "关键参数名称,bench生效值,target生效值,是否一致" in (tmp_path / "out" / "hyper_params_verify.csv").read_text(encoding="utf-8")


TABLE = """\
[rank0] hello
------------------------ arguments ------------------------
  adam_beta1 ...................................... 0.9
  data_path ....................................... ['a', 'b']
  empty_one .......................................
  lr .............................................. 1e-06
  none_one ........................................ None
  profile_step .................................... 3
  recompute ....................................... True
  seed ............................................ 1234
-------------------- end of arguments ---------------------
"""


def test_arguments_of_slime_are_read_from_its_log(tmp_path: Path) -> None:
    """Megatron's table with bool, int and float; an empty value stays; ``profile`` is left out of the comparison."""
    (tmp_path / "a.log").write_text(TABLE)
    (tmp_path / "b.log").write_text("(pid=1) " + TABLE.replace("\n  ", "\n(pid=1)   ").replace("1234", "7"))
    values = read_slime(tmp_path / "a.log")
    assert values["empty_one"] == ""
    assert (values["lr"], values["seed"], values["recompute"], values["none_one"]) == (1e-06, 1234, True, "None")
    found = compare_slime(tmp_path / "a.log", tmp_path / "b.log", tmp_path / "out")
    assert found.different == ["seed"]
    assert "profile_step" not in [row[0] for row in found.rows]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing\n", "no settings of verl"),
        ("{'actor_rollout_ref': {'a': 1,\n", "begin in line 1 do not end"),
        ("x\n{'actor_rollout_ref': {'a': __import__('os').system('touch mark')}}\n", "begin in line 2 are no plain dictionary"),
        ("{'actor_rollout_ref': " + "[" * 20_000 + "]" * 20_000 + "}\n", "are no plain dictionary"),
        ("{'actor_rollout_ref': '" + "x" * (5 << 20), "do not end|longer than"),
        ("\0" * 1000, "no settings of verl"),
    ],
)
def test_damaged_logs_are_errors_that_say_the_line(text: str, says: str, tmp_path: Path) -> None:
    """No settings, settings that end early, code in place of values, a log of zeros: the error names the log and the line."""
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(DumpFormatError, match=says) as error:
        read_verl(tmp_path / "a.log")
    assert "a.log" in str(error.value)
    assert len(str(error.value)) < 1000
    with pytest.raises(DumpFormatError, match="no arguments of slime"):
        read_slime(tmp_path / "a.log")


_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
_SETTINGS = st.recursive(
    _VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3), max_leaves=10
)


@given(tree=_SETTINGS, width=st.integers(20, 120))
def test_whatever_verl_prints_is_read_back(tree: Any, width: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any plain settings, printed at any width, come back the same."""
    config = {"actor_rollout_ref": {"x": tree}}
    lines = pprint.pformat(config, width=width).splitlines()
    path = tmp_path_factory.mktemp("logs") / "a.log"
    path.write_text("".join(f"(T pid=1) {line}\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    if all(line.isprintable() for line in lines):
        assert read_verl(path) == config
        assert flat_settings(config)
