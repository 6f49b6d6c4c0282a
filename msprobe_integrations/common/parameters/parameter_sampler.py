"""Takes every family of the parameter side at the moments that a source reports.

===========  ====================  ===============================================================================
phase        family                of what
===========  ====================  ===============================================================================
local        grad_unreduced        one micro batch's gradient, before it is added to others
accumulated  grad_unreduced        sum over micro batches on this rank, before the reduction over ranks
reduced      grad_reduced          after the reduction; still carries the loss scale where there is one
unscaled     grad_reduced          without the loss scale
clipped      grad_reduced          as the optimizer gets it, where gradients were clipped
===========  ====================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msprobe_engine.core.guard import Guard, raise_of_training
from msprobe_engine.core.records import FINER_COPY, FROZEN, LEFT_OPTIMIZER, NO_GRADIENT, NO_OPTIMIZER, Sample
from msprobe_integrations.common.parameters.gradients import ACCUMULATED, LOCAL, REDUCED, Get, Piece, Pieces, Row
from msprobe_integrations.common.parameters.source import ParameterValues
from msprobe_integrations.common.parameters.updates import Updates

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.parts import ProbeBase
    from msprobe_integrations.common.ranks.replicas import ReplicaCheck

GRADIENTS, UNREDUCED, MICRO = "monitor.gradients", "monitor.unreduced_gradients", "monitor.micro_batch_gradients"
PARAMETERS, STATES, UPDATES = "monitor.parameters", "monitor.optimizer_states", "monitor.updates"
AGREEMENT = "monitor.momentum_agreement"
OWN_FAMILIES = frozenset(("exp_avg", "exp_avg_sq"))
"""States that are a family of their own; all others are ``opt_state``."""
_ALL: set[Piece] = set()
_OF_AN_ATTEMPT = ("phase", "_taken", "_noted", "_micro", "_micro_seen", "_changed", "_readied", "_samples")


class ParameterSource(ParameterValues, Protocol):
    """`ParameterValues`, and when an update begins and ends."""

    def connect(self, watch: ParameterSampler) -> None:
        """Put on what is needed as long as the watch lives: the borders of an update. Calls `watch.before_step`, `watch.ready`,
        `watch.after_step`."""
        ...

    def open(self) -> None:
        """A monitored step begins: put on what only such steps need (hooks on single parameters). Called again in the next one."""
        ...

    def shut(self) -> None:
        """The next step is not monitored: take off what `open` put on."""
        ...

    def close(self) -> None:
        """Take everything off."""
        ...


class ParameterSampler:
    """One per source. A fault in a family switches that family off and nothing else.

    Args:
        probe: owner; its monitor settings say what is watched.
        source: where things are. `connect` is called here.

    Attributes:
        on_begin: called when a step begins, monitored or not.
        on_update: called after every update of the optimizer with True when it was skipped; for loops that take an update for a step.
        replicas: told of every update; None: nobody compares replicas.
        owned: names of the parameters that have been in an optimizer.
        entry_only: gradients are taken only at the entry of the optimizer's step, under the phase they have reached by then.
        idle: monitored steps that have ended since the last update; -1 before the first.
        in_place: between the backward pass and the update gradients change without a new version (a reduction over ranks).
    """

    def __init__(self, probe: ProbeBase, source: ParameterSource) -> None:
        monitor = probe.monitor
        assert monitor is not None
        self.on_begin: Callable[[], None] | None = None
        self.on_update: Callable[[bool], None] | None = None
        self.replicas: ReplicaCheck | None = None
        self.owned: set[str] = set()
        self.entry_only = False
        self.idle = -1
        self.in_place = True
        self.source = source
        self._probe = probe
        self._pieces = Pieces(probe)
        self._updates = Updates(probe, self._pieces, source)
        self._phases = frozenset(monitor.gradient_phases)
        self._states_before = monitor.states_when == "before"
        self._open = False
        self._copies_noted = False
        self._due = False
        self._unreduced_on = self._micro_on = False
        self._samples: list[Sample] | None = None
        self._aside: tuple[dict[str, Any], Any] | None = None
        self._fresh()
        source.connect(self)

    def _fresh(self) -> None:
        """What belongs to one step, or to one attempt at it."""
        self.phase = REDUCED
        self._taken: dict[str, set[Piece]] = {}
        self._noted: dict[Piece, tuple[Row, str, int, bool]] = {}
        self._micro = 0
        self._micro_seen: set[Piece] = set()
        self._changed = self._readied = False
        self._pieces.forget()
        self._updates.fresh()
        self._samples = self._probe.pipeline.samples

    def _swap_attempts(self) -> None:
        """The step runs a second time, or its first run is gone on with."""
        present = {name: getattr(self, name) for name in _OF_AN_ATTEMPT}
        merges = self._pieces.exchange()
        aside, self._aside = self._aside, (present, merges)
        self._fresh()
        if aside is not None and aside[0]["_samples"] is self._samples:
            vars(self).update(aside[0])
            self._pieces.exchange(aside[1])

    def begin_step(self, due: bool) -> None:
        """A step begins; `due`: it is monitored."""
        if self.on_begin is not None:
            self.on_begin()
        self._due = due
        if not due:
            self._shut()
            return
        self._fresh()
        self._aside = None
        settings, faults = self._probe.monitor, self._probe.faults
        assert settings is not None
        self._unreduced_on = settings.unreduced_gradients and faults.is_enabled(UNREDUCED)
        self._micro_on = settings.micro_batch_gradients and faults.is_enabled(MICRO)
        self._open = True
        self.source.open()

    def _shut(self) -> None:
        if self._open:
            self._open = False
            self.source.shut()

    @property
    def active(self) -> bool:
        """True in a monitored step, outside of pauses."""
        if not self._due or self._probe._paused:
            return False
        if self._samples is not self._probe.pipeline.samples:
            self._swap_attempts()
        return True

    @property
    def awake(self) -> bool:
        """The entry of the next update is wanted: by the families, or to compare replicas."""
        return self.active or (self.replicas is not None and self.replicas.due(self.source))

    def guard(self, part: str) -> Guard:
        return self._probe.guard(part)

    def micro_gradient(self, piece: Piece, gradient: Any, phase: str = LOCAL, micro_step: int = -1, part: bool = False) -> None:
        """The gradient of one micro batch (``micro_batch_gradients``). -1: numbered by the probe, or by how often it came.

        Args:
            part: as of `sample_unreduced`.
        """
        if self._micro_on and self.active:  # called for every parameter: nothing here but what it takes
            try:
                with self._probe.unseen():
                    number = self._number(piece) if micro_step < 0 else micro_step
                    ref, histogram = self._pieces.reduce("grad_unreduced", piece, gradient, part)
                    self._pieces.add("grad_unreduced", piece, ref, phase=phase, micro_step=number, part=part, histogram=histogram)
            except Exception as error:
                raise_of_training(error)
                self._micro_on = False
                self._probe.faults.fail(MICRO, error)

    def no_more_micro_batches(self) -> None:
        """For the rest of this step."""
        self._micro_on = False

    def sample_unreduced(self, piece: Piece, gradient: Any, phase: str = ACCUMULATED, micro_step: int = -1, part: bool = False) -> None:
        """This rank's gradient before the reduction (``unreduced_gradients``). The last one of a step counts.

        Args:
            part: `gradient` is of this rank's part of the piece (other ranks hold the rest of the same gradient), not of the whole.
        """
        if self._unreduced_on and self.active:
            try:
                with self._probe.unseen():
                    if self.in_place:
                        self._changed = True
                    self._noted[piece] = self._pieces.reduce("grad_unreduced", piece, gradient, part), phase, micro_step, part
            except Exception as error:
                raise_of_training(error)
                self._unreduced_on = False
                self._probe.faults.fail(UNREDUCED, error)

    def no_sum(self, piece: Piece) -> None:
        """What `sample_unreduced` got of this piece in this step is no sum over micro batches."""
        self._noted.pop(piece, None)

    def change_to(self, phase: str) -> None:
        """Something is about to change the gradients in place; afterwards they are in `phase`. They are taken as they are if the phase
        they are in is wanted."""
        if self.active:
            if phase != self.phase and not self.entry_only:
                self._take_gradients(None)
            self._changed = True
        self.phase = phase

    def before_step(self) -> None:
        """Entry of the update: gradients in the present phase, parameters."""
        if self.active:
            if not self._copies_noted:
                self._copies_noted = True
                self._note_copies()
            self._take_gradients(None)
            self._sample_part(PARAMETERS, "param_origin", self.source.pieces, self.source.value)
            self._note_untrained()
        if self.replicas is not None:
            self.replicas.before_update(self.source, self.active)

    def ready(self, pieces: Sequence[Piece] | None = None) -> None:
        """Gradients and states are what the update will use: gradients in the present phase, states before, agreement.

        Args:
            pieces: those of which this is true by now, each once a step; None: all.
        """
        if not self.active:
            return
        if not self.entry_only:
            self._take_gradients(pieces)
        self._readied = True
        chosen = self.source.pieces if pieces is None else pieces
        if self._states_before:
            self._take_states(chosen)
        if self._probe.wanted(AGREEMENT):
            with self._probe.guard(AGREEMENT), self._probe.shield(), self._probe.backend.batched():
                self._updates.agreement(chosen)

    def sample_updates(self, pieces: Sequence[Piece] | None = None) -> None:
        """The inner update of these pieces (None: all that have not been named in this step) is done, gradients are still there:
        update and ratio."""
        if self.active and self._probe.wanted(UPDATES):
            with self._probe.guard(UPDATES), self._probe.shield(), self._probe.backend.batched():
                self._updates.sample_updates(pieces)

    def after_step(self, skipped: bool | Any = False) -> None:
        """The update is done, or was skipped (a tensor: 0 or 1, read at once only where that waits for nothing): parameters, states,
        update and ratio. Calls `on_update`."""
        if not isinstance(skipped, bool) and self._probe.at_hand(skipped):
            skipped = bool(skipped)
        sure = skipped is True
        self.idle = 0
        if self.active:
            if not sure:
                self._probe.backend.forget()  # fused updates leave version counters as they are
                self.sample_updates()
            self._sample_part(PARAMETERS, "param_updated", self.source.pieces, self.source.value)
            if not self._states_before or not self._readied:  # a skipped update may not have come to its inner step
                self._take_states(self.source.pieces)
        self.scalar("skipped", float(skipped) if isinstance(skipped, bool) else skipped)
        if not isinstance(skipped, bool) and self.active:
            self._pieces.only_unless(self._probe.pipeline.read_scalar("skipped"), ("update", "ratio"))
        if self.replicas is not None:
            self.replicas.after_update(self.source, self.active)
        self.phase = REDUCED
        if self.on_update is not None:
            self.on_update(sure)

    def scalar(self, name: str, value: Any) -> None:
        """A number of this step; one that is given to `end_step` of the probe replaces it. What is on a device is read in monitored steps
        only, other numbers are known for nothing and noted in all."""
        probe = self._probe
        if self.active or (probe._in_step and not probe._paused and getattr(getattr(value, "device", None), "type", "cpu") == "cpu"):
            with probe.guard(f"scalar {name}"), probe.shield():
                probe.pipeline.scalar(name, value)

    def end_step(self, again: bool = True) -> None:
        """The step is over: merges over ranks are handed on.

        Args:
            again: the next step is monitored too.
        """
        if not self._due:
            return
        if self.active:
            self._emit_unreduced()
        with self._probe.guard("merge over ranks"):
            if self._probe.faults.is_enabled("merge over ranks"):
                self._pieces.flush(self._probe.step)
        self._due = False
        if not again:
            self._shut()

    def close(self) -> None:
        """Take everything off; the probe goes on without it."""
        self.end_step(again=False)  # what is noted of a step that goes on has to be merged
        self.on_begin = self.on_update = None
        self.source.close()

    def _note_copies(self) -> None:
        """Where the optimizer updates a finer copy the parameter itself may stay the same for many steps: rules have to know."""
        with self._probe.guard(PARAMETERS), self._probe.unseen():
            for piece in self.source.pieces:
                main, parameter = self.source.main(piece), piece.parameter
                if main is not None and self._probe.finer(main, parameter):
                    piece.add_fact(FINER_COPY, str(main.dtype))

    def _note_untrained(self) -> None:
        """Parameters that the update passes by: without a gradient, or in no optimizer (any more)."""
        if not self._probe.wanted(GRADIENTS):
            return
        owned = getattr(self.source, "owned", set)
        with self._probe.guard("untrained parameters"), self._probe.shield():
            held: set[Piece] = owned()
            untrained, before = self._probe.pipeline.untrained, self.owned
            for piece in self.source.pieces:
                name = f"{piece.name} (vpp stage {piece.vpp_stage})" if piece.vpp_stage else piece.name
                if self.source.gradient(piece) is None:
                    if piece in held or name in before or not held:  # else nobody means to train it, as a teacher's
                        untrained[name] = NO_GRADIENT if piece.parameter.requires_grad else FROZEN
                elif piece in held:
                    before.add(name)
                elif name in before:
                    untrained[name] = LEFT_OPTIMIZER
                elif held:
                    untrained[name] = NO_OPTIMIZER

    def _emit_unreduced(self) -> None:
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        with self._probe.guard(UNREDUCED):
            for piece, ((ref, histogram), phase, micro_step, part) in noted.items():
                self._pieces.add("grad_unreduced", piece, ref, phase=phase, micro_step=micro_step, part=part, histogram=histogram)

    def _take_gradients(self, pieces: Sequence[Piece] | None) -> None:
        """In the present phase: of every piece once in a step."""
        self._emit_unreduced()
        phase = self.phase
        if (phase not in self._phases and not self.entry_only) or not self._probe.wanted(GRADIENTS):
            return
        if self._changed:
            self._probe.backend.forget()
            self._changed = False
        taken = self._taken.get(phase)
        if pieces is None and taken is None:
            chosen = self.source.pieces
            self._taken[phase] = _ALL
        elif taken is _ALL:
            return
        else:
            taken_pieces = self._taken.setdefault(phase, set())
            chosen = [piece for piece in (self.source.pieces if pieces is None else pieces) if piece not in taken_pieces]
            taken_pieces.update(chosen)
        with self._probe.guard(GRADIENTS), self._probe.shield():
            self._pieces.take_all("grad_reduced", chosen, self.source.gradient, phase=phase)

    def _sample_part(self, part: str, family: str, pieces: Sequence[Piece], get: Get) -> None:
        if self._probe.wanted(part):
            with self._probe.guard(part), self._probe.shield():
                self._pieces.take_all(family, pieces, get)

    def _take_states(self, pieces: Sequence[Piece]) -> None:
        if not self._probe.wanted(STATES):
            return
        with self._probe.guard(STATES), self._probe.shield(), self._probe.backend.batched():
            for piece in pieces:
                for name, tensor in self.source.states(piece).items():
                    row = self._pieces.reduce(name if name in OWN_FAMILIES else "opt_state", piece, tensor, True)
                    ref, histogram = row
                    if name in OWN_FAMILIES:
                        self._pieces.add(name, piece, ref, part=True, histogram=histogram)
                    else:
                        self._pieces.add("opt_state", piece, ref, part=True, histogram=histogram, extra={"state": name}, state=name)

    def _number(self, piece: Piece) -> int:
        """Micro batches are counted by the probe, or else a new one has begun when a piece comes the second time."""
        number = self._probe.micro_step
        if number >= 0:
            return number
        if piece in self._micro_seen:
            self._micro += 1
            self._micro_seen.clear()
        self._micro_seen.add(piece)
        return self._micro
