"""What one run says about itself: the first NaN or Inf over all ranks, collectives that do not give what was put into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.diagnose import collectives, findings
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
        return found  # an incident or monitor output without a dump
    from msprobe_engine.diagnose.run import read_step

    for step in dump.steps:
        checked = collectives.check(read_step(dump, step, found.problems))
        found.looked_at["collectives"] = found.looked_at.get("collectives", 0) + checked.count
        if checked.wrong:
            found.finding = findings.COLLECTIVE
            found.suspects = [wrong.suspect(step) for wrong in checked.wrong]
            found.evidence += [wrong.why for wrong in checked.wrong[:5]]
            break
    return found


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
