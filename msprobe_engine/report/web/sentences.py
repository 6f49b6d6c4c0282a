"""Sentences about a run in Chinese. Their templates stand in ``sentences_zh.json``, by the English ones."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from msprobe_engine.core.text.sentences import Sentence, filled

_FILE = Path(__file__).parent / "sentences_zh.json"


@lru_cache(maxsize=1)
def templates() -> dict[str, str]:
    """English template -> Chinese template."""
    loaded: dict[str, str] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded


def chinese(sentence: str) -> str:
    """A sentence in Chinese. What is none stays as it is, and so does a template that has no Chinese one, around its arguments."""
    if not isinstance(sentence, Sentence):
        return sentence
    template = templates().get(sentence.template, sentence.template)
    return filled(template, map(chinese, sentence.arguments))


def both(sentence: str) -> str | list[str]:
    """What ``Kit.said`` of kit.js reads: [English, Chinese], or one text that stays as it is."""
    other = chinese(sentence)
    return [str(sentence), other] if other != sentence else str(sentence)
