"""The graph files that the existing tool builds of dump directories."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import NamedTuple

from existing_environment import environment_of


class Node(NamedTuple):
    """One node of a graph.

    Attributes:
        kind: ``module``, ``api`` or ``collection`` (calls that stand between modules).
        parent: name of the node above, empty at the root.
        matched: it has a partner in the other graph (of a comparison).
    """

    kind: str
    parent: str
    matched: bool


KINDS = {"0": "module", "1": "api", "9": "collection"}
Graphs = dict[str, dict[str, Node]]
"""Side (``NPU`` is the target, ``Bench`` the golden one) -> node name -> node."""


def build(version: str, venv: Path, out: Path, target: Path, golden: Path | None = None) -> Graphs:
    """Build the graph of a rank directory, or of two with their nodes matched.

    Raises:
        AssertionError: the tool says ERROR, ends with a code, or writes other than one file.
    """
    out.mkdir(parents=True)
    if version == "8.1.1":
        # Its command line needs packages that only its pre-check uses; these functions are what the command calls.
        paths = {"npu_path": str(target), "is_print_compare_log": True} | ({"bench_path": str(golden)} if golden else {})
        (out / "compare.json").write_text(json.dumps(paths))
        call = (
            "import argparse; from msprobe.visualization import graph_service as g; parser = argparse.ArgumentParser();"
            "g._pt_graph_service_parser(parser); parser.set_defaults(framework='pytorch');"
            "g._pt_graph_service_command(parser.parse_args())"
        )
        command = [str(venv / "bin/python"), "-c", call, "-i", str(out / "compare.json"), "-o", str(out / "graph")]
    else:
        command = [str(venv / "bin/msprobe"), "graph_visualize", "-tp", str(target), *(["-gp", str(golden)] if golden else [])]
        command += ["-o", str(out / "graph")]
    environment = environment_of(venv / "bin/python")
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False, cwd=out)
    # Without the vendor's toolkit 26.2.0 says so at every start; that is no error of the graph.
    log = "\n".join(line for line in (ran.stdout + ran.stderr).splitlines() if "CANN environment" not in line)
    files = sorted((out / "graph").iterdir()) if (out / "graph").is_dir() else []
    assert ran.returncode == 0, log[-3000:]
    assert "ERROR" not in log, log[-3000:]
    assert len(files) == 1, (files, log[-3000:])
    return _vis(files[0]) if version == "8.1.1" else _database(files[0])


def _database(path: Path) -> Graphs:
    graphs: Graphs = {}
    with sqlite3.connect(path) as connection:
        rows = connection.execute("select data_source, node_name, node_type, up_node, matched_node_link from tb_nodes")
        for side, name, kind, parent, links in rows:
            graphs.setdefault(side, {})[name] = Node(KINDS[str(kind)], _name(parent), bool(json.loads(links or "[]")))
    return graphs


def _name(parent: str | None) -> str:
    return "" if parent in (None, "None") else str(parent)


def _vis(path: Path) -> Graphs:
    document = json.loads(path.read_text())
    sides = {side: document[side] for side in ("NPU", "Bench") if side in document} or {"NPU": document}
    return {
        side: {
            name: Node(KINDS[str(node["node_type"])], _name(node["upnode"]), bool(node["matched_node_link"]))
            for name, node in graph["node"].items()
        }
        for side, graph in sides.items()
    }
