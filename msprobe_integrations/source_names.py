"""Names in sources, which are read and not imported: an import of a training framework takes seconds. Is a name there, and which ones
does an integration ask `requirements.need` for?

Only what the source says beyond doubt counts: definitions, assignments and imports at the outermost level of a module or of a class,
through imported names, stars and base classes. What stands below an ``if`` or a ``try`` has to be looked for by importing.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msprobe_integrations.requirements import Requirement

_DEPTH = 20
"""Names are followed through this many modules and base classes; cycles end here."""


class _Scope(NamedTuple):
    """What a module or a class defines.

    Attributes:
        names: by name: the class, or where it is imported from (module, path; relative ones made absolute), None: anything else.
        stars: modules of ``from module import *``.
    """

    names: dict[str, ast.ClassDef | tuple[str, tuple[str, ...]] | None]
    stars: list[str]


def defines(module: str, path: Sequence[str]) -> bool:
    """Does the source of `module` say that ``module.path[0].path[1]...`` is there? False: not, or not beyond doubt. Never raises."""
    try:
        return _defines(module, tuple(path), _DEPTH)
    except (OSError, SyntaxError, ValueError, ImportError, RecursionError):
        return False


def _defines(module: str, path: tuple[str, ...], depth: int) -> bool:
    scope = _scope_of(module)
    if scope is None or depth == 0:
        return False
    if not path:
        return True
    if path[0] not in scope.names:
        return any(_defines(star, path, depth - 1) for star in scope.stars)
    definition, rest = scope.names[path[0]], path[1:]
    while isinstance(definition, ast.ClassDef) and rest:
        inner = _scope(definition.body, module, package=False)
        if rest[0] not in inner.names:
            bases = [_split_dotted_name(base) for base in definition.bases]
            return any(_defines(module, (*base, *rest), depth - 1) for base in bases if base)
        definition, rest = inner.names[rest[0]], rest[1:]
    if isinstance(definition, tuple):
        where, names = definition
        inside = bool(names) and _defines(where, (*names, *rest), depth - 1)
        return inside or _defines(".".join((where, *names)), rest, depth - 1)  # the imported name may be a module
    return not rest


@functools.cache
def _scope_of(module: str) -> _Scope | None:
    """The outermost level of a module, None where it has no source."""
    file = _file(module)
    return None if file is None else _scope(ast.parse(file.read_bytes()).body, module, package=file.stem == "__init__")


def _scope(body: Sequence[ast.stmt], module: str, *, package: bool) -> _Scope:
    scope = _Scope({}, [])
    for node in body:
        if isinstance(node, ast.ClassDef):
            scope.names[node.name] = node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope.names[node.name] = None
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                scope.names.update({name.id: None for name in ast.walk(target) if isinstance(name, ast.Name)})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                scope.names[alias.asname or root] = (alias.name if alias.asname else root, ())
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: (None if package else -1)]
            above = base[: len(base) - node.level + 1] if node.level else []
            where = ".".join((*above, *((node.module,) if node.module else ())))
            for alias in node.names:
                if alias.name == "*":
                    scope.stars.append(where)
                else:
                    scope.names[alias.asname or alias.name] = (where, (alias.name,))
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    scope.names.pop(target.id, None)
    return scope


def _file(module: str) -> Path | None:
    """Source, or stub of a module in C; its parents are not imported."""
    root, *inner = module.split(".")
    spec = importlib.util.find_spec(root) if root else None
    if spec is None:
        return None
    if not inner and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for part in inner[:-1]:
        places = [place / part for place in places if (place / part).is_dir()]
    for place in places:
        inner_place = place / inner[-1] if inner else place
        for file in (
            inner_place / "__init__.py",
            inner_place.with_name(f"{inner_place.name}.py"),
            inner_place / "__init__.pyi",
            inner_place.with_name(f"{inner_place.name}.pyi"),
        ):
            if (inner or file.stem == "__init__") and file.is_file():
                return file
    return None


def _split_dotted_name(node: ast.expr) -> tuple[str, ...]:
    """``a.b.c`` as its names; nothing for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _split_dotted_name(node.value)):
        return (*before, node.attr)
    return _split_dotted_name(node.value) if isinstance(node, ast.Subscript) else ()


def find_needed_names(folder: Path) -> list[Requirement]:
    """What the sources of an integration ask `need` for: the table of that, which nobody has to write. Names and texts that are made while
    running are not in it."""
    needed: dict[str, Requirement] = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if "need(" in text else []
        values = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
        texts = {ast.unparse(node.targets[0]): node.value for node in values}
        for node in nodes:
            if isinstance(node, ast.Call) and (asked := _format_need(node)):
                given = next((word.value for word in node.keywords if word.arg == "for_"), None)
                part = texts.get(given.id) if isinstance(given, ast.Name) else given
                needed.setdefault(asked, Requirement(asked, str(part.value) if isinstance(part, ast.Constant) else ""))
    return list(needed.values())


def _format_need(call: ast.Call) -> str:
    """``object.name | object.other`` of a call of `need`; the whole path of one within another. Empty: it is none, or names nothing."""
    names = [str(name.value) for name in call.args[1:] if isinstance(name, ast.Constant)]
    if not isinstance(call.func, ast.Name) or call.func.id != "need" or not names:
        return ""
    thing = call.args[0]
    thing = thing.body if isinstance(thing, ast.IfExp) else thing.func if isinstance(thing, ast.Call) and not thing.args else thing
    owner = (isinstance(thing, ast.Call) and _format_need(thing)) or ast.unparse(thing).removeprefix("self.").lstrip("_")
    return " | ".join(f"{one}.{name!s}" for one in owner.split(" | ") for name in names)
