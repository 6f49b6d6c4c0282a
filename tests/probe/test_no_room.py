"""Full disks, taken ports and directories that cannot be written: the training ends with the same bits and is told once."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest

from msprobe_engine.dump.reader import open_dump
from msprobe_engine.settings.schema import (
    CsvSettings,
    DumpSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    PrometheusSettings,
    SinkSettings,
    TensorBoardSettings,
)
from msprobe_integrations.torch.debugger import PrecisionDebugger
from msprobe_integrations.torch.probe import TorchProbe

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


def plain() -> dict[str, Any]:
    job = pr.gpt.Job(pr.TINY)
    return pr.state(job.model, [job.step() for _ in range(STEPS)])


def same_training(done: dict[str, Any], tmp_path: Path) -> None:
    reference = pr.run(plain, directory=tmp_path)[0].value
    assert {k: done[k] for k in reference} == reference


def with_probe(setup: ProbeSettings, scrape: bool) -> dict[str, Any]:
    probe = TorchProbe(setup)
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    losses = []
    for step in range(STEPS):
        probe.begin_step(step)
        losses.append(job.step())
        probe.end_step({"loss": losses[-1]})
    probe.session.writer.flush()
    text = ""
    if scrape:
        (sink,) = (s for s in probe.session.writer.sinks if s.name == "prometheus")
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:  # type: ignore[attr-defined]
            text = answer.read().decode()
    probe.close()
    return {**pr.state(job.model, losses), "lost": dict(probe.session.writer.lost), "metrics": text}


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


def test_probe_on_a_full_disk(tmp_path: Path, small: Path) -> None:
    """Every sink says once that it cannot write, and the Prometheus endpoint counts what each lost."""
    setup = ProbeSettings(
        output_dir=str(small),
        monitor=MonitorSettings(parameters=True, optimizer_states=True, activations=True),
        dump=DumpSettings(level="mix"),
        incident=IncidentSettings(enabled=False),
        sinks=SinkSettings(tensorboard=TensorBoardSettings(enabled=True), prometheus=PrometheusSettings(enabled=True, port=0)),
    )
    done = pr.run(with_probe, setup, True, directory=tmp_path)[0]
    same_training(done.value, tmp_path)
    lost = done.value["lost"]
    assert set(lost) == {"csv", "tensorboard", "dump"}
    for name in lost:
        assert len(done.lines(f"sink {name} lost data", "training goes on")) == 1
    exported = dict(re.findall(r'msprobe_write_errors_total\{[^}]*sink="(\w+)"[^}]*\} (\d+)', done.value["metrics"]))
    assert {k: int(v) for k, v in exported.items()} == lost


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
        done = pr.run(with_probe, setup, False, directory=tmp_path)[0]
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
    done = pr.run(with_probe, setup, False, directory=tmp_path)[0]
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
