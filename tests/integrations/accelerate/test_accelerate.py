"""Loops of one's own around an `Accelerator`: followed by whoever follows the optimizer, or the engine, inside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acc_job
import accelerate
import accelerate.accelerator
import pytest
import torch
from trainer_checks import compare, config, digest, everything, files, installed, ranks

from msprobe_integrations.accelerate import autoload
from msprobe_integrations.torch import owner

WATCHED = ("monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer")


def on_and_off(tmp_path: Path, n: int, arguments: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train with the probe and without: the bits are the same. What each rank has seen."""
    plain = ranks(n, acc_job.train, tmp_path, None, arguments)
    followed = ranks(n, acc_job.train, tmp_path, config(tmp_path, **sections), arguments)
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    return [found for _, found in followed]


@pytest.mark.parametrize("n", [1, 2])
def test_ddp(tmp_path: Path, cells: Any, n: int) -> None:
    """Norms are those of a float64 training by hand with the global batch; accumulated batches are one step; evaluation, gathered
    metrics and checkpoints leave nothing; everything that files are asked for is written."""
    found = on_and_off(tmp_path, n, {}, **everything())
    for each in found:
        assert each["steps"] == [0, 1, 2, 3]
        assert compare(each["norms"], acc_job.reference(n)) > 30
        for step in each["steps"]:
            assert {"loss", "grad_norm", "learning_rate", "skipped"} <= each["scalars"][step].keys()
        assert len([name for name in each["entries"][1] if ".first.Linear.forward" in name]) == 2  # no evaluation
        assert not [name for name in each["entries"][1] if "gather" in name]
    assert files(tmp_path) == {"dump": True, "grad_probe": True, "incident": True}
    several = () if n == 1 else ("replica check",)
    layout = "1 rank" if n == 1 else "DDP, 2 ranks"
    cells.ran("Accelerate", layout, *WATCHED, "same bits", version=installed("accelerate"))
    cells.wrote("Accelerate", layout, "dump mix", "grad probe", "incident capture", *several, version=installed("accelerate"))


def test_mixed_precision(tmp_path: Path) -> None:
    """bf16: the same bits, gradients close to those of a training by hand."""
    (found,) = on_and_off(tmp_path, 1, {"mixed_precision": "bf16"})
    assert found["steps"] == [0, 1, 2, 3]
    compare(found["norms"], acc_job.reference(), tolerance=0.1, families=["grad_reduced"])


def fsdp2() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="no_wrap", cpu_offload=False)


def test_fsdp2(tmp_path: Path, cells: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 by its plugin: gradients over all shards are those of a training by hand, their norm is the one of `clip_grad_norm_`."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    for found in on_and_off(tmp_path, 2, {"fsdp_plugin": fsdp2}):
        assert found["steps"] == [0, 1, 2, 3]
        assert compare(found["norms"], acc_job.reference(2)) > 30
        assert "grad_norm" in found["scalars"][1]
    cells.ran("Accelerate", "FSDP2, 2 ranks", *WATCHED, "same bits", version=installed("accelerate"))


def zero2() -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(
        hf_ds_config={
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
        }
    )


def test_deepspeed(tmp_path: Path, cells: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DeepSpeed's plugin it is the engine that is followed."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for found in on_and_off(tmp_path, 2, {"deepspeed_plugin": zero2}):
        assert found["steps"] == [0, 1, 2, 3]
        assert compare(found["norms"], acc_job.reference(2), families=["grad_reduced"]) > 10
    cells.ran("Accelerate", "DeepSpeed ZeRO 2, 2 ranks", "monitor: gradients", "same bits", version=installed("accelerate"))


class Broken:
    """An observer of which everything raises."""

    in_step = True
    settings = type("S", (), {"strict": False})

    def evaluation(self) -> Any:
        raise RuntimeError("planted")

    note = evaluation

    def close(self) -> None: ...


def _bits(folder: Path) -> str:
    net = acc_job.Net()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, acc_job.adamw(net.parameters()))
    loss = model(acc_job.samples()).pow(2).mean()
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.save_state(str(folder / "state"))
    return digest([*net.parameters(), norm, accelerator.gather(loss.detach())])


def test_faults_and_restoring(tmp_path: Path, cells: Any) -> None:
    """What raises in the observer does not come out of the Accelerator, whose results and parameters are the same bits; every method that
    is looked through is put back, and is the very same object as before."""

    def job() -> Any:
        before = dict(vars(accelerate.accelerator.Accelerator))
        undo = autoload.patch(accelerate.accelerator)
        replaced = {name for name, value in vars(accelerate.accelerator.Accelerator).items() if value is not before.get(name)}
        owner.own("user", Broken())  # type: ignore[arg-type]
        bits = _bits(tmp_path)
        for each in undo:
            each()
        after = dict(vars(accelerate.accelerator.Accelerator))
        return bits, replaced, [name for name in before | after if after.get(name) is not before.get(name)]

    ((bits, replaced, left),) = ranks(1, job)
    assert [bits] == ranks(1, _bits, tmp_path)
    assert replaced == {name for name in (*autoload.NOT_TRAINING, "clip_grad_norm_") if hasattr(accelerate.Accelerator, name)}
    assert left == []
    cells.ran("Accelerate", "1 rank", "detach", version=installed("accelerate"))
