"""Samples of settings, scripts, packs and the small files that a run reads of itself: each function fills an empty directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from samples import FIXTURES, dumps, monitor_jsonl

from msprobe_engine.cli.main import main


def packs(root: Path) -> None:
    packs = sorted((FIXTURES / "config_packs" / "ours").rglob("*.zip"))
    for side, pack in zip(("a", "b"), packs if len(packs) > 1 else packs * 2):
        shutil.copy(pack, root / f"{side}.zip")


def settings(root: Path) -> None:
    (root / "probe.yaml").write_text(
        "output_dir: out\ndump: {task: statistics, level: mix, step: [1, 3-6], rank: [0]}\n"
        "monitor: {activations: true, interval: 10}\nrules: [{rule: nan_inf, severity: critical}, {rule: loss_spike}]\n"
        "sinks: {prometheus: {enabled: true, port: 9100}}\n"
    )


def existing_settings(root: Path) -> None:
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


def scripts(root: Path) -> None:
    (root / "run.sh").write_text(
        'export A=1\nN=$((2 * 4))\nARGS="--lr 1e-4 --seq-length ${N} --config args.yaml --deepspeed ds.json"\n'
        "for i in 1 2; do X=${X:-0}$i; done\nif [ $N -gt 3 ]; then B=2; fi\ntorchrun --nproc_per_node 8 train.py $ARGS\n"
    )
    (root / "args.yaml").write_text("lr: 1e-4\nmodel: {layers: 4, name: x}\nbase: &a {b: 1}\nmore: {<<: *a, c: [1, 2, {d: 3}]}\n")
    (root / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    (root / "train.py").write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=1e-3)\n")


VERL = {
    "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-06, "betas": [0.9, 0.95]}}, "rollout": {"name": "vllm"}},
    "data": {"train_batch_size": 8, "shuffle": True},
    "trainer": {"balance_batch": True},
}
SLIME = """\
------------ arguments ------------
  lr .......... 1e-06
  names ....... ['a', 'b']
  seed ........ 1234
----- end of arguments -----
"""


def logs(root: Path) -> None:
    """What verl and slime print when they start."""
    import pprint

    for side in ("a", "b"):
        text = pprint.pformat(VERL)
        (root / f"verl_{side}.log").write_text("begin\n" + "".join(f"(TaskRunner pid=1) {line}\n" for line in text.splitlines()) + "end\n")
        (root / f"slime_{side}.log").write_text("begin\n" + SLIME)
    (root / "wanted.yaml").write_text("data: {shuffle: true}\ndata/train_batch_size: 512\nmissing: [1, 2]\n")


def more_scripts(root: Path) -> None:
    """Kinds of files of settings that `scripts` has not."""
    (root / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --array=0-3\nsource env.sh\nsrun python -u train.py --lr ${LR:-1} --cfg conf.toml "
        "$(echo a) ${A[@]} <<EOF\nx $Y\nEOF\n"
    )
    (root / "env.sh").write_text(
        "LR=1e-4\nA=(1 2 3)\ncase $LR in 1*) B=1;; *) B=2;; esac\nf() { export C=$1; }\nf 3\nwhile false; do :; done\n"
    )
    (root / "conf.toml").write_text('title = "x"\n[model]\nlayers = 4\nsizes = [1, 2.5]\n[[data]]\nname = "a"\ndate = 2026-01-01\n')
    (root / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=1e-3)\nCONFIG = dict(a=1, b=[2, 3])\n"
    )


def existing_packs(root: Path) -> None:
    """Packs of both versions of the existing tool."""
    for version in ("26.2.0", "8.1.1"):
        for side, pack in zip(("a", "b"), sorted((FIXTURES / "config_packs" / version).rglob("*.zip"))):
            shutil.copy(pack, root / f"{version}_{side}.zip")


def bands(root: Path) -> None:
    monitor_jsonl(root)
    assert main(["monitor", "learn", str(root), "-o", str(root / "bands.json")]) == 0


def rules(root: Path) -> None:
    """Rules of one's own, and bands that were learned."""
    bands(root)
    (root / "probe.yaml").write_text(
        "output_dir: out\nmonitor: {gradients: true}\nrules:\n  - rule: condition\n    args:\n      name: big\n"
        '      when: norm("grad_reduced", "layers.*.attn.*") > 0.9 * norm("grad_reduced", "*") and loss > 1.5 * median(loss)\n'
        "      window: 100\n      for_steps: 3\n  - {rule: learned, args: {file: ../in/bands.json}}\n"
        '  - {rule: turbulence, args: {threshold: 4, scalars: [loss, "grad_norm"]}}\n'
    )


def with_config(root: Path) -> None:
    dumps("L1")(root)
    existing_settings(root)


def existing_monitor_settings(root: Path) -> None:
    (root / "monitor.json").write_text(
        json.dumps(
            {
                "targets": {"module.encoder": {"input": "tuple[2]:0", "output": "tensor"}},
                "print_struct": False, "xy_distribution": True, "wg_distribution": True, "mv_distribution": True, "module_ranks": [0],
                "format": "csv", "ops": ["norm", "min", "max"], "step_interval": 1, "collect_times": 100,
                "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}], "dump": True},
            }
        )
    )  # fmt: skip


def authority(root: Path) -> None:
    """Certificates for the online pre-check."""
    assert main(["certs", "init", str(root / "authority")]) == 0
    assert main(["certs", "host", str(root / "authority"), "localhost", "-o", str(root / "host")]) == 0


def small_documents(root: Path) -> None:
    """Files of a few values each that a run reads of itself, or of its other ranks."""
    (root / "losses.json").write_text(
        json.dumps({"alerts": 3, "lost": {"csv": {"steps": 1, "first": 2, "last": 3, "alerts": 0}}, "process": "x"})
    )
    families = [["msprobe_loss", [["msprobe_loss", [["rank", "0"]], 1.5]]], ["msprobe_step", [["msprobe_step", [], 3]]]]
    (root / "snapshot.json").write_text(json.dumps({"written": 1.5, "rank": 1, "families": families}))
    (root / "note.json").write_text(json.dumps({"session": "a" * 32, "first": 1, "last": 3, "world": 2}))
    (root / "key.txt").write_bytes(b"0123456789abcdef0123456789abcdef\n")


def repository(root: Path) -> None:
    """A git repository with a file that was changed."""
    import subprocess

    (root / "train.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    (root / ".git" / "packed-refs").write_text("# pack-refs with: peeled\n" + "0" * 40 + " refs/heads/main\n")
    shutil.rmtree(root / ".git" / "hooks", ignore_errors=True)
    shutil.rmtree(root / ".git" / "objects")
    (root / ".git" / "objects").mkdir()


def message(root: Path) -> None:
    """What a training sends to the online pre-check: frames, one after the other."""
    from msprobe_engine.accuracy.online.tcp.frames import Kind, encode_control, encode_header, encode_prefix

    calls: dict[str, object] = {"calls": {"Functional.linear.0.forward": {"input_args": []}}, "names": {}, "sources": {}}
    body = json.dumps(calls).encode()
    sent = [encode_control(Kind.HELLO, {"session": "a" * 32, "rank": 0, "first": 1, "lost": 0})]
    for number, (header, payload) in enumerate(
        (
            ({"kind": "run", "version": 1, "rank": 0, "world": 2, "framework": "pytorch"}, b""),
            ({"kind": "calls", "calls": len(body), "rank": 0, "step": 0, "number": 1}, body + bytes(16)),
            ({"kind": "step", "files": {"stack.json": 2, "construct.json": 2}, "rank": 0, "step": 0}, b"{}{}"),
        )
    ):
        text = encode_header(header)
        sent.append(encode_prefix(Kind.MESSAGE, number + 1, len(text), len(payload)) + text + payload)
    (root / "message.bin").write_bytes(b"".join(sent))


def http_request(root: Path) -> None:
    (root / "request.txt").write_bytes(
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9100\r\nAccept: application/openmetrics-text; version=1.0.0\r\n"
        b"Accept-Encoding: gzip;q=0.5\r\nConnection: close\r\n\r\n"
    )


def formulas(root: Path) -> None:
    (root / "operators.yaml").write_text(
        "operators:\n  npu_swiglu: {forward: npu_swiglu, description: text}\n  my_kernels.rms_norm:\n    forward: npu_rms_norm\n"
    )


def event(root: Path) -> None:
    text = {"id": "step12-nan_inf", "step": 12, "rule": "nan_inf", "rank": 0, "capture_step": 13, "message": "w is NaN"}
    (root / "event.json").write_text(json.dumps(text))
