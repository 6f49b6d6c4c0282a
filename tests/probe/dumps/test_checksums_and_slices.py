"""summary_mode md5 and xor, and slice, in runs of PrecisionDebugger and the probe; against 26.2.0 where that is installed."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import existing_environment
import existing_run
import probe_ranks as pr
import pytest
import torch

from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings, SliceSettings
from msprobe_engine.core.statistics import rows
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe

sys.path.insert(0, str(Path(__file__).parents[2] / "dump"))
import existing_tool

pytestmark = pytest.mark.framework
SLICES = [{"dim": 1, "size": 8, "begin": -3}, {"dim": 0, "begin": 0, "end": 1}]


def crc(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()):08x}"


def in_place(config: Path) -> list[str]:
    """A large tensor that is changed in place again and again; returns the CRC before each call, computed here."""
    debugger = PrecisionDebugger(str(config))
    x = torch.arange(500_000.0)
    known = []
    debugger.start()
    for _ in range(20):
        debugger.stop()
        known.append(crc(x))
        debugger.start()
        x.add_(1.0)
    debugger.stop()
    debugger.step()
    debugger.writer.close()
    return known


def test_in_place_changes(tmp_path: Path) -> None:
    """The checksum of an input is that of its value when the call began, however it is changed afterwards (26.2.0 computes it in a
    thread while the training goes on); async_dump, which 26.2.0 refuses together with md5, changes nothing."""
    config = pr.write_config(tmp_path, "L1", summary_mode="md5", async_dump=True)
    known = pr.run(in_place, config, directory=tmp_path)[0].value
    entries = open_dump(tmp_path / "dump").load(0).entries
    found = [entries[f"Tensor.add_.{i}.forward"].sections["input_args"][0].md5 for i in range(20)]
    assert found == known
    assert entries["Tensor.add_.0.forward"].sections["output"][0].md5 == known[1]


def save_all(config: Path) -> None:
    """One step of the tiny GPT with tensor files."""
    debugger = PrecisionDebugger(str(config))
    job = pr.gpt.Job(pr.TINY)
    debugger.start(job.model)
    job.forward().backward()
    debugger.stop()
    debugger.step()
    debugger.pipeline.close()


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_files_are_what_checksums_say(tmp_path: Path, level: str) -> None:
    """Task tensor with slice and md5: every file holds the part that was cut, with the CRC-32 and the shape of its record."""
    pr.run(save_all, pr.write_config(tmp_path, level, task="tensor", summary_mode="md5", slice=SLICES), directory=tmp_path)
    dump, seen, cut = open_dump(tmp_path / "dump").load(0), 0, 0
    for entry in dump.entries.values():
        for _, tensor in entry.tensors():
            path = None if tensor.data_name is None else dump.files.source(tensor.data_name).path
            if path is None:
                continue
            saved = torch.load(path, weights_only=True)
            assert (crc(saved), tuple(saved.shape)) == (tensor.md5, tensor.description.shape)
            seen += 1
            cut += "full_shape" in dict(tensor.description.extra)
    assert min(seen, cut) > 50


def probed(output: str, mode: str) -> list[tuple[int, int, set[tuple[int, ...]]]]:
    """Steps of the probe with a dump of step 1: per step, rows with a checksum, all rows, and shapes of the monitor's samples."""
    kept = MemorySink()
    probe = TorchProbe(
        ProbeSettings(
            output_dir=output,
            strict=True,
            monitor=MonitorSettings(),
            dump=DumpSettings(level="mix", step=(1,), summary_mode=mode, slice=(SliceSettings(dim=0, end=1),)),
            incident=IncidentSettings(enabled=False),
        ),
        extra_sinks=[kept],
    )
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    for step in range(3):
        probe.begin_step(step)
        job.forward().backward()
        job.update()
        probe.end_step()
    probe.close()
    flag = rows.HAS_CRC | rows.HAS_XOR | rows.HAS_DIGEST
    return [
        (int((rows.as_int64(f.rows)[:, rows.FLAGS] & flag != 0).sum()), len(f.rows), {s.ref.description.shape for s in f.samples})
        for f in kept.frames
    ]


@pytest.mark.parametrize("mode", ["md5", "xor", "digest"])
def test_the_dump_of_the_probe(tmp_path: Path, mode: str) -> None:
    """Checksums are taken in the steps that are dumped and in no others; cuts are of the dump, the monitor's tensors stay whole."""
    found = pr.run(probed, str(tmp_path), mode, directory=tmp_path)[0].value
    assert [step[0] for step in found[::2]] == [0, 0]
    assert found[1][0] > 100
    assert found[0][2] == found[1][2]
    entry = open_dump(tmp_path / "dump").load(1).entries["Module.norm.LayerNorm.forward.0"]
    (output,) = entry.sections["output"]
    assert output.description.shape == (1, 8, 16)
    assert dict(output.description.extra)["full_shape"] == [2, 8, 16]
    assert bool(output.md5) == (mode != "digest")
    assert bool(output.digest) == (mode == "digest")


def checksums(dump: Path) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Place of every tensor to its checksum and shape, without outputs of API backward entries: 26.2.0 writes the input gradients of
    the last autograd node there, see docs/reference/compatibility.md."""
    return {
        f"{entry.name}.{place}": (t.md5, t.description.shape)
        for entry in open_dump(dump).load(0).entries.values()
        for place, t in entry.tensors()
        if not (entry.name.endswith(".backward") and place.startswith("output"))
    }


@pytest.mark.existing_tool
@pytest.mark.parametrize(
    ("level", "mode", "section"),
    [("L0", "md5", {}), ("L1", "md5", {}), ("mix", "md5", {}), ("L0", "xor", {"slice": SLICES}), ("mix", "md5", {"slice": SLICES})],
)
def test_checksums_of_26_2_0(tmp_path: Path, level: str, mode: str, section: dict[str, Any]) -> None:
    """Every checksum and shape that 26.2.0 writes for a training is ours; but for the XOR of 0-dim tensors, where it writes the value."""
    existing = existing_environment.existing_tool("26.2.0")
    keys = json.dumps({"summary_mode": mode, **section})
    ours = existing_run.run(sys.executable, level, tmp_path / "ours", keys)
    theirs = existing_run.run(existing.python, level, tmp_path / "theirs", keys)
    mine, other = checksums(ours), checksums(theirs)
    common = mine.keys() & other.keys()
    different = {p: (mine[p], other[p]) for p in common if mine[p] != other[p] and (mode == "md5" or other[p][1] != ())}
    print(len(mine), len(other), len(common))
    assert different == {}
    assert len(common) > 60
    assert sum(checksum is not None for checksum, _ in (mine[p] for p in common)) == len(common)
    if (level, section) == ("mix", {}):
        files = [open_dump(root).path(0) / "dump.json" for root in (ours, theirs)]
        for target, golden, name in ((*files, "ours_theirs"), (*reversed(files), "theirs_ours")):
            sheet = existing_tool.compare("26.2.0", existing.directory, target, golden, tmp_path / name)
            equal = [r for r in sheet if r["Result"] == "pass" and r["NPU MD5"] == r["BENCH MD5"] != ""]
            assert len(equal) > 200
