"""What is attacked: a command and a kind of file it reads, with samples as the tools write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.accuracy import precision_compare
from msprobe_engine.accuracy.precheck.calls import read_calls, remarks_on_lists, why_not, without_repeats
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.cli.main import main
from msprobe_engine.errors import ProbeError

FIXTURES = Path(__file__).parent.parent / "fixtures"


@dataclass(frozen=True)
class Target:
    """A command on files.

    Attributes:
        name: of its corpus.
        make: writes the sample into an empty directory.
        argv: of the command; ``{in}`` and ``{out}`` are directories.
        attacked: patterns of the files that are changed.
        few: inputs in the fast suite.
        enter: takes the arguments in place of the command line, where the command does much more than to read.
        codes: exit codes for the sample itself.
    """

    name: str
    make: Callable[[Path], None]
    argv: tuple[str, ...]
    attacked: tuple[str, ...]
    few: int = 40
    enter: Callable[[Sequence[str]], int] = main
    codes: tuple[int, ...] = (0, 1)


def _read_calls(argv: Sequence[str]) -> int:
    """What `acc_check` takes from a dump. The command itself runs the calls in processes of their own, which import torch first: 17 inputs
    a minute."""
    try:
        calls = without_repeats(read_calls(argv[0]).calls)
    except ProbeError as error:
        print(error)
        return 3
    settings = PrecheckSettings()
    for call in calls:
        why_not(call, settings)
    remarks_on_lists(calls, settings)
    return 0


def _dumps(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        step = FIXTURES / "26.2.0" / name / "step0"
        for side in ("a", "b"):
            for number, rank in enumerate(sorted(step.iterdir())):
                shutil.copytree(rank, root / side / "step0" / f"rank{number}")
        _not_finite(root / "a" / "step0" / "rank0" / "dump.json")

    return make


def _not_finite(file: Path) -> None:
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


def _mappings(root: Path) -> None:
    _dumps("mix")(root)
    names = "Functional.linear: Functional.linear\nTorch.relu.0.forward: Torch.relu.0.forward\n"
    for name in ("data", "api", "cell"):
        (root / f"{name}.yaml").write_text(names)
    (root / "layer.yaml").write_text("TopLayer:\n  head: head\nLinear: {weight: weight, bias: bias}\n")
    np.save(root / "m.npy", np.eye(4))
    (root / "post.yaml").write_text("right_matmul:\n  target_tensor_map: {m.npy: [b, c]}\n")


def _alert(step: int, rank: int) -> dict[str, Any]:
    return {
        "rule": "nan_inf", "severity": "critical", "kind": "grad", "step": step, "rank": rank, "name": "layers.1.w", "value": "NaN",
        "expected": "finite", "message": "layers.1.w is NaN", "order": 3, "micro_step": 0,
        "extra": {"family": "grad_reduced", "phase": "reduced", "op": "nans", "meaning": "m", "next": "n", "vpp_stage": 0},
    }  # fmt: skip


def _monitor_csv(root: Path) -> None:
    for rank in range(2):
        place = root / "monitor" / f"Dec03_21-34-40-rank{rank}-1a2b3c4d"
        place.mkdir(parents=True)
        info = {"rank": rank, "world_size": 2, "rank_info": {"pp": rank, "dp": 0, "tp": 0}, "started_unix": 1.0, "stamp": "Dec03_21-34-40"}
        (place / "run.json").write_text(json.dumps(info))
        (place / "alerts.jsonl").write_text("".join(json.dumps(_alert(step, rank)) + "\n" for step in range(3)))
        rows = [f"0,layers.{layer}.w,{step},{1.0 + layer + step},-1,1,0" for step in range(4) for layer in range(3)]
        (place / "grad_reduced_0-9.csv").write_text("\n".join(["vpp_stage,name,step,norm,min,max,nans", *rows]) + "\n")
        (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss,{3 - step}\n" for step in range(4)))


def _monitor_jsonl(root: Path) -> None:
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
            lines.append({"step": step, "scalars": {"loss": 3.0 - step}, "samples": samples, "alerts": [_alert(step, rank)]})
        (root / "jsonl" / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _trend(root: Path) -> None:
    _monitor_csv(root / "source")
    assert main(["data2db", "--db", str(root / "trend"), "--data", str(root / "source" / "monitor")]) == 0
    shutil.rmtree(root / "source")


def _anomalies(root: Path) -> None:
    for rank in range(2):
        place = root / "anomaly_detected" / f"rank{rank}"
        place.mkdir(parents=True)
        record = {
            "rank": rank, "step": 1, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": 5, "group_mates": [0, 1],
            "tag_name": "0:layers.0:1/rank0/actv",
            "message": "Rule AnomalyTurbulence reports anomaly signal in ('0:layers.0/rank0/actv', 'norm') at step 1.",
        }  # fmt: skip
        (place / "anomaly.json").write_text(json.dumps({"anomaly_0": record, "anomaly_1": {**record, "step": 2}}))


def _tables(root: Path) -> None:
    columns = ("Max", "Min", "Mean", "L2norm"), ("Max", "Min", "Mean", "Norm")
    differences = [*(f"{name} diff" for name in columns[0]), *(f"{name}RelativeErr" for name in columns[1])]
    header = ",".join(["NPU Name", "Bench Name", "NPU Tensor Dtype", *differences, "NPU max", "Bench max"])
    for rank in range(2):
        rows = [f"Distributed.all_reduce.{n}.forward.input.0,x,torch.float32,{n},0,0,1,1%,0%,0%,1%,1,2" for n in range(3)]
        (root / f"compare_result_rank{rank}_20260101000000.csv").write_text("\n".join([header, *rows]) + "\n")
    (root / "merge.yaml").write_text("api: [Distributed.all_reduce]\ncompare_index: [Max diff, L2norm diff]\n")


def _packs(root: Path) -> None:
    packs = sorted((FIXTURES / "config_packs" / "ours").rglob("*.zip"))
    for side, pack in zip(("a", "b"), packs if len(packs) > 1 else packs * 2):
        shutil.copy(pack, root / f"{side}.zip")


def _settings(root: Path) -> None:
    (root / "probe.yaml").write_text(
        "output_dir: out\ndump: {task: statistics, level: mix, step: [1, 3-6], rank: [0]}\n"
        "monitor: {activations: true, interval: 10}\nrules: [{rule: nan_inf, severity: critical}, {rule: loss_spike}]\n"
        "sinks: {prometheus: {enabled: true, port: 9100}}\n"
    )


def _existing_settings(root: Path) -> None:
    (root / "config.json").write_text(
        json.dumps(
            {
                "task": "statistics",
                "dump_path": "x",
                "rank": [0],
                "step": ["0-2"],
                "level": "L1",
                "statistics": {"scope": [], "list": ["relu"], "data_mode": ["all"]},
            }
        )
    )


def _with_config(root: Path) -> None:
    _dumps("L1")(root)
    _existing_settings(root)


def _checkpoints(root: Path) -> None:
    import torch

    for side in ("a", "b"):
        (root / side).mkdir()
        torch.save({"w": torch.ones(3, 4), "step": torch.tensor(1.0), "n": 3, "names": ["x"]}, root / side / "model.pt")


def _safetensors(root: Path) -> None:
    from safetensors.numpy import save_file

    for side in ("a", "b"):
        (root / side).mkdir()
        save_file({"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}, root / side / "model.safetensors")
        index = {"metadata": {"total_size": 64}, "weight_map": {"w": "model.safetensors", "b": "model.safetensors"}}
        (root / side / "model.safetensors.index.json").write_text(json.dumps(index))
        (root / side / "trainer_state.json").write_text(
            json.dumps({"global_step": 3, "epoch": 1.0, "log_history": [{"loss": 1.0, "step": 1}]})
        )


def _dcp(root: Path) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    for side in ("a", "b"):
        state = {"w": torch.ones(30, 4), "step": torch.tensor(1.0)}
        save(state, storage_writer=FileSystemWriter(root / side), no_dist=True)


def _zarr(root: Path) -> None:
    for side in ("a", "b"):
        shutil.copytree(FIXTURES / "megatron_zarr" / "iter_0000003", root / side)


def _mindspore(root: Path) -> None:
    for side in ("a", "b"):
        (root / side).mkdir()
        shutil.copy(FIXTURES / "mindspore_checkpoints" / "adam.ckpt", root / side / "adam.ckpt")


def _arrays(root: Path) -> None:
    import torch

    (root / "d").mkdir()
    np.save(root / "d" / "a.npy", np.ones((3, 4), np.float32))
    torch.save(torch.ones(3, 4), root / "d" / "b.pt")
    header = b"$Version=1.0\n$Object.Count=1\n$Object.Length=48\nformat=2\ndtype=0\ndims=3,4\nobject.count=1\n$End=1\n"
    (root / "d" / "c.bin").write_bytes(header + bytes(48))


def _gradients(root: Path) -> None:
    for side in ("a", "b"):
        place = root / side / "rank0"
        place.mkdir(parents=True)
        (place / "grad_summary_1.csv").write_text('param_name,max,min,norm,shape\nw,1,0,2,"[3, 4]"\nb,1,0,2,"[4]"\n')
        (place / "step1").mkdir()
        np.save(place / "step1" / "w.npy", np.ones((3, 4), bool))
        np.save(place / "step1" / "b.npy", np.ones(4, bool))


def _results(root: Path) -> None:
    metrics = [column for column in precision_compare._NEEDED if column not in ("API Name", "DEVICE Dtype")]
    for side in ("npu", "gpu"):
        rows = [f"Functional.linear.{n}.forward.output.0,torch.float32" + ",0.01" * len(metrics) for n in range(3)]
        (root / f"{side}.csv").write_text("\n".join([",".join(["API Name", "DEVICE Dtype", *metrics]), *rows]) + "\n")


def _incident(root: Path) -> None:
    place = root / "step12-nan_inf"
    place.mkdir()
    (place / "incident.json").write_text(
        json.dumps({"step": 12, "rule": "nan_inf", "alert": _alert(12, 0), "ranks": [0], "steps": [11, 12]})
    )
    (place / "samples").mkdir()
    lines = [{"step": step, "samples": [{"family": "grad", "name": "w", "norm": "NaN", "nans": 1}]} for step in (11, 12)]
    (place / "samples" / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rank = sorted((FIXTURES / "26.2.0" / "mix" / "step0").iterdir())[0]
    shutil.copytree(rank, place / "step12" / "rank0")
    _not_finite(place / "step12" / "rank0" / "dump.json")


def _scripts(root: Path) -> None:
    (root / "run.sh").write_text(
        'export A=1\nN=$((2 * 4))\nARGS="--lr 1e-4 --seq-length ${N} --config args.yaml --deepspeed ds.json"\n'
        "for i in 1 2; do X=${X:-0}$i; done\nif [ $N -gt 3 ]; then B=2; fi\ntorchrun --nproc_per_node 8 train.py $ARGS\n"
    )
    (root / "args.yaml").write_text("lr: 1e-4\nmodel: {layers: 4, name: x}\nbase: &a {b: 1}\nmore: {<<: *a, c: [1, 2, {d: 3}]}\n")
    (root / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    (root / "train.py").write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=1e-3)\n")


def _job(root: Path) -> None:
    _dumps("L1")(root)
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


def _with_mapping(root: Path) -> None:
    _monitor_csv(root)
    (root / "names.json").write_text(json.dumps({"layers.0.w": "first", "layers.1.w": "second"}))


def _sheets(root: Path) -> None:
    import xlsxwriter

    _tables(root)
    for table in root.glob("*.csv"):
        with xlsxwriter.Workbook(str(table.with_suffix(".xlsx"))) as book:
            sheet = book.add_worksheet()
            for row, line in enumerate(table.read_text().splitlines()):
                sheet.write_row(row, 0, line.split(","))
        table.unlink()


_DUMPED = ("*/dump.json", "*/stack.json", "*/construct.json")
A, B = "{in}/a", "{in}/b"
MONITORED = ("*.csv", "*.json", "*.jsonl", "*.db")

TARGETS = (
    Target("compare", _dumps("mix"), ("compare", A, B, "-o", "{out}", "--csv"), _DUMPED),
    Target("compare-first-difference", _dumps("L1"), ("compare", A, B, "-o", "{out}", "-da"), _DUMPED),
    Target(
        "compare-compat",
        _dumps("L1"),
        ("compare", "-tp", A + "/step0", "-gp", B + "/step0", "-o", "{out}", "--compat", "--csv"),
        _DUMPED,
        codes=(3,),  # both sides hold a NaN, which cannot be compared; what differs does not show in the exit code of the existing tool
    ),
    Target("compare-tensors", _dumps("tensor"), ("compare", A, B, "-o", "{out}", "--csv"), (*_DUMPED, "*.pt")),
    *(
        Target(
            f"compare-{name}-mapping",
            _mappings,
            ("compare", A, B, "-o", "{out}", "--csv", flag, "{in}/" + name + ".yaml"),
            (f"{name}.yaml",),
        )
        for name, flag in (("data", "-dm"), ("api", "-am"), ("cell", "-cm"), ("layer", "-lm"), ("post", "--config"))
    ),
    Target("diagnose-two", _dumps("mix"), ("diagnose", A, B, "-o", "{out}"), _DUMPED),
    Target("diagnose-one", _dumps("mix"), ("diagnose", A, "-o", "{out}"), _DUMPED),
    Target("diagnose-monitor", _monitor_csv, ("diagnose", "{in}", "-o", "{out}"), MONITORED),
    Target("diagnose-incident", _incident, ("diagnose", "{in}/step12-nan_inf", "-o", "{out}"), ("*.json", "*.jsonl")),
    Target("nan_analyze", _dumps("mix"), ("nan_analyze", "-i", A, "-o", "{out}"), _DUMPED),
    Target("nan_analyze-incident", _incident, ("nan_analyze", "-i", "{in}/step12-nan_inf", "-o", "{out}"), ("*.json", "*.jsonl")),
    Target("graph", _dumps("mix"), ("graph", A, B, "-o", "{out}"), _DUMPED, few=12),
    Target("estimate", _dumps("L1"), ("estimate", A, "--task", "tensor", "--json"), _DUMPED),
    Target("show", _monitor_csv, ("show", "{in}"), MONITORED),
    Target("acc_check", _dumps("L1"), (A + "/step0/rank0/dump.json",), ("*/a/step0/rank0/dump.json",), enter=_read_calls),
    Target(
        "acc_check-run",
        _dumps("L1"),
        ("acc_check", A + "/step0/rank0/dump.json", "-o", "{out}", "-d", "cpu", "--timeout", "20"),
        ("*/a/step0/rank0/dump.json",),
        few=1,
    ),
    Target("op_generate", _dumps("L1"), ("op_generate", "--dump", A + "/step0/rank0", "--api", "linear", "-o", "{out}"), _DUMPED, few=20),
    Target("trends-csv", _monitor_csv, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-jsonl", _monitor_jsonl, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-db", _trend, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-dump", _dumps("L0"), ("trends", A, "-o", "{out}/t.html"), _DUMPED),
    Target("report-csv", _monitor_csv, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("report-jsonl", _monitor_jsonl, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("report-db", _trend, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("analyze-csv", _monitor_csv, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-jsonl", _monitor_jsonl, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-db", _trend, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-existing", _anomalies, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("learn", _monitor_jsonl, ("monitor", "learn", "{in}", "-o", "{out}/bands.json"), MONITORED),
    Target("data2db", _monitor_csv, ("data2db", "--db", "{out}/trend", "--data", "{in}/monitor"), MONITORED, few=20),
    Target("merge_result", _tables, ("merge_result", "-i", "{in}", "-o", "{out}", "-config", "{in}/merge.yaml"), ("*.csv", "*.yaml")),
    Target("config_check", _packs, ("config_check", "-c", "{in}/a.zip", "{in}/b.zip", "-o", "{out}"), ("*.zip",), few=8),
    Target("config_check-ranks", _packs, ("config_check", "--ranks", "{in}/a.zip"), ("*/a.zip",), few=16),
    Target("check-config", _settings, ("check-config", "{in}/probe.yaml"), ("*.yaml",)),
    Target("check-config-existing", _existing_settings, ("check-config", "{in}/config.json"), ("*.json",)),
    Target("ckpt-torch", _checkpoints, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.pt",)),
    Target("ckpt-safetensors", _safetensors, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.json", "*.safetensors")),
    Target("ckpt-zarr", _zarr, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-mindspore", _mindspore, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.ckpt",)),
    Target("ckpt-dcp", _dcp, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",), few=12),
    Target("ckpt-show", _safetensors, ("ckpt", "show", A, "--tensors"), ("*.json", "*.safetensors")),
    Target("parse", _arrays, ("parse", "-d", "{in}/d", "-t", "npy", "-o", "{out}"), ("*",)),
    Target("grad_probe", _gradients, ("grad_probe", "compare", A, B, "-o", "{out}", "--no-plots"), ("*",)),
    Target(
        "api_precision_compare",
        _results,
        ("api_precision_compare", "-npu", "{in}/npu.csv", "-gpu", "{in}/gpu.csv", "-o", "{out}"),
        ("*.csv",),
    ),
    Target("compare-job", _job, ("compare", "-i", "{in}/compare.json", "-o", "{out}"), ("compare.json",)),
    Target("config_check-scripts", _scripts, ("config_check", "-d", "{in}/run.sh", "{in}/ds.json", "-o", "{out}/p.zip"), ("*",)),
    Target(
        "data2db-mapping",
        _with_mapping,
        ("data2db", "--db", "{out}/t", "--data", "{in}/monitor", "--mapping", "{in}/names.json"),
        ("names.json",),
        few=20,
    ),
    Target("csv2tb", _monitor_csv, ("monitor", "csv2tb", "{in}/monitor", "-o", "{out}/tb"), ("*.csv", "run.json")),
    Target("merge_result-xlsx", _sheets, ("merge_result", "-i", "{in}", "-o", "{out}", "-config", "{in}/merge.yaml"), ("*.xlsx",)),
    Target("show-dump", _dumps("L0"), ("show", "{in}/a", "--json"), _DUMPED),
    Target("ckpt-digest", _safetensors, ("ckpt", "digest", A, "-o", "{out}/d.json"), ("*.json", "*.safetensors")),
    Target("estimate-config", _with_config, ("estimate", A, "--config", "{in}/config.json"), ("config.json",)),
)
