"""Cost of saving tensors: what the training thread pays per tensor, and how fast the bytes reach the disk next to ``dd``.

    python benchmarks/tensors.py [--directory DIR] [--rounds 3]

Hook: time of `TensorSaver.reduce` less that of the statistics alone. Step: many small tensors (20,000 of 4 KiB) and few large ones (64 of
16 MiB), from the first copy until the last file is written, and until ``sync`` of its file system has returned; ``dd`` writes the same
number of bytes right before, without and with ``conv=fsync``. Shares are bytes per second over those of ``dd`` in the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver, template

STEPS = {"small": (20_000, 1024), "large": (64, 4 << 20)}
"""Number of tensors and float32 elements of each."""


def keeper(backend: TorchBackend, packed: bool, budget: int = 2048 << 20) -> TensorSaver:
    """What saves every tensor."""
    store = TensorStore(Options(saves=lambda _: True), template, Faults(strict=True), packed=packed, budget=budget)
    return TensorSaver(backend, store, Faults(strict=True), lambda _: None)


def hook(elements: int, tensors: int, directory: Path) -> tuple[float, float]:
    """Seconds per tensor of the statistics, and of statistics and copy; from the second step on, when there is memory to use again."""
    data = [torch.ones(elements) for _ in range(tensors)]
    best = [float("inf")] * 2
    backend = TorchBackend()
    kept = keeper(backend, packed=True)
    for number in range(8):
        kept.store.begin_step(number, str(directory))
        kept.begin_step(number)
        for i, reduce in enumerate((backend.reduce, kept.reduce)):
            backend.forget()
            start = time.perf_counter()
            for tensor in data:
                reduce(tensor)
            best[i] = min(best[i], (time.perf_counter() - start) / tensors)
        kept.end_step([])
        backend.finish_step()
        kept.store.finish(number)
        shutil.rmtree(directory / "dump_tensor_data", ignore_errors=True)
    return best[0], best[1]


def steps(packed: bool, tensors: int, elements: int, directory: Path) -> list[tuple[float, float, float]]:
    """Of a first step and of one after it, which finds memory to use again: seconds until the training thread was through, until all
    was written, and until the system had it on the disk."""
    data = [torch.full((elements,), float(i)) for i in range(min(tensors, 64))]
    backend = TorchBackend()
    kept = keeper(backend, packed)
    times = []
    for number in range(2):
        folder = directory / f"step{number}"
        folder.mkdir()
        kept.store.begin_step(number, str(folder))
        kept.begin_step(number)
        start = time.perf_counter()
        for i in range(tensors):
            tensor = data[i % len(data)]
            tensor.add_(0)  # a new version: a row and a file of its own
            kept.hand_over(Entry(f"Functional.relu.{i}.forward", {"output": [kept.reduce(tensor)]}))
        kept.end_step([])
        backend.finish_step()
        through = time.perf_counter() - start
        kept.store.finish(number)
        written = time.perf_counter() - start
        subprocess.run(["sync", "-f", str(directory)], check=True)
        times.append((through, written, time.perf_counter() - start))
    return times


def dd(nbytes: int, directory: Path, fsync: bool) -> float:
    """Bytes per second."""
    path = directory / "dd"
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={max(1, nbytes >> 20)}", *(["conv=fsync"] if fsync else [])]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    path.unlink()
    subprocess.run(["sync", "-f", str(directory)], check=True)
    return nbytes / seconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=arguments.directory))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {place}\n\nhook, us per tensor: statistics, with the copy")
    for name, elements, tensors in (("4 B", 1, 2000), ("4 KiB", 1024, 2000), ("256 KiB", 65536, 200), ("16 MiB", 4 << 20, 8)):
        without, with_copy = hook(elements, tensors, place)
        print(f"  {name:8} {without * 1e6:10.1f} {with_copy * 1e6:10.1f}   {elements * 4 / (with_copy - without) / 1e9:6.2f} GB/s copied")
    print("\nstep: MB/s written, share of dd; MB/s on the disk, share of dd conv=fsync; ms of the training thread; tensors/s")
    for name, (tensors, elements) in STEPS.items():
        nbytes = tensors * elements * 4
        for packed in (False, True):
            form, rows = "packed" if packed else "files", []
            for number in range(arguments.rounds):
                fast, slow = dd(nbytes, place, False), dd(nbytes, place, True)
                folder = place / f"{name}-{form}-{number}"
                folder.mkdir()
                for through, written, synced in steps(packed, tensors, elements, folder):
                    rows.append((nbytes / written, nbytes / written / fast, nbytes / synced, nbytes / synced / slow, through))
                if name == "large":  # ext4 is slow to make files where thousands were removed lately: small ones go at the end
                    shutil.rmtree(folder)
                subprocess.run(["sync", "-f", str(place)], check=True)
            for which, part in (("first", rows[::2]), ("later", rows[1::2])):
                a, b, c, d, e = (statistics.median(column) for column in zip(*part))
                line = f"{name:6} {form:7} {which} {a / 1e6:8.0f} {b:6.0%}   {c / 1e6:8.0f} {d:6.0%}   {e * 1e3:8.0f}"
                print(f"  {line}   {tensors / (nbytes / a):8.0f}", flush=True)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
