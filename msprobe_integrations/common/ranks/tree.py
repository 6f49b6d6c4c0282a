"""Ranks as a tree, and what one of them does with what the others say: numbers go up and are merged on the way, the answer comes down.

The ranks of a node (of each 8 that follow each other) hang below the first of them, and these firsts below each other, so that of a large
group one rank of each node speaks to other nodes. A rank has at most 7 neighbours, most have one; 10,240 ranks are nine connections deep.
No connection is opened and nothing is waited for here: `links` carries the messages.

What a rank has for one step goes up as soon as all ranks below it have sent theirs for the same step. Where ranks disagree (one has
nothing of that step, or something else), the rank above them finds out, because what it has of each is in the order of their steps; it
says so to those below it, and goes on with what all of them have. Each rank gets one answer to each message that it has sent up, in a
large group after nine hops up and nine down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
NODE = 8
"""Ranks that follow each other and hang together: those of a machine."""
FAN = 3
"""Ranks right below one, within a node and again among the firsts of nodes."""
SELF = -1
"""In the place of a neighbour: this rank."""
NOTHING: Words = np.zeros(0, np.int64)


class Kind(IntEnum):
    """Of a message."""

    UP = 0
    """What the ranks from the sender on downwards have, merged."""
    ANSWER = 1
    """What all ranks have."""
    MISSED = 2
    """Some ranks have nothing of this step."""
    UNLIKE = 3
    """Ranks have different things for this step, which is said upwards and downwards."""
    LEFT = 4
    """The rank `number` takes part no longer; `words` says why. Without a reason it cannot be reached."""


class Message(NamedTuple):
    """What a rank tells a neighbour.

    Attributes:
        lane: messages of one lane follow each other in the same order on all ranks.
        number: of a step.
        identity: equal on ranks whose words belong together.
    """

    kind: Kind
    lane: int
    number: int
    identity: int
    words: Words = NOTHING


class Shape(NamedTuple):
    """The neighbours of a rank, as places in the list of its group's ranks; `parent` is -1 at the root, which is the first of them."""

    parent: int
    children: tuple[int, ...]


@lru_cache(maxsize=64)
def shapes_of(ranks: tuple[int, ...]) -> tuple[Shape, ...]:
    """Of all ranks of a group."""
    nodes: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        nodes.setdefault(rank // NODE, []).append(place)
    firsts = [places[0] for places in nodes.values()]
    parents, children = [-1] * len(ranks), [[] for _ in ranks]  # type: list[int], list[list[int]]
    for places in (*nodes.values(), firsts):
        for i, place in enumerate(places[1:]):
            parents[place] = places[i // FAN]
            children[places[i // FAN]].append(place)
    return tuple(Shape(parent, tuple(below)) for parent, below in zip(parents, children))


def shape_of(ranks: Sequence[int], place: int) -> Shape:
    """Of the rank at `place` of these global ranks, the same list on all of them."""
    return shapes_of(tuple(ranks))[place]


Merge = Callable[[Words, Words], Words]
"""Raises ValueError where two of them do not fit together."""
Sent = list[tuple[int, Message]]
"""Neighbours, or `SELF`, and what is for them."""


class Lane:
    """What a rank does with the messages of one lane.

    Args:
        merge: of what two parts of the tree have.
        answer: made of what all have, by the root; goes to all.
    """

    def __init__(self, shape: Shape, merge: Merge, answer: Callable[[Words], Words] = lambda words: words) -> None:
        self._shape, self._merge, self._answer = shape, merge, answer
        self._lines: dict[int, deque[Message]] = {source: deque() for source in (SELF, *shape.children)}

    def receive(self, source: int, message: Message) -> Sent:
        """A message of a neighbour, or of this rank; what is to be sent now."""
        if source == self._shape.parent != SELF:
            return self._down(message)
        line = self._lines.get(source)
        if line is None or message.kind not in (Kind.UP, Kind.UNLIKE):
            raise ValueError(f"a message of kind {message.kind} from place {source}")
        line.append(message)
        sent: Sent = []
        while all(self._lines.values()):
            sent += self._match()
        return sent

    def _down(self, message: Message) -> Sent:
        return [(place, message) for place in (*self._shape.children, SELF)]

    def _match(self) -> Sent:
        heads = {source: line[0] for source, line in self._lines.items()}
        newest = max(head.number for head in heads.values())
        older = [source for source, head in heads.items() if head.number < newest]
        if older:
            return [(source, self._lines[source].popleft()._replace(kind=Kind.MISSED, words=NOTHING)) for source in older]
        for line in self._lines.values():
            line.popleft()
        first, *others = heads.values()
        kind, words = first.kind, first.words
        try:
            for other in others:
                if other.identity != first.identity or Kind.UNLIKE in (kind, other.kind):
                    raise ValueError("other contents")
                words = self._merge(words, other.words)
        except ValueError:
            kind, words = Kind.UNLIKE, NOTHING
        if self._shape.parent >= 0:
            return [(self._shape.parent, first._replace(kind=kind, words=words))]
        if kind is Kind.UP:
            kind, words = Kind.ANSWER, self._answer(words)
        return self._down(first._replace(kind=kind, words=words))
