"""`TorchProbe.attempts`: a training step that runs once, and a second time with everything captured when a rule fires in it.

for step, batch in enumerate(data):
    for attempt in probe.attempts(step, reset=optimizer.zero_grad):
        loss = forward_backward(batch)
    optimizer.step()
    probe.end_step({"loss": loss})

The second run starts from the first one's random state and module buffers and ends with the first one's random state, so that a
deterministic body leaves the training as if it had run once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.rerun_check import AT_ONCE, RerunCheck
from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.ranks.step_exchange import StepExchange
from msprobe_integrations.common.ranks.tree import Lane, Words
from msprobe_integrations.torch.capture.recorder import no_torch_function
from msprobe_integrations.torch.monitor.step_rerun import StepRerun, seen_so_far
from msprobe_integrations.torch.ranks.job import job_store

_log = get_logger()
_PART = "attempts"
_RANKS = 1 << 31
MEETING = 3.0
"""Seconds that the first step waits for the other ranks' first step; where not all come, none of them tries steps again."""
PATIENCE = 1800.0
"""After so many seconds without an answer of every rank, steps run once from then on."""


class _Vote:
    """Of one rank in one step, and the highest of all ranks once that is known."""

    lane = identity = 0

    def __init__(self, number: int, vote: int) -> None:
        self.number, self.vote = number, vote
        self.apart = ""
        self.missing = False
        self.highest: int | None = None

    def words(self) -> Words:
        return np.array([self.vote], np.int64)


class _Votes(StepExchange):
    """The highest vote of all ranks."""

    def __init__(self) -> None:
        super().__init__(job_store(), range(dist.get_world_size()), dist.get_rank(), "attempts", limit=2)
        self._steps = 0

    def highest(self, vote: int) -> int:
        """Waits for the others, which may take as long as their step does; not for one that has left.

        Raises:
            RuntimeError: there is no agreement any more.
        """
        self._steps += 1
        own = _Vote(self._steps, vote)
        self.submit(own)
        while own.highest is None:
            if self.failed or own.apart or self.silent_for(PATIENCE):
                raise RuntimeError(f"not all ranks use attempts any more ({self.failed or own.apart or 'one does not answer'})")
            time.sleep(0.0002)
        return own.highest

    def _make_lanes(self) -> list[Lane]:
        return [Lane(self._shape, np.maximum)]

    def _receive(self, item: _Vote, words: Words) -> None:
        item.highest = int(words[0])


class RerunOnAlert:
    """The attempts of one probe. Made at the first step, on all ranks: it connects them, and waits `MEETING` seconds for them.

    Args:
        models: whose gradients and buffers are looked after.
    """

    def __init__(self, probe: Probe, models: list[nn.Module]) -> None:
        self._probe = probe
        self._judge = RerunCheck(probe.settings)
        self._votes: _Votes | None = None
        self._parameters = [
            (chunk, name.removeprefix("module."), parameter)
            for chunk, model in enumerate(models)
            for name, parameter in model.named_parameters()
        ]
        self._buffers = [(m._buffers, name) for model in models for m in model.modules() for name in m._buffers]
        self.alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if not self.alone:
            with no_torch_function():
                self._meet()

    def _meet(self) -> None:
        votes = _Votes()
        if not votes.meet(MEETING):
            why = votes.missing or votes.failed or "not all of them have come"
            votes.close("has waited for the others in vain")
            raise RuntimeError(f"not all ranks use attempts, so steps run once ({why})")
        self._votes = votes

    def close(self) -> None:
        """Leave the other ranks, which hear of it."""
        votes, self._votes = self._votes, None
        if votes is not None:
            votes.close()

    def run(self, reset: Callable[[], Any] | None) -> Iterator[int]:
        """The numbers of the attempts, 0 and perhaps 1; see `TorchProbe.attempts`."""
        probe = self._probe
        state: _State | None = None
        with probe.guard(_PART):
            state = _State(probe, self._buffers)
        yield 0
        vote = 0
        first: Frame | None = None
        alerts: list[Alert] = []
        with probe.guard(_PART), torch.no_grad(), no_torch_function():
            first, alerts = self._judge_first_run()
        with probe.guard("agreement on a second run"), torch.no_grad(), no_torch_function():
            vote = self._highest(self._vote(alerts))  # also when something failed above: the other ranks wait for this one
        if not vote:
            return
        second: StepRerun | None = None
        ended: Any = None
        with probe.guard(_PART), torch.no_grad(), no_torch_function():
            probe.scheduler.pause()
            probe.count_micro_steps_again()
            ended = probe.backend.random_state()
            if first is not None:
                second = self._second(vote, first, alerts)
            if state is not None:
                state.restore()
        if reset is not None:
            reset()  # the user's: what it raises is the user's too
        with probe.guard(_PART):
            if second is not None:
                second.begin()
        finished = False
        try:
            yield 1
            finished = True
        finally:
            with probe.guard(_PART), torch.no_grad(), no_torch_function():
                same = _same(probe.backend.random_state(), ended)
                if finished and ended is not None:
                    probe.backend.set_random_state(ended)
                if second is not None:
                    verdict = second.end(finished, {"random_equal": same}, self._gradients())
                    _log.warning("step %d ran twice: %s", probe.step, verdict)
                else:
                    probe.scheduler.resume()

    def _judge_first_run(self) -> tuple[Frame, list[Alert]]:
        """What the first attempt has shown, and what is wrong with it."""
        probe = self._probe
        first = seen_so_far(probe, self._gradients(), self._loss_scale())
        probe.pipeline.advance()  # the rows of steps before have arrived too: their incidents come first
        return first, self._judge.check(first)

    def _vote(self, alerts: list[Alert]) -> int:
        """The graver the rule and the lower the rank, the higher; 0 without a reason to run again."""
        incidents = self._probe.session.incidents
        if not alerts or alerts[0].severity != "critical" or incidents is None or not incidents.may_rerun(self._probe.step):
            return 0
        return (1 + AT_ONCE.index(alerts[0].rule)) * _RANKS + (_RANKS - 1 - (self._probe.backend.rank() or 0))

    def _second(self, vote: int, first: Frame, alerts: list[Alert]) -> StepRerun:
        probe = self._probe
        rule, by = AT_ONCE[vote // _RANKS - 1], _RANKS - 1 - vote % _RANKS
        fired = bool(alerts) and alerts[0].severity == "critical"
        message = alerts[0].message if fired else f"{rule} fired on rank {by}"
        event = Event(f"step{probe.step}-{rule}", probe.step, rule, by, probe.step, message[:500])
        probe.pipeline.alert(alerts)
        return StepRerun(probe, self._judge, first, fired=fired, event=event, alerts=alerts)

    def _highest(self, vote: int) -> int:
        if self._votes is None:
            return vote if self.alone else 0
        try:
            return self._votes.highest(vote)
        except Exception:
            self.close()  # a rank is gone, or does not take part: no agreement any more
            raise

    def _gradients(self) -> list[Sample]:
        """Gradients as they are now. Those that the optimizer gets unchanged are not read again when they are sampled there."""
        reduce = self._probe.backend.reduce
        return [
            Sample("grad_reduced", name, reduce(p.grad), "reduced", -1, chunk) for chunk, name, p in self._parameters if p.grad is not None
        ]

    def _loss_scale(self) -> dict[str, float]:
        """As of the last step: with one, NaN in gradients is no incident."""
        incidents = self._probe.session.incidents
        frames = incidents.ring.last() if incidents is not None else None
        return {k: v for k, v in frames.scalars.items() if k == "loss_scale"} if frames is not None else {}


class _State:
    """What an attempt starts from: random state and buffers (running statistics, counters); taken without a wait."""

    def __init__(self, probe: Probe, buffers: list[tuple[dict[str, torch.Tensor | None], str]]) -> None:
        self._backend = probe.backend
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad(), no_torch_function():
            self._random = probe.backend.random_state()
            for owner, name in buffers:
                tensor = owner.get(name)
                if tensor is not None and tensor.numel():
                    self._buffers.append((owner, name, tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Go back to it."""
        self._backend.set_random_state(self._random)
        for owner, name, tensor, value in self._buffers:
            tensor.copy_(value)
            owner[name] = tensor


def _same(first: Any, second: Any) -> bool:
    """Equal random states?"""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return isinstance(second, dict) and first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return (
            isinstance(second, (list, tuple))
            and len(first) == len(second)
            and all(_same(first_item, second_item) for first_item, second_item in zip(first, second))
        )
    return bool(first == second)
