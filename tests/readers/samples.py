"""Samples of what is attacked, as the tools write them: each function fills an empty directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.accuracy import precision_compare
from msprobe_engine.cli.main import main

FIXTURES = Path(__file__).parent.parent / "fixtures"


def dumps(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        step = FIXTURES / "26.2.0" / name / "step0"
        for side in ("a", "b"):
            for number, rank in enumerate(sorted(step.iterdir())):
                shutil.copytree(rank, root / side / "step0" / f"rank{number}")
        not_finite(root / "a" / "step0" / "rank0" / "dump.json")

    return make


def not_finite(file: Path) -> None:
    """NaN in some outputs, a shape more than once, so that all of the analysis is reached."""
    document = json.loads(file.read_text())
    for record in list(document["data"].values())[3::2]:
        for tensor in record.get("output") or () if isinstance(record, dict) else ():
            if isinstance(tensor, dict) and "Max" in tensor:
                tensor.update(Max=float("nan"), Min=float("nan"), Mean=float("nan"), Norm=float("nan"))
    for record in list(document["data"].values())[4::3]:
        for tensor in (record.get("parameters") or {}).values() if isinstance(record, dict) else ():
            if isinstance(tensor, dict) and "Max" in tensor:
                tensor.update(Max=float("nan"), Min=float("nan"))
    file.write_text(json.dumps(document, indent=1))


def mappings(root: Path) -> None:
    dumps("mix")(root)
    names = "Functional.linear: Functional.linear\nTorch.relu.0.forward: Torch.relu.0.forward\n"
    for name in ("data", "api", "cell"):
        (root / f"{name}.yaml").write_text(names)
    (root / "layer.yaml").write_text("TopLayer:\n  head: head\nLinear: {weight: weight, bias: bias}\n")
    np.save(root / "m.npy", np.eye(4))
    (root / "post.yaml").write_text("right_matmul:\n  target_tensor_map: {m.npy: [b, c]}\n")


def alert(step: int, rank: int) -> dict[str, Any]:
    return {
        "rule": "nan_inf", "severity": "critical", "kind": "grad", "step": step, "rank": rank, "name": "layers.1.w", "value": "NaN",
        "expected": "finite", "message": "layers.1.w is NaN", "order": 3, "micro_step": 0,
        "extra": {"family": "grad_reduced", "phase": "reduced", "op": "nans", "meaning": "m", "next": "n", "vpp_stage": 0},
    }  # fmt: skip


def monitor_csv(root: Path) -> None:
    for rank in range(2):
        place = root / "monitor" / f"Dec03_21-34-40-rank{rank}-1a2b3c4d"
        place.mkdir(parents=True)
        info = {"rank": rank, "world_size": 2, "rank_info": {"pp": rank, "dp": 0, "tp": 0}, "started_unix": 1.0, "stamp": "Dec03_21-34-40"}
        (place / "run.json").write_text(json.dumps(info))
        (place / "alerts.jsonl").write_text("".join(json.dumps(alert(step, rank)) + "\n" for step in range(3)))
        rows = [f"0,layers.{layer}.w,{step},{1.0 + layer + step},-1,1,0" for step in range(4) for layer in range(3)]
        (place / "grad_reduced_0-9.csv").write_text("\n".join(["vpp_stage,name,step,norm,min,max,nans", *rows]) + "\n")
        (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss,{3 - step}\n" for step in range(4)))


def monitor_jsonl(root: Path) -> None:
    (root / "jsonl").mkdir()
    for rank in range(2):
        lines: list[dict[str, Any]] = [{"run": {"rank": rank, "world_size": 2, "rank_info": {"pp": rank}}}]
        for step in range(24):
            samples = [
                {
                    "family": "actv",
                    "name": f"layers.{n}",
                    "vpp_stage": 0,
                    "micro_step": 0,
                    "norm": 1.0 + n,
                    "min": -1.0,
                    "max": 1.0,
                    "nans": 0,
                }
                for n in range(3)
            ] + [{"family": "grad_reduced", "name": "layers.0.w", "phase": "reduced", "norm": "NaN", "min": 0.0, "max": 1.0, "nans": 2}]
            lines.append({"step": step, "scalars": {"loss": 3.0 - step}, "samples": samples, "alerts": [alert(step, rank)]})
        (root / "jsonl" / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def trend(root: Path) -> None:
    monitor_csv(root / "source")
    assert main(["data2db", "--db", str(root / "trend"), "--data", str(root / "source" / "monitor")]) == 0
    shutil.rmtree(root / "source")


def anomalies(root: Path) -> None:
    for rank in range(2):
        place = root / "anomaly_detected" / f"rank{rank}"
        place.mkdir(parents=True)
        record = {
            "rank": rank, "step": 1, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": 5, "group_mates": [0, 1],
            "tag_name": "0:layers.0:1/rank0/actv",
            "message": "Rule AnomalyTurbulence reports anomaly signal in ('0:layers.0/rank0/actv', 'norm') at step 1.",
        }  # fmt: skip
        (place / "anomaly.json").write_text(json.dumps({"anomaly_0": record, "anomaly_1": {**record, "step": 2}}))


def tables(root: Path) -> None:
    columns = ("Max", "Min", "Mean", "L2norm"), ("Max", "Min", "Mean", "Norm")
    differences = [*(f"{name} diff" for name in columns[0]), *(f"{name}RelativeErr" for name in columns[1])]
    header = ",".join(["NPU Name", "Bench Name", "NPU Tensor Dtype", *differences, "NPU max", "Bench max"])
    for rank in range(2):
        rows = [f"Distributed.all_reduce.{n}.forward.input.0,x,torch.float32,{n},0,0,1,1%,0%,0%,1%,1,2" for n in range(3)]
        (root / f"compare_result_rank{rank}_20260101000000.csv").write_text("\n".join([header, *rows]) + "\n")
    (root / "merge.yaml").write_text("api: [Distributed.all_reduce]\ncompare_index: [Max diff, L2norm diff]\n")


def arrays(root: Path) -> None:
    import torch

    (root / "d").mkdir()
    np.save(root / "d" / "a.npy", np.ones((3, 4), np.float32))
    torch.save(torch.ones(3, 4), root / "d" / "b.pt")
    header = b"$Version=1.0\n$Object.Count=1\n$Object.Length=48\nformat=2\ndtype=0\ndims=3,4\nobject.count=1\n$End=1\n"
    (root / "d" / "c.bin").write_bytes(header + bytes(48))


def gradients(root: Path) -> None:
    for side in ("a", "b"):
        place = root / side / "rank0"
        place.mkdir(parents=True)
        (place / "grad_summary_1.csv").write_text('param_name,max,min,norm,shape\nw,1,0,2,"[3, 4]"\nb,1,0,2,"[4]"\n')
        (place / "step1").mkdir()
        np.save(place / "step1" / "w.npy", np.ones((3, 4), bool))
        np.save(place / "step1" / "b.npy", np.ones(4, bool))


def results(root: Path) -> None:
    metrics = [column for column in precision_compare._NEEDED if column not in ("API Name", "DEVICE Dtype")]
    for side in ("npu", "gpu"):
        rows = [f"Functional.linear.{n}.forward.output.0,torch.float32" + ",0.01" * len(metrics) for n in range(3)]
        (root / f"{side}.csv").write_text("\n".join([",".join(["API Name", "DEVICE Dtype", *metrics]), *rows]) + "\n")


def incident(root: Path) -> None:
    place = root / "step12-nan_inf"
    place.mkdir()
    (place / "incident.json").write_text(
        json.dumps({"step": 12, "rule": "nan_inf", "alert": alert(12, 0), "ranks": [0], "steps": [11, 12]})
    )
    (place / "samples").mkdir()
    lines = [{"step": step, "samples": [{"family": "grad", "name": "w", "norm": "NaN", "nans": 1}]} for step in (11, 12)]
    (place / "samples" / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rank = sorted((FIXTURES / "26.2.0" / "mix" / "step0").iterdir())[0]
    shutil.copytree(rank, place / "step12" / "rank0")
    not_finite(place / "step12" / "rank0" / "dump.json")


def whole_run(root: Path) -> None:
    """What an output directory has: a dump, an incident, what the monitor wrote and what it lost."""
    dumps("L1")(root / "both")
    shutil.move(root / "both" / "b", root / "dump")
    shutil.rmtree(root / "both")
    monitor_csv(root)
    (root / "incidents").mkdir()
    incident(root / "incidents")
    lost = {"csv": {"steps": 2, "first": 1, "last": 2, "alerts": 0, "why": "ENOSPC+deleted"}}
    for place in (root / "monitor").iterdir():
        (place / "losses.json").write_text(json.dumps({"version": 1, "alerts": 0, "lost": lost}))


def begun(root: Path) -> None:
    """A step that could not be written."""
    from msprobe_engine.formats.dump import frame_log, layout

    shutil.copytree(sorted((FIXTURES / "26.2.0" / "mix" / "step0").iterdir())[0], root / "a" / "step0" / "rank0")
    place = root / "a" / "step1" / "rank0"
    place.mkdir(parents=True)
    (place / layout.MARKER).write_bytes(frame_log.line(1, 0, "ENOSPC"))


def job(root: Path) -> None:
    dumps("L1")(root)
    (root / "compare.json").write_text(
        json.dumps(
            {
                "npu_path": "../in/a/step0/rank0/dump.json",
                "bench_path": "../in/b/step0/rank0/dump.json",
                "stack_path": "../in/a/step0/rank0/stack.json",
                "is_print_compare_log": True,
            }
        )
    )


def with_mapping(root: Path) -> None:
    monitor_csv(root)
    (root / "names.json").write_text(json.dumps({"layers.0.w": "first", "layers.1.w": "second"}))


def sheets(root: Path) -> None:
    import xlsxwriter

    tables(root)
    for table in root.glob("*.csv"):
        with xlsxwriter.Workbook(str(table.with_suffix(".xlsx"))) as book:
            sheet = book.add_worksheet()
            for row, line in enumerate(table.read_text().splitlines()):
                sheet.write_row(row, 0, line.split(","))
        table.unlink()


def frame_log(root: Path) -> None:
    """A rank that was killed: the log of its step, and no dump.json."""
    from msprobe_engine.core.records import Entry, Frame, Opaque, TensorDescription, TensorRef
    from msprobe_engine.core.statistics import rows
    from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

    numbers = rows.empty(6)
    rows.as_int64(numbers)[:, [rows.COUNT, rows.FLAGS]] = 12, rows.WRITTEN
    numbers[:, rows.MAX], numbers[:, rows.MIN], numbers[:, rows.SUM], numbers[:, rows.SUMSQ] = 2.0, -1.0, 3.0, 4.0
    float32 = TensorDescription("torch.Tensor", "torch.float32", (3, 4), True)
    entries = []
    for call in range(3):
        scale = Opaque({"type": "float", "value": 0.5})
        sections = {"input_args": [TensorRef(2 * call, float32), scale], "output": [TensorRef(2 * call + 1, float32)]}
        entries.append(Entry(f"Functional.linear.{call}.forward", sections, "Module.fc.Linear.forward.0", 0))
    for side in ("a", "b"):
        DumpSink(root / side, level="mix", rank=0).write_log(
            Frame(0, 0, numbers, entries, stacks=[["File x.py, line 1, in f"]], level="mix")
        )


def packed(root: Path) -> None:
    """A dump whose tensors are in safetensors files."""
    import torch
    from safetensors.torch import save_file

    from msprobe_engine.formats.dump.writing.packed_files import FORMAT, INDEX, VERSION, shard_name

    dumps("tensor")(root)
    for data in root.glob("*/step0/rank*/dump_tensor_data"):
        tensors = {file.name: torch.load(file, weights_only=True).detach().contiguous() for file in sorted(data.iterdir())}
        for file in data.iterdir():
            file.unlink()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, data / shard_name(0), {"format": "pt"})
        names = {name: {"file": shard_name(0), "dtype": str(tensor.dtype)} for name, tensor in tensors.items()}
        (data / INDEX).write_text(json.dumps({"format": FORMAT, "version": VERSION, "tensors": names, "aliases": {}}))
        document = json.loads((data.parent / "dump.json").read_text())
        (data.parent / "dump.json").write_text(json.dumps({"tensor_format": "packed", **document}, indent=1))


def version_811(root: Path) -> None:
    """A dump of 8.1.1 with tensors."""
    step = sorted((FIXTURES / "8.1.1" / "tensor").rglob("dump.json"))[0].parent
    for side in ("a", "b"):
        shutil.copytree(step, root / side / "step0" / "rank0")


IR = """\
subgraph @kernel_graph0() {
  %0(equiv_9_CNode_447) = Load(%para1_fc1.weight, UMonad[U]) cnode_attrs: {checkpoint: Bool(1)}
      : (<Ref[Tensor[Float32]], (8, 8)>, <UMonad, NoShape>) -> (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: (Default/Load-op0)
  %1(equiv_8_x) = PrimFunc_MatMul(%para2_x, %0, Bool(0), Bool(1)) {instance name: matmul} cnode_primal_attrs: {unique_id: "8478"}
      : (<Tensor[Float32], (2, 8)>) -> (<Tensor[Float32], (2, 8)>)
      # Fullname with scope: (Default/fc1-Dense/MatMul-op1)
      # In file net.py:10~19, 4~16/    def construct(self, x):/
  Return(%1)
      : (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: (Default/Return-op0)
}
"""


def kernels(root: Path) -> None:
    """Kernel dumps of a static graph, with the graph, and a table of statistics."""
    (root / "graph.ir").write_text(IR)
    for side, scale in (("a", 1.0), ("b", 2.0)):
        place = root / side / "rank_0" / "Net" / "0" / "0"
        place.mkdir(parents=True)
        for number, what in enumerate(("input", "output")):
            array = np.arange(6, dtype=np.float32).reshape(2, 3) * scale
            np.save(place / f"MatMul.Default_fc1-Dense_MatMul-op1.0.0.{1000 + number}.{what}.0.DefaultFormat.Float32.npy", array)
    place = root / "table" / "rank_0" / "Net" / "0" / "0"
    place.mkdir(parents=True)
    columns = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,L2Norm Value"
    rows = [f'MatMul,Default_fc1-Dense_MatMul-op1,0,0,{1000 + n},output,0,24,float32,"(2, 3)",5,0,7.4' for n in range(3)]
    (place / "statistic.csv").write_text("\n".join([columns, *rows]) + "\n")


def request(root: Path) -> None:
    """The settings of a script, with the dump that they name from the working directory."""
    dumps("L1")(root)
    call = next(name for name in json.loads((root / "a/step0/rank0/dump.json").read_text())["data"] if name.startswith("Functional.linear"))
    document = {
        "dump_json_path": "../in/a/step0/rank0/dump.json", "api_name": ".".join(call.split(".")[:3]), "propagation": "forward",
        "data_mode": "random_data", "random_seed": 1234, "iter_times": 1,
    }  # fmt: skip
    (root / "config_op.json").write_text(json.dumps(document))


def incident_pieces(root: Path) -> None:
    """What each rank writes of an incident."""
    for rank in range(2):
        event = {"id": "step12-nan_inf", "step": 12, "rule": "nan_inf", "rank": 0, "capture_step": 13, "message": "w is NaN"}
        record = {
            "step": 12,
            "name": "layers.1.w",
            "statistics": {"count": 12, "nans": 1, "infs": 0, "max": 2.0, "min": "NaN", "norm": 3.0},
        }
        document = {
            "version": 1, "state": "complete", "event": event, "rank": rank, "world_size": 2, "rank_info": {"pp": rank, "dp": 0},
            "steps": [11, 12], "levels": ["L1"], "alerts": [alert(12, rank)], "capture": {"level": "mix", "first_step": 13, "steps": 1},
            "lost": {"late": 1}, "first_nonfinite": record, "worst": [record],
            "rerun": {"verdict": "transient", "different": 1, "compared": 3, "differences": ["x"], "random_equal": False},
        }  # fmt: skip
        (root / f"samples_rank{rank}.jsonl").write_text(json.dumps(document) + "\n")


def precheck_results(root: Path) -> None:
    """What an interrupted pre-check has left."""
    from msprobe_engine.accuracy.result_forms import Form

    form = Form()
    for name, columns in (("result", form.result_columns), ("details", form.details_columns)):
        values = {
            "API Name": "Functional.linear.0.forward.output.0",
            "API name": "Functional.linear.0",
            "Shape": '"(3, 4)"',
            "Status": "pass",
        }
        rows = [
            ",".join(values.get(column, "0.5" if column not in ("Message", "Standard") else "x") for column in columns) for _ in range(2)
        ]
        (root / f"{name}.csv").write_text("\n".join([",".join(columns), *rows]) + "\n")


def extracted(root: Path) -> None:
    """A call taken out of a dump, and the settings of a script for it."""
    document = json.loads((FIXTURES / "26.2.0/L1/step0").rglob("dump.json").__next__().read_text())
    name = next(name for name in document["data"] if name.startswith("Functional.linear"))
    (root / "call.json").write_text(json.dumps({name: document["data"][name]}))
    settings = {"extract_api_path": "../in/call.json", "api_name": "", "propagation": "forward", "data_mode": "random_data"}
    (root / "config_op.json").write_text(json.dumps(settings))
