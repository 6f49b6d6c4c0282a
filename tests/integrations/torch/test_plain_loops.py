"""Loops of plain torch that make no call: which steps they have, and what is seen of each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import parameter_cases as pc
import plain_cases as cases
import pytest
import torch
from harness.restored import snapshot
from torch import nn

from msprobe_engine.core import log
from msprobe_engine.find.run import diagnose

pytestmark = pytest.mark.framework
ALL = {(0, f"{part}.{kind}") for part in ("encoder", "decoder") for kind in ("weight", "bias")}


def test_steps_loss_and_evaluation() -> None:
    """A step is an update with all its micro batches; its loss is the sum of what backward was called on, the learning rate the one
    of the update. Evaluation, with or without gradients, is no step and leaves no rows. All names are put back."""
    torch.optim.AdamW(cases.two().parameters())  # torch puts its own hook on the class
    state = torch.get_rng_state()
    before = snapshot()
    truth: list[dict[str, Any]] = []
    with cases.launched({**cases.MONITOR, "activations": True}) as launch:
        model = cases.two()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(3):
            losses = []
            for micro in range(2):
                loss = model(cases.batch(2 * number + micro)).square().mean() / 2
                losses.append(loss.item())
                loss.backward()
            truth.append({"loss": sum(losses), "lr": 0.01 * 0.5**number, "grad": pc.whole(model.encoder.weight.grad)})
            optimizer.step()
            truth[-1]["param"] = pc.whole(model.encoder.weight)
            optimizer.zero_grad()
            schedule.step()
            model.eval()
            model(cases.batch(77))
            model.train()
            with torch.no_grad():
                model(cases.batch(78))
        del model, optimizer, schedule
    assert [frame.step for frame in launch.frames] == [0, 1, 2]
    assert launch.scalars("loss") == pytest.approx([t["loss"] for t in truth])
    assert launch.scalars("learning_rate") == [t["lr"] for t in truth]
    assert launch.scalars("skipped") == [0.0] * 3
    for frame, expected in zip(launch.frames, truth):
        assert cases.names(frame, "grad_reduced") == ALL
        seen = pc.samples(frame)
        pc.assert_same(seen["grad_reduced", "encoder.weight", "reduced"], expected["grad"], frame.step)
        pc.assert_same(seen["param_updated", "encoder.weight", ""], expected["param"], frame.step)
        assert sum(s.family == "actv" and s.name.startswith("decoder") for s in frame.samples) == 2 * 2  # input and output, micro batches
    torch.set_rng_state(state)
    assert before.changed() == []


@pytest.mark.parametrize("prepared", [False, True])
def test_work_between_an_update_and_the_next_pass_says_where_it_stands(prepared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A NaN of the next batch is born behind the update of the step before: the alert and the diagnosis say it, of one in the step not."""
    with cases.launched(rules=["nan_inf"], dump={"level": "mix", "step": [0, 1, 2]}) as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            bad = torch.full((8, 4), -1.0 if number == 2 else 1.0)
            x = cases.batch(number) + bad.log() if prepared else cases.batch(number)
            out = model(x)
            loss = out.square().mean() + (0.0 if prepared else bad.log().sum())
            loss.backward()
            optimizer.step()
    found = diagnose(launch.directory / "dump")
    first = found.first_suspect
    assert first is not None
    assert (first.step, first.after_update, "after the update" in found.headline()) == (1 if prepared else 2, prepared, prepared)
    assert any("it may belong to step 2" in line for line in found.evidence) is prepared
    assert ("step 1 after its update" in caplog.text) is prepared


@pytest.mark.parametrize("new_optimizer", [False, True])
def test_a_training_that_goes_on_in_evaluation_mode(new_optimizer: bool, caplog: pytest.LogCaptureFixture) -> None:
    """All steps are seen but the first, which is said, and each says in which mode it is; evaluations beside them are no steps. Also
    where the second part of a training has an optimizer of its own."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(7):
            if number == 2:
                model.eval()
                if new_optimizer:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if number == 6:
                model.train()
            with torch.no_grad():
                model(cases.batch(70))
            model(cases.batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [frame.step for frame in launch.frames] == [0, 1, 3, 4, 5, 6]
    assert [frame.scalars.get("evaluation_mode") for frame in launch.frames] == [None, None, 1.0, 1.0, 1.0, None]
    assert "step 2 is not watched: the model is trained in evaluation mode" in caplog.text


@pytest.mark.parametrize("evaluated", ["only", "before"])
def test_a_model_that_is_trained_in_evaluation_mode(evaluated: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is said at the first update, and once, not at the end of the training alone; one that was evaluated before is watched."""
    log.forget_warnings()
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        if evaluated == "before":
            model(cases.batch(70))
            model.train()
        for number in range(2):
            model(cases.batch(number)).square().mean().backward()
            optimizer.step()
            assert caplog.text.count("an optimizer updates Two, which was only called in evaluation mode so far") == (evaluated == "only")
    assert [frame.step for frame in launch.frames] == ([] if evaluated == "only" else [0, 1])
    assert ("Call model.train() before the loop" in caplog.text) is (evaluated == "only")


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("cleared", ["not", "to none", "to zero", "through data", "behind the forward pass"])
def test_gradients_that_nobody_clears(cleared: str, micro: int) -> None:
    """A step says so when its backward passes add to the gradients of the update before."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            for part in range(micro):
                loss = model(cases.batch(number)).square().mean()
                if cleared == "behind the forward pass" and part == 0:
                    optimizer.zero_grad()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if cleared.startswith("to"):
                optimizer.zero_grad(set_to_none=cleared == "to none")
            elif cleared == "through data":
                for parameter in model.parameters():
                    parameter.grad.data.zero_()
    kept = [frame.scalars.get("gradients_kept") for frame in launch.frames]
    assert kept == ([None, 1.0, 1.0, 1.0] if cleared == "not" else [None] * 4)


@pytest.mark.parametrize("micro", [1, 2])
def test_how_long_ago_a_batch_was_there(micro: int) -> None:
    """Each step but the first, in which the model is found, says how many steps ago the model was given the same bits, of all its passes
    and in their order; parts of a larger tensor are seen, arguments by name and in containers, too."""

    class Sum(cases.Two):
        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(x) + more["ids"].sum()

    with cases.launched(monitor={"gradients": True, "interval": 5}, rules="recommended") as launch:
        torch.manual_seed(0)
        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in (9, 1, 2, 2, 1, 3, 4, 3, 4):
            for part in range(micro):
                ids = torch.full((3, 50_000), number)
                model(cases.batch(part), more={"ids": ids}).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [frame.facts.get("batch_age") for frame in launch.frames] == [None, None, None, 1, 3, None, None, 2, 2]
    assert launch.scalars("batch_age") == [None] * 9


def test_an_epoch_in_the_order_of_the_one_before() -> None:
    """A sampler that shuffles and that nobody tells the epoch; one that is told, and one that does not shuffle, are no news."""
    for shuffle, told in ((True, False), (True, True), (False, False)):
        with cases.launched(rules="recommended") as launch:
            sampler = torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=0, shuffle=shuffle)
            model = cases.two()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(2):
                if told:
                    sampler.set_epoch(epoch)
                for number in sampler:
                    model(cases.batch(number)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        kept = [frame.facts.get("order_kept") for frame in launch.frames]
        assert kept == [None, None if told or not shuffle else 1.0, None, None]


@pytest.mark.parametrize(
    ("how", "twice"),
    [
        (lambda loss: loss / 3 / 3, True),
        (lambda loss: (loss / 3) * (1 / 3), True),
        (lambda loss: loss / 3, False),
        (lambda loss: loss / 2 / 3, False),
        (lambda loss: (loss + loss + loss) / 3 / 3, False),  # the mean of three
    ],
)
def test_losses_that_are_divided_twice(how: Callable[[torch.Tensor], torch.Tensor], twice: bool) -> None:
    """By the number of micro batches, in each of them."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=twice)
        for number in range(2):
            for part in range(3):
                scaler.scale(how(model(cases.batch(3 * number + part)).square().mean())).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [frame.facts.get("loss_divided_twice") for frame in launch.frames] == [1.0 if twice else None] * 2


@pytest.mark.parametrize("same", [False, True])
def test_a_second_model_loses_no_state_and_keeps_no_gradients(same: bool) -> None:
    """The optimizer of other parameters counts from 0, which no rule takes for a lost state; that of the same parameters says nothing
    of it. Gradients that are left in the first model are not added to."""
    with cases.launched(rules="recommended") as launch:
        models = [cases.two(), cases.two(1)]
        for model in models[:1] * 2 if same else models:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for number in range(4):
                optimizer.zero_grad()
                model(cases.batch(number)).square().mean().backward()
                optimizer.step()
    made = launch.scalars("updates_made")
    assert made == ([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0] if not same else made)
    assert 0.0 not in made[1:] or not same
    assert launch.scalars("gradients_kept") == [None] * len(made)
    lines = [line for file in launch.directory.rglob("alerts.jsonl") for line in file.read_text().splitlines()]
    assert [json.loads(line)["name"] for line in lines] == (["updates_made"] if same else [])


def gan(rounds: int, critic: int) -> None:
    generator, discriminator = cases.two(1), cases.two(2)
    of_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    for number in range(rounds):
        for _ in range(critic):
            with torch.no_grad():
                fake = generator(cases.batch(number))
            real = discriminator(cases.batch(number + 50)).mean()
            (discriminator(torch.cat([fake, fake], 1)).mean() - real).backward()
            of_d.step()
            of_d.zero_grad()
        fake = generator(cases.batch(number))
        (-discriminator(torch.cat([fake, fake], 1)).mean()).backward()
        of_g.step()
        of_g.zero_grad()


def test_gan() -> None:
    """Two models with an optimizer each, which update in turn: a step is one update of both, also of the model that was first seen
    without gradients."""
    with cases.launched() as launch:
        gan(3, 1)
    both = {(chunk, name) for chunk in (0, 1) for _, name in ALL}
    assert [cases.names(frame, "param_updated") for frame in launch.frames] == [both] * 3
    assert launch.scalars("learning_rate") == [0.01] * 3  # that of the optimizer made first


def test_gan_with_five_updates_of_the_critic() -> None:
    """Where one optimizer comes round more often, each of its updates is a step once this is known."""
    with cases.launched() as launch:
        gan(3, 5)
    updated = [{chunk for chunk, _ in cases.names(frame, "param_updated")} for frame in launch.frames]
    # the second of the fifteen updates tells that the other model is not waited for; the last of the other has a step of its own
    assert updated == [{1}, {1}, {1}, {1}, {0, 1}, {1}, {1}, {1}, {1}, {0, 1}, {1}, {1}, {1}, {1}, {0}]
    assert [frame.facts["updated_by"] for frame in launch.frames] == [sum(1 << chunk for chunk in chunks) for chunks in updated]


def test_an_optimizer_that_never_updates(caplog: pytest.LogCaptureFixture) -> None:
    """It is waited for until the other comes round again: the first step has the loss of one pass, the second is said to be left out,
    and the others have the numbers that the loop counts."""
    log.forget_warnings()
    losses = []
    with cases.launched() as launch:
        model, unused = cases.two(1), cases.two(2)
        update, _never = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(unused.parameters())
        for number in range(5):
            loss = model(cases.batch(number)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(loss.item())
    assert [frame.step for frame in launch.frames] == [0, 2, 3, 4]
    assert launch.scalars("loss") == pytest.approx([losses[0], *losses[2:]])
    assert "step 1 is not watched" in caplog.text


def _closures(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> float:
    losses = []

    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = parts[0](cases.batch(number)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizers[0].step(closure)  # type: ignore[arg-type]
    return losses[0]


def _second_step(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> float:
    """The second optimizer updates in every second step, before the first one."""
    loss = (parts[0](cases.batch(number)) + parts[1](cases.batch(number))).square().mean()
    loss.backward()
    for optimizer in (optimizers[1], optimizers[0]) if number % 2 else optimizers[:1]:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _in_turn(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> float:
    total = 0.0
    for part, optimizer in zip(parts[:2], optimizers):
        loss = part(cases.batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


def _no_loss(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> None:
    result = parts[0](cases.batch(number))
    result.backward(torch.ones_like(result))
    optimizers[0].step()
    optimizers[0].zero_grad()


@pytest.mark.parametrize("one", [_closures, _second_step, _in_turn, _no_loss])
def test_a_round_that_comes_again_is_told_from_the_passes(one: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also where backward has no loss, is called by a closure, the second optimizer updates in every second step only, or two models are
    trained in turn while the third never is: the numbers are those of the loop."""
    log.forget_warnings()
    with cases.launched() as launch:
        parts: list[nn.Module] = [cases.two(seed) for seed in range(3)]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
        losses = [one(parts, optimizers, number) for number in range(6)]
    assert [frame.step for frame in launch.frames] == [0, 2, 3, 4, 5]
    if one is not _no_loss:
        assert launch.scalars("loss") == pytest.approx([losses[0], *losses[2:]])
    assert "step 1 is not watched" in caplog.text


def test_an_optimizer_that_was_waited_for_in_vain_is_not_waited_for_again() -> None:
    """Where a later optimizer takes the place of the one that trains, no further step is lost to the one that never does."""
    with cases.launched() as launch:
        parts = [cases.two(seed) for seed in range(2)]
        never = torch.optim.SGD(parts[1].parameters(), lr=0.05)
        losses = []
        for number in range(9):
            if number % 3 == 0:
                optimizer = torch.optim.SGD(parts[0].parameters(), lr=0.05)
            losses.append(_in_turn(parts[:1], [optimizer], number))
        del never
    assert [frame.step for frame in launch.frames] == [0, *range(2, 9)]
    assert launch.scalars("loss") == pytest.approx([losses[0], *losses[2:]])


def test_the_loss_of_each_closure_counts_once() -> None:
    """A closure that is evaluated several times gives the loss of its first pass, also beside an update before it in the step."""
    with cases.launched() as launch:
        parts = [cases.two(seed) for seed in range(2)]
        optimizers = [torch.optim.LBFGS(part.parameters(), lr=0.1, max_iter=2) for part in parts]
        losses = [sum(_closures([part], [one], number) for part, one in zip(parts, optimizers)) for number in range(3)]
    assert launch.scalars("loss") == pytest.approx(losses)


@pytest.mark.parametrize("later", [False, True])
def test_two_optimizers_of_one_model(later: bool) -> None:
    """Optimizers of parts of one model that are called one after the other make one step, also when the second is made later."""
    with cases.launched() as launch:
        model = cases.two()
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.encoder.parameters(), lr=0.1)]
        for number in range(4):
            if number == (2 if later else 0):
                optimizers.append(torch.optim.AdamW(model.decoder.parameters(), lr=0.1))
            model(cases.batch(number)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(launch.frames) == 4
    assert [{n for _, n in cases.names(f, "exp_avg")} for f in launch.frames] == [
        {"decoder.weight", "decoder.bias"} if number >= 2 or not later else set() for number in range(4)
    ]
    assert cases.names(launch.frames[3], "param_updated") == ALL


def test_optimizer_is_replaced() -> None:
    """A second optimizer over the same parameters is followed from the step after its first update; numbers go on."""
    with cases.launched() as launch:
        model = cases.two()
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        second = torch.optim.Adam(model.parameters(), lr=0.1)
        for number, optimizer in enumerate([first, first, second, second, second]):
            model(cases.batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [frame.step for frame in launch.frames] == list(range(5))
    assert [bool(cases.names(frame, "exp_avg")) for frame in launch.frames][-2:] == [True, True]


def test_closures() -> None:
    """An optimizer that evaluates the model several times in one update makes one step; its loss is that of the first evaluation."""
    first: list[float] = []
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for number in range(2):
            found: list[float] = []

            def closure(number: int = number, found: list[float] = found) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(cases.batch(number)).square().mean()
                loss.backward()
                found.append(loss.item())
                return loss

            optimizer.step(closure)
            assert len(found) > 1
            first.append(found[0])
    assert len(launch.frames) == 2
    assert launch.scalars("loss") == pytest.approx(first)


def test_loss_scaler() -> None:
    """With `GradScaler` the loss is the unscaled one; an update that it leaves out is a step that says so."""
    truth = []
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(4):
            loss = model(cases.batch(number)).square().mean() * (float("inf") if number == 1 else 1.0)
            truth.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert len(launch.frames) == 4
    assert launch.scalars("loss") == pytest.approx(truth)
    assert launch.scalars("skipped") == [0.0, 1.0, 0.0, 0.0]
    assert launch.scalars("loss_scale") == [8.0, 8.0, 4.0, 4.0]
    assert launch.scalars("learning_rate") == [0.1] * 4


def test_parts_are_called_without_the_model() -> None:
    """A model of which the loop calls the parts has the names that the whole model gives."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            model.decoder(torch.relu(model.encoder(cases.batch(number)))).mean().backward()
            optimizer.step()
    assert [cases.names(frame, "grad_reduced") for frame in launch.frames] == [ALL] * 3


@pytest.mark.fast_cells("function")
@pytest.mark.parametrize("how", ["function", "method", "inside"])
def test_compiled(how: str) -> None:
    """Compiled models have their own names, and are compiled once, as without the probe."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    with cases.launched() as launch:
        model: nn.Module = cases.two()
        if how == "method":
            model.compile(backend=backend)
        elif how == "function":
            model = torch.compile(model, backend=backend)  # type: ignore[assignment]
        else:
            model.encoder = torch.compile(model.encoder, backend=backend)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            model(cases.batch(number)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [cases.names(frame, "grad_reduced") for frame in launch.frames] == [ALL] * 3
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_compiled_update() -> None:
    """No Python runs in a compiled ``optimizer.step``; the steps count as without compilation, and what is dumped is one of them."""
    for compiled in (False, True):
        torch._dynamo.reset()
        with cases.launched(False, dump={"step": [1], "level": "L1"}) as launch:
            model = cases.two()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for i in range(4):
                model(cases.batch(i)).mean().backward()
                update()
                optimizer.zero_grad()
        (dumped,) = launch.directory.glob("dump/step*/rank0/dump.json")
        calls = [name for name in json.loads(dumped.read_text())["data"] if name.startswith("Torch.tanh.") and name.endswith("forward")]
        assert (dumped.parent.parent.name, calls) == ("step1", ["Torch.tanh.0.forward"]), compiled


def test_only_trainings_are_touched() -> None:
    """Without an optimizer, or with one whose model is only called for inference, nothing is written and no probe is made."""
    with cases.launched() as launch:
        model = cases.two()
        model(cases.batch(0))
        torch.optim.SGD(model.parameters(), lr=0.1)
        teacher = cases.two(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        teacher(cases.batch(0))
        with torch.no_grad():
            model(cases.batch(0))
        model.eval()
        model(cases.batch(0))
        del optimizer
    assert not launch.frames
    assert not launch.directory.exists()


def test_a_teacher_and_an_average_leave_no_trace() -> None:
    """Models that no optimizer trains (a teacher, a moving average of the weights) are no part of the step; a copy of the model has
    nothing of the probe."""
    with cases.launched({**cases.MONITOR, "activations": True}) as launch:
        model, teacher = cases.two(), cases.two(5)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            with torch.no_grad():
                target = teacher(cases.batch(number)) + average(cases.batch(number))
            (model(cases.batch(number)) - target).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
            assert copy.deepcopy(model).__dict__.get("_compiled_call_impl") is None
    assert [cases.names(frame, "grad_reduced") for frame in launch.frames] == [ALL] * 2
    for frame in launch.frames:
        assert sum(s.family == "actv" and s.name.startswith("decoder") for s in frame.samples) == 2


def test_float32_copies_of_the_parameters() -> None:
    """An optimizer of float32 copies trains the model in 16 bits that they are cast back into."""
    with cases.launched() as launch:
        model = cases.two().bfloat16()
        copies = [p.detach().float().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.AdamW(copies, lr=0.01)
        for number in range(3):
            model(cases.batch(number).bfloat16()).square().mean().backward()
            for one, p in zip(copies, model.parameters()):
                one.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
            optimizer.step()
            with torch.no_grad():
                for one, p in zip(copies, model.parameters()):
                    p.copy_(one)
        del model, optimizer
    assert [frame.step for frame in launch.frames] == [0, 1, 2]
    assert len(launch.scalars("loss")) == 3


def test_a_resumed_training_goes_on_counting() -> None:
    """The number of the first step is what the optimizer's own counter says after a checkpoint was loaded."""
    model = cases.two()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(3):
        model(cases.batch(number)).mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    with cases.launched() as launch:
        again = torch.optim.Adam(model.parameters())
        again.load_state_dict(state)
        model(cases.batch(9)).mean().backward()
        again.step()
    assert [frame.step for frame in launch.frames] == [3]


@pytest.mark.parametrize("close", [False, True])
def test_a_step_that_was_cut_off(close: bool) -> None:
    """The last step is complete when its updates were made; one without an update is marked as cut off."""
    with cases.launched() as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(cases.batch(0)).mean().backward()
        optimizer.step()
        if close:
            model(cases.batch(1)).mean().backward()
    assert [frame.complete for frame in launch.frames] == [True, False][: 1 + close]


def test_same_bits() -> None:
    """Parameters after a training with dropout are the same with the probe on and off."""

    def train() -> list[bytes]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for number in range(4):
            model(cases.batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [np.asarray(p.detach()).tobytes() for p in model.parameters()]

    alone = train()
    with cases.launched({**cases.MONITOR, "activations": True, "updates": True}, dump={"level": "mix", "step": [1]}):
        watched = train()
    assert watched == alone
