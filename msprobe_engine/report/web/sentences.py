"""Sentences about a run in Chinese. Their templates stand in ``sentences_zh.json``, by the English ones; those of texts that files have in
English in ``texts_zh.json``."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from msprobe_engine.core.text.sentences import Sentence, filled
from msprobe_engine.report.web.texts import in_chinese

_FILE = Path(__file__).parent / "sentences_zh.json"


@lru_cache(maxsize=1)
def templates() -> dict[str, str]:
    """English template -> Chinese template."""
    loaded: dict[str, str] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded


def chinese(sentence: str) -> str:
    """A sentence, or a text of a file, in Chinese. What is none stays as it is, and so does a template that has no Chinese one, around its
    arguments."""
    if not isinstance(sentence, Sentence):
        return in_chinese(sentence) if " " in sentence else sentence  # names of tensors, of which there are many, have no spaces
    template = templates().get(sentence.template, sentence.template)
    return filled(template, map(chinese, sentence.arguments))


def both(sentence: str) -> str | list[str]:
    """What ``Kit.said`` of kit.js reads: [English, Chinese], or one text that stays as it is."""
    other = chinese(sentence)
    return [str(sentence), other] if other != sentence else str(sentence)
