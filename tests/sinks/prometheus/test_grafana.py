"""The Grafana dashboard: its schema, its queries, and that it shows every metric."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from msprobe_engine.probe.sinks.prometheus.names import METRICS, format_exported_name

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/msprobe.json").read_text())
SCHEMA = jsonschema.Draft7Validator(json.loads((ROOT / "tests/fixtures/grafana/dashboard.schema.json").read_text()))


def expressions() -> Iterator[str]:
    """All queries."""
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])


def test_it_is_what_the_script_makes() -> None:
    """msprobe.json is the output of build.py."""
    made = subprocess.run([sys.executable, ROOT / "deploy/grafana/build.py"], capture_output=True, text=True, check=True).stdout
    assert json.loads(made) == DASHBOARD


def test_it_passes_the_schema_of_grafana() -> None:
    """Nothing in the dashboard is unknown to Grafana's own type, or has another type there."""
    assert [error.message for error in SCHEMA.iter_errors({"dashboard": DASHBOARD})] == []


@pytest.mark.parametrize("path", [("title",), ("panels", 1, "gridPos", "h"), ("panels", 1, "type"), ("time", "from")])
def test_the_schema_sees_mistakes(path: tuple[Any, ...]) -> None:
    """A value of another type is an error."""
    wrong = copy.deepcopy(DASHBOARD)
    at: Any = wrong
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = ["no"]
    assert list(SCHEMA.iter_errors({"dashboard": wrong}))


def test_panels_have_their_own_place_and_number() -> None:
    """No two panels have one number or overlap, and no row has more than five."""
    panels = DASHBOARD["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [(x, y) for p in panels for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(set(cells)) == len(cells)
    rows = [p["gridPos"]["y"] for p in panels]
    assert max(rows.count(y) for y in rows) <= 5


def test_every_metric_is_shown_and_every_metric_shown_exists() -> None:
    """The dashboard queries each metric of the table but the one that only joins, and none that is not exported."""
    used = {name for e in expressions() for name in re.findall(r"\bmsprobe_\w+", e)}
    names = {format_exported_name(name) + ("_bucket" if metric.type == "histogram" else "") for name, metric in METRICS.items()}
    variables = {n for v in DASHBOARD["templating"]["list"] for n in re.findall(r"\bmsprobe_\w+", str(v["query"]))}
    assert used | variables == names


def test_every_query_is_promql(binary: Callable[[str], str], tmp_path: Path) -> None:
    """The real promtool parses each query."""
    rules = [{"record": f"panel:query{i}", "expr": e.replace("$job", ".*").replace("$rank", ".*")} for i, e in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run([binary("promtool"), "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
