"""What ``msprobe frameworks`` shows: what an integration relies on in its framework, and what is lost where a version has it no longer.

Each integration has a module ``reliance`` with ``NAME``, ``PACKAGE`` (distribution) and ``TABLE``, to which what its sources ask
`requirements.need` for is added. It is looked through in a process of its own per framework:
``python -m msprobe_integrations.framework_report MODULE FILE [import]`` writes `report` as JSON. A module may have ``PARTS``: packages of
the framework that need not be installed, whose rows do not count then; and ``trouble()``: why the framework cannot work in this
environment although it is installed, else ``""``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msprobe_integrations.requirements import Requirement, find_missing, version_of
from msprobe_integrations.source_names import defines, find_needed_names


def report(module: ModuleType, *, imports: bool = False) -> dict[str, Any]:
    """What ``msprobe frameworks`` shows of one framework. What its source does not say is looked for by importing it.

    Args:
        imports: import it in any case.

    Returns:
        name, package, version (``""``: unknown), installed, error (why it cannot be imported, ``""``), and rows: on, needed_for, versions
        and state, which is ``there``, ``lost``, ``in training`` (about objects of a training) or ``not installed`` (an optional part).
    """
    own = Path(module.__file__ or "")
    table: Sequence[Requirement] = (*module.TABLE, *(find_needed_names(own.parent) if own.name == "reliance.py" else ()))
    ways = [address for row in table for address in _ways(row)]
    roots = sorted({address.partition(":")[0].partition(".")[0] for address in ways if ":" in address})
    version = version_of(module.PACKAGE)
    packages = [root for root in roots if _has_package(root)]
    installed = bool(packages or version)
    said: dict[str, Any] = {"name": module.NAME, "package": module.PACKAGE, "version": version, "installed": installed, "error": ""}
    if not installed:
        return {**said, "rows": []}
    said["error"] = getattr(module, "trouble", str)()
    if said["error"]:
        return {**said, "rows": []}
    absent = [part for part in getattr(module, "PARTS", ()) if not _has_package(part)]
    states = [_from_source(row, absent) for row in table]
    if imports or "" in states:
        for root in packages:
            try:
                importlib.import_module(root)
            except Exception as error:
                said["error"] = f"{type(error).__name__}: {error}"
        states = [_by_import(row) if not state or (imports and state == "there") else state for row, state in zip(table, states)]
    return {**said, "rows": [{**row._asdict(), "state": state} for row, state in zip(table, states)]}


def _ways(row: Requirement) -> list[str]:
    return [way.strip() for way in row.on.split("|")]


def _from_source(row: Requirement, absent: Sequence[str]) -> str:
    """The state of a row as far as it is known without an import; ``""``: not known."""
    ways = _ways(row)
    if all(f"{way.partition(':')[0]}.".startswith(tuple(f"{part}." for part in absent)) for way in ways):
        return "not installed"
    named = [way.partition(":") for way in ways if ":" in way]
    if not named:
        return "in training"
    return "there" if any(defines(module, path.split(".")) for module, _, path in named) else ""


def _by_import(row: Requirement) -> str:
    ways = _ways(row)
    if any(not find_missing((Requirement(way, ""),)) for way in ways if ":" in way):
        return "there"
    return "in training" if any(":" not in way for way in ways) else "lost"


def _has_package(name: str) -> bool:
    """Is there such a package? Its parents are imported, itself not."""
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False


def module_of(name: str) -> ModuleType:
    """A module with a table by its name. The package around it is not imported: it may refuse that where its framework is missing.

    Raises:
        ImportError: there is none of that name.
    """
    root, *inner = name.split(".")
    package = importlib.util.find_spec(root)
    for place in (package.submodule_search_locations or ()) if package is not None and inner else ():
        file = Path(place, *inner).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            made = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made)
            return made
    return importlib.import_module(name)


def main(argv: Sequence[str]) -> None:
    """``MODULE FILE [import]``: write the report of a module with a table into a file."""
    content = report(module_of(argv[0]), imports="import" in argv[2:])
    Path(argv[1]).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
