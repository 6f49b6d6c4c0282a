"""Files of the summary modes: what is in dump.json, also when the process dies before it was written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.core.records import Entry, Frame, TensorDescription, TensorRef
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

X = np.array([[0, 1, 2], [3, 4, 5]], np.float32)
BAD = np.array([1, np.nan], np.float32)
BOTH = host_kernel.WANT_CRC | host_kernel.WANT_XOR
STATISTICS = ["Max", "Min", "Mean", "Norm"]


def row_of(x: np.ndarray, want: int = BOTH) -> R.Rows:
    """Its row, with both checksums unless told otherwise."""
    row = R.empty(1)
    host_kernel.reduce(x.ctypes.data, x.size, host_kernel.CODES[x.dtype.name], row.ctypes.data, want, 0)
    return row


def ref(row: int, x: np.ndarray, **changes: Any) -> TensorRef:
    """A tensor with the row of this number."""
    made = TensorDescription("torch.Tensor", f"torch.{x.dtype.name}", x.shape, False)
    return TensorRef(row, made._replace(**changes))


def frame() -> Frame:
    """One record: a tensor, one with a NaN, an empty one, a truth value, one without a row, a numpy array, one whose checksum is
    missing."""
    none, true = np.zeros((0, 3), np.float32), np.array([True])
    rows = np.concatenate([row_of(X), row_of(BAD), row_of(none), row_of(true), row_of(X, 0)])
    refs = [ref(0, X), ref(1, BAD), ref(2, none), ref(3, true), ref(-1, X), ref(0, X, type="numpy.ndarray", requires_grad=None), ref(4, X)]
    return Frame(0, 0, rows, [Entry("Torch.f.0.forward", {"input_args": refs, "output": []})])


def tensors(path: Path) -> list[dict[str, Any]]:
    """The tensor objects of dump.json."""
    found: list[dict[str, Any]] = json.loads((path / "dump.json").read_text())["data"]["Torch.f.0.forward"]["input_args"]
    return found


def test_md5(tmp_path: Path) -> None:
    """CRC-32 as eight digits behind the other keys of the existing tool, beside statistics; of nothing it is 0, unknown is null."""
    DumpSink(tmp_path, level="L1", rank=0, summary_mode="md5").write(frame())
    found = tensors(tmp_path / "step0/rank0")
    assert [t.get("md5") for t in found] == ["91e79017", f"{zlib.crc32(BAD):08x}", "00000000", "a505df1b", None, None, None]
    assert ["md5" in t for t in found] == [True] * 5 + [False, True]
    assert list(found[0]) == ["type", "dtype", "shape", *STATISTICS, "requires_grad", "md5"]
    assert list(found[1])[-2:] == ["md5", "nan_count"]
    assert (found[0]["Max"], found[2]["Max"], found[3]["Max"], found[5]["Max"]) == (5.0, None, True, 5.0)


def test_xor(tmp_path: Path) -> None:
    """The XOR where statistics stand otherwise, and nothing of these but what is not finite; of nothing and unknown it is null."""
    DumpSink(tmp_path, level="L1", rank=0, summary_mode="xor").write(frame())
    found = tensors(tmp_path / "step0/rank0")
    words = ["0x3f60000000800000", "0x7fc000003f800000", None, "0x0000000000000001", None, None, None]
    assert [t.get("md5") for t in found] == words
    assert list(found[0]) == ["type", "dtype", "shape", "md5", "requires_grad"]
    assert list(found[1]) == ["type", "dtype", "shape", "md5", "requires_grad", "nan_count"]
    assert list(found[5]) == ["type", "dtype", "shape", *STATISTICS]


@pytest.mark.parametrize("mode", ["statistics", "digest"])
def test_modes_without_md5(tmp_path: Path, mode: str) -> None:
    """A checksum in a row is written only where the mode asks for it."""
    DumpSink(tmp_path, level="L1", rank=0, summary_mode=mode).write(frame())
    assert not any("md5" in t for t in tensors(tmp_path / "step0/rank0"))


@pytest.mark.parametrize("mode", ["statistics", "md5", "xor", "digest"])
def test_a_killed_process_loses_nothing(tmp_path: Path, mode: str) -> None:
    """The dump made from the frame log is the one that would have been written, header included, and the header names the mode."""
    DumpSink(tmp_path / "a", level="L1", rank=0, summary_mode=mode).write(frame())
    DumpSink(tmp_path / "b", level="L1", rank=0, summary_mode=mode).write_log(frame())
    written, recovered = open_dump(tmp_path / "a").load(0), open_dump(tmp_path / "b").load(0)
    assert recovered.recovered
    assert repr(recovered.entries) == repr(written.entries)
    assert recovered.header == written.header
    assert written.header.get("summary_mode", "statistics") == mode
    md5 = [t.md5 for _, t in written.entries["Torch.f.0.forward"].tensors()]
    assert md5[0] == {"md5": "91e79017", "xor": "0x3f60000000800000"}.get(mode)
