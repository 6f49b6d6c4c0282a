"""Ways in which people use Hugging Face's Trainer: what the probe says of steps is what the Trainer says itself, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.case import TrainingCase
from harness.checks import compare
from harness.frameworks import transformers_trainer as hf
from harness.memory import seen
from harness.models import reference
from harness.run import ask, digest, ranks, write_settings
from transformers import TrainerCallback

from msprobe_integrations.deepspeed import autoload as deepspeed_autoload
from msprobe_integrations.torch.training import owner
from msprobe_integrations.transformers import patches
from msprobe_integrations.transformers.callback import MsprobeCallback, follow_training

pytestmark = pytest.mark.framework
ALONE = TrainingCase("transformers_trainer", "gpt_tiny", features=("accumulation", "clipping"))
ZERO = TrainingCase("transformers_trainer", "gpt_tiny", {"dp": 2, "zero": 2}, features=("accumulation", "clipping"))


class Few(torch.utils.data.IterableDataset):
    """Runs out amid the micro batches of a step."""

    def __iter__(self) -> Iterator[Any]:
        return (hf.Samples()[i] for i in range(7))


class Interrupting(TrainerCallback):
    """As if Ctrl-C were pressed after the first micro batch of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            raise KeyboardInterrupt


class Looking(TrainerCallback):
    """Evaluates between micro batches and predicts after every step."""

    trainer: Any = None

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.trainer.evaluate()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.predict(hf.Samples())


class Thrice(hf.InOrder):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 3, outputs) if return_outputs else outputs.loss * 3


def own_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)


def frozen(trainer: Any) -> None:
    for name, p in trainer.model.named_parameters():
        p.requires_grad_("mlp" in name)


def few(trainer: Any) -> None:
    trainer.train_dataset = Few()


def looking(trainer: Any) -> None:
    trainer.add_callback(Looking())
    trainer.callback_handler.callbacks[-1].trainer = trainer


def thrice(trainer: Any) -> None:
    trainer.__class__ = Thrice


def job(folder: Path, file: Path | None, arguments: dict[str, Any], change: Callable[[Any], None] | None) -> Any:
    """Train; bits, what was seen, what the Trainer has logged, what came out."""
    ask(file, "transformers", "torch", "accelerate")
    trainer = hf.make_trainer(folder, logging_steps=1, **arguments)
    if change is not None:
        change(trainer)
    raised = None
    try:
        trainer.train()
    except BaseException as error:
        raised = repr(error)
    log = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.parameters()), seen(), log, raised


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
EVERY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
WAYS = {
    "compute_loss": ({}, thrice),
    "optimizer": ({}, own_optimizer),
    "label smoothing": ({"label_smoothing_factor": 0.1}, None),
    "compiled": (COMPILED, None),
    "recomputed": ({"gradient_checkpointing": True}, None),
    "partly frozen": ({}, frozen),
    "best model": ({**BEST, **EVERY}, None),
    "partial accumulation": ({"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 1}, None),
    "out of data": ({"gradient_accumulation_steps": 3}, few),
    "evaluating within steps": ({}, looking),
}


@pytest.mark.parametrize(
    "names", [("compute_loss", "partial accumulation"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)], ids=("few", "all")
)
@pytest.mark.slow
def test_ways(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Loss, gradient norm and learning rate of every step are what the Trainer logs; no step comes twice; evaluation is not seen; the bits
    are those without the probe."""

    plain = [ranks(1, job, tmp_path / "out", None, *WAYS[name])[0] for name in names]
    dumped = {"step": [1], "level": "L0"}
    found = [ranks(1, job, tmp_path / "out", write_settings(tmp_path / name, dump=dumped), *WAYS[name])[0] for name in names]
    for name, without, (bits, saw, log, raised) in zip(names, plain, found):
        assert raised is None, name
        assert (bits, log) == (without[0], without[2]), name
        assert saw["steps"] == list(range(len(log))), name
        for step, (loss, norm, rate) in enumerate(log):
            scalars = saw["scalars"][step]
            assert float(scalars["loss"]) == pytest.approx(loss, rel=1e-6), (name, step)
            assert float(scalars["grad_norm"]) == pytest.approx(float(norm), rel=1e-5), (name, step)
            assert scalars["learning_rate"] == rate, (name, step)
            assert saw["complete"][step], (name, step)
        passes = [entry for entry in saw["entries"][1] if ".lm_head.Linear.forward" in entry]
        if name != "compiled":  # compiled modules are seen at their border
            assert len(passes) == len(saw["micro"]["actv", 1]), (name, passes)


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C comes out as it is, and the step that it cut off is marked as incomplete."""
    change = lambda trainer: trainer.add_callback(Interrupting())  # noqa: E731
    ((_, saw, _, raised),) = ranks(1, job, tmp_path, write_settings(tmp_path), {}, change)
    assert raised == "KeyboardInterrupt()"
    assert saw["steps"] == [0, 1]
    assert saw["complete"] == {0: True, 1: False}
    assert saw["scalars"][1]["interrupted"] == 1.0


class Scaled(hf.InOrder):
    """With a loss scaler, which the Trainer itself has for fp16 on a GPU only (on a CPU ``fp16=True`` trains in fp32, without one); the
    gradients of step 1 overflow."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1e38 * 1e38 if self.state.global_step == 1 else loss


def test_skipped_update(tmp_path: Path) -> None:
    """A step whose update the scaler leaves out is a step of its own: `skipped`, with the scale that it was made with."""

    def scaled(folder: Path, file: Path | None) -> Any:
        ask(file, "transformers")
        trainer = hf.make_trainer(folder, made=Scaled, max_grad_norm=0.0)
        trainer.train()
        return digest(trainer.model.parameters()), seen()

    ((plain, _),) = ranks(1, scaled, tmp_path, None)
    ((bits, saw),) = ranks(1, scaled, tmp_path, write_settings(tmp_path))
    assert bits == plain
    assert saw["steps"] == [0, 1, 2]
    assert [saw["scalars"][step]["skipped"] for step in (0, 1, 2)] == [0.0, 1.0, 0.0]
    assert [float(saw["scalars"][step]["loss_scale"]) for step in (0, 1, 2)] == [4.0, 4.0, 2.0]


@pytest.mark.slow
def test_key(tmp_path: Path) -> None:
    """The key ``msprobe`` of the DeepSpeed configuration that a Trainer is given is all that is needed: its gradients are those of a
    training by hand, its steps the Trainer's."""

    def job(folder: Path, file: Path | None) -> Any:
        asked_by_key = {} if file is None else {"msprobe": {"config": str(file)}}
        deepspeed_autoload.arm()
        trainer = hf.make_trainer(folder, deepspeed={**hf.make_arguments(ZERO)["deepspeed"], **asked_by_key})
        trainer.train()
        return digest(trainer.model.parameters()), seen()

    plain = ranks(2, job, tmp_path, None)
    followed = ranks(2, job, tmp_path, write_settings(tmp_path, monitor={"gradients": True}))
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    for _, found in followed:
        assert found["steps"] == [0, 1, 2]
        assert compare(found["norms"], reference(ZERO), families=["grad_reduced"]) > 50


def test_resume(tmp_path: Path) -> None:
    """A resumed training goes on counting, and its numbers are those of the training that was not interrupted."""

    def first(folder: Path) -> Any:
        trainer = hf.make_trainer(folder, save_strategy="steps", save_steps=2)
        trainer.train()
        return digest(trainer.model.parameters())

    def resumed(folder: Path, file: Path) -> Any:
        ask(file, "transformers")
        trainer = hf.make_trainer(folder)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return digest(trainer.model.parameters()), seen()

    (bits,) = ranks(1, first, tmp_path / "run")
    ((again, found),) = ranks(1, resumed, tmp_path / "run", write_settings(tmp_path))
    assert again == bits
    assert found["steps"] == [2]
    compare(found["norms"], {k: v for k, v in reference(ALONE).items() if k[1] == 2})


def test_several_trainings(tmp_path: Path) -> None:
    """A second training of the process goes on counting; evaluation and prediction by themselves are no steps."""

    def job(folder: Path, file: Path) -> Any:
        ask(file, "transformers")
        for _ in range(2):
            trainer = hf.make_trainer(folder)
            trainer.train()
            trainer.evaluate()
            trainer.predict(hf.Samples())
        return seen()

    (found,) = ranks(1, job, tmp_path, write_settings(tmp_path))
    assert found["steps"] == [0, 1, 2, 3, 4, 5]
    assert found["norms"]["grad_reduced", 0, "transformer.wte.weight"] == found["norms"]["grad_reduced", 3, "transformer.wte.weight"]


def test_own_callback(tmp_path: Path) -> None:
    """A callback that the script makes follows alone, whatever the environment asks for; `close` gives `Trainer.train` back."""

    def job(folder: Path, file: Path) -> Any:
        from transformers import Trainer

        before = Trainer.train
        callback = MsprobeCallback(file)
        assert Trainer.train is not before
        trainer = hf.make_trainer(folder, callbacks=[callback])
        trainer.train()
        assert not {"training_step", "evaluate", "_maybe_log_save_evaluate"} & vars(trainer).keys()
        found = seen(callback.observer)
        callback.close()
        assert Trainer.train is before
        assert owner.current() is None
        return found

    (found,) = ranks(1, job, tmp_path, write_settings(tmp_path))
    assert found["steps"] == [0, 1, 2]
    assert compare(found["norms"], reference(ALONE)) > 100


class Failing(hf.InOrder):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1:
            raise ValueError("out of data")
        return super().training_step(*args, **kwargs)


def test_exception(tmp_path: Path) -> None:
    """An exception in a step comes out as it is; what was seen of the step is kept, and marked."""

    def job(folder: Path, file: Path) -> Any:
        ask(file, "transformers")
        trainer = hf.make_trainer(folder)
        trainer.__class__ = Failing
        with pytest.raises(ValueError, match="out of data"):
            trainer.train()
        return seen()

    (found,) = ranks(1, job, tmp_path, write_settings(tmp_path))
    assert found["steps"] == [0, 1]
    assert found["scalars"][1]["interrupted"] == 1.0


def test_nobody_asked(tmp_path: Path) -> None:
    """Without a request a patched Trainer trains as ever, without a callback."""

    def job(folder: Path) -> Any:
        patches.patch_trainer("test", follow_training)
        trainer = hf.make_trainer(folder)
        trainer.train()
        assert not any(isinstance(each, MsprobeCallback) for each in trainer.callback_handler.callbacks)
        return digest(trainer.model.parameters())

    assert ranks(1, job, tmp_path) == [ranks(1, hf.train_with, tmp_path, None, {})[0][0]]
