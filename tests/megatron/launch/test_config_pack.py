"""What a run on megatron-core was started with: configurations of model, optimizer and data parallel, sizes of groups, random streams."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import train_gpt
from forkpool import run_ranks
from megatron_harness import probe_settings

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.core.settings.schema import ConfigCheckSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.config_checker import ConfigChecker
from msprobe_integrations.megatron.callback import MegatronCallback

pytestmark = pytest.mark.framework


def job(argv: str, output: str) -> None:
    a = train_gpt.arguments(["--quiet", "--steps", "1", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    settings = probe_settings(MonitorSettings())
    path = f"{output}/run.zip"
    probe = MegatronCallback(ProbeSettings(**{**vars(settings), "config_check": ConfigCheckSettings(path=path)}))
    checker = ConfigChecker(chunks, None, f"{output}/by_hand.zip")
    probe.on_setup(chunks, optimizer)
    probe.on_step_begin(0)
    train_gpt.train(a, chunks, optimizer)
    probe.on_step_end()
    checker.close()
    probe.close()


def test_configurations_of_a_loop_on_megatron_core() -> None:
    """Fields that differ from their class are the program's, others defaults; every rank has its shards and inputs; the streams of the
    tracker are among the states."""
    with tempfile.TemporaryDirectory() as output:
        run_ranks(2, job, "--tp 2 --distopt", output)
        for name in ("run.zip", "by_hand.zip"):
            pack = read_pack(Path(output) / name)
            assert pack.problems == []
            assert pack.ranks == [0, 1]
            found: dict[str, dict[str, Any]] = pack.json("msprobe/hyperparameters/rank1.json")
            assert (found["tensor_model_parallel_size"]["value"], found["tensor_model_parallel_size"]["origin"]) == (2, "code")
            assert found["layernorm_epsilon"] == {"value": 1e-5, "origin": "default", "where": "", "framework": "megatron"}
            assert found["data_parallel_size"]["value"] == 1
            assert found["add_bias_linear"]["framework"] == "megatron"
            first, second = (pack.json(f"msprobe/weights/step0/rank{rank}.json") for rank in range(2))
            assert list(first) == list(second)
            differ = {name for name in first if first[name]["digest"] != second[name]["digest"]}
            assert any("linear_qkv.weight" in name for name in differ)
            assert not any("layernorm" in name for name in differ)
        run = read_pack(Path(output) / "run.zip").json("msprobe/hyperparameters/rank0.json")
        assert run["use_distributed_optimizer"]["value"] is True
        assert run["optimizer"]["framework"] == "megatron"
        assert "lr" in run
        states = pack.json("msprobe/random/rank0.json")["states"]
        assert any(name.startswith("tracker:") for name in states["step0"])
        assert any(tag.startswith(("args.", "kwargs.")) for tag in pack.json("msprobe/dataset/step0/rank0.json"))
