"""`Diagnosis` as one page of html, readable without scripts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.text.ranges import few_ranges, ranges_of
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import NONE, Diagnosis, Suspect, finite_json
from msprobe_engine.report.web.markup import Html, bullets, code, facts, paragraph, section, table, text, tiles
from msprobe_engine.report.web.page import document
from msprobe_engine.report.web.words import section_of, words

_MOST_NAMES = 200


def write(found: Diagnosis, directory: Path | str) -> tuple[Path, Path]:
    """Write ``diagnosis.json`` and ``diagnosis.html`` (mode 0640).

    Raises:
        OSError: they cannot be written.
    """
    make_directories(os.fspath(directory))
    data, html = Path(directory) / "diagnosis.json", Path(directory) / "diagnosis.html"
    write_file(data, [finite_json(found.as_json())])
    write_file(html, [page(found).encode()])
    return data, html


def page(diagnosis: Diagnosis) -> str:
    """The whole document."""
    first = diagnosis.first_suspect
    parts = _first(first, diagnosis.differences) if first is not None else []
    parts += section(_t("evidence"), bullets(diagnosis.evidence))
    parts += section(_t("next"), bullets(map(code, diagnosis.next)))
    parts += section(_t("further"), _suspects(diagnosis.suspects[1:]))
    parts += section(_t("also"), bullets(diagnosis.first_nonfinite()))
    for side, names in diagnosis.unmatched.items():
        parts += section(_t(f"only_{side}"), bullets(map(code, names[:_MOST_NAMES])))
    parts += section(_t("renamed"), table((_t("name_target"), _t("name_golden")), diagnosis.renamed.items(), names={0, 1}))
    parts += section(_t("problems"), bullets(diagnosis.problems))
    if first is not None and first.stack:
        parts += section(_t("stack"), f"<pre>{text(chr(10).join(first.stack))}</pre>")
    parts += section(_t("looked_at"), facts(_looked_at(diagnosis)))
    return document(
        diagnosis.headline(),
        kind="diagnosis",
        body="\n".join(parts),
        sections=("diagnosis", "diagnosis_facts"),
        verdict="bad" if diagnosis.finding != NONE else "warn" if diagnosis.problems else "good",
        headline=text(diagnosis.headline()),
    )


def _looked_at(found: Diagnosis) -> list[tuple[object, object]]:
    """Of the records how many, where not all of them could be compared."""
    rows = {key: value for key, value in found.looked_at.items() if key != "recorded"}
    if (all_of_them := found.looked_at.get("recorded")) not in (None, rows.get("records")):
        rows["records"] = f"{rows['records']} / {all_of_them}"
    return [(_word(key), value) for key, value in rows.items()]


def _t(key: str, *arguments: object) -> Html:
    return words("diagnosis", key, *arguments)


def _word(name: str) -> str:
    """A name that a diagnosis gives to a fact, in both languages; names of statistics (Max, Norm) stay."""
    return words("diagnosis_facts", name) if name in section_of("diagnosis_facts") else name


def _first(first: Suspect, differences: int) -> list[str]:
    rows: list[tuple[object, object]] = [(_t("record"), code(first.record))]
    if first.module:
        rows.append((_t("module"), code(first.module)))
    rows.append((_t("where"), f"{first.step}, {few_ranges(first.on_ranks or ranges_of(first.ranks or [first.rank]))}"))
    rows += [
        (_t(key), code(" ".join(value.split())))
        for key, value in (("source", first.source), ("tensor", first.tensor), ("partner", first.partner))
        if value
    ]
    why = paragraph(Sentence("{0}.", first.reason())) if first.why else ""
    parts = section(_t("first_suspect"), why + facts(rows)) + section(_t("numbers"), _numbers(first.numbers))
    return [_tiles(first, differences), f'<div class="beside">{"".join(parts)}</div>']


def _tiles(first: Suspect, differences: int) -> Html:
    found: list[tuple[object, object, str]] = []
    if first.distance is not None and first.limit and math.isfinite(first.distance):
        found.append((_t("times"), f"{first.distance / first.limit:,.0f}", "bad"))
    if differences:
        found.append((_t("differences"), f"{differences:,}", ""))
    return tiles(found)


def _numbers(numbers: Mapping[str, Any]) -> Html:
    """Both sides' rows; what differs stands out."""
    keys = list(dict.fromkeys(key for side in numbers.values() for key in side))
    head = (_t("number"), *map(_word, numbers))
    rows = [(_word(key), *(_format_value(side.get(key)) for side in numbers.values())) for key in keys]
    tones = ["apart" if key != "row" and len(set(row[1:])) > 1 else "" for key, row in zip(keys, rows)]
    return table(head, rows, tones=tones, kind="narrow")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _suspects(suspects: Sequence[Suspect]) -> Html:
    head = (_t("step"), _t("rank"), _t("record"), _t("why"))
    return table(
        head, ((s.step, few_ranges(s.on_ranks or [str(s.rank)]), s.record, s.reason()) for s in suspects), numbers={0, 1}, names={2}
    )
