"""Size of the page of graphs, and how fast a browser opens and moves it: a synthetic comparison of many nodes, a real chromium.

python benchmarks/graph_page.py --nodes 200000 --browser /usr/bin/chromium
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable
from msprobe_engine.report.graph.nodes.model import API, MODULE, Comparison, Graph, Link

CALLS = (
    ("ln_1.LayerNorm", ("Functional.layer_norm",)),
    ("attn.qkv.Linear", ("Functional.linear",)),
    ("attn.core.Attention", ("Tensor.view", "Torch.matmul", "Tensor.__mul__", "Functional.softmax", "Functional.dropout", "Torch.matmul")),
    ("attn.proj.Linear", ("Functional.linear",)),
    ("ln_2.LayerNorm", ("Functional.layer_norm",)),
    ("mlp.fc.Linear", ("Functional.linear",)),
    ("mlp.act.GELU", ("Functional.gelu",)),
    ("mlp.proj.Linear", ("Functional.linear", "Distributed.all_reduce")),
)
"""Modules of a layer and the calls inside each."""


class Model:
    """A made-up transformer as a graph: forward, then backward, with statistics.

    Args:
        layers: how many.
        noise: relative difference of all numbers, so that two models differ by it.
        fault: layer whose softmax multiplies its output by 1.5, or makes NaN when `nan`; -1: none.
    """

    def __init__(self, layers: int, noise: float = 0.0, fault: int = -1, nan: bool = False, rank: int = 0) -> None:
        self.side = DumpTable(Path("dump.json"), {"framework": "pytorch", "task": "statistics"})
        self.graph = Graph(0, rank, self.side)
        self.random = np.random.default_rng(7)
        self.noise = np.random.default_rng(11 + rank)
        self.size = noise
        self.calls: dict[str, int] = {}
        self.truth = 1.0
        self.at = (0.1, 0.0)
        self.fault, self.nan, self.rank = fault, nan, rank
        self.off = 1.0
        caller = "File /home/user/train.py, line 88, in step,  loss = model(batch)"
        self.stack = {
            name: (f"File /home/user/model/gpt.py, line {40 + 7 * i}, in forward,  x = self.{name}(x)", caller)
            for i, (name, _) in enumerate(CALLS)
        }
        root = self.module("Module.model.GPT.forward.0", 0)
        for layer in range(layers):
            block = self.module(f"Module.model.layers.{layer}.Block.forward.0", root)
            attention = -1
            for name, calls in CALLS:
                if name.startswith("attn.") and attention < 0:
                    attention = self.module(f"Module.model.layers.{layer}.attn.SelfAttention.forward.0", block)
                outer = attention if name.startswith("attn.") else block
                inner = self.module(f"Module.model.layers.{layer}.{name}.forward.0", outer)
                for call in calls:
                    self.call(call, "forward", inner, name, layer)
                self.finish_module(inner)
                if name == "attn.proj.Linear":
                    self.finish_module(attention)
            self.finish_module(block)
        self.finish_module(root)
        self.call("Functional.cross_entropy", "forward", 0, CALLS[0][0], -1)
        back = self.module("Module.model.GPT.backward.0", 0)
        for layer in reversed(range(layers)):
            block = self.module(f"Module.model.layers.{layer}.Block.backward.0", back)
            attention = -1
            for name, calls in reversed(CALLS):
                if name.startswith("attn.") and attention < 0:
                    attention = self.module(f"Module.model.layers.{layer}.attn.SelfAttention.backward.0", block)
                inner = self.module(f"Module.model.layers.{layer}.{name}.backward.0", attention if name.startswith("attn.") else block)
                for call in reversed(calls):
                    self.call(call, "backward", inner, name, -1)
                self.finish_module(inner)
        graph = self.graph
        records = {record: graph.names[parent] for record, parent in zip(graph.records, graph.parents) if record >= 0 and parent > 0}
        self.side.construct = {name: records.get(record) for record, name in enumerate(self.side.ops)}

    def module(self, name: str, parent: int) -> int:
        """A node without rows so far."""
        return self.graph.add(name, MODULE, parent)

    def finish_module(self, node: int) -> None:
        """Its record comes after what is inside, as in a dump."""
        record = self.record(self.graph.names[node], [("output.0", OUTPUT, self.at)])
        self.graph.records[node] = record

    def call(self, api: str, direction: str, parent: int, name: str, layer: int) -> int:
        """A call that takes the last output and gives a new one."""
        number = self.calls[api + direction] = self.calls.get(api + direction, -1) + 1
        taken = self.at
        self.truth = float(self.random.normal())
        if layer == self.fault >= 0 and api == "Functional.softmax":
            self.off = float("nan") if self.nan else 1.5
        self.at = (self.truth * self.off * (1 + self.size * float(self.noise.normal())), 1.0)
        rows = [("input.0", INPUT, taken), ("output.0", OUTPUT, self.at)]
        if api == "Functional.linear":
            rows.insert(1, ("parameters.weight", PARAMETERS, (0.5, 1.0)))
        record = self.record(f"{api}.{number}.{direction}", rows)
        node = self.graph.add(self.side.ops[record], API, parent, record, self.stack[name])
        if api.startswith("Distributed."):
            self.graph.links[node] = (Link("send_receive", {1 - self.rank: (None, self.side.ops[record])}),)
        return node

    def record(self, name: str, rows: list[tuple[str, int, tuple[float, float]]]) -> int:
        """A record of tensors."""
        side, at = self.side, len(self.side.ops)
        side.ops.append(name)
        for place, role, (mean, spread) in rows:
            side.op.append(at)
            side.role.append(role)
            side.name.append(f"{name}.{place}")
            side.dtype.append("torch.float32")
            side.shape.append(SHAPE)
            side.numbers.extend((mean + spread, mean - spread, mean, abs(mean) * 512 + spread))
            side.md5.append(None)
            side.requires_grad.append(role == PARAMETERS)
            side.data_name.append("")
        side.offsets.append(len(side.name))
        return at


SHAPE = [4, 1024, 768]


def comparison(nodes: int, nan: bool = False, rank: int = 0) -> Comparison:
    """Two models of about so many nodes each; in the middle layer of the first something is wrong."""
    layers = max(2, round(nodes / 50))
    target, golden = Model(layers, 3e-8, layers // 2, nan, rank), Model(layers)
    count = len(target.graph)
    mine, theirs = (np.array([one.side.numbers[4 * row + 2] for row in range(len(one.side))]) for one in (target, golden))
    with np.errstate(invalid="ignore"):
        off = np.abs(mine - theirs) / np.abs(theirs) / 6e-8
    units = np.full(count, np.nan)
    for node in range(count):
        rows = target.graph.outputs(node)
        if rows:
            value = max(off[row] for row in rows)
            units[node] = np.inf if np.isnan(value) else value
    suspect = next(node for node in range(count) if units[node] > 1000 and target.graph.types[node] == API)
    partners = list(range(count))
    text = "The output of softmax is 50 % larger than the golden one; its input is equal up to round-off."
    return Comparison(target.graph, golden.graph, "summary", partners, partners, [None] * count, units, suspect=suspect, suspect_text=text)


def write(path: Path, nodes: int, ranks: int = 1, nan: bool = False) -> dict[str, Any]:
    """The page of a synthetic comparison, and what it took."""
    from msprobe_engine.report.graph.page.page import PageWriter

    writer = PageWriter(path, "Synthetic comparison", "run", "golden")
    spent, total = 0.0, 0
    for rank in range(ranks):
        made = comparison(nodes, nan, rank)
        total += len(made.target)
        start = time.perf_counter()
        writer.add(made)
        spent += time.perf_counter() - start
    start = time.perf_counter()
    writer.finish()
    spent += time.perf_counter() - start
    return {"nodes on each side": total, "seconds to write": round(spent, 2), "MB": round(path.stat().st_size / 1e6, 2)}


MEASURE = """
async () => {
  const store = Graph.store, found = {};
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const rank = (values, part) => Math.round(values.sort((a, b) => a - b)[Math.floor((values.length - 1) * part)] * 10) / 10;
  const times = async (name, count, act) => {
    const all = [];
    for (let k = 0; k < count; k++) {
      await frame();
      const start = performance.now();
      await act(k);
      all.push(performance.now() - start);
    }
    found[name] = { p50: rank(all, 0.5), p95: rank(all, 0.95) };
  };
  // Script and paint calls of a frame: from before its first callback to after its last.
  const inFrame = (act) => new Promise((done) => {
    let start;
    requestAnimationFrame(() => { start = performance.now(); });
    act();
    requestAnimationFrame(() => done(performance.now() - start));
  });
  const frames = async (name, count, act) => {
    const all = [], apart = [];
    let before = 0;
    for (let k = 0; k < count; k++) {
      all.push(await inFrame(() => act(k)));
      const now = performance.now();
      if (before) apart.push(now - before);
      before = now;
    }
    const work = { "work p50": rank(all, 0.5), "work p95": rank(all, 0.95) };
    found[name] = { ...work, "apart p50": rank(apart, 0.5), "apart p95": rank(apart, 0.95) };
  };
  const canvas = document.querySelector(".plane canvas"), grid = document.querySelector(".tree-grid");
  const at = { bubbles: true, cancelable: true, clientX: 600, clientY: 450 };
  const wheel = (more) => canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ...more }));
  const modules = [...Array(store.sides[0].count).keys()].filter((i) => store.sides[0].depth[i] === 2 && store.sides[0].size[i] > 1);
  await times("open a module", 40, async (k) => { store.setOpen(0, modules[(k * 97) % modules.length], true); await frame(); });
  await times("choose a node", 40, async (k) => { store.select(0, modules[(k * 61) % modules.length] + 3); await frame(); });
  await frames("scroll the graph", 120, () => wheel({ deltaY: 60 }));
  await frames("zoom out", 100, () => wheel({ deltaY: 20, ctrlKey: true }));
  await frames("zoom in", 100, () => wheel({ deltaY: -20, ctrlKey: true }));
  await frames("scroll the tree", 120, () => { grid.scrollTop += 300; });
  const field = document.querySelector("#graph-bar [aria-controls=graph-hits]");
  const hits = () => document.querySelector("#graph-hits .hit")?.textContent;
  await times("search", 12, async (k) => {
    const before = hits();
    field.value = ["softmax.", "matmul.", "layers."][k % 3] + (k * 37 + 1);
    field.dispatchEvent(new Event("input", { bubbles: true }));
    for (let tries = 0; (!hits() || hits() === before) && tries < 300; tries++) await frame();
  });
  await times("open everything", 1, async () => { store.openBelow(0, 0, 99); await frame(); });
  found["boxes open"] = store.rows(0).length;
  await frames("scroll the graph, all open", 120, () => wheel({ deltaY: 60 }));
  await frames("zoom out, all open", 100, () => wheel({ deltaY: 20, ctrlKey: true }));
  await frames("scroll the tree, all open", 120, () => { grid.scrollTop += 3000; });
  await times("close everything", 1, async () => { store.closeBelow(0, 0); await frame(); });
  return found;
}
"""


def renderer_memory() -> float:
    """Resident megabytes of the largest renderer among the descendants of this process; 0 where /proc does not tell."""
    parents, sizes = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            renders = b"--type=renderer" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(entry.name)] = int(status["PPid"])
        if renders:
            sizes[int(entry.name)] = int(status.get("VmRSS", "0 kB").split()[0]) / 1000

    def ours(process: int) -> bool:
        while process > 1 and process != os.getpid():
            process = parents.get(process, 0)
        return process == os.getpid()

    return max((size for process, size in sizes.items() if ours(process)), default=0.0)


def measure(path: Path, browser: str) -> dict[str, Any]:
    """Open the page in chromium and use it; milliseconds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--enable-precise-memory-info"])
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        opened = []
        for _ in range(3):
            start = time.perf_counter()
            page.goto(path.resolve().as_uri(), wait_until="commit")
            page.wait_for_selector("#graph.ready")
            opened.append(time.perf_counter() - start)
        heap, resident = page.evaluate("performance.memory.usedJSHeapSize / 1e6"), renderer_memory()
        found = page.evaluate(MEASURE)
        after = renderer_memory()
        chromium.close()
    return {
        "seconds until the first suspect is shown": [round(one, 2) for one in opened],
        "JavaScript heap, MB": round(heap, 1),
        "renderer process, MB": round(resident),
        "after all of this, MB": round(after),
        "milliseconds": found,
    }


def main() -> None:
    """Write the page, open it, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nan", action="store_true", help="the fault makes NaN")
    parser.add_argument("--output", type=Path, default=Path("graph_page.html"))
    parser.add_argument("--browser", default="", help="chromium; without it only the page is written")
    arguments = parser.parse_args()
    found = write(arguments.output, arguments.nodes, arguments.ranks, arguments.nan)
    if arguments.browser:
        found |= measure(arguments.output, arguments.browser)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
