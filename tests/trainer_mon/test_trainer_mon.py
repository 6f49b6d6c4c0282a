"""`TrainerMon`: steps, arguments, calls, formats, and that nothing stays behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import probe_ranks as pr
import pytest
import torch
from existing_training import Net
from monitored import EVERYTHING, build, config, directory_of, loop, monitored, steps_of, tables
from torch import nn

from msprobe.pytorch import TrainerMon
from msprobe_engine.core.errors import SettingsError, UsageError

pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))


def test_a_step_is_an_update_of_this_optimizer(tmp_path: Path) -> None:
    """Micro batches are no steps, and updates of another optimizer of the same class are none; start_iteration is the first number."""
    other = nn.Linear(2, 2)
    second = torch.optim.AdamW(other.parameters())

    def between(_step: int) -> None:
        other(torch.ones(1, 2)).sum().backward()
        second.step()

    monitor = monitored(config(tmp_path), 3, micro_batches=2, before=between, start_iteration=10)
    assert steps_of(tmp_path / "out") == [10, 11, 12]
    assert monitor.step == 13
    rows = tables(tmp_path / "out")["grad_reduced"]
    assert len(rows) == 3 * sum(1 for _ in Net().parameters())


def test_the_default_of_params_have_main_grad_harms_nobody(tmp_path: Path) -> None:
    """A plain model with params_have_main_grad=True is watched like any other: gradients are where the model has them."""
    net, optimizer = build()
    monitor = TrainerMon(config(tmp_path), None, True, "Anything")
    monitor.set_monitor(net, optimizer)
    loop(net, optimizer, 1)
    norm = tables(tmp_path / "out")["grad_reduced"][0]["norm"] if not monitor.stop() else ""  # type: ignore[func-returns-value]
    assert float(norm) > 0


def test_steps_that_a_scaler_skips_count_and_are_marked(tmp_path: Path) -> None:
    """With GradScaler a step that overflows is a step like the others: the numbers stay those of the training, and it says so."""
    net, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with TrainerMon(config(tmp_path)) as monitor:
        monitor.set_monitor(net, optimizer)
        for step in range(4):
            ids = torch.randint(0, 11, (3, 5))
            loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert steps_of(tmp_path / "out", "grad_unreduced") == [0, 1, 2, 3]
    said = {}
    for path in directory_of(tmp_path / "out").glob("scalars_*.csv"):
        for line in path.read_text().splitlines()[1:]:
            step, name, value = line.split(",")
            if name == "skipped":
                said[int(step)] = float(value)
    assert said == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}


def test_accelerate(tmp_path: Path) -> None:
    """AcceleratedOptimizer.step is called for every micro batch; only real updates are steps."""
    accelerate = pytest.importorskip("accelerate")

    def job() -> None:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, optimizer = accelerator.prepare(*build())
        with TrainerMon(config(tmp_path)) as monitor:
            monitor.set_monitor(net, optimizer, grad_acc_steps=2)
            for _ in range(6):
                with accelerator.accumulate(net):
                    ids = torch.randint(0, 11, (3, 5))
                    accelerator.backward(nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()))
                    optimizer.step()
                    optimizer.zero_grad()

    pr.run(job, directory=tmp_path)
    assert steps_of(tmp_path / "out") == [0, 1, 2]


def test_evaluation_is_not_seen(tmp_path: Path) -> None:
    """Calls in evaluation mode between the steps have no rows and count as no micro batch."""
    net, optimizer = build()

    def evaluate(_step: int) -> None:
        net.eval()
        with torch.no_grad():
            net(torch.zeros(1, 2, dtype=torch.long))
        net.train()

    with TrainerMon(config(tmp_path, targets={}, xy_distribution=True)) as monitor:
        monitor.set_monitor(net, optimizer)
        loop(net, optimizer, 2, before=evaluate)
    rows = tables(tmp_path / "out")["actv"]
    assert {row["micro_step"] for row in rows} == {"0"}
    assert len({(row["name"], row["step"]) for row in rows}) == len(rows)


def hooks(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that a monitor may have put on."""
    found: list[Any] = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks), "step" in vars(optimizer)]
    for module in net.modules():
        found.append([len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)])
    for p in net.parameters():
        found.append(len(p._post_accumulate_grad_hooks or ()))
    return found


def test_stop_takes_everything_off(tmp_path: Path) -> None:
    """After stop, the model, the optimizer and the functions of torch are as they were; stop may be called twice."""
    import torch.distributed as dist

    net, optimizer = build()
    before, functions = hooks(net, optimizer), (dist.all_reduce, nn.utils.clip_grad_norm_, torch.optim.AdamW.step)
    monitor = TrainerMon(config(tmp_path, **EVERYTHING, cc_distribution={"enable": True}))
    monitor.set_monitor(net, optimizer)
    loop(net, optimizer, 2)
    assert hooks(net, optimizer) != before
    monitor.stop()
    monitor.close()
    assert hooks(net, optimizer) == before
    assert (dist.all_reduce, nn.utils.clip_grad_norm_, torch.optim.AdamW.step) == functions
    loop(net, optimizer, 1)
    assert steps_of(tmp_path / "out") == [0, 1]


def test_the_training_is_the_same(tmp_path: Path) -> None:
    """Losses, weights and random numbers are the same to the bit with every family on."""

    def job(path: Path | None) -> Any:
        net, optimizer = build()
        monitor = TrainerMon(path) if path is not None else None
        if monitor is not None:
            monitor.set_monitor(net, optimizer, grad_acc_steps=2)
        losses = loop(net, optimizer, 4, 2)
        if monitor is not None:
            monitor.stop()
        return pr.state(net, losses)

    path = config(tmp_path, **EVERYTHING, cc_distribution={"enable": True, "cc_pre_hook": True})
    plain, watched = (pr.run(job, p, directory=tmp_path)[0] for p in (None, path))
    assert watched.value == plain.value
    assert not watched.lines("switched off"), watched.log


def test_wrong_use_is_said(tmp_path: Path) -> None:
    """Arguments that cannot work raise before anything is attached, with what is allowed."""
    net, optimizer = build()
    monitor = TrainerMon(config(tmp_path))
    for arguments, keys, says in (
        ((net.state_dict(), optimizer), {}, "model is a OrderedDict"),
        (([], optimizer), {}, "model is a list"),
        ((net, None), {}, "optimizer is None"),
        ((net, optimizer), {"grad_acc_steps": 0}, "grad_acc_steps = 0"),
        ((net, optimizer), {"start_iteration": True}, "start_iteration = True"),
    ):
        refused = TrainerMon(config(tmp_path))
        with pytest.raises(UsageError, match=says):
            refused.set_monitor(*arguments, **keys)
        refused.stop()
    with pytest.raises(UsageError, match="set_wrapped_optimizer"):
        monitor.monitor_gnorm_with_ad(net)
    monitor.set_wrapped_optimizer(optimizer)
    monitor.monitor_gnorm_with_ad(net, grad_acc_steps=np.int64(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="watched already"):
        monitor.set_monitor(net, optimizer)
    monitor.stop()
    with pytest.raises(UsageError, match="was stopped"):
        monitor.set_monitor(net, optimizer)
    with pytest.raises(SettingsError, match="did you mean 'wg_distribution'"):
        TrainerMon(config(tmp_path, wg_distrbution=True))


def test_a_monitor_that_was_never_set_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without set_monitor there are no files: one warning at the end says why; with it there is none."""
    for given in (True, False):
        monitor = TrainerMon(config(tmp_path))
        if given:
            monitor.set_monitor(*build())
        monitor.stop()
        monitor.stop()
        assert caplog.text.count("call set_monitor(model, optimizer) before the training") == (not given)


@pytest.mark.parametrize("ranks", [[0], "0"])
def test_rank_zero_of_a_single_process(tmp_path: Path, ranks: Any) -> None:
    """A single process is rank 0: module_ranks [0], and the published "0", monitor it; [1] does not."""
    monitored(config(tmp_path, targets={}, wg_distribution=True, module_ranks=ranks), 1)
    assert steps_of(tmp_path / "out") == [0]
    monitored(config(tmp_path, targets={}, wg_distribution=True, module_ranks=[1], format="api"), 1)
    assert steps_of(tmp_path / "out") == [0]


def test_a_structure_is_written_and_the_training_goes_on(tmp_path: Path) -> None:
    """print_struct writes shapes of inputs and outputs, stack_info call stacks; neither stops the training."""
    monitored(config(tmp_path, targets={}, xy_distribution=True, print_struct=True, stack_info=True), 3)
    assert steps_of(tmp_path / "out", "actv") == [0, 1, 2]
    (path,) = (tmp_path / "out").rglob("module_struct.json")
    struct = json.loads(path.read_text())
    assert struct["0:layers.0.up"]["input"]["0"] == "size=(3, 5, 8), dtype=torch.float32"
    assert (directory_of(tmp_path / "out") / "stack_info.csv").read_text().startswith("module_name,stack_info\n")


def test_alerts_are_written(tmp_path: Path) -> None:
    """alert.dump: NaN in a weight gives records with the tag of the tensor and the number of the step."""
    net, optimizer = build()

    def spoil(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                net.layers[1].up.weight[0, 0] = math.nan

    with TrainerMon(config(tmp_path, **EVERYTHING)) as monitor:
        monitor.set_monitor(net, optimizer)
        loop(net, optimizer, 2, before=spoil)
    records = json.loads((tmp_path / "out/anomaly_detected/rank0/anomaly.json").read_text())
    assert {r["step"] for r in records.values()} == {1}
    assert any(r["tag_name"] == "0:layers.1.up.output:0/rank0/actv" for r in records.values())
