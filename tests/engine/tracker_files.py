"""What offline runs of W&B and SwanLab have left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]


def records(path: Path) -> list[bytes]:
    """Records of a file of W&B or SwanLab: LevelDB's log format behind seven bytes (blocks of 32 KiB; crc, length, kind, content)."""
    data, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body, at = data[at + 7 : at + 7 + length], at + 7 + length
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):
            found.append(part)
    return found


def wandb_rows(directory: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History rows and summary of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (file,) = Path(directory).parent.glob("*.wandb")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            if not rows or rows[-1]["number"] != record.num:
                rows.append({"number": record.num})
            rows[-1][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return rows, summary


def swanlab_curves(directory: Path) -> Curves:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    (file,) = directory.glob("*/*.swanlab")
    curves: Curves = {}
    for data in records(file):
        record = record_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("scalar"):
            curves.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        if record.HasField("media"):
            curves.setdefault(record.media.key, []).append((record.media.step, math.nan))
    return curves
