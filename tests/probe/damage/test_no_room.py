"""Full disks, taken ports and directories that cannot be written: the training ends with the same bits and is told once."""

from __future__ import annotations

import re
import shutil
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    DumpSettings,
    IncidentSettings,
    JsonLinesSettings,
    MonitorSettings,
    ProbeSettings,
    PrometheusSettings,
    RuleSettings,
    SinkSettings,
    SqliteSettings,
    TensorBoardSettings,
)
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 12


def with_debugger(config: Path, in_the_way: Path | None = None) -> dict[str, Any]:
    debugger = PrecisionDebugger(str(config))
    if in_the_way is not None:
        in_the_way.write_text("not a directory")
    job = pr.gpt.Job(pr.TINY)
    losses = []
    for _ in range(STEPS):
        debugger.start(job.model)
        losses.append(job.step())
        debugger.stop()
        debugger.step()
    debugger.writer.close()
    return {**pr.state(job.model, losses), "lost": dict(debugger.writer.lost)}


def same_training(done: dict[str, Any], tmp_path: Path) -> None:
    assert pr.is_same_training(done, pr.run(pr.train_alone, STEPS, directory=tmp_path)[0].value)


def scrape(probe: TorchProbe) -> dict[str, Any]:
    (sink,) = (s for s in probe.session.writer.sinks if s.name == "prometheus")
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:  # type: ignore[attr-defined]
        return {"metrics": answer.read().decode()}


def test_debugger_on_a_full_disk(tmp_path: Path, small: Path) -> None:
    """Steps that fit are whole, the training ends with the same bits, one line says what is wrong and one what was lost."""
    config = pr.write_config(tmp_path, "mix", dump_path=str(small / "dump"))
    done = pr.run(with_debugger, config, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    lost = done.value["lost"]["dump"]
    assert 0 < lost < STEPS
    assert len(done.lines("No space left")) == 1
    assert done.lines("lost while writing", f"dump {lost}")
    dump = open_dump(small / "dump")
    whole = [s for s in dump.steps if dump.load(s).complete]
    # A step whose raw log did fit is read from that, though its files were counted as lost.
    assert whole == list(range(len(whole)))
    assert len(whole) >= STEPS - lost


def test_readers_of_a_full_disk_say_so(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was killed: steps that the disk had no room for are said to be that, whatever is read."""
    config = pr.write_config(tmp_path, "mix", dump_path=str(small / "dump"))
    pr.run(with_debugger, config, directory=tmp_path)
    for words in (["nan_analyze", "-i", str(small / "dump")], ["diagnose", str(small / "dump"), "-o", str(tmp_path / "d")]):
        assert main(words) == 3
        said = "".join(capsys.readouterr())
        assert "killed" not in said
        assert "the disk was full" in said or "its mark is empty, as one is that was made on a full disk" in said


def test_probe_on_a_full_disk(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sink says once that it cannot write, and the Prometheus endpoint counts what each lost; so do the commands, with the cause."""
    setup = ProbeSettings(
        output_dir=str(small),
        monitor=MonitorSettings(parameters=True, optimizer_states=True, activations=True),
        dump=DumpSettings(level="mix"),
        incident=IncidentSettings(enabled=False),
        sinks=SinkSettings(tensorboard=TensorBoardSettings(enabled=True), prometheus=PrometheusSettings(enabled=True, port=0)),
    )
    done = pr.run(pr.train_with_probe, setup, STEPS, scrape, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    lost = done.value["lost"]
    assert set(lost) == {"csv", "tensorboard", "dump"}
    for name in lost:
        assert len(done.lines(f"sink {name} lost data", "training goes on")) == 1
    exported = dict(re.findall(r'msprobe_write_errors_total\{[^}]*sink="(\w+)"[^}]*\} (\d+)', done.value["metrics"]))
    assert {k: int(v) for k, v in exported.items()} == lost
    for words in (["nan_analyze", "-i", str(small)], ["diagnose", str(small), "-o", str(tmp_path / "d")]):
        assert main(words) == 3
        said = "".join(capsys.readouterr())
        assert "killed" not in said
        for name, count in lost.items() if words[0] == "nan_analyze" else ():  # the page of the other names all
            assert re.search(rf"sink {name} of rank 0 has lost {count} steps, .*: the disk was full", said), said


def test_port_taken(tmp_path: Path) -> None:
    """A taken port leaves the training and the other sinks alone; the message names the port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        setup = ProbeSettings(
            output_dir=str(tmp_path),
            monitor=MonitorSettings(),
            sinks=SinkSettings(prometheus=PrometheusSettings(enabled=True, port=port)),
        )
        done = pr.run(pr.train_with_probe, setup, STEPS, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    (line,) = done.lines("prometheus")
    assert str(port) in line
    assert "sinks.prometheus.port" in line
    assert list((tmp_path / "monitor").glob("*/grad_reduced_*.csv"))


def test_output_directory_cannot_be_made(tmp_path: Path) -> None:
    """An output directory that cannot be made is said once per sink, and the training ends with the same bits."""
    (tmp_path / "file").write_text("not a directory")
    setup = ProbeSettings(
        output_dir=str(tmp_path / "file" / "out"),
        monitor=MonitorSettings(),
        dump=DumpSettings(level="L0"),
        sinks=SinkSettings(csv=CsvSettings(), tensorboard=TensorBoardSettings(enabled=True)),
    )
    done = pr.run(pr.train_with_probe, setup, STEPS, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    for name in ("csv sink", "tensorboard sink", "sink dump"):
        assert len(done.lines(name, "training goes on")) == 1, done.log


def test_debugger_directory_cannot_be_made(tmp_path: Path) -> None:
    """The same for PrecisionDebugger, when the place is lost after its construction: one message, same bits, every frame counted as
    lost."""
    config = pr.write_config(tmp_path, "L0", dump_path=str(tmp_path / "file/dump"))
    done = pr.run(with_debugger, config, tmp_path / "file", directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    assert len(done.lines("a regular file is where a directory belongs")) == 1
    assert done.value["lost"] == {"dump": STEPS}


EVERY_SINK = SinkSettings(
    csv=CsvSettings(),
    tensorboard=TensorBoardSettings(enabled=True),
    jsonl=JsonLinesSettings(enabled=True),
    sqlite=SqliteSettings(enabled=True),
    anomalies=True,
)
ALWAYS = RuleSettings(rule="condition", severity="critical", args={"name": "always", "when": "loss > 0", "recovery": 1})


def everything(root: Path) -> ProbeSettings:
    """All that writes files: every sink, a dump, and an incident in the first step."""
    return ProbeSettings(
        output_dir=str(root), monitor=MonitorSettings(), rules=(ALWAYS,), dump=DumpSettings(level="L0"), sinks=EVERY_SINK,
        incident=IncidentSettings(capture_level="", cooldown_steps=0),
    )  # fmt: skip


def train_without_output(root: Path, steps: int) -> dict[str, Any]:
    """The output directory goes in the midst of the training."""
    probe = TorchProbe(everything(root))
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    losses = []
    for step in range(steps):
        if step == steps // 2:
            probe.session.writer.flush()
            shutil.rmtree(root.rename(root.with_name("removed")))  # the incident may still be written
        probe.begin_step(step)
        losses.append(job.step())
        probe.end_step({"loss": losses[-1]})
    probe.close()
    return {**pr.state(job.model, losses), "lost": dict(probe.session.writer.lost)}


PARTS = ("csv", "tensorboard", "jsonl", "sqlite", "anomal", "dump", "incident")
"""Words that begin the messages of what writes files."""


def said_once(log: str, words: str) -> None:
    """Each part says at most once that it cannot write, with `words`; nothing has a traceback."""
    errors = [line for line in log.splitlines() if "[ERROR]" in line and "ALERT" not in line and "INCIDENT" not in line]
    assert errors, log
    assert "Traceback" not in log
    for part in PARTS:
        mine = [line for line in errors if part in line.partition("] ")[2][:40]]
        assert len(mine) <= 2, mine  # that it cannot, and at the end how much was lost
    assert all(re.search(words, line) or "lost while writing" in line for line in errors), errors


def test_a_read_only_file_system(tmp_path: Path, tmpfs: Callable[[str], Path]) -> None:
    place = tmpfs("size=1m,ro")
    done = pr.run(pr.train_with_probe, everything(place / "out"), STEPS, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    said_once(done.log, r"/out\b.*the file system is read-only: (name another place|set (dump_path|output_dir) to another one)")
    assert list(place.iterdir()) == []


def test_the_output_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("theirs")
    done = pr.run(pr.train_with_probe, everything(tmp_path / "out"), STEPS, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    said_once(done.log, f"{tmp_path}/out.*a (regular )?file is where a directory (belongs|is needed): move it away")
    assert (tmp_path / "out").read_text() == "theirs"


def test_the_output_directory_is_removed_during_the_run(tmp_path: Path) -> None:
    """What cannot be written is counted and said, and what was there before; what makes its directories anew in every step goes on."""
    done = pr.run(train_without_output, tmp_path / "out", STEPS, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    said_once(done.log, str(tmp_path / "out"))
    assert done.value["lost"]["csv"] == STEPS
