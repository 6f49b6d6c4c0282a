"""The settings of one side of a comparison: by name, and by the common terms they stand for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_engine.config.secrets import masking
from msprobe_engine.config.secrets.names import judged_name, names_secret
from msprobe_engine.config.settings import normalize
from msprobe_engine.config.settings.aliases import ANY, FRAMEWORKS, Alias, Term, default_of, key, known_terms

SET, DERIVED, DEFAULT = "set", "derived", "default"
DEFAULT_OF = "default of "
"""Before a framework's name: what a value is called that no setting says."""
NOT_KNOWN = "unknown"
"""Origin of a value that depends on what only a run of the script knows; the value is the text of the script."""
_OF_DEEPSPEED_FILE = re.compile(r"^deepspeed$|(?:^|\.)(?:zero_optimization\.|train_micro_batch_size_per_gpu$)")
_PATH = re.compile(r"\s*(?:[0-9.]+\s+)?(?:~|\.{0,2})/\S.*", re.DOTALL)
ENOUGH = 3
"""Names that only one framework has, before its defaults are taken for what is not said."""
MOST_LEVELS = 16
_OF_ENGINE = frozenset({"clip_grad"})
"""Terms of which a DeepSpeed file alone decides: Transformers' own setting only counts where the file says ``auto`` (fill_match of
transformers/integrations/deepspeed.py); where the file says nothing, DeepSpeed's default holds."""
_PACKAGES = {"deepspeed": ("deepspeed",), "transformers": ("transformers",), "megatron": ("megatron-core",), "torchtitan": ("torchtitan",)}


@dataclass(frozen=True)
class Setting:
    """One setting as it was read.

    Attributes:
        name: as written.
        value: as written; secrets are masked.
        origin: ``default``, ``flag``, ``file``, ``environment``, ``code``, `NOT_KNOWN` or empty.
        where: file and line, or key; empty.
        framework: one of `FRAMEWORKS`, empty when not known.
    """

    name: str
    value: Any
    origin: str = ""
    where: str = ""
    framework: str = ""


@dataclass(frozen=True)
class Quantity:
    """What a common term is on one side.

    Attributes:
        value: as `normalize.plain` has it.
        shown: the value, and how it comes about where it was computed.
        names: the settings it is made of, as written.
        how: `SET`, `DERIVED` or `DEFAULT`.
    """

    value: Any
    shown: str
    names: tuple[str, ...]
    how: str = SET


class PackSettings:
    """Settings of one run.

    Args:
        settings: in their order.
        world_size: of the job; None: not known.
        versions: installed packages.
        opaque: the collector wrote null for what its format cannot hold (the existing tool's dynamic file).
        no_floats: the collector may have dropped numbers with a fraction (version 8.1.1, of YAML files).
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        *,
        world_size: int | None = None,
        versions: Mapping[str, str] | None = None,
        opaque: bool = False,
        no_floats: bool = False,
    ) -> None:
        self.terms = known_terms()
        self.settings: dict[str, Setting] = {}
        self.masked: dict[str, bool] = {}  # settings whose values look like secrets: does the name say that it is one?
        settings = list(settings)
        values = {setting.name: setting.value for setting in settings}
        for setting in settings:
            judged = judged_name(setting.name, values)
            for name, value in _flat(setting.name, masking.mask_setting(judged, setting.value)):
                if value == masking.HIDDEN:
                    self.masked[name] = names_secret((name if judged == setting.name else judged).rpartition(".")[2])
                else:
                    self.settings.setdefault(key(name), Setting(name, value, setting.origin, setting.where, setting.framework))
        self.world_size = world_size
        self.versions = versions or {}
        self.opaque = opaque
        self.no_floats = no_floats
        self.is_told = any(setting.framework for setting in self.settings.values())
        self.frameworks = self._frameworks()
        self.deepspeed_file = any(
            _OF_DEEPSPEED_FILE.search(name) and not normalize.is_unset(setting.value) for name, setting in self.settings.items()
        )
        self.conflicts: dict[str, str] = {}
        self.unsettled: set[str] = set()  # terms that were asked for and have several values, see `derived.quantity`
        self._terms: dict[str, list[tuple[Alias, Setting]]] = {}
        for name, setting in self.settings.items():
            for alias in self.aliases(name):
                self._terms.setdefault(alias.term.name, []).append((alias, setting))

    def _frameworks(self) -> tuple[str, ...]:
        votes: Counter[str] = Counter()
        for name, setting in self.settings.items():
            if setting.framework:
                votes[setting.framework] += ENOUGH
                continue
            frameworks = {alias.framework for alias in self.terms.aliases(name)} - {ANY}
            if "deepspeed" in frameworks and normalize.plain(setting.value) == "auto":  # only Transformers and Accelerate fill that in
                votes["transformers"] += ENOUGH
            if len(frameworks) == 1:
                votes[frameworks.pop()] += 1
        return tuple(name for name in FRAMEWORKS if votes[name] >= ENOUGH)

    def aliases(self, name: str) -> list[Alias]:
        """What a setting is: of its framework, of those this side speaks of, or of any."""
        aliases = self.terms.aliases(name)
        setting = self.settings.get(name)
        own = setting.framework if setting is not None else ""
        best = [alias for alias in aliases if alias.framework == own] or [
            alias for alias in aliases if not own and alias.framework in self.frameworks
        ]
        best = best or [alias for alias in aliases if alias.framework == ANY]
        if not own:  # a name means nothing in a framework that is known to be another one
            best = best or list(aliases)
        seen: dict[tuple[str, int | None], Alias] = {}
        for alias in best:
            seen.setdefault((alias.term.name, alias.index), alias)
        return list(seen.values())

    def term_of(self, name: str) -> Term | None:
        """The term of a setting, None: it is in none."""
        found = self.aliases(name)
        return found[0].term if found else None

    def read_setting(self, alias: Alias, one: Setting) -> Any:
        """A setting's value as its term means it; None when it says nothing."""
        return read_value(alias, one.value)

    def quantity_of(self, name: str) -> Quantity | None:
        """A term that a setting says; of several the one with the longest name, and a note in `conflicts` when they differ."""
        candidates = []
        for alias, setting in self._terms.get(name, ()):
            if self._by_engine(name) and alias.framework != "deepspeed":
                continue
            value = self.read_setting(alias, setting)
            if value is not None:
                candidates.append((alias.length, -_order(alias.framework), value, setting))
        if not candidates:
            return None
        candidates.sort(key=lambda row: row[:2], reverse=True)
        value, setting = candidates[0][2:]
        if isinstance(value, normalize.Several):
            self.unsettled.add(name)
        others = [other for _, _, v, other in candidates[1:] if not normalize.same(v, value)]
        if others:
            self.conflicts[name] = (
                f"{setting.name} is {normalize.show_value(setting.value)}, {others[0].name} is {normalize.show_value(others[0].value)}"
            )
        return Quantity(value, normalize.show_value(setting.value), (setting.name,))

    def possible(self, term: Term) -> tuple[str, ...]:
        """Frameworks that have the names by which this side says a term."""
        frameworks = {
            alias.framework
            for _, setting in self._terms.get(term.name, ())
            for alias in self.terms.aliases(setting.name)
            if alias.term is term
        }
        return tuple(name for name in FRAMEWORKS if name in frameworks)

    def _by_engine(self, name: str) -> bool:
        """Does a DeepSpeed file alone decide on a term?"""
        if name not in _OF_ENGINE or not self.deepspeed_file:
            return False
        return all(normalize.plain(one.value) != "auto" for alias, one in self._terms.get(name, ()) if alias.framework == "deepspeed")

    def default(self, term: Term, frameworks: Iterable[str] = ()) -> Quantity | None:
        """What this side's framework takes when nothing is said; None: not known."""
        for framework in ("deepspeed",) if self._by_engine(term.name) else frameworks or self.frameworks:
            if framework not in term.default:
                continue
            if term.needs and framework not in self.terms[term.needs].default and self.quantity_of(term.needs) is None:
                continue
            version = next((self.versions[name] for name in _PACKAGES.get(framework, ()) if name in self.versions), "")
            try:
                value = normalize.plain(default_of(term, framework, version))
            except KeyError:
                continue
            release = f" {version}" if version and isinstance(term.default[framework], Mapping) else ""
            return Quantity(meant(term, framework, value), normalize.show_value(value), (f"{DEFAULT_OF}{framework}{release}",), DEFAULT)
        return None

    def number(self, name: str, *, default: bool = True) -> float | int | None:
        """A term as a number; None: not said, or no number. ``default``: what the framework takes counts."""
        found = self.quantity_of(name) or (self.default(self.terms[name]) if default else None)
        value = found.value if found is not None else None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def read_value(alias: Alias, value: Any) -> Any:
    """A value as a term means it; None when it says nothing."""
    plain = normalize.plain(value)
    if plain is None or plain == "auto":
        return None
    if isinstance(plain, normalize.Several):
        return plain
    if alias.index is not None:
        if not isinstance(plain, tuple) or alias.index >= len(plain):
            return None
        plain = plain[alias.index]
    if alias.form == "not ":
        plain = not plain
    elif alias.form == "2**":
        plain = 2**plain if isinstance(plain, int) and 0 <= plain < 128 else None
    return None if plain in alias.term.unsaid else meant(alias.term, alias.framework, plain)


def meant(term: Term, framework: str, value: Any) -> Any:
    """A plain value in the words of its term."""
    if term.kind == "dtype":
        return normalize.dtype(value)
    if term.kind == "word" and isinstance(value, str):
        word = re.sub(r"[^a-z0-9]", "", value.lower().rpartition(".")[2])
        word = term.words.get(ANY, {}).get(word, word)
        return term.words.get(framework, {}).get(word, word)
    if term.kind == "path" and isinstance(value, str):
        return last_parts(value)
    return value


def only_moved(path: object, other: object) -> bool:
    """Two texts of paths with the same last parts."""
    if not (isinstance(path, str) and isinstance(other, str) and (_PATH.fullmatch(path) or _PATH.fullmatch(other))):
        return False
    return last_parts(path) == last_parts(other)


def last_parts(text: str) -> str:
    """Paths in a text without their directories: ``0.3 /a/b/books 0.7 web`` is ``0.3 books 0.7 web``."""
    return " ".join(part.rstrip("/").rpartition("/")[2] for part in re.split(r"[\s,]+", text))


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A dictionary by dotted names; what is nested very deeply stays one value."""
    if isinstance(value, Mapping) and value and depth < MOST_LEVELS:
        for part, child in value.items():
            yield from _flat(f"{name}.{part}", child, depth + 1)
    else:
        yield name, value


def _order(framework: str) -> int:
    return FRAMEWORKS.index(framework) if framework in FRAMEWORKS else len(FRAMEWORKS)
