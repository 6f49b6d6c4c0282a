"""F1: two checkpoints are compared as fast as their files are read."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.find.checkpoint.diff import Options, diff
from msprobe_engine.workflow.doctor import Line, Verdict
from msprobe_integrations.doctor.device import Device

SHARE = 0.9
"""Of the speed at which the files are read; goal."""
_BLOCK = 4 << 20
_WIDTH = 8192
_LAYERS = 16
_WORKERS = 8


def run(device: Device) -> Iterator[Line]:
    """Equal files and files that differ in one bit, on the disk of temporary files and in memory."""
    for place in dict.fromkeys((Path(tempfile.gettempdir()), Path("/dev/shm"))):
        if not place.is_dir():
            continue
        most = (2 << 30) if device.full else (64 << 20)
        each = min(most, shutil.disk_usage(place).free // 6)
        if each < 32 << 20:
            yield Line(f"checkpoint diff, {place}", "skipped", why="less than 200 MB are free there")
            continue
        with tempfile.TemporaryDirectory(dir=place) as folder:
            yield compare(Path(folder), place, each, device.full)


def compare(folder: Path, place: Path, size: int, large: bool) -> Line:
    """`large`: the files are large enough to have a goal; files in memory have none, because reading them is no more than a copy."""
    names = [folder / f"{name}.safetensors" for name in ("a", "same", "bit")]
    for path in names:
        write(path, size, flipped=path.stem == "bit")
    workers = min(_WORKERS, usable_cores())
    shares, speeds, wrong = [], [], []
    cached = ""
    for other, expected in ((names[1], 0), (names[2], 1)):
        pair = names[0], other
        cached = "" if all(drop(path) for path in pair) else " (cached)"
        reading = _measure_reading(pair, workers)
        for path in pair:
            drop(path)
        begin = time.perf_counter()
        result = diff(*pair, Options(workers=workers))
        seconds = time.perf_counter() - begin
        if result.code != expected:
            wrong.append(f"{other.stem}: {result.verdict()}")
        shares.append(reading / seconds)
        speeds.append(2 * size / seconds)
    share, has_goal = statistics.median(shares), large and not cached
    verdict: Verdict = "WRONG" if wrong else "ok" if share >= SHARE or not has_goal else "slow"
    figure = f"{share:.0%} of reading{cached}, {statistics.median(speeds) / 1e9:.2f} GB/s, 2 x {size / 1e9:.2f} GB"
    return Line(f"checkpoint diff, {place}", verdict, figure, f"{SHARE:.0%}" if has_goal else "", "; ".join(wrong))


def write(path: Path, size: int, flipped: bool) -> None:
    """A safetensors file of bfloat16 weights; `flipped`: one bit of the middle layer is another one."""
    rows = max(1, size // _LAYERS // 2 // _WIDTH)
    nbytes = rows * _WIDTH * 2
    entries = {
        f"model.layers.{layer}.mlp.up_proj.weight": {
            "dtype": "BF16",
            "shape": [rows, _WIDTH],
            "data_offsets": [layer * nbytes, (layer + 1) * nbytes],
        }
        for layer in range(_LAYERS)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    # values near 0.02: random bits of a few MiB, again and again, shifted from layer to layer
    random = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20).astype(np.uint16)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for layer in range(_LAYERS):
            piece = np.roll(random, layer).tobytes()
            for position in range(0, nbytes, len(piece)):
                file.write(piece[: nbytes - position])
        if flipped:
            file.seek(8 + len(header) + (_LAYERS // 2) * nbytes + 100)
            byte = int(np.roll(random, _LAYERS // 2).view(np.uint8)[100]) ^ 1
            file.write(bytes([byte]))
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> bool:
    """Ask the system to forget what it has of a file; False where it cannot (files in memory, other systems)."""
    if not hasattr(os, "posix_fadvise") or path.is_relative_to("/dev/shm"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def _measure_reading(paths: tuple[Path, Path], workers: int) -> float:
    """Seconds in which so many threads read both files."""

    def read_range(path: Path, first: int, last: int) -> None:
        buffer = np.empty(_BLOCK, np.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            while first < last and (got := file.readinto(buffer.data)):
                first += got

    threads = []
    for path in paths:
        size = path.stat().st_size
        each = -(-size // workers // _BLOCK) * _BLOCK
        threads += [threading.Thread(target=read_range, args=(path, start, min(size, start + each))) for start in range(0, size, each)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin
