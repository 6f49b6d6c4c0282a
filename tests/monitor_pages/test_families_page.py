"""docs/guide/monitor-families.md names families that exist; the settings of docs/guide/replicas.md find what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from page_blocks import ROOT, Tokens, batches, block, blocks, loss_of
from torch.nn.parallel import DistributedDataParallel

from msprobe.pytorch import TorchProbe
from msprobe_engine.formats.monitor.reader import open_run

PAGE = "docs/guide/monitor-families.md"


def train() -> None:
    """One rank of three; in step 3 a bit of rank 2 flips."""
    model = DistributedDataParallel(Tokens())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = TorchProbe.from_config("probe.yaml")
    probe.attach(model, optimizer)
    for step, batch in enumerate(batches(9)):
        probe.begin_step(step)
        if step == 3 and dist.get_rank() == 2:
            with torch.no_grad():
                model.module[2].weight[1, 1] *= 1.0 + 2**-20
        loss = loss_of(model, batch + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


@pytest.mark.framework
def test_replica_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flipped bit is named in the words of the page, and nothing else is; here every second step is due."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    (text,) = blocks("docs/guide/replicas.md", "yaml")
    Path("probe.yaml").write_text("output_dir: runs/a\n" + text.replace("interval: 100 ", "interval: 2 "))
    pr.run(train, ranks=3, directory=tmp_path)
    found = open_run("runs/a")
    alerts = [alert for rank in found.ranks for alert in found.alerts(rank) if alert["rule"] == "replica_mismatch"]
    (shown,) = [line for line in block("docs/guide/replicas.md", "", "## What an alert means").splitlines() if "(dp)" in line]
    (message,) = (alert["message"] for alert in alerts)
    for a, b in (("a.weight", "2.weight"), ("step 400", "step 4"), ("rank 5 of 0-7", "rank 2 of 0-2")):
        shown = shown.replace(a, b)
    assert message.startswith(shown)


def test_families_of_the_table() -> None:
    """The table of the parameter side names switches of the settings, and families that have a row on the page of the files."""
    from dataclasses import fields

    from msprobe_engine.core.settings.schema import MonitorSettings

    text = (ROOT / PAGE).read_text()
    table = text[text.index("| setting | family") : text.index("* A parameter without a gradient")]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    files = (ROOT / "docs/guide/monitor-files.md").read_text()
    assert {row[0].strip().strip("`") for row in rows} <= {f.name for f in fields(MonitorSettings)}
    for _, families in rows:
        name = re.findall(r"`(\w+)`", families)[0]
        assert f"`{name}`" in files
