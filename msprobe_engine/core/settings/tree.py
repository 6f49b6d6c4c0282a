"""Plain data to settings objects and back, driven by the dataclasses of `schema` alone: no key is named here.

All mistakes of a file are collected in one `Report`, each as one line: file, key path, value seen, its type, what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings import rank_choice

T = TypeVar("T")
BAD: Any = object()
"""What a converter returns after it has reported an error."""

_RANGE = re.compile(r"\s*([0-9]{1,7})\s*(?:-\s*([0-9]{1,7})\s*)?")
_FREE_NODES = 10_000
_FREE_DEPTH = 16


class Key(NamedTuple):
    """One key of a section.

    Attributes:
        kind: ``bool``, ``int``, ``float``, ``str``, ``section``, ``free``; with `many` a list of them.
        default: value when the key is absent.
        optional: null is allowed and means "absent".
        section: dataclass of a section (or of the items of a list of sections).
        item: of a list of sections, the key that an item which is a text gives; empty: items are mappings.
        ranks: they may also be chosen by what they are, see `rank_choice`.
    """

    name: str
    kind: str
    many: bool
    default: Any
    optional: bool
    section: type[Any] | None
    choices: tuple[str, ...]
    minimum: int | None
    maximum: int | None
    ranges: bool
    help: str
    item: str = ""
    ranks: bool = False

    @property
    def allowed(self) -> str:
        """What may stand here, in words."""
        words = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string"}.get(self.kind, "a mapping")
        if self.choices:
            words = "one of " + ", ".join(repr(c) for c in self.choices)
        bounds = [f">= {self.minimum}"] * (self.minimum is not None) + [f"<= {self.maximum}"] * (self.maximum is not None)
        if bounds:
            words += " " + " and ".join(bounds)
        if self.ranges:
            words = f"integers {' and '.join(bounds)} or ranges like '3-6'"
            return f"a list of {words}" + (f"; or {rank_choice.ALLOWED}" if self.ranks else "")
        return f"a list, each item {words}" if self.many else words


class Report:
    """The mistakes and remarks about one settings source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def error(self, path: str, message: str) -> Any:
        """Note a mistake at the key path `path`; returns `BAD` so that converters can return it."""
        self.errors.append(f"{self.source}: {path}: {message}" if path else f"{self.source}: {message}")
        return BAD

    def wrong(self, path: str, value: Any, allowed: str) -> Any:
        """Note a value that is not allowed."""
        return self.error(path, f"{format_value(value)} ({type_name(value)}) is not allowed; allowed: {allowed}")

    def unknown(self, path: str, name: Any, known: Iterable[str], what: str = "key") -> Any:
        """Note an unknown name, with the nearest known one."""
        known = list(known)
        near = nearest(name, known)
        hint = f"did you mean '{near}'?" if near else f"known here: {', '.join(known)}"
        return self.error(join(path, name), f"unknown {what}; {hint}")

    def warning(self, path: str, message: str) -> None:
        """Note a remark that stops nothing."""
        self.warnings.append(f"{self.source}: {path}: {message}")

    def raise_errors(self) -> None:
        """Raise one `SettingsError` with one line per mistake, if there are any."""
        if self.errors:
            raise SettingsError("\n".join(self.errors))


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name most like `name`, None when none is near."""
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower()[:100], list(lower), n=1, cutoff=0.6) if isinstance(name, str) else []
    return lower[close[0]] if close else None


def likeness(name: Any, known: Iterable[str]) -> float:
    """How like its nearest known name `name` is, 0 when none is near, 1 when equal."""
    near = nearest(name, known)
    return 0.0 if near is None else difflib.SequenceMatcher(None, near.lower(), str(name).lower()[:100]).ratio()


def join(path: str, name: Any) -> str:
    """Key path of `name` below `path`; names that would break a line are shown escaped."""
    text = name if isinstance(name, str) and name.isprintable() and name and len(name) <= 100 else format_value(name)
    return f"{path}.{text}" if path else text


_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxstring, _short.maxother = 4, 8, 8, 8, 80, 80


def format_value(value: Any) -> str:
    """A value for a message: short, one line, printable whatever it is."""
    try:
        # a YAML file of a few lines can hold a list whose full text would fill the memory
        text = _short.repr(value) if isinstance(value, (list, tuple, Mapping)) else repr(value)
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else text
    except Exception:  # huge integers and recursive objects
        return f"<{type_name(value)}>"
    text = text.encode("ascii", "backslashreplace").decode() if not text.isprintable() else text
    return text if len(text) <= 80 else f"{text[:77]}..."


def type_name(value: Any) -> str:
    """The type of a value in the words of a settings file."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, (list, tuple)):
        return "list"
    return {"str": "string", "int": "integer", "float": "number", "bool": "true/false"}.get(type(value).__name__, type(value).__name__)


def keys_of(cls: type[Any]) -> tuple[Key, ...]:
    """The keys of a section class in order of definition."""
    hints = typing.get_type_hints(cls)
    return tuple(_key(f, hints[f.name]) for f in dataclasses.fields(cls))


def _key(field: dataclasses.Field[Any], hint: Any) -> Key:
    optional = many = False
    if isinstance(hint, types.UnionType):
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        optional = True
    if typing.get_origin(hint) is tuple:
        hint, many = typing.get_args(hint)[0], True
    section = hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
    if section is not None:
        kind = "section"
    elif field.metadata.get("free"):
        kind = "free"
    else:
        kind = {bool: "bool", int: "int", float: "float", str: "str"}[hint]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    m = field.metadata
    choices = tuple(m.get("choices", ()))
    low, high = m.get("minimum"), m.get("maximum")
    words = m.get("help", ""), m.get("item", "")
    return Key(field.name, kind, many, default, optional, section, choices, low, high, bool(m.get("ranges")), *words, bool(m.get("ranks")))


def build(cls: type[T], node: Any, path: str, report: Report) -> T:
    """An object of the section class `cls` from plain data; mistakes go to `report` and leave the default in place."""
    keys = {key.name: key for key in keys_of(cls)}
    if not isinstance(node, Mapping):
        report.wrong(path or "the file", node, "a mapping with the keys " + ", ".join(keys))
        return cls()
    values: dict[str, Any] = {}
    for name, value in node.items():
        key = keys.get(name) if isinstance(name, str) else None
        if key is None:
            report.unknown(path, name, keys)
            continue
        converted = convert(key, value, join(path, name), report)
        if converted is not BAD:
            values[key.name] = converted
    return cls(**values)


def convert(key: Key, value: Any, path: str, report: Report) -> Any:
    """The value of one key, `BAD` when it is not allowed (reported)."""
    if key.ranks and rank_choice.is_choice(value):
        return _chosen_ranks(value, path, report)
    value = written_out(key, value)
    if value is None and (key.optional or key.many or key.section is not None):
        return key.default
    if key.ranges:
        return _ranges(key, value, path, report)
    if not key.many:
        return _single(key, value, path, report)
    if not isinstance(value, (list, tuple)):
        hint = f" (for one item write [{format_value(value)}])" if isinstance(value, (str, int, float)) else ""
        return report.wrong(path, value, key.allowed + hint)
    items = [_single(key, item, f"{path}[{i}]", report) for i, item in enumerate(value)]
    return BAD if any(item is BAD for item in items) else tuple(items)


def written_out(key: Key, value: Any) -> Any:
    """What a short form stands for: one step, rank or rule in place of a list of one; ``true`` for a section that is on as it is, ``false``
    for one that is off. Any other value as it is."""
    if key.ranges and type(value) in (int, str):
        return [value]
    if key.many and key.item:
        items = [value] if isinstance(value, str) else value
        return [{key.item: each} if isinstance(each, str) else each for each in items] if isinstance(items, (list, tuple)) else items
    if key.section is None or key.many or not isinstance(value, bool):
        return value
    if not value and key.optional:
        return None
    if any(inner.name == "enabled" for inner in keys_of(key.section)):
        return {"enabled": value}
    return {} if value else value


def _single(key: Key, value: Any, path: str, report: Report) -> Any:
    if key.section is not None:
        return build(key.section, value, path, report)
    if key.kind == "free":
        return _free(value, path, report)
    if key.kind == "float" and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    expected = {"bool": bool, "int": int, "float": float, "str": str}[key.kind]
    good = type(value) is expected  # bool is a subclass of int: the exact type is asked for
    if good and key.choices:
        good = value in key.choices
        if not good:
            near = nearest(value, [c for c in key.choices if c])
            return report.wrong(path, value, key.allowed + (f"; did you mean '{near}'?" if near else ""))
    if good and isinstance(value, (int, float)) and not isinstance(value, bool):
        good = not (key.minimum is not None and value < key.minimum) and not (key.maximum is not None and value > key.maximum)
        good = good and math.isfinite(value if isinstance(value, float) else 0)
    if good and isinstance(value, str) and "\0" in value:
        good = False
    return value if good else report.wrong(path, value, key.allowed)


def _ranges(key: Key, value: Any, path: str, report: Report) -> Any:
    """Integers and ``"a-b"`` (both ends included), sorted, each once; a list as the existing configuration files have it."""
    if not isinstance(value, (list, tuple)):
        return report.wrong(path, value, key.allowed)
    spans: list[tuple[int, int]] = []
    bad = False
    low, high = key.minimum or 0, key.maximum if key.maximum is not None else 1_000_000
    for i, item in enumerate(value):
        first = last = -1
        if type(item) is int:
            first = last = item
        elif isinstance(item, str) and (match := _RANGE.fullmatch(item)):
            first = int(match[1])
            last = int(match[2]) if match[2] else first
        if not low <= first <= last <= high:
            words = f"; or, in place of the list, {rank_choice.ALLOWED}" if key.ranks and isinstance(item, str) else ""
            allowed = f"an integer or a range 'a-b' with {low} <= a <= b <= {high}{words}"
            bad = report.wrong(f"{path}[{i}]", item, allowed) is BAD
        else:
            spans.append((first, last))
    out: list[int] = []
    for first, last in sorted(spans):  # ranges may overlap
        out.extend(range(max(first, out[-1] + 1) if out else first, last + 1))
    return BAD if bad else tuple(out)


def _chosen_ranks(value: Any, path: str, report: Report) -> Any:
    try:
        ranks = rank_choice.ranks_of(value)
    except SettingsError as error:
        return report.error(path, str(error))
    if ranks is None:
        report.warning(path, f"{format_value(value)} stands for all ranks here, because no launcher says how many there are (WORLD_SIZE)")
    elif not ranks:
        return report.error(path, f"{format_value(value)} stands for no rank of this job")
    return ranks or ()


def _free(value: Any, path: str, report: Report) -> Any:
    """A mapping whose keys belong to somebody else: copied, with a bound on size and depth (YAML aliases can be cyclic)."""
    if not isinstance(value, Mapping):
        return report.wrong(path, value, "a mapping")
    budget = [_FREE_NODES]

    def copy(node: Any, depth: int) -> Any:
        budget[0] -= 1
        if depth > _FREE_DEPTH or budget[0] < 0:
            raise SettingsError(f"too deep or too large; allowed: {_FREE_DEPTH} levels and {_FREE_NODES} values")
        if isinstance(node, Mapping):
            for key in node:
                if not isinstance(key, str):
                    raise SettingsError(f"the key {format_value(key)} ({type_name(key)}) is not allowed; allowed: strings")
            return {key: copy(child, depth + 1) for key, child in node.items()}
        if isinstance(node, (list, tuple)):
            return [copy(child, depth + 1) for child in node]
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise SettingsError(
            f"{format_value(node)} ({type_name(node)}) is not allowed; allowed: strings, numbers, true, false, null, lists, mappings"
        )

    try:
        return copy(value, 0)
    except SettingsError as error:
        return report.error(path, str(error))


def to_tree(settings: Any) -> dict[str, Any]:
    """Settings as plain data (dicts, lists, scalars) that YAML and JSON can hold and `load_settings` reads back to an equal object."""
    return {key.name: plain(getattr(settings, key.name)) for key in keys_of(type(settings))}


def plain(value: Any) -> Any:
    """A value of a setting as `to_tree` has it."""
    if dataclasses.is_dataclass(value):
        return to_tree(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value
