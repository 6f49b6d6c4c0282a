"""Small monitor output with numbers of known names, and alerts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.probe.sinks.run_files import alert_lines

HEAD = "vpp_stage,name,step,norm,min,max"
PARAMETERS = [f"layers.{n}.{name}" for n in range(4) for name in ("attention.weight", "mlp.weight", "mlp.bias")]


class Monitor:
    """Monitor output of some steps: numbers are made of names and steps, activations of ranks, too; `put` changes one. `shared`: all ranks
    have the same batch."""

    def __init__(self, root: Path, ranks: int = 2, steps: int = 3, noise: float = 0.0) -> None:
        self.root, self.ranks, self.steps, self.noise = root, ranks, steps, noise
        self.changed: dict[tuple[int, int, str, str], str] = {}
        self.alerts: list[Alert] = []
        self.places: dict[int, dict[str, Any]] = {rank: {"pp": 0, "dp": rank, "tp": 0} for rank in range(ranks)}
        self.replica_check: dict[int, dict[str, Any]] = {}
        self.shared = False

    def put(self, rank: int, step: int, family: str, name: str, norm: str) -> None:
        self.changed[rank, step, family, name] = norm

    def write(self) -> Path:
        for rank in range(self.ranks):
            place = self.root / "monitor" / f"Dec03_21-34-40-rank{rank}-1a2b3c4d"
            place.mkdir(parents=True)
            settings = {"monitor": {"replica_check": self.replica_check[rank]}} if rank in self.replica_check else {}
            (place / "run.json").write_text(json.dumps({"rank": rank, "rank_info": self.places[rank], "started_unix": 1.0, **settings}))
            (place / "alerts.jsonl").write_text(alert_lines([a for a in self.alerts if a.rank == rank]))
            for family, names in (
                ("param_origin", PARAMETERS),
                ("param_updated", PARAMETERS if any(family == "param_updated" for _, _, family, _ in self.changed) else []),
                ("actv", ["layers.0.output", "layers.1.output"]),
                ("grad_reduced", PARAMETERS),
            ):
                lines = [HEAD + (",micro_step" if family == "actv" else "")]
                for step in range(self.steps):
                    for at, name in enumerate(names):
                        value = (1.0 + at + 0.1 * step) * (1 + self.noise * (at % 3))
                        if family == "actv" and not self.shared:
                            value += 0.01 * rank
                        norm = self.changed.get((rank, step, family, name), f"{value:.6g}")
                        lines.append(f"0,{name},{step},{norm},-{value:.6g},{value:.6g}" + (",0" if family == "actv" else ""))
                (place / f"{family}_0-9.csv").write_text("\n".join(lines) + "\n")
        return self.root


def alert(rule: str, step: int, rank: int, name: str, **fields: Any) -> Alert:
    made = {
        "rule": rule,
        "severity": "critical",
        "kind": "param",
        "step": step,
        "rank": rank,
        "name": name,
        "value": 1.0,
        "expected": "equal",
    }
    return Alert(**{**made, "message": f"{name} differs", "order": 3, "extra": {"family": "param_origin"}, **fields})
