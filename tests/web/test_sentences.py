"""Sentences about a run: English everywhere, Chinese on the pages that are read in Chinese."""

# ruff: noqa: RUF001 - Chinese is meant
from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from pathlib import Path

from msprobe_engine.config.environment.rules import environment_rules
from msprobe_engine.config.settings.aliases import known_terms
from msprobe_engine.core.text.sentences import Sentence, joined, one_line_of
from msprobe_engine.find.config import system
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.report.diagnosis.page import page
from msprobe_engine.report.web import sentences
from msprobe_engine.report.web.markup import text

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
    known = sentences.templates()
    assert not used - known.keys()
    assert not {one for one in known.keys() - used if re.search("[A-Za-z]{2}", re.sub(r"\{\d\}", "", one))}
    for english, chinese in known.items():
        assert set(re.findall(r"\{\d\}", english)) == set(re.findall(r"\{\d\}", chinese)), english


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
    assert joined(", ", ["a", "b", "c"]) == "a, b, c"
    ranks = joined(", ", (Sentence("rank {0}: {1}", rank, 1) for rank in range(10_240)))
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
