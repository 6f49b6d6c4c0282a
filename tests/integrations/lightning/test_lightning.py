"""Lightning's Trainers, followed without a change of the program."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pl_job
import pytest
import torch
from trainer_checks import asked, compare, config, digest, everything, files, ranks, seen

from msprobe_integrations.lightning.callback import MsprobeCallback
from msprobe_integrations.torch import owner
from msprobe_integrations.torch.loop import LoopObserver

WATCHED = ("monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer")


def on_and_off(tmp_path: Path, n: int, arguments: dict[str, Any], made: Any = pl_job.module, **sections: Any) -> list[dict[str, Any]]:
    """Train with the probe and without: the bits are the same. What each rank has seen."""
    plain = ranks(n, pl_job.train, tmp_path, None, arguments, made)
    followed = ranks(n, pl_job.train, tmp_path, config(tmp_path, **sections), arguments, made)
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    return [found for _, found in followed]


@pytest.mark.parametrize("n", [1, 2])
def test_automatic(tmp_path: Path, n: int) -> None:
    """Norms are those of a float64 training by hand with the global batch; accumulated batches are one step; validation and
    checkpoints leave nothing; scalars have what the module logs; everything that files are asked for is written."""
    arguments = {
        "accumulate_grad_batches": 2,
        "val_check_interval": 1,
        "enable_checkpointing": True,
        "gradient_clip_val": 0.5,
        **({"strategy": "ddp", "devices": n} if n > 1 else {}),
    }
    found = on_and_off(tmp_path, n, arguments, **everything())
    for each in found:
        assert each["steps"] == list(range(4 // n))
        assert compare(each["norms"], pl_job.reference(n, per_step=2, clip=0.5)) > 30
        assert each["micro"]["actv", 0] == {0, 1}
        for step in each["steps"]:
            assert {"loss", "logged", "grad_norm", "learning_rate", "skipped"} <= each["scalars"][step].keys()
            assert "valid" not in each["scalars"][step]
        assert len([name for name in each["entries"][1] if ".Linear.forward" in name]) == 4  # two layers, two micro batches
    assert files(tmp_path) == {"dump": True, "grad_probe": True, "incident": True}


def test_manual(tmp_path: Path) -> None:
    """Manual optimization with two optimizers: a batch is a step, both are watched."""
    (found,) = on_and_off(tmp_path, 1, {}, pl_job.Manual)
    assert found["steps"] == list(range(8))
    for prefix in ("one.", "two."):
        compare(found["norms"], pl_job.reference(prefix=prefix))


def test_precision(tmp_path: Path) -> None:
    """bf16-mixed: the same bits, gradients close to those of a training by hand."""
    (found,) = on_and_off(tmp_path, 1, {"precision": "bf16-mixed"})
    assert found["steps"] == list(range(8))
    compare(found["norms"], pl_job.reference(), tolerance=0.1, families=["grad_reduced"])


def test_other_package(tmp_path: Path) -> None:
    """`pytorch_lightning` has classes of its own, and is followed as well."""

    def job(folder: Path, file: Path) -> Any:
        import pytorch_lightning as other

        return pl_job.train(folder, file, {}, lambda: pl_job.module(other), other)

    ((_, found),) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == list(range(8))
    assert compare(found["norms"], pl_job.reference()) > 30


def test_own_callback_and_resume(tmp_path: Path) -> None:
    """A callback that the script makes follows alone, survives being sent to another process, and goes on counting in a resumed
    training; the Trainer has its own methods back afterwards."""

    def job(folder: Path, file: Path) -> Any:
        callback = pickle.loads(pickle.dumps(MsprobeCallback(file)))  # what spawned ranks get
        trainer = pl_job.make_trainer(folder, callbacks=[callback], max_epochs=1)
        model = pl_job.module()
        trainer.fit(model, pl_job.loader())
        trainer.save_checkpoint(folder / "at8.ckpt")
        again = pl_job.make_trainer(folder, callbacks=[callback], max_epochs=2)
        again.fit(pl_job.module(), pl_job.loader(), ckpt_path=str(folder / "at8.ckpt"))
        found = seen(callback.observer)
        callback.close()
        assert "save_checkpoint" not in vars(again)
        assert owner.current() is None
        return found

    (found,) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == list(range(16))
    assert compare(found["norms"], pl_job.reference()) > 30


def test_exception(tmp_path: Path) -> None:
    """An exception in a step comes out as it is; what was seen of the step is kept, and marked."""

    def job(folder: Path, file: Path) -> Any:
        asked(file, "lightning")
        model = pl_job.module()
        step = model.training_step

        def failing(batch: Any, batch_idx: int) -> Any:
            loss = step(batch, batch_idx)
            if batch_idx == 1:
                raise ValueError("out of data")
            return loss

        model.training_step = failing
        with pytest.raises(ValueError, match="out of data"):
            pl_job.make_trainer(folder).fit(model, pl_job.loader())
        return seen()

    (found,) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == [0, 1]
    assert found["scalars"][1]["interrupted"] == 1.0


METHODS = ("setup", "begin", "end", "micro_batch", "evaluation", "interrupted", "safely")


def test_faults_stay_inside(tmp_path: Path) -> None:
    """Whatever raises in the observer, the training has the same bits as without it."""

    def job(folder: Path, file: Path) -> Any:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("planted")

        found = []
        for method in METHODS:
            original = getattr(LoopObserver, method)
            setattr(LoopObserver, method, broken)
            asked(file, "lightning")
            model = pl_job.module()
            pl_job.make_trainer(folder).fit(model, pl_job.loader())
            found.append(digest(model.parameters()))
            setattr(LoopObserver, method, original)
            owner.release()
        return found

    plain = ranks(1, pl_job.train, tmp_path, None, {})[0][0]
    assert ranks(1, job, tmp_path, config(tmp_path, strict=False)) == [[plain] * len(METHODS)]


def test_fabric(tmp_path: Path) -> None:
    """A loop on Fabric has no Trainer: it is followed as a loop of plain torch."""

    def job(file: Path | None) -> Any:
        from lightning.fabric import Fabric

        asked(file, "torch")
        fabric = Fabric(accelerator="cpu", devices=1)
        net = pl_job.make_net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0))
        for (x,) in fabric.setup_dataloaders(pl_job.loader()):
            fabric.backward((model(x) - 1).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return digest(net.parameters()), seen()

    ((plain, _),) = ranks(1, job, None)
    ((bits, found),) = ranks(1, job, config(tmp_path))
    assert bits == plain
    assert found["steps"] == list(range(8))
    prefixes = {k[2].removesuffix("0.weight") for k in found["norms"] if k[0] == "grad_reduced" and k[2].endswith("0.weight")}
    assert compare(found["norms"], pl_job.reference(prefix=prefixes.pop())) > 30


def test_version() -> None:
    """Both packages are there in one version; the callback works for either."""
    assert issubclass(MsprobeCallback, pl.Callback)
