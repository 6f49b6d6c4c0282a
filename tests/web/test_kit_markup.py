"""What pages are made of, without a browser: text is escaped, words have both languages, the policy names what is in the file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.report.web import markup, page, words

WEB = Path(page.__file__).parent
PYTHON = ("diagnosis/page.py", "config/page.py", "checkpoint/page.py", "table_files/html.py")


@given(st.text())
def test_text_makes_no_markup(value: str) -> None:
    """Whatever a name holds, it is text; what can be printed comes back as it was, all else as an escape."""
    made = markup.text(value)
    assert not set("<>\"'") & set(made)
    shown = unescape(made)
    assert all(c.isprintable() or c == "\n" for c in shown)
    if value.isprintable():
        assert shown == value


@given(st.lists(st.text(), min_size=2, max_size=2))
def test_arguments_of_words_are_text(values: list[str]) -> None:
    """An argument that looks like markup or like the place of another argument stays what it is."""
    made = words.words("checkpoint", "different_tensors_top", *values)
    assert made.count("<") == 2
    assert words.plain("checkpoint", "different_tensors_top", *values) == f"Different tensors ({values[0]}), the {values[1]} furthest apart"


def test_every_text_has_both_languages() -> None:
    """Each entry is English and Chinese, with the same places for arguments; the Chinese one has Chinese in it unless it is a term."""
    terms = {"checkpoint.l2", "config.error", "config.warning", "config.pass"}
    for section, entries in json.loads((WEB / "kit_texts.json").read_text(encoding="utf-8")).items():
        for key, (english, chinese) in entries.items():
            where = f"{section}.{key}"
            assert sorted(re.findall(r"\{\d\}", english)) == sorted(re.findall(r"\{\d\}", chinese)), where
            assert english.isascii() or {c for c in english if not c.isascii()} <= set("×≥–"), where  # noqa: RUF001 - these are meant
            assert where in terms or re.search("[\u4e00-\u9fff]", chinese), where


def test_every_text_is_used() -> None:
    """No entry of the texts is left over, and none is missing: keys stand in scripts as section.key, in Python as the last argument."""
    sources = "".join((WEB.parent / name).read_text(encoding="utf-8") for name in PYTHON)
    sources += "".join(path.read_text(encoding="utf-8") for path in [*WEB.glob("*.js"), WEB / "page.py", WEB / "words.py"])
    found = set(re.findall(r"[\w.]+", sources))
    made = {"kind", "units", "only", "headline", "changes", "may", "tile", "harmless"}  # keys that are put together, as those of a side are
    left = [
        f"{section}.{key}"
        for section in ("kit", "diagnosis", "config", "checkpoint", "table")
        for key in words.section_of(section)
        if not {key, f"{section}.{key}", re.sub("_[ab]$", "_", key)} & found and key.split("_")[0] not in made
    ]
    assert not left
    used = set(re.findall(r'"(kit\.\w+)"', "".join(path.read_text(encoding="utf-8") for path in WEB.glob("*.js"))))
    assert not [key for key in used if key.split(".")[1] not in words.section_of(key.split(".")[0]) and not key.endswith("_")]


def test_the_policy_names_the_files() -> None:
    """Each style and script of a page is in its policy by the SHA-256 of exactly what stands in the file."""
    made = b"".join(page.page("t", kind="table", scripts=("table.js",), data=[("x", b"1")])).decode()
    policy = unescape(re.search(r'Policy" content="([^"]*)"', made)[1])  # type: ignore[index]
    inline = re.findall(r"<(style|script)>(.*?)</\1>", made, re.DOTALL)
    assert [kind for kind, _ in inline] == ["style", "script", "script", "script"]
    for kind, content in inline:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy.split(f"{kind}-src ")[1].split(";")[0]


def test_islands_are_the_same_for_the_same_bytes() -> None:
    """`pack` gives base64 of gzip without a time; a page takes what was packed elsewhere as it is."""
    packed = page.pack(b"abc" * 1_000_000)
    assert packed == page.pack(b"abc" * 1_000_000)
    assert gzip.decompress(base64.b64decode(packed)) == b"abc" * 1_000_000
    assert packed in b"".join(page.page("t", kind="table", data=[("x", packed)]))


def test_dark_colours_are_the_same_twice() -> None:
    """The colours for a system that is dark are those of a reader who chose dark, and no token is without one."""
    sheet = (WEB / "kit.css").read_text(encoding="utf-8")
    light, system, chosen = (
        dict(re.findall(r"(--[\w-]+): ([^;]+);", sheet[sheet.index(start) :].split("}")[0]))
        for start in (":root {", ':root:not([data-theme="light"]) {', ':root[data-theme="dark"] {')
    )
    assert system == chosen
    assert set(light) - set(system) == {"--font", "--mono"}


@pytest.mark.parametrize(
    "name", ["s1", "s4", "good", "warn", "bad", "soft", "accent", "ubad-text", *(f"u{i}" for i in (*range(7), "bad", "none"))]
)
def test_contrast(name: str) -> None:
    """Words in a colour reach 4.5 to 1 on the card, words on a colour of the scale on that; lines of charts 3 to 1."""
    sheet = (WEB / "kit.css").read_text(encoding="utf-8")
    for start in (":root {", ':root[data-theme="dark"] {'):
        tokens = dict(re.findall(r"--([\w-]+): (#\w+);", sheet[sheet.index(start) :].split("}")[0]))
        front, back = (f"{name}-ink", name) if f"{name}-ink" in tokens else (name, "card")
        assert _contrast(tokens[front], tokens[back]) >= (3 if name[0] == "s" and name[1].isdigit() else 4.5), (start, name)


def test_the_scale_is_told_by_lightness() -> None:
    """From equal to far beyond round-off every class is further from the page than the last: the order shows without colour vision."""
    sheet = (WEB / "kit.css").read_text(encoding="utf-8")
    for start in (":root {", ':root[data-theme="dark"] {'):
        tokens = dict(re.findall(r"--([\w-]+): (#\w+);", sheet[sheet.index(start) :].split("}")[0]))
        away = [_contrast(tokens[f"u{i}"], tokens["card"]) for i in range(7)]
        assert away == sorted(away), (start, away)


def _contrast(one: str, other: str) -> float:
    """Ratio of two colours, as WCAG 2 defines it."""
    a, b = sorted((_luminance(one), _luminance(other)))
    return (b + 0.05) / (a + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
