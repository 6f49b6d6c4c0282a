"""What one run says about itself: the first NaN or Inf over all ranks, collectives that do not give what was put into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.diagnose import collectives, findings, replicas
from msprobe_engine.diagnose.facts import module_path
from msprobe_engine.diagnose.findings import Diagnosis, Suspect
from msprobe_engine.diagnose.nan_analyze import nan_analyze
from msprobe_engine.dump.reader import open_dump
from msprobe_engine.errors import DumpFormatError


def diagnose_alone(target: Path) -> Diagnosis:
    """Diagnose one run.

    Raises:
        DumpFormatError: there is nothing to read.
        NothingCapturedError: there is, and nothing of it can be read.
    """
    result = nan_analyze(target)
    found = Diagnosis(problems=list(result.problems))
    found.looked_at = {"steps": ", ".join(map(str, result.steps))}
    if result.findings:
        found.suspects = [_suspect(item) for item in result.findings]
        first = result.findings[0]
        found.finding = findings.OVERFLOW if first["what"] in ("Inf", "-Inf") else findings.NONFINITE
        found.evidence = [line.strip() for line in result.text.splitlines()[1:] if line.strip()]
        return found
    found.evidence.append(result.text.splitlines()[0] if result.text else "No NaN or Inf.")
    try:
        dump = open_dump(target)
    except DumpFormatError:
        _began(found, target)
        return found  # an incident without a dump
    from msprobe_engine.diagnose.run import read_step

    for step in dump.steps:
        sides = read_step(dump, step, found.problems)
        checked = collectives.check(sides)
        found.looked_at["collectives"] = found.looked_at.get("collectives", 0) + checked.count
        if checked.wrong:
            found.finding = findings.COLLECTIVE
            found.suspects = [wrong.suspect(step) for wrong in checked.wrong]
            found.evidence += [wrong.why for wrong in checked.wrong[:5]]
            return found
        odd = replicas.odd_ones(step, replicas.parameters(sides))
        if odd:
            found.finding = findings.DESYNC
            found.suspects = [_of_odd(one) for one in odd]
            found.evidence.append(
                f"{len(odd)} parameters that are copies of each other differ; others of their kind are equal on all ranks."
            )
            return found
    _began(found, target)
    return found


def _began(found: Diagnosis, target: Path) -> None:
    """What an incident directory says set it off, when its records show nothing."""
    try:
        document = json.loads((target / "incident.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    began = document.get("began") if isinstance(document, dict) else None
    if not isinstance(began, dict):
        return
    rule, ranks = str(began.get("rule", "")), began.get("ranks")
    rank = ranks[0] if isinstance(ranks, list) and ranks and isinstance(ranks[0], int) else 0
    name, step = str(began.get("name", "")), began.get("step")
    why = f"{began.get('when') or 'alert'}: rule {rule} set the incident off; its records show no NaN and no collective that is off"
    found.finding = findings.DESYNC if rule == "replica_mismatch" else findings.NONFINITE if rule == "nan_inf" else findings.DIVERGENCE
    found.suspects = [Suspect(name, "", rank, step if isinstance(step, int) else 0, kind=rule, why=why, tensor=name)]
    found.evidence.append(str(document.get("message", "")))


def _of_odd(odd: replicas.Odd) -> Suspect:
    record, _, _ = odd.name.rpartition(".parameters.")
    return Suspect(record, module_path(record), odd.rank, odd.step, kind="desync", why=odd.why, tensor=odd.name, numbers=odd.numbers)


def _suspect(item: Mapping[str, Any]) -> Suspect:
    tensors = item["tensors"]
    return Suspect(
        record=item["op_name"],
        module=item["module"],
        rank=item["rank"],
        step=item["step"],
        source=item["source_line"] or "",
        kind=item["cause"],
        why=item["explanation"],
        tensor=f"{item['op_name']}.{tensors[0]['place']}" if tensors else "",
        numbers={"target": tensors[0]} if tensors else {},
        stack=list(item["stack_info"]),
    )
