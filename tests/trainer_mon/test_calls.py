"""Calls of `TrainerMon` while a training runs, and its three formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from monitored import build, config, directory_of, loop, monitored, steps_of, tables

from msprobe.pytorch import TrainerMon
from msprobe_engine.core.errors import UsageError

pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))


def backward(net: torch.nn.Module) -> None:
    ids = torch.randint(0, 11, (3, 5))
    torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()


def test_values_before_and_after_the_update(tmp_path: Path) -> None:
    """The two generate calls give the statistics of the step in progress, after the update those of the last step, with the tags of
    TensorBoard and all digits; asking changes no row."""
    net, optimizer = build()
    monitor = TrainerMon(config(tmp_path, targets={}, wg_distribution=True, xy_distribution=True, ops=["norm", "nans"], format="api"))
    monitor.set_monitor(net, optimizer)
    assert monitor.generate_xy_metrics() == ({}, {})
    assert monitor.generate_wgrad_metrics() == ({}, {})
    backward(net)
    assert net.head.weight.grad is not None
    norm = net.head.weight.grad.double().norm()
    actv, actv_grad = monitor.generate_xy_metrics()
    assert actv["0:head.output:0/rank0/actv"]["shape"] == torch.Size([3, 5, 11])
    assert actv["0:head.output:0/rank0/actv"]["dtype"] is torch.float32
    assert "0:head.output:0/rank0/actv_grad" in actv_grad
    optimizer.step()
    for _ in range(2):
        reduced, unreduced = monitor.generate_wgrad_metrics()
        torch.testing.assert_close(reduced["0:head.weight/rank0/post_grad"]["norm"], norm)
        torch.testing.assert_close(unreduced["0:head.weight/rank0/acc_grad"]["norm"], norm)
        assert reduced["0:head.weight/rank0/post_grad"]["nans"] == 0
    assert len(reduced) == len(list(net.parameters()))
    assert monitor.generate_xy_metrics()[0].keys() == actv.keys()
    monitor.stop()


def test_values_of_tensors_that_are_given(tmp_path: Path) -> None:
    """The call form with an argument, as in the code of the existing tool: the statistics of these tensors, by their tags."""
    net, optimizer = build()
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        reduced, unreduced = monitor.generate_wgrad_metrics({"a/b": torch.tensor([3.0, 4.0]), "none": None})
        assert reduced == {"a/b": {"norm": torch.tensor(5.0), "shape": torch.Size([2]), "dtype": torch.float32}}
        assert unreduced == {}


def test_statistics_may_be_changed(tmp_path: Path) -> None:
    """`ops` may be set while the training runs: the next file has these columns, shape and dtype as ever last."""
    net, optimizer = build()
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        assert monitor.ops == ["norm", "shape", "dtype"]
        loop(net, optimizer, 1)
        monitor.ops = ["max", "nans"]
        loop(net, optimizer, 1)
        for wrong in ("norm", [], ["nrom"], None):
            with pytest.raises(UsageError, match="ops: "):
                monitor.ops = wrong  # type: ignore[assignment]
        assert monitor.ops == ["max", "nans", "shape", "dtype"]
    headers = [(directory_of(tmp_path / "out") / f"grad_reduced_{n}-{n}.csv").read_text().splitlines()[0] for n in (0, 1)]
    assert headers == ["vpp_stage,name,step,norm,shape,dtype,phase", "vpp_stage,name,step,max,nans,shape,dtype,phase"]


def test_activations_may_be_switched(tmp_path: Path) -> None:
    """reload_xy switches activations on and off between the steps; gradients go on."""
    net, optimizer = build()
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        for wanted in (False, True, False):
            monitor.reload_xy(wanted)
            loop(net, optimizer, 1)
    assert steps_of(tmp_path / "out", "actv") == [1]
    assert steps_of(tmp_path / "out") == [0, 1, 2]


def test_any_tensor(tmp_path: Path) -> None:
    """adhoc_check notes a tensor on the named ranks, in the step in progress."""
    net, optimizer = build()
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        monitor.adhoc_check(torch.tensor([3.0, 4.0]), "mine", "loss", [0], ["norm"])
        monitor.adhoc_check(torch.tensor([1.0]), "theirs", "loss", [1], ["norm"])
        loop(net, optimizer, 1)
    (row,) = tables(tmp_path / "out")["other"]
    assert (row["name"], row["norm"], row["step"], row["tag"]) == ("mine", "5.0", "0", "loss")


def test_format_api(tmp_path: Path) -> None:
    """format api keeps one frame per step in memory and writes no table."""
    monitor = monitored(config(tmp_path, targets={}, wg_distribution=True, format="api"), 3)
    assert [frame.step for frame in monitor.frames] == [0, 1, 2]
    assert all(any(s.family == "grad_reduced" for s in frame.samples) for frame in monitor.frames)
    assert not list((tmp_path / "out").rglob("*.csv"))


def test_clipped_gradients_keep_their_tag(tmp_path: Path) -> None:
    """A plain loop clips before the update: the reduced gradients are those, under the tag dashboards know, and their phase says it."""
    net, optimizer = build()
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        backward(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        reduced = monitor.generate_wgrad_metrics()[0]
        assert "0:head.weight/rank0/post_grad" in reduced
    assert sum(float(entry["norm"]) ** 2 for entry in reduced.values()) ** 0.5 == pytest.approx(0.01, rel=1e-3)
    assert {row["phase"] for row in tables(tmp_path / "out")["grad_reduced"]} == {"clipped"}


def test_several_optimizers(tmp_path: Path) -> None:
    """A list of optimizers of one model: the last one's update ends the step, and each parameter has its row."""
    net, _ = build()
    matrices = [p for p in net.parameters() if p.dim() > 1]
    optimizers = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW([p for p in net.parameters() if p.dim() == 1])]
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizers)
        for _ in range(2):
            backward(net)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert steps_of(tmp_path / "out") == [0, 1]
    assert len(tables(tmp_path / "out")["grad_reduced"]) == 2 * len(list(net.parameters()))


def test_a_run_goes_on_in_its_directory(tmp_path: Path) -> None:
    """append_output: the directory with a time stamp in the range gets the further steps."""
    monitored(config(tmp_path), 2)
    where = directory_of(tmp_path / "out")
    stamp = where.name.partition("-rank")[0]
    monitored(config(tmp_path, targets={}, wg_distribution=True, append_output=[stamp, stamp]), 2, start_iteration=2)
    assert directory_of(tmp_path / "out") == where
    assert steps_of(tmp_path / "out") == [0, 1, 2, 3]


def test_format_tensorboard(tmp_path: Path) -> None:
    """format tensorboard: TensorBoard's own reader finds the documented tag of every family, with the statistics of the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys: dict[str, Any] = {
        "targets": {},
        "xy_distribution": True,
        "wg_distribution": True,
        "param_distribution": True,
        "mv_distribution": True,
        "mg_direction": True,
        "ur_distribution": True,
        "ops": ["norm", "max"],
        "format": "tensorboard",
    }
    monitored(config(tmp_path, **keys), 3)
    (event,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(event.parent), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    found.Reload()
    tags = {tag for kind in ("scalars", "tensors") for tag in found.Tags()[kind]}
    expected = {
        f"0:{name}/rank0/{word}_{op}"
        for op in ("norm", "max")
        for name, word in [
            ("head.input:0", "actv"), ("head.output:0", "actv_grad"), ("head.weight", "acc_grad"), ("head.weight", "post_grad"),
            ("head.weight", "param_origin"), ("head.weight", "param_updated"), ("head.weight", "exp_avg"), ("head.weight", "exp_avg_sq"),
            ("head.weight", "mg_direction"),
        ]
    }  # fmt: skip
    assert expected <= tags, sorted(expected - tags)
    assert not any("_min" in tag for tag in tags)
    assert {f"0:head.weight/rank0/{word}" for word in ("adam_update", "adam_ratio")} <= set(found.Tags()["images"])
