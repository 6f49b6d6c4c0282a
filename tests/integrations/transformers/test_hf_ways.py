"""Ways in which people use Hugging Face's Trainer: sharded, resumed, several times, with a callback of their own, failing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_job
import pytest
from hf_cells_job import zero
from trainer_checks import asked, compare, config, digest, ranks, seen

from msprobe_integrations.deepspeed import autoload as deepspeed_autoload
from msprobe_integrations.torch import owner
from msprobe_integrations.torch.loop import LoopObserver
from msprobe_integrations.transformers import patches
from msprobe_integrations.transformers.callback import MsprobeCallback


def test_key(tmp_path: Path) -> None:
    """The key ``msprobe`` of the DeepSpeed configuration that a Trainer is given is all that is needed: its gradients are those of a
    training by hand, its steps the Trainer's."""

    def job(folder: Path, file: Path | None) -> Any:
        asked_by_key = {} if file is None else {"msprobe": {"config": str(file)}}
        deepspeed_autoload.arm()
        trainer = hf_job.make_trainer(folder, deepspeed={**zero(2), **asked_by_key})
        trainer.train()
        return digest(trainer.model.parameters()), seen()

    plain = ranks(2, job, tmp_path, None)
    followed = ranks(2, job, tmp_path, config(tmp_path, monitor={"gradients": True}))
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    for _, found in followed:
        assert found["steps"] == [0, 1, 2]
        assert compare(found["norms"], hf_job.reference(2), families=["grad_reduced"]) > 50


def test_resume(tmp_path: Path) -> None:
    """A resumed training goes on counting, and its numbers are those of the training that was not interrupted."""

    def first(folder: Path) -> Any:
        trainer = hf_job.make_trainer(folder, save_strategy="steps", save_steps=2)
        trainer.train()
        return digest(trainer.model.parameters())

    def resumed(folder: Path, file: Path) -> Any:
        asked(file, "transformers")
        trainer = hf_job.make_trainer(folder)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return digest(trainer.model.parameters()), seen()

    (bits,) = ranks(1, first, tmp_path / "run")
    ((again, found),) = ranks(1, resumed, tmp_path / "run", config(tmp_path))
    assert again == bits
    assert found["steps"] == [2]
    compare(found["norms"], {k: v for k, v in hf_job.reference().items() if k[1] == 2})


def test_several_trainings(tmp_path: Path) -> None:
    """A second training of the process goes on counting; evaluation and prediction by themselves are no steps."""

    def job(folder: Path, file: Path) -> Any:
        asked(file, "transformers")
        for _ in range(2):
            trainer = hf_job.make_trainer(folder)
            trainer.train()
            trainer.evaluate()
            trainer.predict(hf_job.Samples())
        return seen()

    (found,) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == [0, 1, 2, 3, 4, 5]
    assert found["norms"]["grad_reduced", 0, "transformer.wte.weight"] == found["norms"]["grad_reduced", 3, "transformer.wte.weight"]


def test_own_callback(tmp_path: Path) -> None:
    """A callback that the script makes follows alone, whatever the environment asks for; `close` gives `Trainer.train` back."""

    def job(folder: Path, file: Path) -> Any:
        from transformers import Trainer

        before = Trainer.train
        callback = MsprobeCallback(file)
        assert Trainer.train is not before
        trainer = hf_job.make_trainer(folder, callbacks=[callback])
        trainer.train()
        assert not {"training_step", "evaluate", "_maybe_log_save_evaluate"} & vars(trainer).keys()
        found = seen(callback.observer)
        callback.close()
        assert Trainer.train is before
        assert owner.current() is None
        return found

    (found,) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == [0, 1, 2]
    assert compare(found["norms"], hf_job.reference()) > 100


class Failing(hf_job.InOrder):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1:
            raise ValueError("out of data")
        return super().training_step(*args, **kwargs)


def test_exception(tmp_path: Path) -> None:
    """An exception in a step comes out as it is; what was seen of the step is kept, and marked."""

    def job(folder: Path, file: Path) -> Any:
        asked(file, "transformers")
        trainer = hf_job.make_trainer(folder)
        trainer.__class__ = Failing
        with pytest.raises(ValueError, match="out of data"):
            trainer.train()
        return seen()

    (found,) = ranks(1, job, tmp_path, config(tmp_path))
    assert found["steps"] == [0, 1]
    assert found["scalars"][1]["interrupted"] == 1.0


METHODS = ("setup", "begin", "end", "micro_batch", "note", "evaluation", "interrupted", "safely")


def test_faults_stay_inside(tmp_path: Path) -> None:
    """Whatever raises in the observer, the training has the same bits as without it."""

    def job(folder: Path, file: Path) -> Any:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("planted")

        found = []
        for method in METHODS:
            original = getattr(LoopObserver, method)
            setattr(LoopObserver, method, broken)
            found.append(_bits(folder, file))
            setattr(LoopObserver, method, original)
            owner.release()
        return found

    (plain,) = ranks(1, hf_job.train, tmp_path, None, {})
    assert ranks(1, job, tmp_path, config(tmp_path, strict=False)) == [[plain[0]] * len(METHODS)]


def _bits(folder: Path, file: Path) -> str:
    asked(file, "transformers")
    trainer = hf_job.make_trainer(folder)
    trainer.train()
    return digest(trainer.model.parameters())


def test_nobody_asked(tmp_path: Path) -> None:
    """Without a request a patched Trainer trains as ever, without a callback."""

    def job(folder: Path) -> Any:
        patches.follow("test")
        trainer = hf_job.make_trainer(folder)
        trainer.train()
        assert not any(isinstance(each, MsprobeCallback) for each in trainer.callback_handler.callbacks)
        return digest(trainer.model.parameters())

    assert ranks(1, job, tmp_path) == [ranks(1, hf_job.train, tmp_path, None, {})[0][0]]
