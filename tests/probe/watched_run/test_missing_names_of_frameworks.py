"""Names of a framework that have gone: said once, shown in run.json and Prometheus, never read as a default. And rules that have failed."""

from __future__ import annotations

import json
import logging
import types
from pathlib import Path

import pytest
import torch

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings, PrometheusSettings, RuleSettings, SinkSettings
from msprobe_engine.probe.rules.builtin.progress.no_progress import NoProgressRule
from msprobe_integrations import requirements
from msprobe_integrations.requirements import MissingNameError, Requirement, check, need, optional
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.parameters import placements


@pytest.fixture(autouse=True)
def _nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "MISSING", {})


class Thing:
    off = False
    none = None


@pytest.mark.parametrize(("names", "value"), [(("off",), False), (("none", "off"), None), (("gone", "off"), False)])
def test_what_is_there_is_what_it_is(names: tuple[str, ...], value: object) -> None:
    """The first name that is there counts, also where it holds False or None."""
    assert need(Thing(), *names, for_="a part") is value
    assert requirements.MISSING == {}


def test_what_has_gone_is_no_default(caplog: pytest.LogCaptureFixture) -> None:
    """It is raised each time, and said once, with the part that is off."""
    with caplog.at_level(logging.WARNING, "msprobe"):
        for _ in range(3):
            with pytest.raises(MissingNameError, match=r"Thing\.gone or \.lost .* this is off: a part"):
                need(Thing(), "gone", "lost", for_="a part")
    assert len([record for record in caplog.records if "Thing.gone" in record.getMessage()]) == 1
    assert requirements.MISSING == {"Thing.gone or .lost": "a part"}


def test_modules_are_named_as_they_are_imported() -> None:
    """What a message names can be looked for in the framework."""
    with pytest.raises(MissingNameError, match=r"a\.module\.gone"):
        need(types.ModuleType("a.module"), "gone", for_="a part")


def test_optional_says_nothing() -> None:
    """What may be missing is no finding."""
    assert optional(Thing(), "gone", 3, because="only some have it") == 3
    assert requirements.MISSING == {}


def test_a_mark_without_its_dimension_is_no_mark(caplog: pytest.LogCaptureFixture) -> None:
    """Tensor parallelism that no longer says which dimension it cuts: dump.json has no dimension that it made up."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 1  # type: ignore[attr-defined]
    info = types.SimpleNamespace(module=layer, path="fc")
    right = [{"partition_dim": 1, "partition_stride": 1, "names": ["fc.weight"]}]
    assert placements.parameters([info]) == right  # type: ignore[list-item]
    del layer.weight.partition_dim  # type: ignore[attr-defined]
    assert placements.parameters([info]) == []  # type: ignore[list-item]
    assert "partition_dim" in caplog.text


def test_the_run_shows_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """run.json has what `need` and `check` did not find under ``missing``, Prometheus as ``msprobe_integration_missing``, page and text of
    the run as a sentence."""
    prometheus = PrometheusSettings(enabled=True, mode="textfile", textfile_dir=str(tmp_path / "prom"))
    probe = TorchProbe(
        ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings(gradients=True), sinks=SinkSettings(prometheus=prometheus))
    )
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe.attach(model, optimizer)
    with pytest.raises(MissingNameError):
        need(Thing(), "gone", for_="a part")
    assert check("Fake", "no-such-package", (Requirement("thing.lost", "another part"),), {"thing": Thing()})
    probe.begin_step(0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    probe.end_step()
    probe.drain()
    for sink in probe.session.writer.sinks:
        sink.flush()
    shown = next((tmp_path / "prom").glob("*.prom")).read_text(encoding="utf-8")
    probe.close()
    missing = {"Thing.gone": "a part", "Fake: thing.lost": "another part"}
    for name, part in missing.items():
        assert f'msprobe_integration_missing{{name="{name}",part="{part}",rank="0"}} 1.0' in shown
    assert json.loads(next(tmp_path.rglob("run.json")).read_text(encoding="utf-8"))["missing"] == missing
    for command in (["monitor", "analyze"], ["trends", "-o", str(tmp_path / "page.html")]):
        assert main([*command, str(tmp_path)]) == 0
        said = capsys.readouterr().out
        for name, part in missing.items():
            assert f"{name} was not there on rank 0 (another version of the framework), so this was off: {part}" in said


def test_a_rule_that_failed_is_no_all_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Training goes on without it; the files of the run, and who reads them, say that it has not judged."""

    def fail(*_: object) -> list[Alert]:
        raise KeyError("a secret of the training")

    monkeypatch.setattr(NoProgressRule, "check", fail)
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings(), rules=[RuleSettings(rule="no_progress")]))
    for step in range(3):
        probe.begin_step(step)
        probe.end_step({"loss": 3.0 - step})
    probe.close()
    assert "secret" not in next(tmp_path.rglob("run.json")).read_text()
    assert main(["diagnose", str(tmp_path)]) == 3
    assert "rule no_progress has failed on rank 0 (KeyError)" in capsys.readouterr().out
