"""A comparison as one page of html, readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msprobe_engine.config.severity import CHANGES, ERROR, HARMLESS, MAY, PASS, WARNING, level
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.comparison import Comparison, headline
from msprobe_engine.find.config.difference import Difference, short
from msprobe_engine.report.web.markup import Html, badge, bullets, fold_content, paragraph, section, soft, table, text, tiles
from msprobe_engine.report.web.page import Verdict, document
from msprobe_engine.report.web.words import section_of, words

MOST_ROWS = 5_000
_LONGEST = 300
_VERDICTS: Mapping[str, Verdict] = {ERROR: "bad", WARNING: "warn", PASS: "good"}
_RUN_FIRST = ("cmp", "bench")
"""The sides, as pairs of a comparison have them, in the order of every command: RUN GOLDEN."""
_TONES = {CHANGES: "bad", MAY: "warn", HARMLESS: ""}


def page(comparison: Comparison) -> str:
    """The whole document."""
    counts = comparison.counts()
    parts: list[str] = []
    if comparison.differences or comparison.harmless:
        names = ((CHANGES, "tile_changes"), (MAY, "tile_may"), (HARMLESS, "tile_harmless"))
        parts.append(tiles((_t(key), counts[severity], _TONES[severity] if counts[severity] else "") for severity, key in names))
    parts += section(_t("differences"), _differences(comparison.differences))
    checkers = [
        (
            _word(name),
            badge(_t(level(sheet.severity)), _VERDICTS[level(sheet.severity)]),
            sheet.compared,
            sum(difference.matters for difference in sheet.differences),
        )
        for name in comparison.summary()
        for sheet in (comparison.sheets[name],)
    ]
    parts += section(_t("checkers"), table(_head("checker", "verdict", "compared", "n_differences"), checkers, numbers={2, 3}))
    sides = (
        (_t(f"{who}_side"), *(str(comparison.sides[who].get(key, "-")) for key in ("path", "framework", "world_size", "host", "created")))
        for who in _RUN_FIRST
        if who in comparison.sides
    )
    parts += section(_t("packs"), table(_head("side", "pack", "framework", "ranks", "host", "made"), sides, names={1}))
    derived = [
        (_word(name), target, golden, badge(_t("equals"), "good") if equal else badge(_t("differs"), "bad"))
        for name, (golden, target, equal) in comparison.derived.items()
    ]
    parts += section(_t("derived"), table(_head("quantity", "cmp_side", "bench_side", "verdict"), derived))
    parts += section(_t("not_compared"), bullets(comparison.not_compared.values()))
    parts += section(_t("problems"), bullets(comparison.problems))
    parts += section(_t("notes"), bullets(comparison.notes))
    if comparison.harmless:
        parts += ["<section>", fold_content(_t("n_harmless", len(comparison.harmless)), _differences(comparison.harmless)), "</section>"]
    said = headline(comparison)
    return document(
        said,
        kind="config",
        body="\n".join(parts),
        sections=("config", "config_names"),
        verdict=_VERDICTS[comparison.verdict],
        headline=text(said),
    )


def _t(key: str, *arguments: object) -> Html:
    return words("config", key, *arguments)


def _word(name: str) -> str:
    """A checker or a computed quantity in both languages, where it has words of its own."""
    if isinstance(name, Sentence):
        return name
    return words("config_names", name) if name in section_of("config_names") else name.replace("_", " ")


def _head(*keys: str) -> list[Html]:
    return [_t(key) for key in keys]


def _differences(items: Sequence[Difference]) -> Html:
    rows = []
    for difference in items[:MOST_ROWS]:
        location = ", ".join(
            part
            for part in (
                f"step {format_ranges(difference.steps)}" if difference.steps else "",
                f"rank {format_ranges(difference.ranks)}" if difference.ranks else "",
            )
            if part
        )
        names = [difference.bench_name, *([difference.cmp_name] if difference.cmp_name != difference.bench_name else [])]
        name = Html("<br>".join(text(_short(part)) for part in names if part))
        why = Html(f"{text(difference.why)}{soft(_short(' '.join(part for part in (location, difference.where) if part)))}")
        severity = badge(_t(difference.severity.replace(" ", "_")), _TONES[difference.severity])
        rows.append((severity, _word(difference.sheet), name, _short(difference.cmp), _short(difference.bench), why))
    tones = [_TONES[difference.severity] for difference in items[:MOST_ROWS]]
    shown = table(_head("severity", "where", "name", "cmp_side", "bench_side", "why"), rows, names={2}, tones=tones)
    more = paragraph(_t("more", len(items) - MOST_ROWS), soft=True) if len(items) > MOST_ROWS else ""
    return Html(f"{shown}{more}")


def _short(value: str | None) -> str:
    return short(value, _LONGEST) if value else ""
