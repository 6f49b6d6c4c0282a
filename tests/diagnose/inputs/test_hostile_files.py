"""Dumps that come from elsewhere: whatever they hold, the commands end, say so, and a terminal obeys none of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.log import one_line, printable
from msprobe_engine.formats.dump import frame_log
from msprobe_engine.formats.dump.writing.text import Template

EVIL = "\x1b]0;title\x07\x1b[2J\nFirst NaN: forged\r\u202e"
NAN = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": float("nan"), "Min": 1, "Mean": 1, "Norm": 1}


def put(root: Path, **files: str | bytes) -> Path:
    """A dump of one rank with these files (`_` stands for a dot)."""
    rank = root / "step0" / "rank0"
    rank.mkdir(parents=True)
    for name, content in files.items():
        path = rank / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def dump(name: str, **record: Any) -> str:
    return json.dumps({"data": {name: {"input_args": [], "input_kwargs": {}, "output": [NAN], **record}}})


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters and line breaks of record names, stacks, incidents and directories are shown as escapes."""
    name = f"Module.a{EVIL}b.Linear.forward.0"
    root = put(tmp_path / "run", dump__json=dump(name), stack__json=json.dumps({"0": [[name], [f"File {EVIL}"]]}))
    incident = tmp_path / "run" / "incidents" / "x"
    incident.mkdir(parents=True)
    (incident / "incident.json").write_text(json.dumps({"step": EVIL, "rule": EVIL}))
    table = tmp_path / "run" / f"t{EVIL}"
    table.mkdir()
    (table / "a.csv").write_text("x")
    assert main(["nan_analyze", "-i", str(root), "-o", str(tmp_path / "out")]) == 1
    assert main(["show", str(root)]) == 0
    shown = "".join(capsys.readouterr())
    assert "forged" in shown
    assert not any(line.startswith("First NaN: forged") for line in shown.splitlines())
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_text_for_terminals() -> None:
    """Printable text stays as it is, other characters become escapes, line breaks only inside names."""
    assert printable("Schicht 層 1\nb") == "Schicht 層 1\nb"
    assert printable("\x1b[31m\udcff\r") == "\\x1b[31m\\udcff\\r"
    assert one_line("a\nb") == "a\\nb"


@pytest.mark.parametrize(
    "record",
    [
        {"group_ranks": ["a", {}], "root": [1]},
        {"group_ranks": "x", "output": [{**NAN, "Max": None, "shape": 5}]},
        {"input_kwargs": {"group": {"group_ranks": [None]}, "group_src": {"value": -9}}},
    ],
)
def test_odd_records_are_no_reason_to_stop(tmp_path: Path, record: dict[str, Any]) -> None:
    """Wrong types where ranks and shapes are expected do not end the analysis with an internal error."""
    root = put(tmp_path / "run", dump__json=dump("Distributed.broadcast.0.forward", **record))
    assert main(["nan_analyze", "-i", str(root), "-o", str(tmp_path / "out")]) in (0, 1, 3)


def test_odd_samples_are_left_out(tmp_path: Path) -> None:
    """Lines of a sample file with steps that are no numbers, endless nesting or other encodings are skipped."""
    lines = [
        b'{"step": 1e400}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"step": "9"}',
        b'{"step": 3, "family": "actv", "name": "a", "statistics": {"nans": 1}}',
    ]
    (tmp_path / "samples_rank0.jsonl").write_bytes(b"\n".join(lines))
    assert main(["nan_analyze", "-i", str(tmp_path), "-o", str(tmp_path / "out")]) == 1


@pytest.mark.parametrize("operation", [[1, 0, 2_000_000_000, 0], [1 << 30, 0, 2, 0], [1, 0, 2, -5], [1, 9, 2, 0]])
def test_forged_frame_logs_are_errors(tmp_path: Path, operation: list[int]) -> None:
    """A frame log with right checksums and operations that do not fit its text is a damaged file, no internal error."""
    packed = frame_log.pack(Template(b"{}", np.array([operation], np.int32)), b"{}", b"{}")
    parts = frame_log.encode(packed, 0, 0, b'{\n "data": ', np.zeros(1, np.int32), np.zeros(0), np.zeros((1, 16)))
    root = put(tmp_path / "run", __frame__bin=b"".join(bytes(part) for part in parts), __incomplete="{}")
    assert main(["nan_analyze", "-i", str(root), "-o", str(tmp_path / "out")]) == 2


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_without_an_end_are_not_read(tmp_path: Path, kind: str) -> None:
    """A named pipe or a device in place of dump.json is refused at once."""
    root = put(tmp_path / "run")
    file = root / "step0" / "rank0" / "dump.json"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    command = [sys.executable, "-m", "msprobe_engine.cli", "nan_analyze", "-i", str(root), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert "regular file" in done.stderr
