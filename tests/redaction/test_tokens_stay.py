"""``redact: [tokens]``: no token id and no text of a prompt is in anything that the probe writes, and the training has the same bits.

Each case runs without the setting as well, where the search must find something: else it would prove nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm
from artifact_search import finds
from token_training import IDS, OTHER_PROMPT, PROMPT

from msprobe_engine.core import redaction
from msprobe_engine.core.process import user_key

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).with_name("token_training.py")
KEY = {user_key.KEY: "a key that was made by chance 7f3c"}
MONITOR = {"activations": True, "parameters": True, "collectives": True, "ops": ["norm", "min", "max", "mean", "zeros", "digest"]}
SINKS = {name: {"enabled": True} for name in ("csv", "jsonl", "sqlite", "tensorboard")}


class Case(NamedTuple):
    way: str
    settings: dict[str, Any]


def dump(level: str, task: str = "statistics", **section: Any) -> Case:
    return Case("debugger", {"level": level, "task": task, task: section})


CASES = {
    "L0": dump("L0", summary_mode="digest"),
    "L1": dump("L1", summary_mode="md5"),
    "mix": dump("mix"),
    "tensor files": dump("mix", "tensor"),
    "packed tensors": dump("L1", "tensor", tensor_format="packed", summary_mode="md5"),
    "saved by hand": dump("debug", "tensor"),
    "online pre-check": Case("online", {}),
    "monitor": Case("probe", {"monitor": MONITOR, "sinks": SINKS, "incident": {"enabled": False}}),
    "incident": Case("probe", {"monitor": MONITOR, "sinks": SINKS, "incident": {"level": "mix", "capture_level": "mix", "ring_steps": 5}}),
    "configuration pack": Case("pack", {}),
    "single save": Case("saved", {}),
}


class Runs(NamedTuple):
    """All cases, trained with and without the setting."""

    redacted: Path
    open: Path
    plain: str
    """Bits of the training without a probe."""


def train(out: Path, cases: list[list[Any]]) -> Path:
    made = warm.run(warm.script(PROGRAM), json.dumps(cases), out, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]
    return out


Trained = Callable[[tuple[str, ...]], Runs]
FAST = ("L0", "tensor files")
SLOW = tuple(name for name in CASES if name not in FAST)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains cases with and without the setting, once."""

    @functools.cache
    def runs(names: tuple[str, ...]) -> Runs:
        redacted = [
            [name, case.way, {**case.settings, "redact": ["tokens"]}, KEY]
            if case.way in ("debugger", "online", "probe")
            else [name, case.way, case.settings, {**KEY, redaction.WANTED: "tokens"}]
            for name, case in CASES.items()
            if name in names
        ]
        open_cases = [[name, case.way, case.settings, {}] for name, case in CASES.items() if name in names]
        root = tmp_path_factory.mktemp("runs")
        both = train(root / "redacted", redacted), train(root / "open", [*open_cases, ["plain", "plain", {}, {}]])
        return Runs(*both, (root / "open" / "plain.bits").read_text())

    return runs


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "others"])
@pytest.mark.slow
def test_no_token_is_written(names: tuple[str, ...], trained: Trained) -> None:
    """Nothing with the setting, something without; the same bits."""
    runs = trained(names)
    for name in names:
        assert any((runs.redacted / name).rglob("*")), name
        found = finds(runs.redacted / name, IDS, [PROMPT, OTHER_PROMPT, *KEY.values()])
        assert found == [], name
        assert finds(runs.open / name, IDS, [PROMPT, OTHER_PROMPT]), name
        if CASES[name].way in ("probe", "saved"):  # texts become names there
            assert finds(runs.open / name, IDS[:1], [PROMPT]), name
        bits = (runs.redacted / f"{name}.bits").read_text()
        assert bits == (runs.open / f"{name}.bits").read_text(), name
        if CASES[name].way != "probe":  # it has more steps
            assert bits == runs.plain, name


def test_a_dump_says_what_was_left_out(trained: Trained) -> None:
    """Rows of a few ids have no statistics, a keyed digest and the mark of the key; their tensors are listed as not saved; arguments that
    could be tokens say so."""
    runs = trained(FAST)
    (step,) = (runs.redacted / "tensor files").glob("out/step0/*")
    text = (step / "dump.json").read_text()
    ids = json.loads(text)["data"]["Module.words.Embedding.forward.0"]["input_args"][0]
    assert [ids[name] for name in ("Max", "Min", "Mean", "Norm")] == [None] * 4
    assert len(ids["redacted"]) == 16
    assert "data_name" not in ids
    listed = json.loads((step / "not_saved.json").read_text())["not_saved"]
    assert {one["reason"] for one in listed} == {redaction.NOT_SAVED}
    assert any(one["name"].startswith("Module.words.Embedding.forward.0.input") for one in listed)
    (plain,) = (runs.redacted / "L0").glob("out/step0/*")
    row = json.loads((plain / "dump.json").read_text())["data"]["Module.words.Embedding.forward.0"]["input_args"][0]
    (open_step,) = (runs.open / "L0").glob("out/step0/*")
    open_row = json.loads((open_step / "dump.json").read_text())["data"]["Module.words.Embedding.forward.0"]["input_args"][0]
    assert row["digest"] != open_row["digest"]
    assert open_row["Mean"] > min(IDS)
