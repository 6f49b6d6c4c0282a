"""What the record of a communication call says: the operation, the ranks of its group, its root or the peer of a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.core.operator_traits import normal_op

SENDS = ("send", "isend")
RECEIVES = ("recv", "irecv", "recvanysource")
_NOT_A_MEMBER = -100
"""torch's number for a group that this rank is not in, given as the group argument: the call did nothing."""
_ROOT_POSITION = {"broadcast": 1, "scatter": 2, "reduce": 1, "gather": 2, "send": 1, "isend": 1, "recv": 1, "irecv": 1}
Groups = dict[int, tuple[list[Any], "tuple[int, ...] | None"]]
"""List of ranks, by its id (replicas have one for all records of a group) -> the list, which keeps the id, and its members."""


class Told(NamedTuple):
    """op: in normal spelling; group: global ranks, ascending, None where it is not said; root: global rank of the root or of the peer."""

    op: str
    group: tuple[int, ...] | None
    root: int | None


def told_by(known: Groups, name: str, raw: Mapping[str, Any]) -> Iterator[Told]:
    """What a record says of its call; several for a batch of messages, nothing for a call of a group that the rank is not in.

    Args:
        known: of the records before.
        name: of the record.
    """
    op = normal_op(name.split(".")[-3] if name.count(".") >= 3 else name)
    args = raw.get("input_args")
    kwargs = raw.get("input_kwargs")
    args = args if isinstance(args, list) else []
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    if op == "batchisendirecv":
        for item in p2p_items([args, kwargs]):
            yield Told(normal_op(str(item.get("op", ""))), None, _int(item.get("peer")))
        return
    named = _named_group(raw, args, kwargs)
    if named is not None and id(named) not in known:
        known[id(named)] = named, _members(named)
    group = None if named is None else known[id(named)][1]
    if group == () or any(_int(node) == _NOT_A_MEMBER for node in (*args, *kwargs.values())):
        return
    yield Told(op, group, _root(op, raw, args, kwargs, group))


def p2p_items(node: Any) -> Iterator[Mapping[str, Any]]:
    """The messages of a batch among arguments, in their order."""
    if isinstance(node, dict):
        if "P2POp" in str(node.get("class_type", "")):
            yield node
        else:
            for child in node.values():
                yield from p2p_items(child)
    elif isinstance(node, list):
        for child in node:
            yield from p2p_items(child)


def group_of(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Global ranks of a recorded collective, ascending; None where its record does not say them."""
    tagged = _tag(raw, "group_ranks")
    return _members(tagged) if isinstance(tagged, list) else None


def reduction_of(raw: Mapping[str, Any]) -> str | None:
    """``sum``, ``avg``, ...; None where its record does not say it."""
    tagged = _tag(raw, "reduce")
    return tagged.lower() if isinstance(tagged, str) else None


def is_asynchronous(raw: Mapping[str, Any]) -> bool:
    """What the record has as output was read before the call was done."""
    return bool(_tag(raw, "async"))


def _tag(raw: Mapping[str, Any], *keys: str) -> Any:
    tags = raw.get("tags")
    for place in (raw, tags if isinstance(tags, dict) else {}):
        for key in keys:
            if key in place:
                return place[key]
    return None


def _named_group(raw: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    tagged = _tag(raw, "group_ranks")
    if isinstance(tagged, list):
        return tagged
    for node in (*args, *kwargs.values()):
        if isinstance(node, dict) and isinstance(node.get("group_ranks"), list):
            named: list[Any] = node["group_ranks"]
            return named
    return None


def _members(ranks: Sequence[Any]) -> tuple[int, ...] | None:
    return tuple(sorted(ranks)) if {*map(type, ranks)} <= {int, bool} else None


def _root(op: str, raw: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], group: Sequence[int] | None) -> int | None:
    """Global rank of the root, or of the peer of a message."""
    tagged = _int(_tag(raw, "peer", "root", "src", "dst"))
    if tagged is not None:
        return tagged
    for key in ("src", "dst"):
        if (value := _int(kwargs.get(key))) is not None:
            return value
    for key in ("group_src", "group_dst"):
        value = _int(kwargs.get(key))
        if value is not None:
            return group[value] if group is not None and 0 <= value < len(group) else value
    position = _ROOT_POSITION.get(op)
    if position is not None and position < len(args):
        return _int(args[position])
    return None


def _int(node: Any) -> int | None:
    value = node.get("value") if isinstance(node, dict) else node
    return value if isinstance(value, int) and not isinstance(value, bool) else None
