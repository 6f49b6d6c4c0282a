"""Every html page of the product, made by its commands from small inputs; also from inputs whose names are hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from frames_of_lists import frame_of
from safetensors.numpy import save_file

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Sample
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.probe.sinks.csv.monitor import CsvSink

PACKS = Path(__file__).parents[1] / "fixtures" / "config_packs" / "26.2.0"
HOSTILE = "</script></style><img src=x onerror=document.title='run'><script>document.title='run'</script>\u202eevil\u2066\x07\x1b[2J&amp;"
LONG = "long_" * 2_000
"""10,000 characters without a place to break."""


def _tensor(value: float, shape: tuple[int, ...] = (8, 512, 1024)) -> dict[str, Any]:
    stats = {"Max": value, "Min": -value, "Mean": value / 3, "Norm": value * 0.6 * math.prod(shape) ** 0.5}
    return {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": list(shape), **stats, "requires_grad": True}


def write_dump(root: Path, names: list[str], wrong: int | None = None, steps: int = 2, bad: float = 1.37) -> Path:
    """A run of one rank: a chain of calls with these names; the output of call `wrong` is off in the last step, and all after it."""
    for step in range(steps):
        data: dict[str, Any] = {}
        construct: dict[str, str | None] = {}
        value = 1.0 + step
        for i, name in enumerate(names):
            after = value * 1.01 * (bad if i == wrong and step == steps - 1 else 1)
            record = f"{name}.{i}.forward"
            data[record] = {"input_args": [_tensor(value), _tensor(0.02 + i)], "input_kwargs": {}, "output": [_tensor(after)]}
            construct[record] = None
            value = after
        directory = root / f"step{step}" / "rank0"
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": data}))
        (directory / "construct.json").write_text(json.dumps(construct))
        stack = [f"File /home/team/train/model.py, line {120 + i}, in forward, \n x = self.layer(x)" for i in range(4)]
        (directory / "stack.json").write_text(json.dumps({"0": [list(data), stack]}))
    return root


def comparison(root: Path, name: str) -> dict[str, Path]:
    """The diagnosis of two runs, their table and their graphs."""
    names = [f"Functional.{name}linear" if i % 3 else "Torch.matmul" for i in range(90)]
    target = write_dump(root / "target", names, wrong=31)
    golden = write_dump(root / "golden", names)
    assert main(["compare", "-tp", str(target), "-gp", str(golden), "-o", str(root / "out"), "--html", "--step", "1"]) == 1
    assert main(["diagnose", str(target), str(golden), "-o", str(root / "out")]) == 1
    assert main(["graph", str(target), str(golden), "-o", str(root / "graph"), "--format", "html"]) == 1
    (graph,) = (root / "graph").glob("*.html")
    return {"diagnosis": root / "out" / "diagnosis.html", "table": next((root / "out").rglob("compare_result_*.html")), "graph": graph}


def checkpoint(root: Path, name: str) -> dict[str, Path]:
    """Two checkpoints of four layers that differ in some weights."""
    random = np.random.default_rng(0)
    weights = {
        f"model.layers.{i}.{name}{kind}.weight": random.normal(size=(16, 8)).astype(np.float32)
        for i in range(4)
        for kind in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    }
    for side in ("a", "b"):
        (root / side).mkdir(parents=True)
    save_file(weights, root / "a" / "model.safetensors")
    other = {key: value.copy() for key, value in weights.items()}
    for i, key in enumerate(list(other)):
        if i % 3 == 0:
            other[key] *= 1 + 10.0 ** -(7 - i % 7)
    other[list(other)[1]][0, 0] = np.nan
    del other[list(other)[-1]]
    other[f"{name}extra"] = np.zeros(3, np.float32)
    save_file(other, root / "b" / "model.safetensors")
    assert main(["ckpt", "diff", str(root / "a"), str(root / "b"), "-o", str(root / "out")]) == 1
    return {"checkpoint": root / "out" / "ckpt_diff.html"}


def config(root: Path, name: str) -> dict[str, Path]:
    """Two packs of the existing tool with planted differences; `name` becomes a setting."""
    import zipfile

    packs = []
    for i, pack in enumerate(("base", "planted")):
        packs.append(root / f"{pack}.zip")
        root.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(PACKS / f"{pack}.zip") as old, zipfile.ZipFile(packs[-1], "w") as new:
            for entry in old.namelist():
                content = old.read(entry)
                if entry.endswith("_static.json") and name:
                    content = json.dumps(json.loads(content) | {f"{name}setting": f"{name}{i}"}).encode()
                new.writestr(entry, content)
    assert main(["config_check", "-c", *map(str, packs), "-o", str(root / "out")]) == 1
    return {"config": root / "out" / "result.html"}


def monitor(root: Path, name: str) -> dict[str, Path]:
    """A run of four ranks and sixty steps, one layer of which jumps and then is NaN."""
    random = np.random.default_rng(1)
    root.mkdir(parents=True)
    for rank in range(4):
        sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=rank)
        for step in range(60):
            tensors = {f"model.layers.{i}.{name}weight": (random.normal(size=4) * (1 + i) / (1 + step / 30)).tolist() for i in range(12)}
            if step > 40:
                tensors[f"model.layers.5.{name}weight"] = [math.nan if step > 50 else 40.0 * (step - 39)]
            loss = 4 / (1 + step / 12) + 0.05 * random.normal() + (1.5 if step > 41 else 0)
            frame = frame_of(
                tensors, step=step, rank=rank, scalars={"loss": loss, "grad_norm": 2 + abs(random.normal()), "learning_rate": 3e-4}
            )
            frame.samples[:] = [*frame.samples, *(Sample("exp_avg", one.name, one.ref) for one in frame.samples[:6])]
            extra = {"meaning": f"the numbers of {name}layer left their band", "next": "msprobe diagnose, or a dump of this step"}
            where = f"model.layers.5.{name}weight"
            alerts = []
            if step > 50:
                alerts.append(Alert("nan_inf", "critical", "grad", where, step, rank, math.nan, "finite", f"{where} is NaN", extra=extra))
            elif step in (41, 44, 47):
                alerts.append(
                    Alert("outlier", "warning", "grad", where, step, rank, 7.0, "< 3", f"{where} is 7 times its median", extra=extra)
                )
            sink.write(frame, alerts)
        sink.close()
    assert main(["monitor", "report", str(root), "-o", str(root / "report.html")]) == 1
    return {"trends": root / "report.html"}


MAKERS: Mapping[str, Callable[[Path, str], dict[str, Path]]] = {
    "comparison": comparison,
    "checkpoint": checkpoint,
    "config": config,
    "monitor": monitor,
}


def all_pages(root: Path, name: str = "") -> dict[str, Path]:
    """Name of the page to its file; `name` becomes part of every name that the inputs bring along."""
    found: dict[str, Path] = {}
    for key, make in MAKERS.items():
        found |= make(root / key, name)
    return found
