"""Faults planted in real Megatron trainings are caught by the named rule within the stated steps; the same training without the fault
is silent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import CHEAP, EVERYTHING, Training, alerts
from forkpool import run_ranks
from replica_cases import Said, flip_a_bit

pytestmark = pytest.mark.framework
LAYER = "decoder.layers.0"
START = 24
"""Rules that compare with the past have seen enough of it."""


@functools.cache
def healthy(layout: str, steps: int) -> None:
    """The twin: nothing is said by any rank."""
    assert run_ranks(2, alerts, f"--steps {steps} {layout}", timeout=240) == [[], []]


def run(steps: int, layout: str, plant: Any) -> list[list[tuple[str, Said]]]:
    healthy(layout, steps if layout else START + 6)  # the longest of a layout is the twin of all
    return run_ranks(2, alerts, f"--steps {steps} {layout}", plant, timeout=240)


def first(found: list[tuple[str, Said]], *rules: str) -> Said:
    return next(said for rule, said in found if rule in rules)


def parameter(training: Training, name: str) -> torch.nn.Parameter:
    return dict(training.model.named_parameters())[name]


def nan_gradient(training: Training) -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if training.step == 3 and training.rank == 1 else gradient

    parameter(training, f"{LAYER}.mlp.linear_fc1.weight").register_hook(hook)


@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.slow), "--distopt"])
@pytest.mark.slow
def test_nan_gradient(layout: str) -> None:
    """NaN in one gradient of one rank: `nan_inf` in the same step, on the rank that holds the reduced gradient, and no later rank."""
    found = [said for rank in run(5, layout, nan_gradient) for rule, said in rank if rule == "nan_inf"]
    assert min(said.step for said in found) == 3
    assert f"{LAYER}.mlp.linear_fc1.weight" in {said.name for said in found if said.step == 3}


def exploding_rate(training: Training) -> Callable[[], None]:
    def at_step() -> None:
        if training.step >= START:
            for group in training.optimizer.param_groups:
                group["lr"] = 3.0

    return at_step


@pytest.mark.slow  # the rule itself: tests/monitor_rules
def test_exploding_learning_rate() -> None:
    """A learning rate of 3: one of the rules of divergence says so within 5 steps."""
    for found in run(START + 6, "", exploding_rate):
        rules = ("update_norm_doubling", "exploding_gradient", "loss_spike", "loss_not_finite")
        assert START <= first(found, *rules).step < START + 5
        assert all(said.step >= START for _, said in found)


def unmarked_norm(training: Training) -> Callable[[], None]:
    def at_step() -> None:
        if training.step == 3:
            for one in training.model.decoder.layers[0].input_layernorm.parameters():
                one.sequence_parallel = False

    return at_step


@pytest.mark.slow
def test_norm_not_reduced_over_tensor_parallel() -> None:
    """Sequence parallelism, and the gradients of one LayerNorm are not added over the group from step 3 on: the check of step 4 names its
    two parameters and the group, and nothing else."""
    lead, other = run(8, "--tp 2 --sp", unmarked_norm)
    assert other == []
    assert {rule for rule, _ in lead} == {"replica_mismatch"}
    names = {f"{LAYER}.input_layernorm.weight", f"{LAYER}.input_layernorm.bias"}
    assert {said[:5] for _, said in lead} == {(4, "param", name, "tp", (0, 1)) for name in names}


def frozen(training: Training) -> None:
    lost = parameter(training, f"{LAYER}.self_attention.linear_qkv.weight")
    for group in training.optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one is not lost]


@pytest.mark.slow
def test_parameter_left_out_of_the_optimizer() -> None:
    """It has a gradient and stays what it is: `unchanged_parameter` in the third step."""
    for found in run(5, "", frozen):
        assert [(rule, said.name, said.step) for rule, said in found] == [
            ("unchanged_parameter", f"{LAYER}.self_attention.linear_qkv.weight", 2)
        ]


def closed_expert(training: Training) -> Callable[[], None]:
    router = training.model.decoder.layers[0].mlp.router
    gating = router.gating

    def closed(x: torch.Tensor) -> torch.Tensor:
        logits = gating(x)
        mask = torch.zeros_like(logits)
        mask[..., 1] = -1e9 if training.step >= 3 else 0.0
        return logits + mask

    router.gating = closed
    return lambda: None


@pytest.mark.slow
def test_dead_expert() -> None:
    """A router that never chooses expert 1 any more, experts over two ranks: its rank says so after 20 steps."""
    lead, other = run(25, "--ep 2 --experts 4 --mbs 4", closed_expert)
    said = first(lead, "dead_expert")
    assert said.step == 22
    assert "experts.1" in said.name
    assert not [one for rule, one in other if rule == "dead_expert"]


def small_gradients(training: Training) -> None:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        if training.step >= START and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e-36)

    training.model.decoder.final_layernorm.register_forward_hook(hook)


@pytest.mark.slow  # the rule itself: tests/monitor_rules
def test_underflow_in_bfloat16() -> None:
    """Gradients that come down to what bfloat16 cannot hold: `gradient_underflow` within 10 steps."""
    for found in run(START + 11, "--bf16", small_gradients):
        assert START <= first(found, "gradient_underflow").step <= START + 10


def flipped(training: Training) -> Callable[[], None]:
    def at_step() -> None:
        if training.step == 3 and training.rank == 1:
            flip_a_bit(parameter(training, f"{LAYER}.mlp.linear_fc2.weight").data, 18)

    return at_step


def test_flipped_bit() -> None:
    """One bit of one replica's weight: its rank sees in step 3 that no update has written it, and the check of step 4 names it, and both
    ranks of the data-parallel group."""
    lead, other = run(8, "", flipped)
    assert [(rule, said.step, said.name) for rule, said in other] == [("written_parameter", 3, f"{LAYER}.mlp.linear_fc2.weight")]
    said = first(lead, "replica_mismatch")
    assert said[:6] == (4, "param", f"{LAYER}.mlp.linear_fc2.weight", "dp", (0, 1), (0, 1))
    assert said.frame <= 6


def apart_embedding(training: Training) -> Callable[[], None]:
    def at_step() -> None:
        if training.step == 3 and training.rank == 1:
            flip_a_bit(parameter(training, "output_layer.weight").data, 18)

    return at_step


@pytest.mark.slow
def test_tied_embedding_of_two_stages() -> None:
    """The embedding of the first stage and the output weights of the last have different names and the same bits; a flipped one is found,
    under its name on the first stage."""
    lead, other = run(8, "--pp 2 --layers 2", apart_embedding)
    assert [(rule, said.step, said.name) for rule, said in other] == [("written_parameter", 3, "output_layer.weight")]
    assert first(lead, "replica_mismatch")[:6] == (4, "param", "embedding.word_embeddings.weight", "embedding", (0, 1), (0, 1))


@pytest.mark.fast_cells("--ep 2 --experts 4 --distopt", "--fp16 --tp 2")
@pytest.mark.parametrize(
    "argv", ["--distopt --overlap-param", "--distopt --bf16", "--ep 2 --experts 4 --distopt", "--pp 2 --layers 2", "--fp16 --tp 2"]
)
@pytest.mark.slow
def test_layouts_without_a_fault(argv: str) -> None:
    """Parameters and gradients of every layout are equal where the framework says so; also where the next pass gathers them, and
    embeddings that two stages share."""
    healthy(argv, 8)


@pytest.mark.slow
def test_many_healthy_steps() -> None:
    """Tensor and sequence parallel, two data-parallel ranks with the distributed optimizer, everything watched, all recommended rules,
    replicas compared every 10 steps: not a word in 300 steps."""
    argv = "--steps 300 --tp 2 --sp --distopt --nmb 1 --hidden 16"
    assert run_ranks(4, functools.partial(alerts, monitor=EVERYTHING), argv, timeout=280) == [[]] * 4


assert CHEAP.replica_check.interval == 2, "steps in the tests above follow from it"
