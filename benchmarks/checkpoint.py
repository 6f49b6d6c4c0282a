"""Speed and memory of comparing checkpoints: next to reading and reducing the same files once, and to the existing tool.

    python benchmarks/checkpoint.py [--gigabytes 4] [--rounds 5] [--existing VENV-of-26.2.0] [--sparse 5 10 20] [--directory DIR]

Two Megatron checkpoints of format ``torch`` with bf16 weights and the float32 states of Adam (master copy, exp_avg, exp_avg_sq), each of
the given size. Three pairs: the same; one flipped bit; every weight and state moved, as after a step of training. In every round two
commands take turns: reading both files once, in as many threads, and reducing them (a sum of 64-bit words with numpy), and our
comparison; in the first round the existing tool too, which compares the weights only. All are processes of their own. Seconds are those
inside the work, without the start of Python, but for the existing tool, whose command is timed as a whole. Memory is the peak of the
process (VmHWM). The files are in the page cache: they were written, and read once, before.

``--sparse``: two files with holes of so many GB each, for how time and memory grow. They are new for each command, so nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

_PEAK = "import re; peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
_REDUCE = (
    """
import json, os, sys, threading, time
import numpy as np
def one(path, first, last):
    fd, buffer = os.open(path, os.O_RDONLY), np.empty(4 << 20, np.uint8)
    words, total = buffer.view(np.uint64), 0
    with np.errstate(over='ignore'):
        while first < last:
            got = os.preadv(fd, [buffer.data], first)
            total += int(words[: got // 8].sum(dtype=np.uint64))
            first += got
    os.close(fd)
begin, cpu, nbytes, threads = time.perf_counter(), time.process_time(), 0, []
for path in sys.argv[2:]:
    size = os.path.getsize(path); nbytes += size
    each = -(-size // int(sys.argv[1]) // 4096) * 4096
    threads += [threading.Thread(target=one, args=(path, k * each, min(size, (k + 1) * each))) for k in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
seconds = time.perf_counter() - begin
"""
    + _PEAK
    + "print(json.dumps({'seconds': seconds, 'cpu': time.process_time() - cpu, 'bytes': nbytes, 'peak': peak}))"
)
_DIFF = (
    """
import json, sys, time
from msprobe_engine.find.checkpoint.diff import Options, diff
begin, cpu = time.perf_counter(), time.process_time()
found = diff(sys.argv[2], sys.argv[3], Options(workers=int(sys.argv[1]) or None))
seconds = time.perf_counter() - begin
"""
    + _PEAK
    + "numbers = {'seconds': seconds, 'cpu': time.process_time() - cpu, 'bytes': found.nbytes, 'peak': peak}\n"
    + "print(json.dumps({**numbers, 'verdict': found.verdict()}))"
)


class Cost(NamedTuple):
    """Seconds, GB per second, MiB, what was said, and seconds of the processor."""

    seconds: float
    speed: float
    peak: float
    verdict: str = ""
    cpu: float = 0.0


def make(root: Path, gigabytes: float) -> None:
    """``a`` and its variants ``same``, ``bit`` and ``step``, as Megatron saves them."""
    import torch

    hidden = 2048
    # a layer has 12 hidden^2 parameters of 2 + 12 bytes
    layers = max(1, round(gigabytes * 1e9 / (12 * hidden**2 * 14)))
    shapes = {"self_attention.linear_qkv": (3 * hidden, hidden), "self_attention.linear_proj": (hidden, hidden)}
    shapes |= {"mlp.linear_fc1": (4 * hidden, hidden), "mlp.linear_fc2": (hidden, 4 * hidden)}
    names = [(f"decoder.layers.{layer}.{name}.weight", shape) for layer in range(layers) for name, shape in shapes.items()]
    for variant in ("a", "same", "bit", "step"):
        generator = torch.Generator().manual_seed(0)
        moved = variant == "step"
        model, masters, states = {}, [], {}
        for number, (name, shape) in enumerate(names):
            master = torch.empty(shape).normal_(0, 0.02, generator=generator)
            if moved:
                master += 1e-3 * master.roll(1)
            model[name] = master.bfloat16()
            masters.append(master)
            states[number] = {"exp_avg": master * (0.02 if moved else 0.01), "exp_avg_sq": master.square() * (2 if moved else 1)}
        if variant == "bit":
            model[names[len(names) // 2][0]].view(torch.int16)[5, 7] ^= 1
        group = {"params": list(range(len(names))), "lr": 1e-4, "step": 100, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = {"optimizer": {"state": states, "param_groups": [group]}, "fp32_from_fp16_params": [masters], "grad_scaler": {}}
        args = argparse.Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1, num_experts=None, num_layers=layers,
            hidden_size=hidden, num_attention_heads=16, num_query_groups=16, group_query_attention=False, kv_channels=128, swiglu=False,
            untie_embeddings_and_output_weights=True, add_bias_linear=False, bf16=True, use_distributed_optimizer=False,
        )  # fmt: skip
        path = root / variant / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        (root / variant / "latest_checkpointed_iteration.txt").write_text("100")
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 100, "model": model, "optimizer": optimizer}, path)


def child(script: str, *words: object) -> Cost:
    """One measured process."""
    command = [sys.executable, "-c", script, *map(str, words)]
    data = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Cost(data["seconds"], data["bytes"] / data["seconds"] / 1e9, data["peak"], data.get("verdict", ""), data["cpu"])


def existing(venv: Path, a: Path, b: Path, root: Path) -> Cost:
    """The existing tool on the same pair; it wants the package megatron to be importable, an empty one will do."""
    (root / "stub" / "megatron").mkdir(parents=True, exist_ok=True)
    (root / "stub" / "megatron" / "__init__.py").touch()
    output = root / "existing.json"
    output.unlink(missing_ok=True)
    command = [str(venv / "bin" / "msprobe"), "config_check", "-c", str(a), str(b), "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(root / "stub")}
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                return
            peak[0] = max([peak[0], *(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))])

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - begin
    over.set()
    watcher.join()
    if code != 0 or not output.exists():
        return Cost(seconds, 0.0, peak[0], f"failed (exit code {code})")
    found = json.loads(output.read_text())
    different = sum(1 for entry in found.values() if entry["l2"] != 0)
    return Cost(seconds, 0.0, peak[0], f"{different} of {len(found)} weights differ")


def pairs(root: Path, rounds: int, workers: int, venv: Path | None) -> None:
    """The table of the three pairs."""
    print("| pair | read and reduce once | this tool | ratio of speed | of CPU time | peak | existing tool | its peak |")
    print("|---|---|---|---|---|---|---|---|")
    for other in ("same", "bit", "step"):
        files = [root / side / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt" for side in ("a", other)]
        child(_REDUCE, workers, *files)
        ours, bound, ratios, theirs = [], [], [], None
        for number in range(rounds):
            bound.append(child(_REDUCE, workers, *files))
            ours.append(child(_DIFF, workers, root / "a", root / other))
            ratios.append(ours[-1].speed / bound[-1].speed)
            if number == 0 and venv is not None:
                theirs = existing(venv, root / "a", root / other, root)
        median = [statistics.median(cost.speed for cost in costs) for costs in (bound, ours)]
        seconds, peak = statistics.median(cost.seconds for cost in ours), max(cost.peak for cost in ours)
        processor = statistics.median(b.cpu / o.cpu for b, o in zip(bound, ours))
        their = f"{theirs.seconds:.1f} s: {theirs.verdict} | {theirs.peak:.0f} MiB" if theirs is not None else "- | -"
        print(
            f"| {other}: {ours[0].verdict.split(';')[0]} | {median[0]:.2f} GB/s | {median[1]:.2f} GB/s, {seconds:.1f} s | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {processor:.2f} | {peak:.0f} MiB | {their} |",
            flush=True,
        )


def sparse(root: Path, sizes: list[float], workers: int) -> None:
    """The table of files with holes."""
    print("\n| GB each | read and reduce once | this tool | seconds | peak |\n|---|---|---|---|---|")
    for size in sizes:
        rows = round(size * 1e9 / 2 / 8192)
        entries: dict[str, Any] = {}
        at, layers = 0, 32
        for layer in range(layers):
            n = rows // layers * 8192 * 2
            shape = [rows // layers, 8192]
            entries[f"model.layers.{layer}.mlp.up_proj.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
            at += n
        header = json.dumps(entries).encode()
        files = [root / f"{side}.safetensors" for side in "ab"]
        costs = []
        for script in (_REDUCE, _DIFF):
            for path in files:
                with path.open("wb") as file:
                    file.write(len(header).to_bytes(8, "little") + header)
                    file.truncate(8 + len(header) + at)
            costs.append(child(script, workers, *files))
            for path in files:
                path.unlink()
        bound, ours = costs
        print(f"| {size:g} | {bound.speed:.2f} GB/s | {ours.speed:.2f} GB/s | {ours.seconds:.1f} | {ours.peak:.0f} MiB |", flush=True)


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--existing", type=Path)
    parser.add_argument("--sparse", type=float, nargs="*", default=[])
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        if args.gigabytes:
            make(root, args.gigabytes)
            pairs(root, args.rounds, args.workers, args.existing)
        if args.sparse:
            sparse(root, args.sparse, args.workers)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
