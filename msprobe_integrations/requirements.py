"""How a part of the probe gets at a name of a framework that the framework does not promise: `need`, and tables for `check`.

A name that has gone is never read as "not so": a missing flag of sharding taken for False would report a piece of unreduced gradients as
the reduced ones. `need` raises `MissingNameError` instead, says once which part is off, and keeps the name in `MISSING`, which run.json
(``missing``) and Prometheus (``msprobe_integration_missing``) show. The guard around the part, or who asks and can leave something out,
catches it. `optional` is for what versions or objects may lack, with the reason why its absence says nothing wrong.

What is wrapped, and what nothing asks `need` for, is in a table: the module ``reliance`` of each framework, whose rows `check` looks for
when an integration attaches. ``msprobe frameworks`` (`msprobe_integrations.framework_report`) shows these rows, and what the sources ask
`need` for, which stands in no table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

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
    raise make_missing_error(f"{_kind(thing)}.{' or .'.join(names)}", for_)


def make_missing_error(name: str, for_: str) -> MissingNameError:
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


class Requirement(NamedTuple):
    """One thing that has to be there.

    Attributes:
        on: ``package.module:Name.attribute``, or ``object.attribute`` of an object given to `check`; several ways joined by ``|``,
            of which one is enough.
        needed_for: what does not work without it, in the words of the user.
        versions: where it is known to be, for the page.
    """

    on: str
    needed_for: str
    versions: str = ""


def version_of(package: str) -> str:
    """Installed version of a distribution, ``""`` when there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package.replace("-", "_"))
        return str(getattr(module, "__version__", "") or "")


def find_missing(table: Sequence[Requirement], objects: Mapping[str, Any] | None = None) -> list[Requirement]:
    """Rows of `table` that are not there. Rows about objects that were not given are left out."""
    objects = objects or {}
    return [row for row in table if not any(_there(way.strip(), objects) for way in row.on.split("|"))]


def check(name: str, package: str, table: Sequence[Requirement], objects: Mapping[str, Any] | None = None) -> list[Requirement]:
    """Say once per row what is missing and what that takes away, and keep it in `MISSING`; returns the rows. Never raises."""
    lost = find_missing(table, objects)
    for row in lost:
        if (key := f"{name}: {row.on}") not in MISSING:
            MISSING[key] = row.needed_for
            _log.warning("%s %s has no %s: without it: no %s", name, version_of(package) or "(version unknown)", row.on, row.needed_for)
    return lost


def _there(address: str, objects: Mapping[str, Any]) -> bool:
    module, colon, path = address.partition(":")
    if colon:
        value: Any = sys.modules.get(module)
        if value is None:
            try:
                value = importlib.import_module(module)
            except Exception:  # whatever a framework's own module raises, it is not usable
                return False
    else:
        name, _, path = address.partition(".")
        if name not in objects:
            return True
        value = objects[name]
    for part in path.split(".") if path else ():
        try:
            value = getattr(value, part)
        except Exception:
            return False
    return True
