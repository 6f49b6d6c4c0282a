"""A monitor that is switched on and off through its file while the training runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
from existing_training import Net
from monitored import build, config, loop, monitored, steps_of, tables

from msprobe.pytorch import TorchProbe, TrainerMon

pytestmark = pytest.mark.framework
ON: dict[str, Any] = {"targets": {}, "wg_distribution": True, "dynamic_on": True}


def edit(path: Path, **keys: Any) -> None:
    """Change the file as an operator does: a new one in place of the old."""
    before = path.stat().st_mtime_ns
    aside = path.with_name("aside.json")
    aside.write_text(json.dumps(keys))
    os.utime(aside, ns=(before + 10**9, before + 10**9))
    os.replace(aside, path)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


def test_as_verified_of_the_existing_tool(tmp_path: Path) -> None:
    """Edits in steps 2 and 7 with collect_times 2 give the steps 3, 4 and 8, 9, in one directory, and the file is flipped back."""
    path = config(tmp_path, targets={}, wg_distribution=True, dynamic_on=False)

    def before(step: int) -> None:
        if step in (2, 7):
            edit(path, **ON, collect_times=2)

    monitored(path, 12, before=before)
    assert steps_of(tmp_path / "out") == [3, 4, 8, 9]
    assert json.loads(path.read_text()) == {**ON, "collect_times": 2, "dynamic_on": False}


def test_on_from_the_beginning_begins_with_the_second_step(tmp_path: Path) -> None:
    """As in the existing tool nothing is attached before the first step boundary."""
    monitored(config(tmp_path, **ON, collect_times=2), 5)
    assert steps_of(tmp_path / "out") == [1, 2]


def test_other_families_by_an_edit(tmp_path: Path) -> None:
    """An edit changes families, targets and statistics; switching off by hand stops."""
    path = config(tmp_path, **ON)

    def before(step: int) -> None:
        if step == 2:
            edit(path, targets={"layers.0": {}}, xy_distribution=True, mv_distribution=True, dynamic_on=True, ops=["max"])
        if step == 4:
            edit(path, **{**ON, "dynamic_on": False})

    monitored(path, 7, before=before)
    out = tmp_path / "out"
    assert [steps_of(out, f) for f in ("grad_reduced", "actv", "exp_avg")] == [[1, 2], [3, 4], [3, 4]]
    assert {row["name"] for row in tables(out)["actv"]} == {"layers.0.input", "layers.0.output"}
    assert {row["name"].startswith("layers.0.") for row in tables(out)["exp_avg"]} == {True}
    assert "max" in tables(out)["actv"][0]
    assert "norm" not in tables(out)["actv"][0]


def test_a_broken_file_stops_nothing(tmp_path: Path) -> None:
    """A file that cannot be read, or holds mistakes, leaves what runs as it is, with one message each."""

    def job() -> None:
        path = config(tmp_path, **ON)

        def before(step: int) -> None:
            if step == 2:
                edit(path, targets={}, wg_distrbution=True, dynamic_on=True)
            if step == 3:
                path.write_text("{")

        monitored(path, 6, before=before)

    (done,) = pr.run(job, directory=tmp_path)
    assert steps_of(tmp_path / "out") == [1, 2, 3, 4, 5]
    assert len(done.lines("those before stay")) == 2
    assert done.lines("did you mean 'wg_distribution'?")


def test_all_ranks_begin_at_one_step(tmp_path: Path) -> None:
    """Two ranks; rank 0 announces what it has read, and both write exactly the same steps."""

    def job() -> None:
        path = tmp_path / "monitor_config.json"
        net, optimizer = build()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        monitor = TrainerMon(path)
        monitor.set_monitor(ddp, optimizer)

        def before(step: int) -> None:
            if step == 2 and torch.distributed.get_rank() == 0:
                edit(path, **ON, collect_times=3)
            if step == 3:
                time.sleep(0.5)  # news has two steps to arrive, and steps of this net take a millisecond

        loop(ddp, optimizer, 10, before=before)
        monitor.stop()

    config(tmp_path, targets={}, wg_distribution=True, dynamic_on=False)
    pr.run(job, ranks=2, directory=tmp_path)
    assert [steps_of(tmp_path / "out", rank=rank) for rank in (0, 1)] == [[4, 5, 6]] * 2
    assert json.loads((tmp_path / "monitor_config.json").read_text())["dynamic_on"] is False


@pytest.mark.parametrize("other", [{}, {"xy_distribution": True, "mv_distribution": True}])
def test_the_training_is_the_same(tmp_path: Path, other: dict[str, Any]) -> None:
    """Switching while the training runs changes no bit of it."""

    def job(watched: bool) -> Any:
        net, optimizer = build()
        path = config(tmp_path, **ON)
        monitor = TrainerMon(path) if watched else None
        if monitor is not None:
            monitor.set_monitor(net, optimizer)

        def before(step: int) -> None:
            if step in (2, 4) and watched:
                edit(path, **{**ON, **other, "dynamic_on": step == 2})

        return pr.state(net, loop(net, optimizer, 6, before=before))

    plain, watched = (pr.run(job, on, directory=tmp_path)[0] for on in (False, True))
    assert watched.value == plain.value


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """`TorchProbe.from_config` with monitor.hot follows probe.yaml: here it begins at once, and stops and changes by edit."""
    path = tmp_path / "probe.yaml"
    out = tmp_path / "probe_out"
    text = f"output_dir: {out}\nsinks: {{csv: {{path: {out}}}}}\nmonitor:\n  hot: true\n  enabled: true\n"
    path.write_text(text)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    probe = TorchProbe.from_config(path)
    probe.attach(net, optimizer)

    def before(step: int) -> None:
        if step:
            probe.end_step()
        if step in (2, 4):
            path.write_text(text.replace("enabled: true", f"enabled: {str(step == 4).lower()}") + "  parameters: true\n")
            os.utime(path, ns=(10**18 + step * 10**9,) * 2)
        probe.begin_step(step)

    loop(net, optimizer, 8, before=before)
    probe.close()
    assert steps_of(out) == [0, 1, 2, 5, 6, 7]
    assert steps_of(out, "param_origin") == [5, 6, 7]
