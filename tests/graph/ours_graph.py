"""Runs our graph command over the cases of `existing_graph.py` and reads what it wrote into the same form."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import yaml
from existing_graph import Case, Outcome, unpack

from msprobe_engine.report.graph.options import DB, NEW, OLD, VIS, GraphOptions, Layout
from msprobe_engine.report.graph.run import run


def options_of(case: Case) -> GraphOptions:
    """What the flags of a case are here. The existing tool has no matching by structure."""
    old = case.version == OLD
    sizes = _sizes(case.flags)
    mapping: Any = True if "-lm" in case.flags else None
    return GraphOptions(
        generation=OLD if old else NEW,
        formats=(VIS if old else DB,),
        match="exact",
        fuzzy="-fm" in case.flags,
        layer_mapping=yaml.safe_load(case.mapping) if case.mapping else mapping,
        overflow="-oc" in case.flags,
        complete_stack="-cs" in case.flags,
        merge="given" if sizes else "",
        layouts=sizes,
        file_type="json" if "json" in case.flags else "db",
        workers=1,
    )


def _sizes(flags: tuple[str, ...]) -> tuple[Layout, ...]:
    values: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            values[word] = []
        elif values:
            values[next(reversed(values))].append(word)
    sides = range(len(values.get("--rank_size", ())))
    order = values.get("--order", [""])[0] or "tp-cp-ep-dp-pp"
    keys = ("rank_size", "tp", "pp", "vpp")
    return tuple(Layout(**{key: int(values.get(f"--{key}", ["1", "1"])[i]) for key in keys}, order=order) for i in sides)


def ours(case: Case, work: Path, dumps: Path | None = None) -> Outcome:
    """What our command writes for a case, below `work`; `dumps` may hold what other cases of the same version unpacked."""
    dumps = dumps or work / "dumps"
    target, golden = unpack(case, dumps)
    out = work / f"{case.version}-{case.name}"
    run(target, golden, out, options_of(case))
    return Outcome(case, "", read_files(out, dumps))


def read_files(out: Path, dumps: Path) -> dict[str, Any]:
    """Files by name without time, as the fixtures hold them."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name = re.sub(r"_?\d{14}", "", path.relative_to(out).as_posix())
        if path.suffix == ".db":
            with sqlite3.connect(path) as connection:
                found[name] = {"schema": [r[0] for r in connection.execute("select sql from sqlite_master where sql is not null")]}
                for table in ("tb_nodes", "tb_stack", "tb_config"):
                    cursor = connection.execute(f"select * from {table}")
                    columns = [column[0] for column in cursor.description]
                    rows = [[c.replace(f"{dumps}/", "") if isinstance(c, str) else c for c in row] for row in cursor]
                    found[name][table] = {"columns": columns, "rows": rows}
        else:
            found[name] = json.loads(path.read_text().replace(f"{dumps}/", ""))
    return found
