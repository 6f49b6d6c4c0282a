"""One rank, one step: where does something non-finite come from that was not there before?

An *origin* is a call at which a NaN (or an infinity that no mask put there) shows up without having been seen earlier on this
rank. Infinities written on purpose (masked_fill, where, full, triu, ...) are followed as *masked*: they are no fault as long as
they are swallowed, as softmax does, and a NaN born from them is the fault of the call that made NaN of them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.operator_traits import FILLS, MOVES, UNINITIALISED, normal_op
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.nonfinite.flags import FINITE, INF, NAN, NONFINITE, POS_INF, UNKNOWN, Call, TensorFact, Trace
from msprobe_engine.find.nonfinite.trace import is_interesting

SIGN_FLIPS = frozenset(("neg", "mul", "rmul", "sub", "rsub", "abs", "div", "truediv", "multiply"))
"""Operations that may turn the -inf of a mask into +inf without anything being wrong."""
SAME_EVERYWHERE = frozenset(("allreduce", "broadcast"))
"""Collectives after which all ranks go on with the same, so that one rank tells what became of it. After others they go on with different
parts: all-to-all, or all-gather and a choice of tokens."""
_GARBAGE = frozenset(map(normal_op, (*UNINITIALISED, "resize_")))
"""Operations whose output is whatever the memory held."""
POISONS = frozenset(("full", "fulllike", "newfull"))
"""Operations that make new memory with one value."""
_MENDS = "nantonum"
"""The operation with which a training takes NaN and Inf out of its gradients."""


@dataclass
class NonFiniteOrigin:
    """A suspect on one rank.

    Attributes:
        position: time on the rank: the call's index, or half a step before it when the value arrived from outside the record.
        cause: ``operator``, ``module``, ``gradient``, ``collective`` (born inside it), ``missing`` (a rank without a dump may have
            sent it), ``parameter``, ``data``, ``unrecorded`` or ``sample``.
        flags: NaN/Inf bits that appeared.
        facts: the tensors in which they appeared.
        swallowed: it was gone again before the next origin or the end.
        spread: indices of the calls that carried it on, in order.
    """

    rank: int
    position: float
    cause: str
    call: Call
    flags: int
    facts: list[TensorFact]
    notes: list[str] = field(default_factory=list)
    swallowed: bool = False
    spread: list[int] = field(default_factory=list)


@dataclass
class Scan:
    """All origins of one rank in order, and which infinities were taken for masks."""

    trace: Trace
    origins: list[NonFiniteOrigin] = field(default_factory=list)
    masked: set[int] = field(default_factory=set)
    """Indices of calls whose infinite outputs are masks."""
    bad: set[int] = field(default_factory=set)
    """Indices of calls that hold something bad on either side."""


Arrival = Callable[[Call], "tuple[str, list[int]]"]
"""What a communication call with clean inputs and a bad output means: ("brought", ranks), ("masked", ranks), ("missing", ranks)
or ("born", [])."""


def scan(trace: Trace, arrival: Arrival, *, follow_masks: bool = True) -> Scan:
    """Find the origins of one rank.

    Args:
        arrival: explains communication calls, see `Arrival`.
        follow_masks: treat infinities of `FILLS` as intended. False: every infinity counts.
    """
    return _Scanner(trace, arrival, follow_masks).run()


class _Scanner:
    def __init__(self, trace: Trace, arrival: Arrival, follow_masks: bool) -> None:
        self.trace = trace
        self.arrival = arrival
        self.follow_masks = follow_masks
        self.result = Scan(trace)
        self.masked_values: set[tuple[str, ...]] = set()
        self.bad_values: set[tuple[str, ...]] = set()
        self.masks_alive = False
        self.nan_seen = False
        self.inf_seen = False
        self.garbage: Call | None = None
        self.last_was_swallow = False
        self.brought = False
        self.inside_bad: set[str] = set()
        self.inside_masked: set[str] = set()
        self.handing_over: set[str] = set()

    def run(self) -> Scan:
        for call in self.trace.calls:
            if is_interesting(call):
                self._scan_call(call)
        for origin, after in zip(self.result.origins, [*self.result.origins[1:], None]):
            last = origin.spread[-1] if origin.spread else None
            if last is not None:
                handed_on = any(
                    self.trace.calls[i].kind == "collective" and self.trace.calls[i].name in self.handing_over for i in origin.spread
                )
                origin.swallowed = self._swallows(self.trace.calls[last]) and not handed_on
            elif after is not None and not origin.flags & NAN:
                # an infinity that nothing recorded took up, and the next fault started from clean inputs
                origin.swallowed = True
        if any(origin.swallowed for origin in self.result.origins):
            self._keep_what_training_takes()
        return self.result

    def _keep_what_training_takes(self) -> None:
        """An infinite loss, and gradients of parameters, count whatever becomes of numbers that are made of them, such as a norm."""
        calls = self.trace.calls
        losses = _starts_of_backward(self.trace)
        end = max((call.index for call in calls if call.direction == "backward"), default=len(calls))
        for origin in self.result.origins:
            carried = [origin.call.index, *origin.spread]
            last = calls[carried[-1]]
            of_gradients = last.index > end and normal_op(last.op) != _MENDS and any(calls[i].direction == "backward" for i in carried)
            if of_gradients or not losses.isdisjoint(carried):
                origin.swallowed = False

    def _scan_call(self, call: Call) -> None:
        if (normal_op(call.op) in _GARBAGE or _poisons(call)) and not call.in_flags & NONFINITE:
            self.garbage = call
            return
        bad_in = self._bad_inputs(call)
        bad_params = [fact for fact in call.parameter_facts() if fact.flags & NONFINITE] if call.parameter_flags & NONFINITE else []
        bad_out, masked_out = self._bad_outputs(call, bool(bad_in or bad_params))
        bits = _bits(bad_in) | _bits(bad_params)
        out_bits = _bits(bad_out)
        if masked_out:
            self.masks_alive = True
            self.result.masked.add(call.index)
            self.masked_values.update(fact.fingerprint() for fact in masked_out)
            self.inside_masked.update(self.trace.ancestors(call))
        if not bits and not out_bits:
            return
        carried = bool(self.result.origins)
        if bits and not self._is_explained(bits) and call.kind == "api" and call.direction == "forward" and call.op in MOVES:
            # Bits from nowhere that are only handed on: a buffer made before the record began holds garbage until it is written, and
            # may never be read. An operation that computes with them is met later and tells.
            return
        self.result.bad.add(call.index)
        if bits and call.kind == "collective" and normal_op(call.op) not in SAME_EVERYWHERE:
            self.handing_over.update((call.name, *self.trace.ancestors(call)))
        if bits and not self._is_explained(bits):
            self._add_incoming_origin(call, bad_in, bad_params)
            carried = False
        if out_bits and not bits:
            carried = not self._born(call, bad_out)
            if carried and call.kind == "collective" and self._is_swallowed():
                self.brought = True  # what follows came from a peer, not from the last origin
        if carried and self.result.origins and not self.brought:
            self.result.origins[-1].spread.append(call.index)
        self.inside_bad.update(self.trace.ancestors(call))
        if bad_out:
            self.nan_seen = self.nan_seen or bool(out_bits & NAN)
            self.inf_seen = self.inf_seen or bool(out_bits & INF)
            self.bad_values.update(fact.fingerprint() for fact in bad_out if fact.flags & INF)
        self.last_was_swallow = self._swallows(call)

    def _bad_inputs(self, call: Call) -> list[TensorFact]:
        if not call.in_flags & NONFINITE:
            return []
        return [fact for fact in call.inputs() if fact.flags & NAN or (fact.flags & INF and not self._is_masked(fact))]

    def _is_masked(self, fact: TensorFact) -> bool:
        """Is the infinity in this input one that a mask put there?"""
        if not self.follow_masks:
            return False
        print_ = fact.fingerprint()
        if print_ in self.bad_values:
            return False
        if print_ in self.masked_values:
            return True
        # unknown producer (an unrecorded view, a mask given from outside): -inf is a mask unless a computed one is about
        return not fact.flags & POS_INF and (self.masks_alive or not self.inf_seen)

    def _bad_outputs(self, call: Call, bad_in: bool) -> tuple[list[TensorFact], list[TensorFact]]:
        if not call.out_flags & NONFINITE:
            return [], []
        bad: list[TensorFact] = []
        masked: list[TensorFact] = []
        op = normal_op(call.op)
        signs = INF if op in SIGN_FLIPS and call.in_flags & INF else call.in_flags & INF
        for fact in call.outputs():
            if not fact.flags & NONFINITE:
                continue
            intended = (
                self.follow_masks
                and not fact.flags & NAN
                and not bad_in
                and (
                    not fact.flags & INF & ~signs
                    or (op in FILLS and call.kind == "api")
                    or (call.kind == "module" and call.name in self.inside_masked and call.name not in self.inside_bad)
                    or (call.kind == "collective" and self.arrival(call)[0] == "masked")
                )
            )
            (masked if intended else bad).append(fact)
        return bad, masked

    def _is_explained(self, bits: int) -> bool:
        """Were these bits seen in an earlier output of this rank, so that a carrier explains them?"""
        return self.nan_seen or (self.inf_seen and not self.last_was_swallow) or (bool(bits & INF) and self.inf_seen)

    def _is_swallowed(self) -> bool:
        """Was the last origin's value swallowed by now?"""
        spread = self.result.origins[-1].spread if self.result.origins else []
        return bool(spread) and self._swallows(self.trace.calls[spread[-1]])

    def _swallows(self, call: Call) -> bool:
        if call.name in self.handing_over:
            return False  # another rank has it now
        bad_in = (call.in_flags | call.parameter_flags) & NONFINITE
        return bool(bad_in and not call.out_flags & (NONFINITE | UNKNOWN) and call.out_flags & FINITE)

    def _born(self, call: Call, bad_out: list[TensorFact]) -> bool:
        """Clean inputs, bad output. True when the call is an origin, False when something inside it or a peer explains it."""
        notes: list[str] = []
        cause = {"api": "operator", "collective": "collective"}.get(call.kind, call.kind)
        if call.name in self.inside_bad:  # a module, or a function of the user's that calls others
            return False
        if call.kind == "collective":
            kind, ranks = self.arrival(call)
            if kind == "brought":
                return False
            if kind == "missing":
                cause = "missing"
                notes.append(Sentence("its group holds ranks without a dump ({0}): the value may come from there", _ranks(ranks)))
        if call.in_flags & INF and _bits(bad_out) & NAN:
            where = [fact.place for fact in call.inputs() if fact.flags & INF]
            notes.append(
                Sentence("{0} holds infinities of a mask; this call turned them into NaN (a row masked completely?)", ", ".join(where))
            )
        if call.in_flags & UNKNOWN:
            notes.append(Sentence("some inputs have no statistics in the dump"))
        for place, value in call.literals():
            notes.append(Sentence("the call was given {0} as {1}", value, place))
        self._add(call.index, cause, call, bad_out, notes)
        return True

    def _add_incoming_origin(self, call: Call, bad_in: list[TensorFact], bad_params: list[TensorFact]) -> None:
        """Bad inputs that no earlier recorded call of this rank put out."""
        trace = self.trace
        notes: list[str] = []
        if self.garbage is not None:
            notes.append(Sentence("{0} made uninitialised memory before; was it used before it was written?", self.garbage.name))
        owner, facts, cause = call, bad_in or bad_params, "parameter" if bad_params and not bad_in else "data"
        if cause == "data":
            for name in trace.ancestors(call):
                above = trace.find_call(name)
                if above is None:
                    continue
                if above.parameter_flags & NONFINITE and not self._same_as_input(bad_in, above):
                    cause, owner = "parameter", above
                    facts = [fact for fact in above.parameter_facts() if fact.flags & NONFINITE]
                    break
                if not above.in_flags & NONFINITE:
                    cause, owner = "unrecorded", above
                    notes.append(
                        Sentence("an operation inside {0} that the dump does not hold made it, just before {1}", above.name, call.name)
                    )
                    break
            else:
                first = facts[0]
                if first.place != "input.0" and first.requires_grad and not call.parent and call.kind == "api":
                    cause = "parameter"
                    notes.append(Sentence("{0} of {1} looks like a weight", first.place, call.name))
                elif call.kind == "collective":
                    cause = "held"
                elif call.kind == "api" and not call.parent and self._after_clean(call):
                    cause = "unrecorded"
                    notes.append(
                        Sentence("an operation that the dump does not hold made it, or it came from outside, just before this call")
                    )
                elif call.direction == "backward":
                    cause = "unrecorded"
                    notes.append(Sentence("the gradient that arrives here is already bad; the operation that made it is not in the dump"))
        self._add(call.index - 0.5, cause, owner, facts, notes)
        self.result.origins[-1].spread.append(call.index)

    def _after_clean(self, call: Call) -> bool:
        """Did this rank compute something finite before?"""
        return any(c.direction == call.direction and c.out_flags & FINITE for c in self.trace.calls[: call.index])

    def _same_as_input(self, bad_in: list[TensorFact], above: Call) -> bool:
        """Do the bad values come in through the module's inputs rather than its parameters?"""
        shapes = {fact.shape for fact in above.parameter_facts() if fact.flags & NONFINITE}
        return bool(above.in_flags & NAN) and not any(fact.shape in shapes for fact in bad_in)

    def _add(self, position: float, cause: str, call: Call, facts: list[TensorFact], notes: list[str]) -> None:
        self.brought = False
        self.result.origins.append(NonFiniteOrigin(self.trace.rank, position, cause, call, _bits(facts), facts, notes))
        if cause in ("data", "held", "unrecorded", "parameter"):
            bits = _bits(facts)
            self.nan_seen = self.nan_seen or bool(bits & NAN)
            self.inf_seen = self.inf_seen or bool(bits & INF)


def _starts_of_backward(trace: Trace) -> set[int]:
    """The calls whose single number that is not finite is what a backward pass starts from: the first backward call is theirs."""
    starts: set[int] = set()
    for before, call in zip(trace.calls, trace.calls[1:]):
        twin = trace.find_call(forward_twin(call.name)) if (before.direction, call.direction) == ("forward", "backward") else None
        if twin is not None and any(fact.flags & NONFINITE and fact.shape in ((), (1,)) for fact in twin.outputs()):
            starts.add(twin.index)
    return starts


def loss_or_gradient_bad(trace: Trace, explained: Set[int] = frozenset()) -> bool:
    """Does the step end badly on this rank: a gradient, or the last scalar of the forward pass, is not finite?

    Args:
        explained: calls whose gradients are left out.
    """
    loss: Call | None = None
    for call in trace.calls:
        if call.direction == "backward":
            if (call.out_flags | call.in_flags) & NONFINITE and call.index not in explained:
                return True
        elif call.out_flags & (FINITE | NONFINITE):
            scalars = [fact for fact in call.outputs() if not fact.shape] if call.parent is None else []
            if scalars:
                loss = call
    return loss is not None and bool(loss.out_flags & NONFINITE)


def ends_bad(trace: Trace, ignore: Set[int] = frozenset()) -> bool:
    """`loss_or_gradient_bad`, or a top-level module or the last call leaves with something non-finite that is no mask."""
    if loss_or_gradient_bad(trace):
        return True
    tops = [call for call in trace.calls if call.kind == "module" and call.parent is None and call.direction == "forward"]
    last = next((call for call in reversed(trace.calls) if call.out_flags & (FINITE | NONFINITE)), None)
    ends = (*tops[-1:], *((last,) if last is not None else ()))
    return any(call.out_flags & NONFINITE and call.index not in ignore for call in ends)


def _poisons(call: Call) -> bool:
    """Memory filled with NaN on purpose, as a buffer to receive into: what reads it before it is written is met later and tells."""
    return normal_op(call.op) in POISONS and any(value != value for _, value in call.literals())


def _bits(facts: list[TensorFact]) -> int:
    bits = 0
    for fact in facts:
        bits |= fact.flags
    return bits & NONFINITE


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


__all__ = ["FILLS", "Arrival", "NonFiniteOrigin", "Scan", "ends_bad", "loss_or_gradient_bad", "scan"]
