"""Follows one Megatron training: from the events that the launcher or a callback reports to steps of the probe.

Whatever goes wrong in here stays here: every event is guarded, and a probe that cannot be built leaves the training alone.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.settings.schema import ProbeSettings
from msprobe_integrations.megatron.layout import as_list, rank_info, unwrapped
from msprobe_integrations.megatron.optimizers import is_megatron, learning_rate, loss_scale
from msprobe_integrations.megatron.rerun import Rerun
from msprobe_integrations.megatron.source import MegatronSource, find
from msprobe_integrations.torch.probe import TorchProbe

_log = logging.getLogger("msprobe")


class TrainingObserver:
    """One per process.

    Args:
        settings: the probe's settings; the probe itself is built when the model is there (the rank is known then).
        make_probe: builds the probe; for tests.
        file: where the settings come from; followed with ``monitor.hot``.
    """

    def __init__(
        self, settings: ProbeSettings, make_probe: Callable[[ProbeSettings], TorchProbe] = TorchProbe, *, file: str | Path | None = None
    ) -> None:
        self.settings = settings
        self._file = file
        self.probe: TorchProbe | None = None
        self.step = 0
        """Number of the current or next step: optimizer steps from 0, skipped ones counted."""
        self._make_probe = make_probe
        self._broken = False
        self._open = False
        self._driven = 0
        self._models: list[Any] = []
        self._optimizer: Any = None
        self._source: MegatronSource | None = None
        self._scalars: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._rerun = Rerun(lambda: {**self._optimizer_scalars(), **self._scalars}, self._exchange)

    # what is there

    def setup(self, models: Any, optimizer: Any = None) -> None:
        """The model chunks (DDP-wrapped) and the optimizer exist. Called again with other chunks, the newest count."""
        with self._safely("setting up"):
            if self._broken:
                return
            chunks = as_list(models)
            if self._models and all(a is b for a, b in zip(chunks, self._models)) and (optimizer is None or optimizer is self._optimizer):
                return
            self._detach()
            probe = self.probe
            if probe is None:
                probe = self.probe = self._make_probe(self.settings)
                if self._file is not None and self.settings.monitor is not None and self.settings.monitor.hot:
                    probe.follow_file(self._file)
                atexit.register(self.close)
            self._models, self._optimizer = chunks, optimizer
            probe.pipeline.rank_info.update(rank_info())
            self._source = None
            megatron = optimizer is None or is_megatron(optimizer)
            probe.attach([unwrapped(c) for c in chunks], optimizer, find=self._find if megatron else None)
            if optimizer is not None:
                self._wrap_step(optimizer)

    def _find(self, probe: TorchProbe, _models: Sequence[Any], optimizer: Any) -> MegatronSource | None:
        """The source of the wrapped chunks; modules have their names in the unwrapped ones."""
        self._source = find(probe, self._models, optimizer)
        return self._source

    def _wrap_step(self, optimizer: Any) -> None:
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.after_optimizer(result)
            return result

        optimizer.step = step
        self._undo.append(lambda: optimizer.__dict__.pop("step", None) if optimizer.__dict__.get("step") is step else None)

    # steps

    def begin(self, step: int | None = None) -> None:
        """A step begins. Without a number: the one after the last."""
        with self._safely("step begin"):
            if self.probe is None:
                return
            if self._open:
                self.end()
            if step is not None:
                self.step = step
            self._open = True
            self.probe.begin_step(self.step)

    def end(self, scalars: Mapping[str, Any] | None = None) -> None:
        """The step is over."""
        with self._safely("step end"):
            if self.probe is None or not self._open:
                return
            self._open = False
            self._rerun.finish(self.probe, complete=False)
            found = {**self._optimizer_scalars(), **self._scalars, **(scalars or {})}
            self._scalars = {}
            self.probe.end_step(found)
            self.step += 1

    @contextmanager
    def driven(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """A step whose borders are known (`train_step`, a callback): inside, nothing else opens or closes steps. The mapping takes
        the step's scalars."""
        scalars: dict[str, Any] = {}
        self._driven += 1
        if self._driven == 1:
            self.begin(step)
        try:
            yield scalars
        except Exception:
            self.interrupted()
            raise
        finally:
            self._driven -= 1
            if not self._driven:
                self.end(scalars)

    def interrupted(self) -> None:
        """Training raised in this step: what was seen so far is still handed on (and may be what explains it)."""
        with self._safely("step end"):
            if self._open and self.probe is not None:
                self._driven = 0
                self.end({"interrupted": 1.0})
                self.probe.pipeline.advance(wait=True)

    # events within a step

    def forward_backward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a forward-backward function: all micro batches of a step, or an evaluation."""
        if kwargs.get("forward_only"):
            with self.evaluation():
                return function(*args, **kwargs)
        if self.probe is None and "model" in kwargs:
            self.setup(kwargs["model"])
        if not self._open and not self._driven:
            self.begin()
        try:
            result = function(*args, **kwargs)
        except Exception:
            self.interrupted()
            raise
        with self._safely("loss"):
            self._scalars.update(losses(result))
        return result

    def turn(self, machine: Any, run: bool) -> None:
        """Megatron's rerun machine has said whether a pass of the step is to run."""
        with self._safely("second run"):
            if self.probe is not None and self._open:
                self._rerun.turn(self.probe, machine, run)

    def _exchange(self, counts: Any) -> Any:
        return self._source.exchange(counts) if self._source is not None else None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Nothing is seen inside."""
        probe = self.probe
        if probe is None:
            yield
            return
        with self._safely("pause"):
            probe.pause()
        try:
            yield
        finally:
            with self._safely("resume"):
                probe.resume()

    def micro_batch(self, number: Any) -> None:
        """The forward pass of a micro batch begins."""
        if self.probe is not None and isinstance(number, int):
            with self._safely("micro batch"):
                self.probe.micro_step = number

    def after_optimizer(self, result: Any) -> None:
        """Exit of `optimizer.step`; in a loop that we know nothing else of, the end of the step."""
        with self._safely("optimizer"):
            if not self._open:
                return
            if isinstance(result, tuple) and len(result) >= 2:
                self._scalars["skipped"] = 0.0 if result[0] else 1.0
                if result[1] is not None:
                    self._scalars["grad_norm"] = result[1]
            if not self._driven:
                self.end()

    # end

    def close(self) -> None:
        """Take everything off and finish the files."""
        with self._safely("closing"):
            if self._open:
                self.end()
            self._detach()
            if self.probe is not None:
                self.probe.close()
            atexit.unregister(self.close)
        self._broken = True
        self.probe = None

    def _detach(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _optimizer_scalars(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._optimizer is not None:
            rate = learning_rate(self._optimizer)
            if rate is not None:
                found["learning_rate"] = rate
            scale = loss_scale(self._optimizer)
            if scale is not None:
                found["loss_scale"] = scale
        return found

    @contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        try:
            if not self._broken:
                with torch.no_grad():
                    yield
            else:
                yield
        except Exception as error:
            if self.settings.strict:
                raise
            if not self._broken:
                self._broken = True
                _log.error(
                    "the probe is switched off (%s), training goes on: %s: %s (strict: true raises)", what, type(error).__name__, error
                )
                self.probe = None


def losses(result: Any) -> dict[str, Any]:
    """Losses of a step from what a forward-backward function returned: a dict per micro batch, on the last pipeline stage only.

    A value is a number, or a pair (sum, number of tokens) as Megatron's own loss functions give it. The first key is also called
    ``loss``. Works on the device, reads nothing.
    """
    if isinstance(result, Mapping):
        result = [result]
    if not isinstance(result, Sequence) or not result or not isinstance(result[0], Mapping):
        return {}
    found: dict[str, Any] = {}
    for key in result[0]:
        value = _mean([entry[key] for entry in result if key in entry])
        if value is not None:
            found.setdefault("loss", value)
            found[str(key).replace(" ", "_")] = value
    return found


def _mean(values: Sequence[Any]) -> torch.Tensor | None:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            parts = [torch.as_tensor(v).detach().float().reshape(()) for v in value]
            tensors.append(torch.stack(parts))
        elif isinstance(value, (int, float, torch.Tensor)):
            tensors.append(torch.as_tensor(value).detach().float().reshape(-1))
    if not tensors or any(t.shape != tensors[0].shape or t.numel() not in (1, 2) for t in tensors):
        return None
    total = torch.stack(tensors).sum(0)
    return total[0] / total[1] if total.numel() == 2 else total[0] / len(tensors)
