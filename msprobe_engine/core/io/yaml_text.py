"""The one entry for YAML that somebody else wrote: whatever PyYAML raises becomes one error, and nothing in it is ever executed.

PyYAML's constructors let IndexError, AttributeError, KeyError, ValueError, OverflowError and RecursionError through (``!!int ''``,
``!!bool x``, ``2026-99-99``, deep nesting). A document of a few lines can stand for millions of values by its anchors, and a number of
half a million parts (``1:1:1:...``) takes minutes: both are refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.json_text import MAX_DEPTH, MAX_DIGITS

_MOST_MERGED = 100_000
"""Keys that ``<<`` may copy; a few lines that merge each other would make millions."""
_MOST_VALUES = 100_000
"""Values that a document may stand for when its aliases are followed, or one a character if these are more."""


class _BoundedLoader(yaml.SafeLoader):
    """The safe loader of PyYAML, which would copy merged mappings and compute numbers without an end."""

    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > _MOST_MERGED:
            raise _wrong(node, f"more than {_MOST_MERGED} keys when merged mappings are followed")

    def construct_bounded(self, node: yaml.ScalarNode) -> Any:
        """A number or a time."""
        if len(node.value) > MAX_DIGITS:
            raise _wrong(node, f"a number of {len(node.value)} digits; {MAX_DIGITS} are the most")
        make = {"int": self.construct_yaml_int, "float": self.construct_yaml_float, "timestamp": self.construct_yaml_timestamp}
        kind = node.tag.rpartition(":")[2]
        try:
            return make[kind](node)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise _wrong(node, f"{node.value[:80]!r} is no {kind} ({error})") from None

    def construct_checked_bool(self, node: yaml.ScalarNode) -> bool:
        """A truth value; PyYAML raises KeyError for other words."""
        try:
            return self.construct_yaml_bool(node)
        except (LookupError, AttributeError):
            raise _wrong(node, f"{str(node.value)[:80]!r} is no bool; allowed are true and false") from None


for _kind in ("int", "float", "timestamp"):
    _BoundedLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _BoundedLoader.construct_bounded)
_BoundedLoader.add_constructor("tag:yaml.org,2002:bool", _BoundedLoader.construct_checked_bool)


class _UniqueKeyLoader(_BoundedLoader):
    """Refuses two equal keys, of which PyYAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(node, "a mapping is needed here")
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                repeated = key in seen
                seen.add(key)
            except TypeError:
                raise _wrong(key_node, "a key must be a plain value") from None
            if repeated:
                raise _wrong(key_node, f"the key {key!r} appears twice")
        return super().construct_mapping(node, deep)


class _ForeignLoader(_BoundedLoader):
    """Tags of applications (``!include x``, ``!!python/...``) make no objects; the text behind them stays."""

    def construct_unknown(self, suffix: str, node: yaml.Node) -> Any:
        """The value without its tag."""
        if isinstance(node, yaml.ScalarNode):
            return f"!{suffix} {node.value}".strip()
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return self.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else None


_ForeignLoader.add_multi_constructor("!", _ForeignLoader.construct_unknown)
_ForeignLoader.add_multi_constructor("tag:yaml.org,2002:python/", _ForeignLoader.construct_unknown)


def parse_yaml(text: str) -> Any:
    """Plain data of a YAML document in which every key stands once.

    Raises:
        TextError: it is none, or beyond the limits; line and column are said where PyYAML knows them.
    """
    return _load_documents(text, _UniqueKeyLoader)[-1]


def parse_foreign_yaml(text: str) -> list[Any]:
    """Plain data of the YAML documents of another program's file; raises as `parse_yaml`.

    Of equal keys the last counts, and unknown tags stay as text, as those programs have it.
    """
    return _load_documents(text, _ForeignLoader)


def _load_documents(text: str, loader: type[_BoundedLoader]) -> list[Any]:
    try:
        documents = list(yaml.load_all(text, Loader=loader)) if loader is _ForeignLoader else [yaml.load(text, Loader=loader)]
        values = _count(documents, {}, 0)
    except TextError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if mark is None:
            raise TextError(" ".join(str(error).split())[:300]) from None
        raise TextError(error.problem or error.context or "it is no YAML", line=mark.line + 1, column=mark.column + 1) from None
    except RecursionError:
        raise TextError("it is nested too deeply") from None
    except Exception as error:  # whatever else PyYAML has not thought of
        raise TextError(" ".join(str(error).split())[:300] or type(error).__name__) from None
    if values > max(_MOST_VALUES, len(text)):
        raise TextError(f"its aliases stand for {values:,} values; {_MOST_VALUES:,} are the most")
    return documents


def _count(value: Any, known: dict[int, int], depth: int) -> int:
    """Values with all aliases followed, those that were counted before once more without a look."""
    if isinstance(value, int) and not -(10**MAX_DIGITS) < value < 10**MAX_DIGITS:
        raise TextError(f"it holds a number of more than {MAX_DIGITS} digits")
    if not isinstance(value, (dict, list, tuple, set)):
        return 1
    if id(value) in known:
        if known[id(value)] == 0:
            raise TextError("an alias stands inside of what it names, so it would never end")
        return known[id(value)]
    if depth > MAX_DEPTH:
        raise TextError(f"it is nested too deeply: {MAX_DEPTH} levels are the most")
    known[id(value)] = 0
    children = [item for pair in value.items() for item in pair] if isinstance(value, dict) else value
    known[id(value)] = 1 + sum(_count(child, known, depth + 1) for child in children)
    return known[id(value)]


def _wrong(node: yaml.Node, what: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)
