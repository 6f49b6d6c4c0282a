"""What one run says about itself: the first NaN or Inf over all ranks, collectives that do not give what was put into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.collectives import replicas
from msprobe_engine.find.collectives.rank_checks import RankChecks
from msprobe_engine.find.detect import Run
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.nonfinite import incident_samples, report
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.saved_variables import saved_alone
from msprobe_engine.formats.dump.replicas.reader import StepTables

MOST_STEPS = 8
_BESIDE = Sentence(", no collective with a wrong result")
_BESIDE_EQUAL = Sentence(", no collective with a wrong result, no parameter whose statistics differ between ranks")
_TOLD = {
    "tensor": Sentence("tensor"),
    "note": Sentence("note"),
    "before": Sentence("before"),
    "spread": Sentence("spread"),
    "record": Sentence("record"),
    "cause": Sentence("cause"),
    "source": Sentence("source"),
    "next at": Sentence("next at"),
}
"""Words in front of its lines."""
_WORD = 12
"""Where the text begins in a line of the report of `nan_analyze`."""


def diagnose_alone(target: Run, tables: StepTables | None = None) -> Diagnosis:
    """Diagnose one run. `tables`: what was read of its dump before.

    Raises:
        DumpFormatError: there is nothing to read.
        NothingCapturedError: there is, and nothing of it can be read.
    """
    variables = None if target.dump is None else saved_alone(target.dump)
    if variables is not None:
        return variables
    ranks = RankChecks()
    result = nan_analyze(target, seen=ranks.check_step, tables=tables)
    ranks.finish()
    diagnosis = Diagnosis(problems=list(result.problems))
    diagnosis.looked_at, diagnosis.steps = {"steps": ", ".join(map(str, result.steps))}, list(result.steps)
    if result.findings:
        diagnosis.suspects = [_suspect(item) for item in result.findings]
        first = result.findings[0]
        diagnosis.finding = findings.OVERFLOW if first["what"] in ("Inf", "-Inf") else findings.NONFINITE
        diagnosis.evidence = _format_evidence(result.text)
        return diagnosis
    diagnosis.evidence += result.text.splitlines()[:MOST_STEPS]
    if ranks.collectives is not None:
        diagnosis.looked_at["collectives"] = ranks.collectives
    diagnosis.problems += [problem for problem in ranks.problems if problem not in diagnosis.problems]
    if ranks.finding:
        diagnosis.finding, diagnosis.suspects = ranks.finding, ranks.suspects
        diagnosis.evidence += ranks.evidence
        return diagnosis
    _began(diagnosis, target.path)
    if diagnosis.finding == findings.NONE:
        beside = _BESIDE_EQUAL if ranks.equal else _BESIDE if ranks.several else ""
        diagnosis.nothing = Sentence("Nothing found: no NaN or Inf that matters{0}", beside)
        if result.only_modules:
            diagnosis.evidence.append(report.WITHIN)
        if ranks.several and not ranks.equal:
            replicas.say_not_compared(diagnosis, ranks.parted)
        diagnosis.evidence.append(findings.ALONE)
    return diagnosis


def _format_evidence(text: str) -> list[str]:
    """The lines of the report below its first; every line says what it is, and what the first suspect says anyway is left out."""
    lines: list[str] = []
    word, first = "", True
    for line in text.splitlines()[1:]:
        if not line.startswith("  "):
            word, first = "", False
            lines.append(line)
            continue
        word = line[2:_WORD].strip() or word
        if not (first and word in ("record", "cause", "source")):
            lines.append(Sentence("{0}{1}", _TOLD.get(word, word), f"{'':{_WORD - 2 - len(word)}}{line[_WORD:].strip()}"))
    return lines


def _began(diagnosis: Diagnosis, target: Path) -> None:
    """What an incident directory says set it off, when its records show nothing."""
    document = incident_samples.document(target)
    began = document.get("began")
    if not isinstance(began, dict):
        return
    rule, ranks = str(began.get("rule", "")), began.get("ranks")
    rank = ranks[0] if isinstance(ranks, list) and ranks and isinstance(ranks[0], int) else 0
    name, step = str(began.get("name", "")), began.get("step")
    template = "{0}: rule {1} set the incident off; its records show no NaN and no collective that is off"
    why = Sentence(template, began.get("when") or "alert", rule)
    kinds = {"replica_mismatch": findings.DESYNC, "nan_inf": findings.NONFINITE, "loss_not_finite": findings.NONFINITE}
    diagnosis.finding = kinds.get(rule, findings.DIVERGENCE)
    diagnosis.suspects = [Suspect(name, "", rank, step if isinstance(step, int) else 0, kind=rule, why=why, tensor=name)]
    diagnosis.evidence.append(str(document.get("message", "")))


def _suspect(item: Mapping[str, Any]) -> Suspect:
    tensors = item["tensors"]
    return Suspect(
        record=item["op_name"],
        module=item["module"],
        rank=item["rank"],
        step=item["step"],
        source=item["source_line"] or "",
        kind=item["cause"],
        why=Sentence("{0}; {1}", item["why"], item["explanation"]) if item["why"] and item["cause"] == "operator" else item["explanation"],
        cause=item["why"],
        tensor=f"{item['op_name']}.{tensors[0]['place']}" if tensors else "",
        numbers={"target": tensors[0]} if tensors else {},
        stack=list(item["stack_info"]),
        after_update=bool(item.get("after_update")),
    )
