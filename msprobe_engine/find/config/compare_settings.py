"""Settings of two runs, name by name and term by term.

1. The same name on both sides: the values are compared as they are meant.
2. What is left belongs to a common term: with the other side's name for it, computed, or with what its framework takes by default.
3. Quantities that are computed on either side (global batch, warm-up in updates, ...).
4. What is left now is there on one side only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher

from msprobe_engine.config.settings import normalize, schedules
from msprobe_engine.config.settings.aliases import Term
from msprobe_engine.config.settings.derived import derived_terms, quantity
from msprobe_engine.config.settings.pack_settings import DEFAULT, DERIVED, NOT_KNOWN, PackSettings, Quantity, Setting, only_moved
from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import some
from msprobe_engine.find.config.difference import ONLY_BENCH, ONLY_CMP, SETTINGS, SIDES, Difference, SettingsComparison

PURE, MAPPING, BY_DEFAULT, BY_DERIVATION = "pure name", "mapping", "default", "derived"
"""``matched_with``; the existing tool has the first two and ``similarity:0.9``."""
_LOSS_SCALE = "loss_scale"


def compare_settings(bench: PackSettings, cmp: PackSettings, file: str, content: Mapping[str, bool] | None = None) -> SettingsComparison:
    """Compare the settings of two runs.

    Args:
        bench, cmp: the two sides.
        file: the column ``file_name``.
        content: ``weights`` and ``data``: whether their content was compared and is equal; what is not in it was not compared.
    """
    return _Comparison(bench, cmp, file, content or {}).run()


class _Comparison:
    def __init__(self, bench: PackSettings, cmp: PackSettings, file: str, content: Mapping[str, bool]) -> None:
        self.bench, self.cmp, self.file, self.content = bench, cmp, file, content
        self.terms = bench.terms
        self.out = SettingsComparison()
        self.reported: set[str] = set()
        self.said_first: dict[tuple[str, str, str], str] = {}
        self.lost = 0
        self.dropped: list[str] = []
        self.assumed: list[str] = []
        self.quantities: dict[str, tuple[Quantity | None, Quantity | None]] = {}

    def run(self) -> SettingsComparison:
        of_golden, of_target = dict(self.bench.settings), dict(self.cmp.settings)
        for name in [name for name in of_golden if name in of_target and not self._is_filled_in(name)]:
            self._pair(name, of_golden.pop(name), of_target.pop(name))
        self._drop_floats(of_golden, self.cmp)
        self._drop_floats(of_target, self.bench)
        self._by_terms(of_golden, of_target)
        self._compare_derived_terms()
        self._defaults()
        self._rates()
        self._compare_negated_flags(of_golden, of_target)
        self._similar(of_golden, of_target)
        for settings, side, other in ((of_golden, self.bench, self.cmp), (of_target, self.cmp, self.bench)):
            for name, one in settings.items():
                self._alone(name, one, side, other)
        for who, side in (("bench", self.bench), ("cmp", self.cmp)):
            self.out.notes += [Sentence("{0}: {1}; the first counts", SIDES[who], text) for text in side.conflicts.values()]
        masked = self.bench.masked | self.cmp.masked
        self.out.unknown |= {name for name, says_so in masked.items() if not says_so}
        if masked:
            self.out.notes.append(Sentence("settings that are masked were not compared: {0} ({1})", len(masked), some(sorted(masked))))
        if self.assumed:
            self.out.notes.append(
                Sentence(
                    "no pack says which framework it is: a setting that one side alone has is what every framework that knows it takes by "
                    "itself, and another program may take something else: {0}",
                    some(self.assumed),
                )
            )
        if self.lost:
            self.out.notes.append(
                Sentence("{0} settings of {1} are null in a pack of the existing tool, which cannot hold them", self.lost, self.file)
            )
        if self.dropped:
            self.out.notes.append(
                Sentence(
                    "{0}: not compared, the other pack has no number with a fraction at all; version 8.1.1 of the existing tool does not "
                    "keep those of YAML files: take that pack again",
                    ", ".join(self.dropped),
                )
            )
        return self.out

    # -- 1: one name -------------------------------------------------------------------------------------------------------------------

    def _pair(self, name: str, golden: Setting, target: Setting) -> None:
        self.out.compared += 1
        alias = next(iter(self.bench.aliases(name)), None)
        x, y = normalize.plain(golden.value), normalize.plain(target.value)
        if self._is_lost(x, y):
            self.lost += 1
            return
        if normalize.same(x, y):
            return
        if alias is not None and not alias.term.group and alias.index is None:
            u, v = self.bench.read_setting(alias, golden), self.cmp.read_setting(alias, target)
            if u is not None and v is not None and normalize.same(u, v):
                return
        terms = [one.term for one in self.bench.aliases(name)]
        term = self._moved_item(name, golden, target) or (terms[0] if terms else None)
        severity, why = self._classify_difference(name, term, golden, target)
        first = self._said_before(name, term, golden, target) if severity != HARMLESS else ""
        if first:
            severity, why = HARMLESS, Sentence("it says again what '{0}' says", first)
        self._row(
            golden.name,
            target.name,
            normalize.show_value(golden.value),
            normalize.show_value(target.value),
            severity,
            why,
            term,
            PURE,
            _places(golden, target),
        )

    def _said_before(self, name: str, term: Term | None, golden: Setting, target: Setting) -> str:
        """The name of a setting of the same term with the same two values (``lr`` and ``optimizer.lr``); empty: none."""
        if term is None or term.group:
            return ""
        sides = ((self.bench, golden), (self.cmp, target))
        values = [next((side.read_setting(alias, one) for alias in side.aliases(name) if alias.term is term), None) for side, one in sides]
        if None in values:
            return ""
        first = self.said_first.setdefault((term.name, repr(values[0]), repr(values[1])), golden.name)
        return "" if first == golden.name else first

    def _is_filled_in(self, name: str) -> bool:
        """``auto`` on one side stands for what other settings of that side say; it is compared by its term."""
        autos = [normalize.plain(side.settings[name].value) == "auto" for side in (self.bench, self.cmp)]
        terms = [alias.term for alias in self.bench.aliases(name)]
        return autos[0] != autos[1] and bool(terms) and not any(term.group for term in terms)

    def _moved_item(self, name: str, golden: Setting, target: Setting) -> Term | None:
        """Of a list with several terms (betas) the one whose item differs."""
        for alias in self.bench.aliases(name):
            if alias.index is not None and not normalize.same(self.bench.read_setting(alias, golden), self.cmp.read_setting(alias, target)):
                return alias.term
        return None

    def _is_lost(self, x: object, y: object) -> bool:
        """Null of a format that cannot hold the value says nothing about a text or an object."""
        return (x is None and self.bench.opaque and isinstance(y, str)) or (y is None and self.cmp.opaque and isinstance(x, str))

    def _drop_floats(self, settings: dict[str, Setting], other: PackSettings) -> None:
        """Numbers of settings files that the other side's collector may have lost say nothing when they are missing there."""
        for name in [name for name, one in settings.items() if other.no_floats and isinstance(one.value, float)]:
            self.dropped.append(settings.pop(name).name)

    # -- 2: one term -------------------------------------------------------------------------------------------------------------------

    def _by_terms(self, of_golden: dict[str, Setting], of_target: dict[str, Setting]) -> None:
        wanted: dict[str, None] = {}
        for settings, side in ((of_golden, self.bench), (of_target, self.cmp)):
            for name in settings:
                wanted.update((alias.term.name, None) for alias in side.aliases(name) if not alias.term.group)
        done: set[str] = set()
        for name in wanted:
            if self._one_term(self.terms[name]):
                done.add(name)
        for settings, side in ((of_golden, self.bench), (of_target, self.cmp)):
            for name in list(settings):
                terms = {alias.term.name for alias in side.aliases(name) if not alias.term.group}
                if terms and terms <= done:
                    del settings[name]

    def _one_term(self, term: Term) -> bool:
        """Compare a term that the sides call differently; False: one side knows nothing of it."""
        if (term.feeds and all(self._quantity(term.feeds))) or self._is_idle(term):
            return True  # the quantity it is a part of is compared, or nobody reads it
        golden, target = self._quantity(term.name)
        if golden is None and target is None:
            return True  # "auto", or nothing: neither says anything
        golden, target = golden or self._default(term, self.bench, self.cmp), target or self._default(term, self.cmp, self.bench)
        if golden is None or target is None:
            one = golden or target
            return one is not None and term.nothing is not None and normalize.same(one.value, term.nothing)
        self.out.compared += 1
        if not normalize.same(golden.value, target.value):
            self._difference(self._of_unknown_batch(term), golden, target)
        return True

    def _quantity(self, name: str) -> tuple[Quantity | None, Quantity | None]:
        if name not in self.quantities:
            self.quantities[name] = quantity(self.bench, name), quantity(self.cmp, name)
        return self.quantities[name]

    def _default(self, term: Term, side: PackSettings, other: PackSettings) -> Quantity | None:
        """What a side takes that says nothing; where its framework is not known, but it is the other's, what that one takes; where
        neither is known, the other's value if all frameworks that have its name for it take that."""
        said = self._quantity(term.name)[1 if other is self.cmp else 0]
        unknown = bool(side.settings) and not side.frameworks
        found = side.default(term, other.frameworks if unknown else ())
        if found is None and unknown and not other.frameworks:
            shared = [side.default(term, (framework,)) for framework in other.possible(term)]
            equal = said is not None and all(one is not None and normalize.same(one.value, said.value) for one in shared)
            found = shared[0] if shared and equal else None
        told = side.is_told or other.is_told
        if found is not None and said is not None and not told and normalize.same(found.value, said.value):
            self.assumed += [name for name in said.names if name not in self.assumed]
            self.out.unknown |= set(said.names) if term.severity != HARMLESS else set()  # the program may be of none of these frameworks
        return found

    def _difference(self, term: Term, golden: Quantity, target: Quantity) -> None:
        how = BY_DERIVATION if DERIVED in (golden.how, target.how) else BY_DEFAULT if DEFAULT in (golden.how, target.how) else MAPPING
        names = [", ".join(q.names) if q.how != DERIVED or len(q.names) == 1 else term.name for q in (golden, target)]
        self._row(names[0], names[1], golden.shown, target.shown, term.severity, term.why, term, how)

    # -- 3: what is computed -----------------------------------------------------------------------------------------------------------

    def _compare_derived_terms(self) -> None:
        parents = {name: {row.feeds for row in self.terms if row.name == name} - {""} for name in derived_terms()}
        for name in derived_terms():
            golden, target = self._quantity(name)
            if golden is None or target is None:
                continue
            equal = normalize.same(golden.value, target.value)
            if DERIVED in (golden.how, target.how):
                self.out.derived[name] = (golden.shown, target.shown, equal)
            parts = {row.name for row in self.terms if row.feeds == name}
            if equal or ({name} | parts | parents[name]) & self.reported:
                continue
            if DERIVED in (golden.how, target.how) and not self._follows(self.terms[name], golden, target):
                self._difference(self._of_equal_whole(self.terms[name]), golden, target)

    def _of_equal_whole(self, term: Term) -> Term:
        """A computed part of a quantity that is equal (micro batches of the same global batch) is only another order of the same sums."""
        whole = self._quantity(term.feeds) if term.feeds else (None, None)
        if whole[0] is None or whole[1] is None or not normalize.same(whole[0].value, whole[1].value):
            return term
        why = Sentence("the {0} is {1} on both sides, and its sums are made in other parts", term.feeds.replace("_", " "), whole[0].value)
        return replace(term, severity=MAY, why=why)

    def _of_unknown_batch(self, term: Term) -> Term:
        """A part of a batch of which a side does not say the size: others may make up for it (twice the micro batches, half as large)."""
        unknown = term.feeds == "global_batch_size" and not all(self._quantity(term.feeds))
        return replace(term, severity=MAY) if unknown and term.severity == CHANGES else term

    def _rates(self) -> None:
        """The learning rate itself, at updates that tell schedules apart: of other classes and parameters it may still be the same."""
        golden, target = schedules.schedule(self.bench), schedules.schedule(self.cmp)
        if golden is None or target is None:
            return
        differ = []
        for name, update in schedules.points(golden, target).items():
            rates = golden.rate(update), target.rate(update)
            equal = math.isclose(*rates, rel_tol=schedules.CLOSE, abs_tol=1e-15)
            shown = f"{rates[0]:.6g}", f"{rates[1]:.6g}"
            self.out.derived[Sentence("learning_rate of update {0} ({1})", update, name)] = (*shown, equal)
            if not equal:
                differ.append((update, *shown))
        if differ and not self.reported & schedules.TERMS:
            update, x, y = differ[0]
            term = self.terms["learning_rate"]
            why = Sentence("the schedules are set alike and computed otherwise, by the rules of each framework; {0}", term.why)
            self._row(f"rate of update {update}", f"rate of update {update}", x, y, term.severity, why, term, BY_DERIVATION)

    def _follows(self, term: Term, golden: Quantity, target: Quantity) -> bool:
        """A quantity made of settings whose differences are reported themselves, as no less, on both sides by the same names."""
        least = (CHANGES, term.severity)
        return (
            bool(golden.names)
            and golden.names == target.names
            and any(d.bench_name in golden.names and d.severity in least for d in self.out.differences)
        )

    def _defaults(self) -> None:
        """What neither side says, and their frameworks, or the releases of one, take differently."""
        for term in self.terms:
            if not term.default or term.group or term.name in self.reported or term.feeds or any(self._quantity(term.name)):
                continue
            golden, target = self.bench.default(term), self.cmp.default(term)
            if golden is not None and target is not None and not normalize.same(golden.value, target.value) and self._counts(term):
                self._row(
                    golden.names[0],
                    target.names[0],
                    golden.shown,
                    target.shown,
                    term.severity,
                    f"neither side says it, and {term.why}",
                    term,
                    BY_DEFAULT,
                )

    def _counts(self, term: Term) -> bool:
        """Loss scales count in float16 only, of both: else the data type is the difference."""
        if _LOSS_SCALE not in term.name:
            return True
        return all(q is not None and q.value == "float16" for q in self._quantity("compute_dtype"))

    def _is_idle(self, term: Term) -> bool:
        """Loss scales where neither side computes in float16."""
        return _LOSS_SCALE in term.name and all(q is not None and q.value != "float16" for q in self._quantity("compute_dtype"))

    # -- 4: what is left -----------------------------------------------------------------------------------------------------------------

    def _compare_negated_flags(self, of_golden: dict[str, Setting], of_target: dict[str, Setting]) -> None:
        """``--no-x`` of one side is ``x: false`` of the other."""
        for settings, others, swap in ((of_golden, of_target, False), (of_target, of_golden, True)):
            for name in [name for name in settings if name.startswith("no_") and name[3:] in others]:
                golden, target = settings.pop(name), others.pop(name[3:])
                x, y = normalize.plain(golden.value), normalize.plain(target.value)
                self.out.compared += 1
                if isinstance(x, bool) and isinstance(y, bool) and x is not y:
                    continue
                if swap:
                    golden, target = target, golden
                term = self.bench.term_of(name)
                severity, why = self._classify_difference(name, term, golden, target)
                self._row(
                    golden.name,
                    target.name,
                    normalize.show_value(golden.value),
                    normalize.show_value(target.value),
                    severity,
                    why,
                    term,
                    MAPPING,
                    _places(golden, target),
                )

    def _similar(self, of_golden: dict[str, Setting], of_target: dict[str, Setting]) -> None:
        """Names of the same words, however they are joined or ordered: ``maxPositionEmbeddings``, ``max_position_embeddings``."""
        words: dict[tuple[str, ...], list[str]] = {}
        for name, one in of_target.items():
            words.setdefault(_words(one.name), []).append(name)
        for name in list(of_golden):
            names = words.get(_words(of_golden[name].name), [])
            if len(names) != 1 or names[0] not in of_target:
                continue
            golden, target = of_golden.pop(name), of_target.pop(names[0])
            self.out.compared += 1
            if not normalize.same(normalize.plain(golden.value), normalize.plain(target.value)):
                term = self.bench.term_of(name)
                severity, why = self._classify_difference(name, term, golden, target)
                ratio = SequenceMatcher(None, golden.name.lower(), target.name.lower()).ratio()
                shown = normalize.show_value(golden.value), normalize.show_value(target.value)
                self._row(golden.name, target.name, *shown, severity, why, term, f"similarity:{ratio:.3f}", _places(golden, target))

    def _alone(self, name: str, one: Setting, side: PackSettings, other: PackSettings) -> None:
        if normalize.is_unset(one.value) or normalize.plain(one.value) == "auto":
            return
        if other.opaque and one.framework and one.origin == "default":
            return
        term = side.term_of(name)
        severity, why = self._classify_difference(name, term, one, None)
        if term is not None and term.feeds and all(self._quantity(term.feeds)):
            return
        unknown = term is None or (term.group and term.severity == MAY)
        if severity != HARMLESS and one.origin == "default" and unknown:
            severity, why = HARMLESS, Sentence("it is at its framework's default, and the other side has no setting of this name")
        elif severity != HARMLESS:
            severity, why = MAY, Sentence("only one side says it, and what the other one takes is not known; {0}", why)
        names = (one.name, ONLY_BENCH) if side is self.bench else (ONLY_CMP, one.name)
        value = normalize.show_value(one.value)
        values = (value, "") if side is self.bench else ("", value)
        self._row(*names, *values, severity, why, term, "", one.where)

    # -- what it means -------------------------------------------------------------------------------------------------------------------

    def _classify_difference(self, name: str, term: Term | None, setting: Setting, other: Setting | None) -> tuple[str, str]:
        """Severity and why. `other`: None, of a setting that one side alone has."""
        severity, why = self._by_table(name, term, setting, other)
        if any(isinstance(one.value, normalize.Several) for one in (setting, other) if one is not None):
            why = Sentence("several commands or files of one side give it other values; {0}", why)
        if severity == CHANGES and NOT_KNOWN in (setting.origin, other.origin if other is not None else ""):
            return MAY, Sentence("what it is depends on the run of the script, which was only read; {0}", why)
        return severity, why

    def _by_table(self, name: str, term: Term | None, setting: Setting, other: Setting | None) -> tuple[str, str]:
        if term is None:
            row = self.terms.pattern(name)
            if row.severity != HARMLESS and other is not None and only_moved(setting.value, other.value):
                return HARMLESS, "it is the same file or directory at another place"
            return row.severity, row.why
        if self._is_idle(term):
            return HARMLESS, "neither side computes in float16, which alone needs a scale of the loss"
        if term.content and term.content in self.content:
            what = "the samples" if term.content == "data" else "the weights"
            return HARMLESS, f"only the name differs; {what} themselves were compared"
        if term.kind == "path" and other is not None and only_moved(setting.value, other.value):
            return HARMLESS, "it is the same file or directory at another place"
        if term.content:
            return MAY, f"{term.why}, if what is there differs; the packs do not say"
        if term.feeds and other is not None:
            return self._part(term)
        return term.severity, term.why

    def _part(self, term: Term) -> tuple[str, str]:
        """A part of a computed quantity matters as much as the quantity, when that is known on both sides."""
        golden, target = self._quantity(term.feeds)
        if golden is None or target is None:
            return self._of_unknown_batch(term).severity, term.why
        whole = term.feeds.replace("_", " ")
        if normalize.same(golden.value, target.value):
            if term.severity == MAY:
                return MAY, f"{term.why}; the {whole} is {golden.value} on both sides"
            return HARMLESS, f"the {whole} is {golden.value} on both sides"
        above = self.terms[term.feeds]
        return above.severity, f"{above.why}: the {whole} is {golden.value} against {target.value}"

    def _row(
        self, golden: str, target: str, x: str, y: str, severity: str, why: str, term: Term | None, matched: str, place: str = ""
    ) -> None:
        if term is not None:
            self.reported.add(term.name)
        common = "" if term is None else term.name
        self.out.differences.append(Difference(SETTINGS, golden, target, x, y, severity, why, common, matched, self.file, where=place))


def _places(golden: Setting, target: Setting) -> str:
    return " and ".join(dict.fromkeys(one.where for one in (golden, target) if one.where))


def _words(name: str) -> tuple[str, ...]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return tuple(sorted(word for word in re.split(r"[^A-Za-z0-9]+", apart.lower()) if word))
