"""What a run with a DeepSpeed engine was started with: its configuration as the engine has resolved it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_engine.config.pack.reader import Pack, read_pack
from msprobe_engine.core.settings.schema import ConfigCheckSettings

pytestmark = pytest.mark.framework


def train(stage: int, output: str, as_file: bool) -> None:
    conf: Any = harness.config(stage, "bf16", 2, more_of_ours=1)
    del conf["gradient_clipping"]
    if as_file:
        place = Path(output) / f"of_rank{dist.get_rank()}" / "ds_config.json"  # one that both write would be read half written
        place.parent.mkdir()
        place.write_text(json.dumps(conf))
        sys.argv = ["train.py", f"--config={place}"]
        engine = harness.engine_of(str(place))  # as a launch script names it
        callback = jobs.follow(engine, jobs.settings(output, config_check=ConfigCheckSettings(path=f"{output}/pack.zip")))
        jobs.loop(engine, harness.batches("bf16", 2))
        assert callback is not None
        callback.close()
    else:
        jobs.train(conf, "bf16", 1, {"config_check": ConfigCheckSettings(path=f"{output}/pack.zip")})


def collected(stage: int, as_file: bool) -> tuple[Pack, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as output:
        run_ranks(2, train, stage, output, as_file)
        pack = read_pack(Path(output) / "pack.zip")
        weights = pack.json("msprobe/weights/step0/rank1.json")
        assert pack.ranks == [0, 1]
        return pack.json("msprobe/hyperparameters/rank1.json"), weights


@pytest.mark.fast_cells("False")
@pytest.mark.parametrize("as_file", [False, True])
def test_resolved_configuration(as_file: bool) -> None:
    """Given values with their file or as the program's, batch sizes that DeepSpeed computes, defaults of its sections; ZeRO 3 keeps its
    shards, whose digests are there."""
    found, weights = collected(3, as_file)
    given = "file" if as_file else "code"
    expected = {
        "train_micro_batch_size_per_gpu": (4, given),
        "gradient_accumulation_steps": (2, given),
        "train_batch_size": (16, "code"),
        "gradient_clipping": (0.0, "default") if "gradient_clipping" not in found else (found["gradient_clipping"]["value"], "default"),
        "optimizer.type": ("adam", given),
        "optimizer.params.lr": (0.01, given),
        "zero_optimization.stage": (3, given),
        "zero_optimization.overlap_comm": (False, given),
        "zero_optimization.allgather_partitions": (True, "default"),
        "bf16.enabled": (True, given),
        "fp16.enabled": (False, "default"),
        "more_of_ours": (1, given),
    }
    assert {name: (found[name]["value"], found[name]["origin"]) for name in expected} == expected
    assert found["train_batch_size"]["where"] == "computed by DeepSpeed"
    assert not as_file or found["optimizer.params.lr"]["where"].endswith("ds_config.json:optimizer.params.lr")
    assert {one["framework"] for name, one in found.items() if name.startswith("zero")} == {"deepspeed"}
    assert all(one["digest"] for one in weights.values())
    assert any(one.get("whole") for one in weights.values())
