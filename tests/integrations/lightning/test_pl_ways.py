"""Ways in which people use Lightning's Trainer: what the probe says of steps is what the Trainer says itself, with the same bits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.case import TrainingCase
from harness.checks import compare
from harness.frameworks import lightning_trainer as pl_small
from harness.memory import seen
from harness.models import MODELS, OPTIMIZER, mlp_loss, reference
from harness.run import ask, digest, ranks, write_settings

from msprobe_integrations.lightning.callback import MsprobeCallback
from msprobe_integrations.torch.training import owner

pytestmark = pytest.mark.framework
REFERENCE = reference(TrainingCase("lightning_trainer", steps=8))
Automatic = type(pl_small.make_module())


class Manual(pl.LightningModule):
    """Two optimizers, stepped by hand in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = MODELS["mlp"].make(), MODELS["mlp"].make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        loss = None
        for net, optimizer in zip((self.one, self.two), self.optimizers()):
            optimizer.zero_grad()
            loss = mlp_loss(net, batch[0])
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), **OPTIMIZER) for net in (self.one, self.two)]


def test_manual(tmp_path: Path) -> None:
    """Manual optimization with two optimizers: a batch is a step, both are watched."""
    ((plain, _),) = ranks(1, pl_small.train_with, tmp_path, None, {}, Manual)
    ((bits, found),) = ranks(1, pl_small.train_with, tmp_path, write_settings(tmp_path), {}, Manual)
    assert bits == plain
    assert found["steps"] == list(range(8))
    for prefix in ("one.", "two."):
        compare(found["norms"], {(family, step, prefix + name): norm for (family, step, name), norm in REFERENCE.items()})


def test_own_callback_and_resume(tmp_path: Path) -> None:
    """A callback that the script makes follows alone, survives being sent to another process, and goes on counting in a resumed
    training; the Trainer has its own methods back afterwards."""

    def job(folder: Path, file: Path) -> Any:
        callback = pickle.loads(pickle.dumps(MsprobeCallback(file)))  # what spawned ranks get
        trainer = pl_small.make_trainer(folder, callbacks=[callback], max_epochs=1)
        model = pl_small.make_module()
        trainer.fit(model, pl_small.make_loader())
        trainer.save_checkpoint(folder / "at8.ckpt")
        again = pl_small.make_trainer(folder, callbacks=[callback], max_epochs=2)
        again.fit(pl_small.make_module(), pl_small.make_loader(), ckpt_path=str(folder / "at8.ckpt"))
        found = seen(callback.observer)
        callback.close()
        assert "save_checkpoint" not in vars(again)
        assert owner.current() is None
        return found

    (found,) = ranks(1, job, tmp_path, write_settings(tmp_path))
    assert found["steps"] == list(range(16))
    assert compare(found["norms"], REFERENCE) > 30


def test_exception(tmp_path: Path) -> None:
    """An exception in a step comes out as it is; what was seen of the step is kept, and marked."""

    def job(folder: Path, file: Path) -> Any:
        ask(file, "lightning")
        model = pl_small.make_module()
        step = model.training_step

        def failing(batch: Any, batch_idx: int) -> Any:
            loss = step(batch, batch_idx)
            if batch_idx == 1:
                raise ValueError("out of data")
            return loss

        model.training_step = failing
        with pytest.raises(ValueError, match="out of data"):
            pl_small.make_trainer(folder).fit(model, pl_small.make_loader())
        return seen()

    (found,) = ranks(1, job, tmp_path, write_settings(tmp_path))
    assert found["steps"] == [0, 1]
    assert found["scalars"][1]["interrupted"] == 1.0


def test_fabric(tmp_path: Path) -> None:
    """A loop on Fabric has no Trainer: it is followed as a loop of plain torch."""

    def job(file: Path | None) -> Any:
        from lightning.fabric import Fabric

        ask(file, "torch")
        fabric = Fabric(accelerator="cpu", devices=1)
        net = MODELS["mlp"].make()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), **OPTIMIZER))
        for (x,) in fabric.setup_dataloaders(pl_small.make_loader()):
            fabric.backward(mlp_loss(model, x))
            optimizer.step()
            optimizer.zero_grad()
        return digest(net.parameters()), seen()

    ((plain, _),) = ranks(1, job, None)
    ((bits, found),) = ranks(1, job, write_settings(tmp_path))
    assert bits == plain
    assert found["steps"] == list(range(8))
    assert compare(found["norms"], REFERENCE) > 30


class Log(pl.Callback):
    """Per update: the sum of the losses of its batches and the learning rate that it is made with."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self._loss, self._rate, self._updated = 0.0, 0.0, False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        self._rate, self._updated = trainer.optimizers[0].param_groups[0]["lr"], True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        self._loss += float(outputs["loss"]) if outputs else 0.0
        if self._updated:
            self.steps.append([self._loss, self._rate])
            self._loss, self._updated = 0.0, False


class Scheduled(Automatic):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


class Closures(Automatic):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Skipping(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class Adversaries(Manual):
    """Toggled optimizers, one of them with a closure and in every other batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        self.toggle_optimizer(one)
        self.manual_backward((self.one(batch[0]) - 1).pow(2).mean())
        self.clip_gradients(one, 0.5)
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)

        def closure() -> Any:
            two.zero_grad()
            loss = (self.two(batch[0]) + self.one(batch[0]).detach()).pow(2).mean()
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            self.toggle_optimizer(two)
            two.step(closure=closure)
            self.untoggle_optimizer(two)


class Overflowing(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1e38 if batch_idx == 2 else 1)


def scaled() -> Any:
    """A loss scaler, which Lightning itself has for fp16 on a GPU only (on a CPU 16-mixed is bf16-mixed)."""
    plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return plugin


def job(folder: Path, file: Path | None, arguments: Callable[[], dict[str, Any]], made: Any, before: Any = None) -> Any:
    """Fit; bits, what was seen, what the Trainer has said, what came out."""
    ask(file, "lightning", "torch")
    log, model = Log(), made()
    given = arguments()
    trainer = pl_small.make_trainer(folder, callbacks=[*given.pop("callbacks", ()), log], **given)
    if before is not None:
        before(trainer, model)
    raised = None
    try:
        trainer.fit(model, pl_small.make_loader(), pl_small.make_loader())
    except BaseException as error:
        raised = repr(error)
    return digest(model.parameters()), seen(), log.steps, raised


def averaging() -> dict[str, Any]:
    return {"max_epochs": 3, "callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)]}


WAYS: dict[str, tuple[Callable[[], dict[str, Any]], Any]] = {
    "scheduler": (dict, Scheduled),
    "closures": (dict, Closures),
    "adversaries": (dict, Adversaries),
    "steps without a loss": (lambda: {"accumulate_grad_batches": 2}, Skipping),
    "partial accumulation": (lambda: {"accumulate_grad_batches": 3, "max_epochs": 2}, pl_small.make_module),
    "stopped": (lambda: {"accumulate_grad_batches": 3, "max_steps": 2, "max_epochs": -1}, pl_small.make_module),
    "averaged weights": (averaging, pl_small.make_module),
    "validation": (lambda: {"val_check_interval": 1, "num_sanity_val_steps": 2}, pl_small.make_module),
    "16-true": (lambda: {"precision": "16-true"}, Scheduled),
    "scaler": (lambda: {"plugins": [scaled()]}, Overflowing),
}


@pytest.mark.parametrize("names", [("closures", "scaler"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)], ids=("few", "all"))
@pytest.mark.slow
def test_ways(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Loss and learning rate of every step are those of the Trainer; no step comes twice; validation is not seen; the bits are those
    without the probe. A step whose update a scaler leaves out is `skipped`, with the scale that it was made with."""

    plain = [ranks(1, job, tmp_path / "out", None, *WAYS[name])[0] for name in names]
    dumped = {"step": [1], "level": "L0"}
    found = [ranks(1, job, tmp_path / "out", write_settings(tmp_path / name, dump=dumped), *WAYS[name])[0] for name in names]
    for name, without, (bits, saw, log, raised) in zip(names, plain, found):
        assert raised is None, name
        assert bits == without[0], name
        assert repr(log) == repr(without[2]), name
        assert saw["steps"] == list(range(len(log))), name
        for step, (loss, rate) in enumerate(log):
            scalars = saw["scalars"][step]
            assert scalars["learning_rate"] == rate, (name, step)
            assert name == "adversaries" or float(scalars["loss"]) == pytest.approx(loss, rel=1e-6), (name, step)
            assert saw["complete"][step], (name, step)
    (_, saw, log, _) = found[names.index("scaler")]
    assert [saw["scalars"][step]["skipped"] for step in range(8)] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [float(saw["scalars"][step]["loss_scale"]) for step in range(4)] == [4.0, 4.0, 4.0, 2.0]


def test_searched_rate(tmp_path: Path) -> None:
    """The Tuner's search for a learning rate before the training leaves nothing."""

    class Rated(Automatic):
        lr = 1e-2

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def search(trainer: Any, model: Any) -> None:
        pl.tuner.Tuner(trainer).lr_find(model, pl_small.make_loader(), num_training=5)

    ((plain, *_),) = ranks(1, job, tmp_path, None, dict, Rated, search)
    ((bits, saw, *_),) = ranks(1, job, tmp_path, write_settings(tmp_path), dict, Rated, search)
    assert bits == plain
    assert saw["steps"] == list(range(8))


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends the process as Lightning does it, and the step that it cut off is marked as incomplete."""

    class Interrupting(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                raise KeyboardInterrupt

    ((_, _, _, plain),) = ranks(1, job, tmp_path, None, lambda: {"callbacks": [Interrupting()]}, pl_small.make_module)
    ((_, saw, _, raised),) = ranks(
        1, job, tmp_path, write_settings(tmp_path), lambda: {"callbacks": [Interrupting()]}, pl_small.make_module
    )
    assert raised == plain
    assert saw["complete"] == {0: True, 1: False}
    assert saw["scalars"][1]["interrupted"] == 1.0
