"""Sentences about a run: English everywhere, Chinese on the pages that are read in Chinese."""

# ruff: noqa: RUF001 - Chinese is meant
from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from pathlib import Path

import pytest

from msprobe_engine.config.environment.rules import environment_rules
from msprobe_engine.config.settings.aliases import known_terms
from msprobe_engine.core.text.sentences import Sentence, join_sentences, one_line_of
from msprobe_engine.find.config import system
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.measure import missing_statistics
from msprobe_engine.probe.rules.registry import RULES
from msprobe_engine.report.diagnosis.page import page
from msprobe_engine.report.web import sentences
from msprobe_engine.report.web.markup import text
from msprobe_engine.report.web.sentences import in_chinese

ENGINE = Path(sentences.__file__).parents[2]


def _templates(tree: ast.Module) -> set[str]:
    """Texts that a module makes sentences of; of a name, all texts that are given to it."""
    named: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(str(node.value.value))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Sentence" and node.args:
            first = node.args[0]
            found |= {str(first.value)} if isinstance(first, ast.Constant) else set(named.get(getattr(first, "id", ""), ()))
    return {one for one in found if re.search("[A-Za-z]", re.sub(r"\{\d\}", "", one))}


def test_every_sentence_has_chinese() -> None:
    """Each template of the sources has a Chinese one with the same places, and no Chinese one is left over."""
    used: set[str] = set()
    for path in ENGINE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "Sentence(" in source:
            used |= _templates(ast.parse(source))
    used |= known_terms().reasons() | environment_rules().reasons() | {why for _, _, why in system.RULES}
    known = sentences.templates(sentences.SENTENCES)
    assert not used - known.keys()
    assert not {one for one in known.keys() - used if re.search("[A-Za-z]{2}", re.sub(r"\{\d\}", "", one))}
    for english, chinese in known.items():
        assert set(re.findall(r"\{\d\}", english)) == set(re.findall(r"\{\d\}", chinese)), english


RULES_AND_ROWS = [*(ENGINE / "probe" / "rules").rglob("*.py"), ENGINE / "find" / "verdicts" / "rows.py"]


def test_texts_of_files_have_chinese() -> None:
    """What a rule means and advises is known on pages; templates have the same places in both languages, and only words of the sources."""
    for rule in RULES.values():
        for one in (rule.meaning, rule.next):
            assert not re.search("[a-z]{3,} [a-z]{2,} [a-z]{2,}", re.sub("`.*?`", "", in_chinese(one))), one
    sources = " ".join(path.read_text(encoding="utf-8") for path in [*RULES_AND_ROWS, Path(missing_statistics.__file__)])
    words = set(re.findall("[A-Za-z]{3,}", sources))
    for english, chinese in sentences.templates(sentences.TEXTS).items():
        assert sorted(re.findall(r"\{\d", english)) == sorted(re.findall(r"\{\d", chinese)), english
        assert set(re.findall("[A-Za-z]{3,}", english)) <= words, english


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "loss_not_finite: loss, rank 0 step 9: value nan; expected a finite number",
            "loss_not_finite：loss，卡 0 第 9 步：值 nan；应为有限的数",
        ),
        (
            "nan_inf: w (grad, reduced), rank 1 step 3: 8 NaN, 2 +Inf of 64 elements; expected only finite values (and 3 more)",
            "nan_inf：w (grad, reduced)，卡 1 第 3 步：64 个元素中有 8 个 NaN、2 个 +Inf；应为只有有限值（另有 3 个）",
        ),
        (
            "off by 3.1 of its size, 40 times what round-off explains; what is recorded of what went in is the same",
            "相差其大小的 3.1，为舍入误差可解释的 40 倍；输入的记录一致",
        ),
        ("my_rule: of another version", "my_rule: of another version"),
    ],
)
def test_a_text_of_a_file_is_found_again(said: str, shown: str) -> None:
    """By its templates, one inside the other; what is not known stays."""
    assert sentences.chinese(said) == shown


def test_a_sentence_is_its_english_text() -> None:
    """Files, processes and copies get the text as it is; what was put in stays what it is, also where it looks like a place."""
    inner = Sentence("{0} ({1} times round-off)", "25.00%", "3,000")
    one = Sentence("{0} differs by {1}; what goes in is the same", "{1} <b>", inner)
    assert one == "{1} <b> differs by 25.00% (3,000 times round-off); what goes in is the same"
    assert json.dumps([one]) == json.dumps([str(one)])
    for made in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one_line_of(one)):
        assert made == one
        assert sentences.chinese(made) == "{1} <b> 相差 25.00%（舍入误差的 3,000 倍）；输入一致"
    assert sentences.both(one) == [str(one), sentences.chinese(one)]
    assert sentences.both("plain") == "plain"
    assert join_sentences(", ", ["a", "b", "c"]) == "a, b, c"
    ranks = join_sentences(", ", (Sentence("rank {0}: {1}", rank, 1) for rank in range(10_240)))
    assert ranks.startswith("rank 0: 1, rank 1: 1, ")
    assert len(re.findall("[,，、]", sentences.chinese(ranks))) == 10_239
    assert one_line_of(Sentence("{0} holds NaN or Inf", "a\nb")) == "a\\nb holds NaN or Inf"


def test_names_in_a_sentence_are_text_of_the_page() -> None:
    """Both languages are escaped."""
    made = text(Sentence("{0} holds NaN or Inf", '"><script>\u202e'))
    assert "<script" not in made
    assert "\u202e" not in made
    assert made.count('"') == 2


def test_the_diagnosis_says_why_in_chinese() -> None:
    """Headline, reason, evidence and problems of the page bring their Chinese along, the title is English text."""
    why = Sentence("{0} differs by {1}; what goes in is the same", "output.0", "3.00%")
    found = Diagnosis("divergence", [Suspect("Functional.linear.0.forward", "mlp", 1, 2, why=why)], ["own words"], problems=["{x}"])
    found.evidence.append(Sentence("The largest difference is {0}: {1}.", "1", "here"))
    made = page(found)
    assert "<title>First difference: step 2, rank 1, module mlp, Functional.linear.0.forward</title>" in made
    assert 'data-zh="首个差异：第 2 步，卡 1，模块 mlp，Functional.linear.0.forward"' in made
    assert 'data-zh="output.0 相差 3.00%；输入一致。"' in made
    assert 'data-zh="最大差异为1：here。"' in made
    assert found.as_json()["first_suspect"]["why"] == "output.0 differs by 3.00%; what goes in is the same"
