"""`need`: how a part of the probe gets at a name of a framework that the framework does not promise.

A name that has gone is never read as "not so": a missing flag of sharding taken for False would report a piece of unreduced gradients as
the reduced ones. `need` raises `MissingNameError` instead, says once which part is off, and keeps the name in `MISSING`, which run.json
(``missing``) and Prometheus (``msprobe_integration_missing``) show. The guard around the part, or who asks and can leave something out,
catches it. `optional` is for what versions or objects may lack, with the reason why its absence says nothing wrong.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from msprobe_engine.core.log import get_logger

_log = get_logger()
MISSING: dict[str, str] = {}
"""Names that were needed and not there in this process, to the part that is off without them."""


class MissingNameError(Exception):
    """A name of a framework is not there, or not what it was; its text names the part that is off."""


def need(thing: Any, *names: str, for_: str) -> Any:
    """The first of the attributes `names` that `thing` has: today's name, and those of other versions.

    Args:
        thing: module, class or object of a framework.
        names: of one meaning.
        for_: what does not work without it, in the words of the user.

    Raises:
        MissingNameError: it has none of them. Said once, and kept in `MISSING`.
    """
    for name in names:
        try:
            return getattr(thing, name)
        except AttributeError:
            continue
    raise missing(f"{_kind(thing)}.{' or .'.join(names)}", for_)


def missing(name: str, for_: str) -> MissingNameError:
    """The error to raise where a check of one's own shows that `name` is not what it was; said once, and kept in `MISSING`."""
    text = f"{name} is not there as the probe knows it, so this is off: {for_}"
    if name not in MISSING:
        MISSING[name] = for_
        _log.warning("%s (another version of the framework; msprobe frameworks lists what is relied on)", text)
    return MissingNameError(text)


def optional(thing: Any, name: str, default: Any = None, *, because: str) -> Any:  # noqa: ARG001 - the reason is for who reads the call
    """The attribute, or `default` where its absence means just that: `because` says why."""
    return getattr(thing, name, default)


def _kind(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return thing.__name__
    return (thing if isinstance(thing, type) else type(thing)).__name__
