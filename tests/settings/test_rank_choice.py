"""Ranks that are chosen by what they are, in every setting that takes ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.core.settings.rank_choice import ranks_of
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import keys_of

MEGATRON = ["pretrain.py", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]
MOE = [*MEGATRON, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen ranks, eight on a node."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


@pytest.mark.parametrize(
    ("choice", "argv", "ranks"),
    [
        ("first_of_node", [], [0, 8]),
        ({"sample": 4}, [], [0, 4, 8, 12]),
        ({"sample": 3}, [], [0, 5, 10]),
        ({"sample": 99}, [], list(range(16))),
        ("one_replica", MEGATRON, [0, 1, 8, 9]),
        ({"dp": 0}, MEGATRON, [0, 1, 8, 9]),
        ({"dp": 0}, [*MEGATRON, "--use-tp-pp-dp-mapping"], [0, 1, 2, 3]),
        ({"dp": "0-1", "tp": 1}, MEGATRON, [1, 3, 9, 11]),
        ({"pp": [1], "dp": [0, 3]}, MEGATRON, [8, 9, 14, 15]),
        ({"dp": 0, "sizes": {"tp": 4}}, MEGATRON, [0, 1, 2, 3]),
        ({"dp": 0, "sizes": {}}, [], [0]),
        ({"cp": 1, "sizes": {"tp": 2, "cp": 2}}, [], [2, 3, 6, 7, 10, 11, 14, 15]),
        ({"ep": 1}, MOE, [1, 3, 5, 7, 9, 11, 13, 15]),
        ("one_replica", [*MEGATRON, "--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"], [0, 1, 2, 3, 8, 9, 10, 11]),
    ],
)
def test_ranks_of_a_choice(choice: Any, argv: list[str], ranks: list[int]) -> None:
    """They are those of Megatron's order; of a model with experts one replica has all of them."""
    assert ranks_of(choice, argv) == tuple(ranks)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"dp": 0}, "sizes: {tp: 8, pp: 4}"),
        ({"dq": 0}, "dq: 0 stands for no ranks"),
        ({}, "an empty mapping"),
        ({"dp": -1}, "dp: -1 is no coordinate"),
        ({"dp": "x"}, "dp: x is no coordinate"),
        ({"dp": []}, "dp: \\[\\] is no coordinate"),
        ({"sample": 0}, "sample: 0 stands for no ranks"),
        ({"sample": 2, "dp": 0}, "stands for no ranks"),
        ({"sizes": {"tp": 2}}, "sizes alone"),
        ({"dp": 0, "sizes": {"tp": 3}}, "tp 3 x cp 1 x pp 1 do not make up the 16 ranks"),
        ({"dp": 0, "sizes": {"dp": 4}}, "dp 4 do not make up the 16 ranks"),
        ({"dp": 0, "sizes": {"tp": True}}, "stands for no ranks"),
    ],
)
def test_what_is_no_choice(choice: Any, said: str) -> None:
    """The message says what may stand there; how ranks are laid out is not guessed."""
    with pytest.raises(SettingsError, match="(?s)" + said.replace("{", "\\{").replace("(", "\\(")):
        ranks_of(choice, ["train.py"])


def _settings_of_ranks() -> list[str]:
    found: list[str] = []

    def look(cls: type[Any], path: str) -> None:
        for key in keys_of(cls):
            if key.section is not None and not key.many:
                look(key.section, f"{path}{key.name}.")
            elif key.name == "rank" and key.ranges:
                found.append(path + key.name)

    look(ProbeSettings, "")
    return found


@pytest.mark.parametrize("path", _settings_of_ranks())
def test_every_setting_of_ranks_takes_them(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One parser for all of them."""
    monkeypatch.setattr(sys, "argv", MEGATRON)
    *sections, name = path.split(".")
    node: Any = {name: {"dp": 0}} | ({"path": str(tmp_path), "modules": ["Module.a.Linear.forward.0"]} if sections[-1:] == ["load"] else {})
    for name in reversed(sections):
        node = {name: node}
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(node))
    found: Any = read_settings(file)[0]
    for name in path.split("."):
        found = getattr(found, name)
    assert found == (0, 1, 8, 9)


@pytest.mark.parametrize("written", ["first_of_nod", "tp=0", ["one_replica", 3]])
def test_a_word_that_stands_for_no_ranks_is_told_the_words_that_do(written: Any, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text(json.dumps({"monitor": {"rank": written}}))
    with pytest.raises(SettingsError, match="one_replica, first_of_node, "):
        read_settings(file)


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how many ranks there are, the file is right, and it is said that all ranks are meant."""
    monkeypatch.delenv("WORLD_SIZE")
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "RANK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "probe.yaml"
    file.write_text("dump: {rank: one_replica}")
    settings, warnings = read_settings(file)
    assert settings.dump is not None
    assert settings.dump.rank == ()
    assert any("stands for all ranks here" in text for text in warnings)
