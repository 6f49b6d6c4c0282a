"""torchtitan's Trainer with a small llama3 on the CPU: its scalars, faults that stay inside, what a version lacks."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.frameworks import torchtitan_trainer as titan
from harness.memory import everything, files, seen
from harness.run import ask, ranks, write_settings

from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.loop import LoopObserver
from msprobe_integrations.torchtitan.reliance import TABLE

pytestmark = pytest.mark.framework


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokenizer and text."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    titan.assets(tmp_path / "run")
    return tmp_path / "run"


def job(folder: Path, file: Path | None, keys: dict[str, int]) -> Any:
    """Train in this rank; a group of one rank is made by torchtitan."""
    titan.join_alone()
    ask(file, "torchtitan")
    trainer = titan.config(folder, **keys).build()
    before = set(vars(trainer))
    trainer.train()
    found = seen()
    assert not {"forward_backward_step"} & (set(vars(trainer)) - before)  # the Trainer has its own methods back
    bits = titan.digest(p for part in trainer.model_parts for p in part.parameters())
    owner.release()
    trainer.close()
    return bits, found


def on_and_off(folder: Path, n: int, keys: dict[str, int], **sections: Any) -> list[dict[str, Any]]:
    """Train with the probe and without: the bits are the same. What each rank has seen."""
    plain = ranks(n, job, folder, None, keys)
    followed = ranks(n, job, folder, write_settings(folder.parent, **sections), keys)
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    return [found for _, found in followed]


@pytest.mark.slow
def test_one_rank(folder: Path) -> None:
    """Steps are the Trainer's minus one, micro batches those of gradient accumulation; validation leaves nothing; the scalars are
    torchtitan's own; everything that files are asked for is written."""
    (found,) = on_and_off(folder, 1, {"accumulate": 2, "validate": 1}, **everything())
    assert found["steps"] == [0, 1, 2]
    assert found["micro"]["actv", 0] == {0, 1}
    for step in (0, 1, 2):
        scalars = found["scalars"][step]
        assert {"loss", "grad_norm", "learning_rate", "skipped"} <= scalars.keys()
        total = sum(v * v for (family, s, _), v in found["norms"].items() if family == "grad_reduced" and s == step) ** 0.5
        assert abs(scalars["grad_norm"] - total) < 1e-4 * total
    assert found["scalars"][1]["global_avg_loss"] == pytest.approx(found["scalars"][1]["loss"], rel=1e-6)
    last = ("Module.lm_head.", "Module.output.")  # since 0.3, and before
    assert len([name for name in found["entries"][1] if name.startswith(last) and "forward" in name]) == 2
    assert files(folder.parent) == {"dump": True, "grad_probe": True, "incident": True}


METHODS = ("setup", "begin", "add_scalars", "driven")


@pytest.mark.slow
def test_faults_stay_inside(folder: Path) -> None:
    """Whatever raises in the observer, the training has the same bits as without it."""

    def broken_job(file: Path) -> Any:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("planted")

        found = []
        for method in METHODS:
            original = getattr(LoopObserver, method)
            setattr(LoopObserver, method, broken)
            found.append(job(folder, file, {"steps": 2})[0])
            setattr(LoopObserver, method, original)
        return found

    plain = ranks(1, job, folder, None, {"steps": 2})[0][0]
    assert ranks(1, broken_job, write_settings(folder.parent, strict=False)) == [[plain] * len(METHODS)]


LACKING = {"forward_backward_step": {"loss"}, "clip_grad_norm_": set()}
"""What `train_step` calls by name, to the scalars that are lost without it (the gradient norm comes in the steps that are logged, too)."""


@pytest.mark.slow
def test_what_a_version_lacks(folder: Path) -> None:
    """Where a function of the table has another name, the training has the same bits, one message names it and what is lost by it, and
    the rest is seen."""

    def lacking(file: Path) -> Any:
        from torchtitan.distributed import utils
        from torchtitan.trainer import Trainer

        lines: list[str] = []
        logging.getLogger("msprobe").addFilter(lambda record: lines.append(record.getMessage()) or True)
        found = {}
        step = Trainer.train_step
        code = step.__code__
        for name in LACKING:
            owner_of = utils if name in vars(utils) else Trainer
            original, other = getattr(owner_of, name), f"{name}_of_another_version"
            setattr(owner_of, other, original)
            delattr(owner_of, name)
            step.__code__ = code.replace(co_names=tuple(other if n == name else n for n in code.co_names))
            lines.clear()
            bits, seen = job(folder, file, {"steps": 2})
            found[name] = bits, list(lines), seen["steps"], {key for step in seen["scalars"].values() for key in step}
            setattr(owner_of, name, original)
            delattr(owner_of, other)
            step.__code__ = code
        return found

    if find_spec("torchtitan.trainer") is None:
        pytest.skip("before 0.3 the Trainer is defined elsewhere")
    plain = ranks(1, job, folder, None, {"steps": 2})[0][0]
    (found,) = ranks(1, lacking, write_settings(folder.parent, strict=False))
    for name, (bits, lines, steps, scalars) in found.items():
        assert bits == plain, name
        assert steps == [0, 1], name
        said = [line for line in lines if "without it" in line]
        assert len(said) == 1, (name, lines)
        assert name in said[0]
        (row,) = [row for row in TABLE if name in row.on]
        assert row.needed_for in said[0]
        assert not LACKING[name] & scalars
        assert "learning_rate" in scalars
