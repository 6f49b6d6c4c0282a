"""docs/guide/monitor.md: its settings, loops and commands run as they stand, and do what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
import torch.distributed.run
from page_blocks import ROOT, Tokens, batches, block, blocks, commands, loss_of, run

from msprobe.pytorch import TorchProbe
from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.formats.monitor.reader import open_run

PAGE = "docs/guide/monitor.md"
TORCH, TRAINER = "## Two minutes: TorchProbe", "## Two minutes: TrainerMon"
pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text(block(PAGE, "yaml", TORCH))
    Path("monitor_config.json").write_text(block(PAGE, "json", TRAINER))


def test_torch_probe(capsys: pytest.CaptureFixture[str]) -> None:
    """The training of the page raises the alerts that its answer shows; the three commands work on it; TensorBoard has its directory."""
    run(block(PAGE, "python", TORCH), PAGE, {})
    show, analyze, report = commands(block(PAGE, "bash", TORCH))
    assert main(show) == 0
    listed = capsys.readouterr().out
    assert "monitor: 1 rank, steps 0 to 59: grad_reduced, param_origin, param_updated, ratio, update (" in listed
    assert "TensorBoard tensorboard: tensorboard --logdir runs/a/tensorboard" in listed
    assert main(analyze) == 1
    assert capsys.readouterr().out.startswith(block(PAGE, "text", TORCH))
    assert main(report) == 1  # the page shows alerts
    assert Path("runs/a/analysis/report-1/report.html").is_file()
    assert {alert["rule"] for alert in open_run("runs/a").alerts(0)} >= {"loss_not_finite", "nan_inf"}


def loop(model: Any, optimizer: Any) -> None:
    """A training with two micro batches per update."""
    for first, second in zip(*[iter(batches(6))] * 2):
        for batch in (first, second):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_trainer_mon() -> None:
    """Three updates are three steps, in one file per family; everything is off afterwards."""
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    run(block(PAGE, "python", TRAINER), PAGE, {"model": model, "optimizer": optimizer, "train": loop})
    found = open_run("monitor_output")
    assert set(found.families(0)) == {"exp_avg", "exp_avg_sq", "grad_reduced", "grad_unreduced"}
    assert set(found.table(0, "grad_reduced").steps.tolist()) == {0, 1, 2}
    assert [path.name for path in Path("monitor_output").glob("*/grad_reduced*")] == ["grad_reduced_0-99.csv"]
    assert not optimizer._optimizer_step_pre_hooks


class Layers(torch.nn.Module):
    """A model that keeps its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(under: str) -> None:
    """One rank of a data-parallel training with the lines of the page."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    names = {"model": Tokens(), "probe": TorchProbe.from_config("probe.yaml"), "torch": torch}
    names |= {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard}
    if under == "**FSDP2**":
        names["model"] = Layers()
    run(block(PAGE, "python", under), PAGE, names)
    probe, model, optimizer = (names[key] for key in ("probe", "model", "optimizer"))
    for step, batch in enumerate(batches(3)):
        probe.begin_step(step)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


@pytest.mark.parametrize("under", ["**DDP.**", "**FSDP2**"])
def test_data_parallel(tmp_path: Path, under: str) -> None:
    """Every rank writes the reduced gradient of every parameter, whole, under its plain name."""
    pr.run(sharded, under, ranks=2, directory=tmp_path)
    found = open_run("runs/a")
    assert found.ranks == [0, 1]
    norms = [found.series(rank, "grad_reduced", "norm") for rank in found.ranks]
    assert {key.name.rpartition(".")[2] for key in norms[0]} == {"weight", "bias"}
    assert {key.name.rpartition(".")[0] for key in norms[0]} == ({"0", "2"} if under == "**DDP.**" else {"layers.0", "layers.1"})
    for key, series in norms[0].items():
        assert series.steps.tolist() == [0, 1, 2]
        assert series.values.tolist() == norms[1][key].values.tolist()


def prepared() -> None:
    import accelerate

    model = Tokens()
    names: dict[str, Any] = {"accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), "model": model}
    names |= {"optimizer": torch.optim.AdamW(model.parameters()), "data": batches(6), "loss_of": loss_of}
    run("from msprobe.pytorch import TrainerMon\n" + block(PAGE, "python", "**Accelerate.**"), PAGE, names)


def test_accelerate(tmp_path: Path) -> None:
    """Six micro batches of two are three steps."""
    pytest.importorskip("accelerate")
    pr.run(prepared, directory=tmp_path)
    assert set(open_run("monitor_output").table(0, "grad_reduced").steps.tolist()) == {0, 1, 2}


def test_every_switch_is_a_key() -> None:
    """The table of switches names keys of the monitor section, and the statistics are those that `ops` takes."""
    text = (ROOT / PAGE).read_text()
    table = text[text.index("## What to watch") : text.index("## When\n")]
    from dataclasses import fields

    from msprobe_engine.core.settings.schema import MonitorSettings
    from msprobe_engine.core.statistics.columns import OPS

    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in row.replace("(on unless switched off)", "").replace("`", "").replace(",", " ").split()}
    assert named <= {f.name for f in fields(MonitorSettings)}
    assert len(named) >= 11
    listed = table[table.index("`ops` chooses") :].split("\n")[0].split("`")[3::2]
    assert set(listed) == set(OPS) - {"shape", "dtype"} | {"digest"}


def test_settings_of_the_page_are_right() -> None:
    """Both settings files load without a word."""
    assert [len(blocks(PAGE, language)) for language in ("yaml", "json")] == [1, 1]
    for name in ("probe.yaml", "monitor_config.json"):
        assert load_settings(name).monitor is not None
