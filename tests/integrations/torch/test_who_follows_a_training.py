"""Who follows a loop of plain torch when others could, and which processes are left alone."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import plain_cases as cases
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.autoload import request
from msprobe_integrations.patching import FunctionPatch
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.loop import LoopObserver
from msprobe_integrations.torch.training.plain.training_detector import TrainingDetector


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for number in range(count):
        model(cases.batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def patches(*names: tuple[Any, str]) -> list[str]:
    """Which of these functions are ours now."""
    code = next(c for c in FunctionPatch.__init__.__code__.co_consts if getattr(c, "co_name", "") == "call_handlers")
    return [name for where, name in names if getattr(vars(where)[name], "__code__", None) is code]


PLACES = ((torch.optim.Optimizer, "__init__"), (nn.Module, "__call__"), (torch.autograd, "backward"))


def test_a_probe_of_the_script_comes_first(tmp_path: Path) -> None:
    """A script that makes a probe itself is not followed a second time, and nothing of the launch stays in its way."""
    with cases.launched() as launch:
        file = tmp_path / "own.yaml"
        file.write_text(f"output_dir: {tmp_path / 'own'}\nmonitor: {{gradients: true}}\nsinks: {{memory: true}}\n")
        probe = TorchProbe.from_config(file)
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe.attach(model, optimizer)
        for number in range(2):
            probe.begin_step(10 + number)
            steps(model, optimizer, 1)
            probe.end_step()
        assert patches(*PLACES) == []
        probe.close()
    assert [frame.step for frame in probe.frames] == [10, 11]
    assert not launch.directory.exists()


def test_changes_of_the_launch_hold_for_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that names the file that the launch line names gets the launch line's changes; nothing is left to warn of."""
    file = tmp_path / "probe.yaml"
    file.write_text("output_dir: elsewhere\nmonitor: {gradients: true}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(request.CONFIG, str(file))
    monkeypatch.setenv(request.CHANGES, f"output_dir={tmp_path / 'here'}\nmonitor.parameters=true")
    try:
        probe = TorchProbe.from_config("probe.yaml")
        probe.close()
        assert probe.settings.output_dir == str(tmp_path / "here")
        assert probe.monitor is not None
        assert probe.monitor.parameters
        asked = request.current()
        assert asked is not None
        assert not request.left_aside(asked)
    finally:
        owner.release()
        request.forget()


def test_a_launch_line_that_is_not_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with another settings file keeps that, and one warning says which file and changes do not count."""
    for name in ("own", "launch"):
        (tmp_path / f"{name}.yaml").write_text(f"output_dir: {tmp_path / name}\nmonitor: {{gradients: true}}\n")
    monkeypatch.setenv(request.CONFIG, str(tmp_path / "launch.yaml"))
    monkeypatch.setenv(request.CHANGES, "monitor.parameters=true")
    said: list[str] = []
    monkeypatch.setattr(owner._log, "warning", lambda text, *values: said.append(text % values))
    try:
        for _ in range(2):
            probe = TorchProbe.from_config(tmp_path / "own.yaml")
            assert probe.settings.output_dir == str(tmp_path / "own")
            probe.close()
    finally:
        owner.release()
        request.forget()
    (line,) = said
    assert f"{tmp_path / 'launch.yaml'} monitor.parameters=true" in line


def test_who_knows_more_takes_over() -> None:
    """An integration that sees the training later and knows more of it follows it from then on; ours takes everything off."""

    def make(settings: ProbeSettings, _: Path) -> LoopObserver:
        return LoopObserver(settings)

    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(model, optimizer)
        probe = owner.current().probe  # type: ignore[union-attr]
        assert probe is not None
        assert patches(*PLACES) == ["__init__", "backward"]
        assert owner.claim("transformers", make) is not None
        assert probe.closed
        assert patches(*PLACES) == []
        assert "_compiled_call_impl" not in model.__dict__
        steps(model, optimizer)
    assert [frame.step for frame in probe.frames] == [0, 1]
    assert not launch.frames  # those of the other, which was told nothing


def test_who_knows_more_is_there_already() -> None:
    """When a Trainer follows the training before its first pass, ours stands back for good."""
    with cases.launched():
        owner.claim("lightning", lambda settings, _: LoopObserver(settings))
        model = cases.two()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert TrainingDetector.current is not None
        assert TrainingDetector.current.stood_back
        assert patches(*PLACES) == []


def test_forked_children() -> None:
    """A child that is forked from a training is none: its calls of the model are no steps, and it has no patches."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(model, optimizer)
        child = os.fork()
        if child == 0:
            steps(model, optimizer, 3)
            os._exit(0 if patches(*PLACES) == [] and "_compiled_call_impl" not in model.__dict__ else 1)
        assert os.waitpid(child, 0)[1] == 0
        steps(model, optimizer, 1)
    assert [frame.step for frame in launch.frames] == [0, 1, 2]


def test_models_are_not_kept_alive() -> None:
    """A model and an optimizer that the script lets go of, before or while it is followed by another, are gone."""
    with cases.launched():
        model = cases.two()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        entry = model.__dict__["_compiled_call_impl"]
        assert entry._module() is model
        one = cases.two(7)
        other = weakref.ref(one)
        torch.optim.SGD(one.parameters(), lr=0.1)
        del one
        gc.collect()
        assert other() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Forward passes that are done again within the backward pass are no passes of the loop, also of a model that is wrapped whole."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            data = cases.batch(number).requires_grad_()
            checkpoint(model, data, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(launch.frames) == 3
    assert [loss is not None for loss in launch.scalars("loss")] == [not reentrant, True, True]  # found within the first backward pass
    for frame in launch.frames:
        assert len(cases.names(frame, "grad_reduced")) == 4


def test_an_error_in_an_update_is_the_script_s() -> None:
    """An update that raises, and is tried again, is one step; the exception reaches the script as it is."""

    class Fails(torch.optim.SGD):
        left = 1

        def step(self, closure: Any = None) -> Any:
            if self.left:
                self.left -= 1
                raise KeyError("as it is")
            return super().step(closure)

    with cases.launched() as launch:
        model = cases.two()
        optimizer = Fails(model.parameters(), lr=0.1)
        model(cases.batch(0)).mean().backward()
        with pytest.raises(KeyError, match="as it is"):
            optimizer.step()
        optimizer.step()
        steps(model, optimizer, 2)
    assert len(launch.frames) == 3
