"""How far numbers of two monitored runs may be apart when nothing is wrong.

Each kind of number has a floor of its own, which grows slowly with the steps: norms of parameters hardly move, gradients are a thousand
times noisier. No number lends its noise to another kind, so that a loss that drifts is not hidden by a gradient. The floors are three times
what healthy pairs show (another order of sums, one rounding unit; 40 pairs of 200 steps), and not less than what a file of six digits
rounds to.

In a training that is not stable a difference grows by itself, in multiples: what is at most half as large again as the largest of its kind
before is that growth, and no place where two runs part. It is said at the end how far they are apart.

The gradient of a bias may come to nothing (that of the keys of an attention, that of what goes into a norm): it is a sum of terms that
cancel, and what is left is their round-off, half a unit of their size. Its terms are no larger than the gradient of the weight beside it,
which sums up their products with what goes in. But these terms may be what is left of larger ones, which other weights of the module
around it have gradients of (that of scores is that of chances less its mean): in float32 the largest of these is taken. In 16 bits this
would leave nothing of a bias to judge. An optimizer moves such a bias, which begins at zero, at random: where part of it is so, it is held
to a fifth of itself in 16 bits. What one number is allowed in this way says nothing of others of its kind.

The loss is a mean over tokens, each of which has the round-off of a unit in the last place, so that the loss of few tokens has more of it.
A loss that is something else (of preferences, of rewards) may be made of sums that cancel. In 16 bits the gradient of each activation says
by how much the loss moves when its elements are rounded; that is taken where it is more, and no more of it than of a gradient.
The norm of a parameter in 16 bits moves by what some of its elements are rounded to, the more the fewer there are. A parameter that begins
at zero is nothing but its updates.
Where one run keeps the states of its optimizer in 16 bits and the other one in float32, updates that are less than half a unit of a
parameter are lost in one of them: what a parameter was moved by so far tells nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msprobe_engine.core.dtypes import FLOATS
from msprobe_engine.find.monitor.number_pairs import Number
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key, Kind

GROWTH = 1.5
"""By how much more than the largest difference of its kind so far a number must differ."""

UNKNOWN = 1e-4
"""The floor of all numbers where no file says the data types."""


class Floor(NamedTuple):
    """Relative difference in the first step, and how much more is accepted per step."""

    first: float
    per_step: float


_LOSS, _GRADIENT, _PARAMETER, _BIAS = "loss", "gradient", "parameter", "bias"
_SQUARES, _NUMBER = "squares", "number of the step"
_WIDE = {
    _LOSS: Floor(3e-6, 1e-8),
    _GRADIENT: Floor(1e-5, 1e-7),
    _PARAMETER: Floor(2e-6, 4e-9),
    _BIAS: Floor(1e-3, 1e-6),
    _SQUARES: Floor(1e-5, 0.0),
    _NUMBER: Floor(2e-6, 0.0),
}
_SHORT = {
    _LOSS: Floor(5e-4, 5e-5),
    _GRADIENT: Floor(2e-2, 5e-4),
    _PARAMETER: Floor(2e-4, 3e-5),
    _BIAS: Floor(0.2, 1e-3),
    _SQUARES: Floor(8e-2, 0.0),
    _NUMBER: Floor(2e-6, 0.0),
}
_OF_FEW = ("max", "min", "mean")
_FEW_ELEMENTS = 4.0
"""Times the floor of a gradient that a mean or an extreme may move: what a few elements do shows in them."""

_OF_ITS_GRADIENT = 3.0
"""Times the difference of a parameter's own gradient that its moments and its update may differ: where a gradient comes to nothing, an
optimizer moves the parameter at random."""

_IN_COMMON, _OF_ELEMENTS = 0.25, 100.0
"""Half units by which the norm of an activation may move: four times what healthy pairs show, of what its elements have in common, and of
each element by itself."""

_OF_PARAMETERS, _OF_THE_LOSS = 4.0, 4.0
"""Half units by which elements of a parameter may be apart, and standard deviations of what rounding of activations does to the loss."""

_PARAMETERS = ("param_origin", "param_updated")
_STATES = ("exp_avg", "opt_state")
_RATES = ("learning_rate", "lr")


class SeriesNoise:
    """What is accepted, step after step.

    Args:
        run, other: both runs; the coarsest data type of a floating point number in them says how they compute.
    """

    def __init__(self, run: Run, other: Run) -> None:
        self._unit = max((_unit(any_run) for any_run in (run, other)), default=0.0)
        self._floors = _SHORT if self._unit > 2.0**-20 else _WIDE
        self._largest: dict[tuple[str, bool], float] = {}
        self._first: int | None = None
        self._gradients: dict[tuple[int, str], float] = {}  # of each parameter, in this step and before
        self._sizes: dict[tuple[int, str, Key], float] = {}  # norms of gradients in this step, and the largest in a module
        self._types = {
            (rank, key): kinds for any_run in (run, other) for rank in any_run.ranks for key, kinds in _activations(any_run, rank).items()
        }
        self._elements = {place: min((kind.elements for kind in kinds if kind.shape), default=0) for place, kinds in self._types.items()}
        self._of_parameters = {
            (rank, key.name): min((kind.elements for kind in kinds if kind.shape and _is_short(kind.dtype)), default=0)
            for any_run in (run, other)
            for rank in any_run.ranks
            for family in _PARAMETERS
            if family in any_run.families(rank)
            for key, kinds in any_run.kinds(rank, family).items()
        }
        self._from_zero: set[tuple[int, str]] = set()  # parameters
        self._of_loss: dict[int, float] = {}  # rank -> what rounding of activations may move its loss by, in this step
        self._wide: set[Number] = set()  # activations of the first step that nothing of 16 bits came before
        self._chosen_otherwise = False  # by a router, in this step
        self._of_tokens = 2 * self._unit / math.sqrt(tokens) if (tokens := min(_tokens(any_run) for any_run in (run, other))) else 0.0
        self._moved_before: dict[tuple[int, str], float] = {}  # when the step begins
        self._moved: dict[tuple[int, str], float] | None = {} if _other_states(run, other) else None

    @property
    def of_gradients(self) -> float:
        """What it may do to the norm of a gradient in the first step."""
        return self._floors[_GRADIENT].first

    def limit(self, item: Number) -> float:
        """What round-off may amount to in a number."""
        made = _OF_ITS_GRADIENT * self._gradients.get((item.rank, item.key.name), 0.0) if self._is_made_of_gradients(item) else 0.0
        allowed = max(self._of_kind(item) + self._of_terms(item), made)
        return _FEW_ELEMENTS * allowed if self._chosen_otherwise and self._is_of_backward(item) else allowed

    def _of_kind(self, item: Number) -> float:
        """What it may amount to in any number of its kind."""
        kind, few = self._kind(item), item.op in _OF_FEW
        floor = self._floors[_GRADIENT if few and kind not in (_NUMBER, _BIAS) else kind]
        steps = item.step - (self._first if self._first is not None else item.step)
        first = max(floor.first, self._of_tokens if kind == _LOSS else 0.0)
        if item.family == "actv":
            first = self._of_activation(item, first, few)
        if kind == _LOSS:
            most = self._floors[_GRADIENT].first
            first = max(first, min(most, self._of_loss.get(item.rank, 0.0) / max(abs(item.target), abs(item.golden), item.size)))
        elif kind == _PARAMETER and item.family in _PARAMETERS and (size := self._of_parameters.get((item.rank, item.key.name), 0)):
            first = max(first, _OF_PARAMETERS * self._unit / math.sqrt(size))
        allowed = first + floor.per_step * steps
        if self._moved is not None and kind == _PARAMETER:
            moved = self._moved_before if item.family == _PARAMETERS[0] else self._moved
            allowed = max(allowed, moved.get((item.rank, item.key.name), 0.0))
        allowed *= _FEW_ELEMENTS if few else 1.0
        if not self._unit:
            allowed = max(allowed, UNKNOWN)
        return allowed if kind == _NUMBER else max(allowed, GROWTH * self._largest.get((kind, few), 0.0))

    def _of_activation(self, item: Number, most: float, few: bool) -> float:
        """Of what no tensor of 16 bits came before in the first step it is that of float32; else a norm shows what its elements have in
        common, and of the rest the less the more elements it has."""
        if item in self._wide:
            return _WIDE[_GRADIENT].first
        size = self._elements.get((item.rank, item.key), 0)
        if few or not size:
            return most
        return min(most, max(_IN_COMMON, _OF_ELEMENTS / math.sqrt(size)) * self._unit) if self._floors is _SHORT else most

    def _of_terms(self, item: Number) -> float:
        """What the terms of the gradient of a bias leave where they cancel."""
        terms = self._sizes.get((item.rank, item.family, self._around(item.key)), 0.0) if item.key.name.endswith("bias") else 0.0
        if not terms or not math.isfinite(item.distance):
            return 0.0
        return self._unit * terms / max(abs(item.target), abs(item.golden), item.size)

    def _around(self, key: Key) -> Key:
        """What the terms of a bias are as large as: the weight beside it, or in float32 the module around both."""
        module = key.name.rpartition(".")[0]
        return key._replace(name=f"{module}.weight" if self._floors is _SHORT or "." not in module else module.rpartition(".")[0])

    def may_pass(self, off: Iterable[Number], limits: Mapping[Number, float]) -> bool:
        """Whether what is off may be gone in the next step: in 16 bits, in gradients and what is made of them alone, and not far off. One
        batch in which the backward pass is ill-conditioned shows rounding as no other one does."""
        return self._floors is _SHORT and all(self._is_of_backward(item) and item.distance <= _FEW_ELEMENTS * limits[item] for item in off)

    def _is_of_backward(self, item: Number) -> bool:
        """Gradients, and what is made of them alone."""
        return item.family != "actv" and self._kind(item) in (_GRADIENT, _SQUARES)

    def add_step(self, items: Iterable[Number]) -> None:
        """The numbers of the next step: how far gradients are apart, which limits what optimizers make of them, and how large they are."""
        items = list(items)
        self._sizes.clear()
        self._see_updates(items)
        self._see_rounding(items)
        if self._first is None:
            origins = (item for item in items if item.family == _PARAMETERS[0] and item.op == "norm")
            self._from_zero |= {(item.rank, item.key.name) for item in origins if not item.target and not item.golden}
        self._see_activations(items if self._first is None else ())
        self._see_choices(items)
        for item in items:
            if item.family.startswith("grad") and item.distance < math.inf:
                key = item.rank, item.key.name
                self._gradients[key] = max(self._gradients.get(key, 0.0), item.distance)
                if item.op == "norm":
                    size = max(abs(item.target), abs(item.golden))
                    self._sizes[item.rank, item.family, item.key] = size
                    if item.key.name.endswith("weight"):
                        place = item.rank, item.family, self._around(item.key)
                        self._sizes[place] = max(self._sizes.get(place, 0.0), size)

    def _see_updates(self, items: Sequence[Number]) -> None:
        """By how much of itself each parameter was moved so far."""
        if self._moved is None:
            return
        self._moved_before = dict(self._moved)
        rates = {item.rank: max(item.target, item.golden) for item in items if item.key.name in _RATES}
        sizes = {
            (item.rank, item.key.name): min(item.target, item.golden)
            for item in items
            if item.family == _PARAMETERS[0] and item.op == "norm"
        }
        for item in items:
            place = item.rank, item.key.name
            if item.family == "update" and item.op == "norm" and sizes.get(place) and item.rank in rates:
                part = rates[item.rank] * max(item.target, item.golden) / sizes[place]
                self._moved[place] = self._moved.get(place, 0.0) + part

    def _see_rounding(self, items: Sequence[Number]) -> None:
        """By how much the loss of each rank moves when each element of each activation in 16 bits is rounded by itself."""
        self._of_loss.clear()
        if self._floors is not _SHORT:
            return
        norms = {(item.rank, item.key): item.golden for item in items if item.family == "actv" and item.op == "norm"}
        squares: dict[int, float] = {}
        for item in items:
            place = item.rank, item.key
            if item.family != "actv_grad" or item.op != "norm" or place not in norms or "output" not in item.key.name:
                continue
            if any(_is_short(kind.dtype) for kind in self._types.get(place, ())) and (size := self._elements.get(place, 0)):
                moved = self._unit * norms[place] * item.golden
                squares[item.rank] = squares.get(item.rank, 0.0) + (moved * moved / size if math.isfinite(moved) else 0.0)
        self._of_loss = {rank: _OF_THE_LOSS * math.sqrt(square) for rank, square in squares.items()}

    def _see_choices(self, items: Sequence[Number]) -> None:
        """Whether round-off has changed which experts some tokens go to: whole numbers that one module gives and another one takes in. The
        gradients of a router are of few tokens, and then of others."""
        chosen = [item for item in items if item.family == "actv" and self._is_whole(item)]
        taken = {(item.rank, item.op, item.target, item.golden) for item in chosen if "input" in item.key.name}
        self._chosen_otherwise = self._floors is _SHORT and any(
            0.0 < item.distance <= self._of_kind(item) and (item.rank, item.op, item.target, item.golden) in taken
            for item in chosen
            if "output" in item.key.name
        )

    def _is_whole(self, item: Number) -> bool:
        types = self._types.get((item.rank, item.key), frozenset())
        return bool(types) and all("int" in kind.dtype for kind in types)

    def _see_activations(self, items: Iterable[Number]) -> None:
        self._wide.clear()
        short: set[int] = set()
        for item in sorted((item for item in items if item.family == "actv"), key=lambda item: item.order):
            types = {kind.dtype for kind in self._types.get((item.rank, item.key), ())}
            if not types or any(map(_is_short, types)):
                short.add(item.rank)
            if item.rank not in short and "input" in item.key.name and types & FLOATS.keys():
                self._wide.add(item)

    def accept(self, step: int, items: Iterable[Number]) -> None:
        """A step in which nothing was off."""
        self._first = step if self._first is None else self._first
        for item in [item for item in items if item.distance <= self._of_kind(item)]:
            key = self._kind(item), item.op in _OF_FEW
            self._largest[key] = max(self._largest.get(key, 0.0), item.distance)

    def _is_made_of_gradients(self, item: Number) -> bool:
        made = item.family in ("update", "ratio", "exp_avg", "exp_avg_sq") or self._kind(item) == _BIAS
        return made or (item.family in _PARAMETERS and (item.rank, item.key.name) in self._from_zero)

    @staticmethod
    def _kind(item: Number) -> str:
        if item.family == "loss":
            return _LOSS
        if item.family == "step":
            return _GRADIENT if "norm" in item.key.name else _NUMBER
        if item.family in _PARAMETERS or (item.family in ("update", "ratio") and item.key.name.endswith("bias")):
            return _BIAS if item.key.name.endswith("bias") else _PARAMETER
        return _SQUARES if item.family == "exp_avg_sq" else _GRADIENT


def _unit(run: Run) -> float:
    """Half a unit of the coarsest data type of a run; 0 where no file says one. What is written may be wider than what it was made of:
    gradients in float32 of a training under autocast."""
    kinds: Iterable[Mapping[Key, frozenset[object]]] = (run.kinds(rank, family) for rank in run.ranks[:1] for family in run.families(rank))
    names = {getattr(kind, "dtype", "") for table in kinds for some in table.values() for kind in some}
    for rank in run.ranks[:1]:
        names |= set(types) if isinstance(types := run.info(rank).get("computed_in"), Mapping) else set()
    return max((FLOATS[name].eps / 2 for name in names if name in FLOATS), default=0.0)


def _is_short(dtype: str) -> bool:
    return dtype in FLOATS and FLOATS[dtype].eps > 2.0**-20


def _tokens(run: Run) -> int:
    """How many tokens a pass of a run sees at least; 0 where no activation of integers says it."""
    ranks = (run.kinds(rank, "actv").values() for rank in run.ranks if "actv" in run.families(rank))
    return max((kind.elements for kinds in ranks for some in kinds for kind in some if "int" in kind.dtype), default=0)


def _other_states(run: Run, other: Run) -> bool:
    """The optimizer of one run keeps its states in another data type: an update that is less than half a unit of a parameter is lost in one
    of them."""
    types = [
        {kind.dtype for family in _STATES if family in any_run.families(0) for some in any_run.kinds(0, family).values() for kind in some}
        for any_run in (run, other)
    ]
    return all(types) and types[0] != types[1]


def _activations(run: Run, rank: int) -> Mapping[Key, frozenset[Kind]]:
    return run.kinds(rank, "actv") if "actv" in run.families(rank) else {}
