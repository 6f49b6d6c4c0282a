"""What an integration relies on in its framework, as a table, and what is lost where a version has it no longer.

Each integration has a module ``reliance`` with ``NAME``, ``PACKAGE`` (distribution) and ``TABLE``. It is checked once, when the integration
attaches; ``msprobe frameworks`` checks it for everything that is installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.log import get_logger

_log = get_logger()
_said: set[tuple[str, str]] = set()


class Reliance(NamedTuple):
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


def missing(table: Sequence[Reliance], objects: Mapping[str, Any] | None = None) -> list[Reliance]:
    """Rows of `table` that are not there. Rows about objects that were not given are left out."""
    objects = objects or {}
    return [row for row in table if not any(_there(way.strip(), objects) for way in row.on.split("|"))]


def check(name: str, package: str, table: Sequence[Reliance], objects: Mapping[str, Any] | None = None) -> list[Reliance]:
    """Say once per row what is missing and what that takes away; returns the rows. Never raises."""
    lost = missing(table, objects)
    for row in lost:
        if (name, row.on) not in _said:
            _said.add((name, row.on))
            _log.warning("%s %s has no %s: without it: no %s", name, version_of(package) or "(version unknown)", row.on, row.needed_for)
    return lost


def _there(way: str, objects: Mapping[str, Any]) -> bool:
    module, colon, path = way.partition(":")
    if colon:
        found: Any = sys.modules.get(module)
        if found is None:
            try:
                found = importlib.import_module(module)
            except Exception:  # whatever a framework's own module raises, it is not usable
                return False
    else:
        name, _, path = way.partition(".")
        if name not in objects:
            return True
        found = objects[name]
    for part in path.split(".") if path else ():
        try:
            found = getattr(found, part)
        except Exception:
            return False
    return True
