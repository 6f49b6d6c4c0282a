"""A comparison as text for a console: the first line is the verdict."""

from __future__ import annotations

from msprobe_engine.config.severity import CHANGES, MAY, level
from msprobe_engine.core.log import one_line
from msprobe_engine.find.config.comparison import MOST_HARMLESS, Comparison, headline
from msprobe_engine.find.config.difference import fold_differences

TOP = 20
_WIDTH = 16


def text(comparison: Comparison, top: int = TOP) -> str:
    """Verdict, checkers, differences, the worst first.

    Args:
        top: how many differences are listed.
    """
    sentences_of = {
        severity: [
            difference.sentence()
            for difference in fold_differences(difference for difference in comparison.differences if difference.severity == severity)
        ]
        for severity in (CHANGES, MAY)
    }
    lines: list[str] = [headline(comparison, {severity: len(sentences) for severity, sentences in sentences_of.items()})]
    words = ", ".join(f"{name} {level(comparison.sheets[name].severity)}" for name in comparison.summary())
    lines += _label_lines("checkers", [words] if words else ["the packs have nothing in common that can be compared"])
    for severity, sentences in sentences_of.items():
        if len(sentences) > top:
            sentences[top:] = [f"... and {len(sentences) - top} more, see the report"]
        lines += _label_lines(severity.replace(" numerics", ""), sentences)
    lines += _label_lines(
        "computed", [f"{name}: {target}, golden {golden}" for name, (golden, target, equal) in comparison.derived.items() if not equal]
    )
    if comparison.harmless:
        names = list(dict.fromkeys(f"{difference.sheet} {difference.name}" for difference in comparison.harmless))
        more = f" and {len(names) - MOST_HARMLESS} more" if len(names) > MOST_HARMLESS else ""
        lines += _label_lines("harmless", [", ".join(names[:MOST_HARMLESS]) + more])
    lines += _label_lines("not compared", list(comparison.not_compared.values()))
    lines += _label_lines("problem", comparison.problems)
    lines += _label_lines("note", comparison.notes)
    return "\n".join(one_line(line) for line in lines)


def _label_lines(word: str, items: list[str]) -> list[str]:
    return [f"  {word if i == 0 else '':{_WIDTH}}{item}" for i, item in enumerate(items)]
