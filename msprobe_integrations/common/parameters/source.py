"""Where a framework keeps gradients, parameters and states, and when they are what they are.

A `ParameterSource` knows one framework: which part of which parameter this rank holds (`ParameterValues`), and which moments a step has.
`ParameterSampler` knows the families and takes them at these moments; it is the same for all frameworks. Sources are found from the
objects that are passed, never from what is importable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.gradients import Piece


class Replicas(NamedTuple):
    """Ranks that have to hold the same bits.

    Attributes:
        label: what shares them: ``dp``, ``expert_dp``, ``tp``, ``embedding``.
        group: process group of more than one rank.
        part: of the part that `ParameterSource.value` gives; False: of the whole model parameter, `Piece.parameter`, also where only a
            part of it is this rank's to update.
        late: the whole is there only when the next forward pass has gathered it; after the update it is not.
    """

    label: str
    group: Any
    part: bool = False
    late: bool = False


class ParameterValues(Protocol):
    """One framework's view of the parameters of one optimizer on this rank.

    What `gradient`, `value`, `main` and `states` give is what this rank holds: of a sharded piece its part, else the whole tensor. None
    is "there is none, on no rank", and makes no row; a rank that holds nothing of a piece gives an empty tensor, so that it takes part
    in the merge. They are called only while a step is monitored and may be called often: look up, do not search.
    """

    @property
    def pieces(self) -> Sequence[Piece]:
        """Parameters in an order that is the same on all ranks that share them."""
        ...

    def gradient(self, piece: Piece) -> Any:
        """The gradient of `piece` as it is now, in the phase that the watch was told of last."""
        ...

    def value(self, piece: Piece) -> Any:
        """The parameter as the model uses it."""
        ...

    def main(self, piece: Piece) -> Any:
        """What the optimizer updates: an fp32 copy, a shard of it, or the parameter itself."""
        ...

    def states(self, piece: Piece) -> Mapping[str, Any]:
        """State tensors of the optimizer (``exp_avg``, ...), each with as many elements as `main`; empty before the first update."""
        ...

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """The piece's own parameter group without ``params``, and ``algorithm`` (``adam``, ``adamw``, ``sgd``, ``lion``, ``muon``, ...,
        ``""``: unknown) and ``step`` (updates so far, this one included once it is done; a number or a tensor on the host). Of a
        parameter that no optimizer has, `msprobe_integrations.common.parameters.updates.IN_NO_OPTIMIZER` is true in it."""
        ...

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """Groups of ranks that hold the same parameter as this rank does."""
        ...
