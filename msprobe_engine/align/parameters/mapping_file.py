"""Mapping files of checkpoints: which names belong together where the tool cannot know, and facts of the model that no file says.

```yaml
facts: {heads: 32, kv_heads: 8, head_dim: 128, experts: 8, gated: true, vocab: 32000}
names:
  - {a: "encoder.block.{n}.attn.weight", b: "layers.{n}.attention.weight"}
  - {a: "blocks.{n}.qkv.weight", b: ["layers.{n}.q.weight", "layers.{n}.k.weight", "layers.{n}.v.weight"]}
  - {a: "head.weight", b: "output.weight", transposed: true}
ignore: ["*.running_mean", "probe.*"]
```

``{n}`` stands for one part of a dotted name or a piece of one (``weight{e}``), the same on both sides; ``*`` under ``ignore`` for
anything. States of optimizers follow their parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError

_NUMBERS = ("heads", "kv_heads", "head_dim", "hidden", "layers", "experts", "vocab")
_FLAGS = ("gated", "tied")
_KEYS = ("facts", "names", "ignore")
_RULE_KEYS = ("a", "b", "dim", "transposed")
_MOST = 10_000
_PLACE = re.compile(r"\\\{([A-Za-z_][A-Za-z0-9_]*)\\\}")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of both sides that hold the same elements. One of the sides may have several tensors, one behind the other along `dim`.

    Attributes:
        a, b: templates with places in braces.
        transposed: B's tensor has its last two dimensions exchanged.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    dim: int = 0
    transposed: bool = False

    def places(self, name: str) -> dict[str, str] | None:
        """What stands at the places of the first template of side A in a name; None: the name is another."""
        match = _pattern(self.a[0]).fullmatch(name)
        return match.groupdict() if match is not None else None

    @staticmethod
    def fill_template(template: str, places: MappingType[str, str]) -> str:
        for key, value in places.items():
            template = template.replace("{" + key + "}", value)
        return template

    def __str__(self) -> str:
        return f"{', '.join(self.a)} -> {', '.join(self.b)}"


@dataclass(frozen=True)
class Mapping:
    """A mapping file.

    Attributes:
        facts: of the model; they go before what checkpoints say.
        names: rules, the first that fits a name counts.
        ignore: patterns of names that are not compared.
        path: of the file, for messages.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    names: tuple[Names, ...] = ()
    ignore: tuple[str, ...] = ()
    path: str = ""

    def ignores(self, name: str) -> bool:
        """Whether a name is not to be compared."""
        return any(_matches(pattern, name) for pattern in self.ignore)


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a template; a place that stands twice must be filled alike."""
    seen: set[str] = set()

    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>[^.]+)"

    return re.compile(_PLACE.sub(place, re.escape(template)), re.DOTALL)


def _matches(pattern: str, name: str) -> bool:
    """Whether a name is one of a pattern in which ``*`` stands for anything; in time that grows with its length alone."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    position, end = len(first), len(name) - len(last)
    for part in middle:
        position = name.find(part, position, end)
        if position < 0:
            return False
        position += len(part)
    return True


def read_mapping(path: Path) -> Mapping:
    """The mapping of a YAML or JSON file.

    Raises:
        SettingsError: the file cannot be read.
        UsageError: it holds what no mapping has; the message names the file, the place and what is allowed.
    """
    from msprobe_engine.core.settings.text import read_file

    data = read_file(path)
    return mapping_of({} if data is None else data, str(path))


def mapping_of(data: Any, path: str = "mapping") -> Mapping:
    """As `read_mapping`, of plain data.

    Raises:
        UsageError: see `read_mapping`.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a mapping file holds {', '.join(_KEYS)}; this one is a {type(data).__name__}")
    _check_keys(data, _KEYS, path)
    names = _list(data, "names", path)
    rules = tuple(_rule(rule, f"{path}: names[{i}]") for i, rule in enumerate(names))
    ignore = _list(data, "ignore", path)
    for i, pattern in enumerate(ignore):
        _text(pattern, f"{path}: ignore[{i}]")
    return Mapping(_facts(data.get("facts") or {}, path), rules, tuple(ignore), path)


def _facts(data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{path}: facts is a {type(data).__name__}; a mapping of {', '.join(_NUMBERS + _FLAGS)} is needed")
    _check_keys(data, _NUMBERS + _FLAGS, f"{path}: facts")
    for key, value in data.items():
        if key in _FLAGS and not isinstance(value, bool):
            raise UsageError(f"{path}: facts.{key} is a {type(value).__name__}; true or false is needed")
        if key in _NUMBERS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{path}: facts.{key} must be a whole number above 0")
    return dict(data)


def _rule(data: Any, where: str) -> Names:
    if not isinstance(data, dict) or "a" not in data or "b" not in data:
        raise UsageError(f"{where}: needs `a` and `b`, names of side A and of side B")
    _check_keys(data, _RULE_KEYS, where)
    sides = []
    for side in ("a", "b"):
        names_of_side = data[side] if isinstance(data[side], list) else [data[side]]
        if not names_of_side or len(names_of_side) > _MOST:
            raise UsageError(f"{where}.{side}: a name or a list of names is needed")
        sides.append(tuple(_text(name, f"{where}.{side}") for name in names_of_side))
    if min(len(side) for side in sides) > 1:
        raise UsageError(f"{where}: one side must be a single name; {len(sides[0])} and {len(sides[1])} are given")
    dim, transposed = data.get("dim", 0), data.get("transposed", False)
    if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < 8:
        raise UsageError(f"{where}.dim: a whole number from 0 on is needed")
    if not isinstance(transposed, bool):
        raise UsageError(f"{where}.transposed: true or false is needed")
    places = set(_PLACE.findall(re.escape(sides[0][0])))
    for name in (*sides[0], *sides[1]):
        other = set(_PLACE.findall(re.escape(name))) - places
        if other:
            raise UsageError(f"{where}: {{{sorted(other)[0]}}} of {name!r} does not stand in {sides[0][0]!r}")
        if any(len(_PLACE.findall(re.escape(part))) > 1 for part in name.split(".")):
            raise UsageError(f"{where}: {name!r} has two places in one part of the name; dots must be between them")
    if any("*" in name for side in sides for name in side):
        raise UsageError(f"{where}: `*` is allowed under ignore only; use places like {{n}}")
    return Names(sides[0], sides[1], dim, transposed)


def _check_keys(data: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    other = [key for key in data if key not in known]
    if other:
        raise UsageError(f"{where}: unknown key {str(other[0])[:80]!r}; allowed are {', '.join(known)}")


def _list(data: dict[str, Any], key: str, path: str) -> list[Any]:
    entries = data.get(key) or []
    if not isinstance(entries, list) or len(entries) > _MOST:
        raise UsageError(f"{path}: {key} is a {type(entries).__name__}; a list of at most {_MOST} entries is needed")
    return entries


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 1000:
        raise UsageError(f"{where}: a {type(value).__name__} stands where a name is needed")
    return value
