"""Plain data that flows from hooks to sinks and rules.

A *step frame* is everything that one rank saw in one step. Hooks append `Entry` objects (one call of a module, an API or a
collective, with nested arguments, as dump files have them) and `Sample` objects (one flat tensor of the monitor: a gradient,
a parameter, an optimizer state). Both refer to rows of one statistics buffer, so nothing is read from the device before the
step boundary. When the rows have arrived the `Frame` is complete and goes to rules, ring and sinks. It is never changed
afterwards and may be read from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows, Statistics


class TensorDescription(NamedTuple):
    """What is known about a tensor without reading its data. Interned per backend: compare with ``is``."""

    type: str
    """As in dump files: ``torch.Tensor``, ``torch.nn.parameter.Parameter`` is written as ``torch.Tensor``."""
    dtype: str
    """As the framework prints it: ``torch.float32``."""
    shape: tuple[int, ...]
    requires_grad: bool | None
    device: str = "cpu"
    extra: tuple[tuple[str, Any], ...] = ()
    """Further JSON-ready facts: DTensor placements, mesh and global shape, sparse layout, ..."""


class TensorRef(NamedTuple):
    """A tensor seen by a hook: the index of its statistics row in the frame (-1: no statistics exist for it, for example a
    meta tensor) and its description. Inside `Entry` structures a tuple is always a `TensorRef`; containers are lists and dicts."""

    row: int
    description: TensorDescription


class Opaque(NamedTuple):
    """A JSON-ready object that stands for a value that is not a tensor, as the dump format writes it, for example
    ``{"type": "int", "value": 3}``. Held apart from dict so that structures stay unambiguous."""

    json: Any


class Entry(NamedTuple):
    """One call as dump files have it.

    Attributes:
        name: full record name, grammar in `msprobe_engine.core.names`, for example ``Module.fc.Linear.forward.0``.
        sections: key of the dump file (``input_args``, ``input_kwargs``, ``output``, ``parameters``, ``input``, or a parameter's
            name in a ``parameters_grad`` record) to structure: list, dict, `TensorRef`, `Opaque` or None.
        parent: record name of the enclosing call, None at the top; what ``construct.json`` holds.
        stack: index into the frame's `stacks`, -1 when not recorded.
        micro_step: micro batch within the step, -1 when unknown.
        tags: further facts, for example ``{"is_recompute": True}`` or a collective's ranks.
    """

    name: str
    sections: dict[str, Any]
    parent: str | None = None
    stack: int = -1
    micro_step: int = -1
    tags: Mapping[str, Any] = {}


NODE_ONLY: Mapping[str, Any] = {"node_only": True}
"""Tags of an entry that is a node of construct.json and no record: it encloses records, or its record was left out."""


FINER_COPY = "finer_copy"
"""Fact of a parameter: dtype of the copy that the optimizer updates, where that has more bits than the parameter itself."""


class Sample(NamedTuple):
    """One flat tensor of the monitor.

    Attributes:
        family: what it is, one of `FAMILIES`.
        name: parameter or module tensor name, for example ``decoder.layers.0.mlp.linear_fc1.weight``.
        ref: row and description.
        phase: where in the life of a gradient: ``local`` (this micro batch), ``accumulated``, ``reduced``, ``unscaled``,
            ``clipped``; ``""`` for what is no gradient.
        micro_step: micro batch, -1 when per step.
        vpp_stage: virtual pipeline chunk, 0 when there is one model.
        extra: further JSON-ready facts (``{"shard": [lo, hi], "of": n}``, ``{"scope": "local"}``).
    """

    family: str
    name: str
    ref: TensorRef
    phase: str = ""
    micro_step: int = -1
    vpp_stage: int = 0
    extra: Mapping[str, Any] = {}


FAMILIES = (
    "actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "opt_state",
    "update", "ratio", "attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook", "other",
)  # fmt: skip
"""Monitor families; those that the existing tool has carry the names of its CSV files. ``opt_state`` are states of the optimizer with
other names (``extra["state"]`` says which), ``update`` and ``ratio`` what the optimizer adds to a parameter and m / sqrt(v), the
``*_hook`` families single numbers (``extra["column"]`` says which), ``other`` collectives and momentum agreement."""


class Record(NamedTuple):
    """One tensor of a finished frame, flat: what rules and most sinks look at."""

    name: str
    """``Module.fc.Linear.forward.0.input.0`` for entries, the sample's name otherwise."""
    source: Entry | Sample
    row: int
    statistics: Statistics


UPDATES_MADE, EVALUATION_MODE, GRADIENTS_KEPT = "updates_made", "evaluation_mode", "gradients_kept"
"""Numbers of the step: how many updates the optimizer itself counts so far, 0 where a new one has other parameters; 1 where the model is
trained in evaluation mode; 1 where the last backward pass added to gradients of the update before."""
BATCH_DIGEST = "batch_digest"
"""Number of the step, between 0 and 1: a digest of what is in the integer tensors (tokens, labels) that the models were called with, the
same whatever the order of the samples and however they are cut into micro batches. None where not all of them were looked at."""
BATCH_AGE, ORDER_KEPT, DIVIDED_TWICE = "batch_age", "order_kept", "loss_divided_twice"
"""Facts of the step, each there only where it says something: how many steps ago the models were given the very same tensors; 1 where a
sampler that shuffles for several ranks has begun a further epoch in the same order; 1 where the losses of the step were divided by their
number twice."""
UPDATED_BY = "updated_by"
"""Fact of the step: which of several optimizers have updated in it, a bit for each: with another one the loss is another, too."""
UPDATES_LOST, WEIGHTS_GROWN = "updates_lost", "weights_grown"
"""Facts of the step, of samples of what this rank holds: which part of the elements of parameters in 16 bits that have a gradient the
update has left as they were; in the first steps, how many times as large as before the first update the matrices are, in the median."""
FACTS = frozenset((BATCH_AGE, ORDER_KEPT, DIVIDED_TWICE, UPDATED_BY, UPDATES_LOST, WEIGHTS_GROWN))
"""They depend on where a run begins and on how it is divided: nothing that two runs have in common."""
NO_GRADIENT, FROZEN, LEFT_OPTIMIZER, NO_OPTIMIZER = "no gradient", "frozen", "left its optimizer", "in no optimizer"
"""Why an update passes a parameter by: it requires a gradient and has none, requires none any more, or is in no optimizer."""


@dataclass(frozen=True)
class Frame:
    """Everything one rank saw in one step.

    Attributes:
        step: optimizer step (iteration) the data belongs to.
        rank: global rank.
        rows: [n, 16] float64 statistics, see `msprobe_engine.core.statistics.rows`.
        entries: calls in order of completion.
        samples: monitor tensors in order of observation.
        scalars: numbers of the step (``loss``, ``grad_norm``, ``learning_rate``, ``loss_scale``, ``step_seconds``); NaN is kept.
        stacks: call stacks, each a list of lines, innermost frame first; entries refer to them by index.
        level: ``L0``, ``L1``, ``mix`` or ``""`` when only samples were taken.
        framework: ``pytorch`` or ``mindspore``.
        complete: False when the step was cut off (killed, exception).
        lost: what was observed but could not be kept, reason to count.
        parallel: where the rank is in a parallel layout, and which parameters are pieces of larger ones; JSON-ready, as in dump.json.
        untrained: watched parameters that the update of this step passes by, to why: `NO_GRADIENT`, `FROZEN`,
            `LEFT_OPTIMIZER` or `NO_OPTIMIZER`.
        facts: numbers for rules alone, by the names in `FACTS`; no file has them.
        doubtful: parameters that the run begins with to what is doubtful about them, in words; in the frame of its first step only.
        elsewhere: other ranks write its samples (``sinks.rank``), so it has none.
        updated: how many of the entries were there when the update was done: the forward calls behind them may be of the next step; -1:
            not known.
    """

    step: int
    rank: int
    rows: Rows
    entries: list[Entry] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    stacks: list[list[str]] = field(default_factory=list)
    level: str = ""
    framework: str = "pytorch"
    complete: bool = True
    lost: dict[str, int] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    untrained: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    doubtful: Mapping[str, str] = field(default_factory=dict)
    elsewhere: bool = False
    updated: int = -1

    @property
    def skipped(self) -> bool:
        """True when the optimizer's update of this step was skipped because of an overflow."""
        return self.scalars.get("skipped", 0.0) > 0.0

    def records(self) -> Iterator[Record]:
        """All tensors, flat, entries first. Reads every row: not for the training thread of a large frame."""
        for entry in self.entries:
            for place, ref in leaves(entry):
                if ref.row >= 0:
                    yield Record(f"{entry.name}.{place}", entry, ref.row, _rows.read_row(self.rows[ref.row]))
        for sample in self.samples:
            if sample.ref.row >= 0:
                yield Record(sample.name, sample, sample.ref.row, _rows.read_row(self.rows[sample.ref.row]))


_PLACE = {"input_args": "input", "input_kwargs": "kwargs"}


def place_of(section: str) -> str:
    """First part of the place of a section's tensors: ``input_args`` is ``input``, ``input_kwargs`` is ``kwargs``."""
    return _PLACE.get(section, section)


def leaves(entry: Entry) -> Iterator[tuple[str, TensorRef]]:
    """The tensors of an entry with their place, as tensor files are named: ``input.0``, ``kwargs.mask``, ``output.0.1``,
    ``parameters.weight``; in ``parameters_grad`` entries the parameter's name."""
    for section, structure in entry.sections.items():
        yield from _walk(place_of(section), structure)


def _walk(place: str, node: Any) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(node, TensorRef):
        yield place, node
    elif isinstance(node, Opaque) or node is None:
        return
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(f"{place}.{key}", child)
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _walk(f"{place}.{i}", child)
