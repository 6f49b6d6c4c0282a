"""Settings of training frameworks under common names: the table in ``aliases.yaml``, and which of its rows a setting belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from msprobe_engine.config.severity import SHORT
from msprobe_engine.core.text.sentences import Sentence

ANY = "any"
FRAMEWORKS = ("torchtitan", "megatron", "mindspore", "transformers", "lightning", "accelerate", "deepspeed", "torch")
"""Whose defaults hold comes first where a configuration speaks of several: Accelerate, DeepSpeed and torch are driven by the others."""

_ALIAS = re.compile(r"(?P<form>not |2\*\*)?(?P<name>[^\[\]]+?)(?:\[(?P<index>[0-9]+)\])?")


@dataclass(frozen=True)
class Term:
    """One row of the table; see the head of ``aliases.yaml``."""

    name: str
    severity: str
    why: str
    kind: str = ""
    group: bool = False
    feeds: str = ""
    content: str = ""
    nothing: Any = None
    needs: str = ""
    unsaid: Sequence[Any] = ()
    default: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alias:
    """What a framework calls a term.

    Attributes:
        form: ``not ``: a flag that switches it off; ``2**``: an exponent; empty: the value itself.
        index: the item of a list that is meant, None: all of it.
        length: parts of the dotted name that fit; the longest is the best.
    """

    term: Term
    framework: str
    form: str
    index: int | None
    length: int


@dataclass(frozen=True)
class Pattern:
    """What is said of a setting that is in no term."""

    match: re.Pattern[str] | None
    severity: str
    why: str


def key(name: str) -> str:
    """A name as it is compared: without leading dashes, in small letters, with ``_`` for ``-``."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace("/", ".").replace(":", ".")


class Terms:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self.terms: dict[str, Term] = {}
        self._aliases: dict[str, list[Alias]] = {}
        for name, row in data["terms"].items():
            names = row.pop("names")
            row["severity"], row["why"] = SHORT[row["severity"]], Sentence(row["why"])
            term = self.terms[name] = Term(name, **row)
            for framework, texts in names.items():
                for text in texts:
                    m = _ALIAS.fullmatch(text)
                    if m is None:
                        raise ValueError(f"aliases.yaml: {name}: name {text!r}")
                    path = m["name"]
                    alias = Alias(term, framework, m["form"] or "", int(m["index"]) if m["index"] else None, path.count(".") + 1)
                    self._aliases.setdefault(path, []).append(alias)
        self._patterns = [Pattern(re.compile(row["match"]), SHORT[row["severity"]], Sentence(row["why"])) for row in data["patterns"]]
        self._unknown = Pattern(None, SHORT[data["unknown"]["severity"]], Sentence(data["unknown"]["why"]))
        self._found: dict[str, tuple[Alias, ...]] = {}

    def __getitem__(self, name: str) -> Term:
        return self.terms[name]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms.values())

    def reasons(self) -> set[str]:
        """All that may be said of a setting that differs."""
        return {*(term.why for term in self.terms.values()), *(row.why for row in (*self._patterns, self._unknown))}

    def aliases(self, name: str) -> tuple[Alias, ...]:
        """What a setting of this name can be: the longest part of its dotted name that is in the table decides."""
        known = self._found.get(name)
        if known is None:
            parts = key(name).split(".")
            tails = (".".join(parts[i:]) for i in range(len(parts)))
            known = self._found[name] = tuple(next((self._aliases[tail] for tail in tails if tail in self._aliases), ()))
        return known

    def of(self, name: str, framework: str = "") -> Alias | None:
        """The alias of a setting, of this framework if it is known; None: it is in no term."""
        found = self.aliases(name)
        return next((alias for alias in found if alias.framework == framework), found[0] if found else None)

    def pattern(self, name: str) -> Pattern:
        """What is said of a setting that is in no term."""
        plain = key(name)
        return next((row for row in self._patterns if row.match is not None and row.match.search(plain)), self._unknown)


def default_of(term: Term, framework: str, version: str = "") -> Any:
    """What a framework takes when nothing is said.

    Raises:
        KeyError: it is not known, or depends on the version, which is not.
    """
    value = term.default[framework]
    if not isinstance(value, Mapping):
        return value
    for condition, default in value.items():
        if version and _holds(condition, version):
            return default
    raise KeyError(framework)


def _holds(condition: str, version: str) -> bool:
    sign, bound = ("<", condition[1:]) if condition[0] == "<" else (">=", condition[2:])
    return (_numbers(version) < _numbers(bound)) == (sign == "<")


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: ``0.19.3+cu12`` is (0, 19, 3)."""
    m = re.match(r"[0-9]+(?:\.[0-9]+)*", version.strip())
    return tuple(int(part) for part in m[0].split(".")) if m else ()


@lru_cache(maxsize=1)
def known_terms() -> Terms:
    """The table of this package."""
    text = files("msprobe_engine.config.settings").joinpath("aliases.yaml").read_text(encoding="utf-8")
    return Terms(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
