"""No exception of the probe reaches a Megatron training, whatever function of ours it comes from; what Megatron lacks costs the part
that needs it.

The full tier tries all functions that the training calls.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import megatron_harness as harness
import pytest
import torch
from harness.fault_trials import Bits, Job, Outcome, Trial, lacking, outcomes, reached, start_process_with_probe, table, trials, wrong
from harness.probe_faults import Plant

pytestmark = pytest.mark.framework
train_gpt = harness.train_gpt


def train(place: Path, seen: bool, argv: str) -> Bits:
    """A loop of one's own that the environment's probe follows."""
    if seen:
        start_process_with_probe(place, "megatron")
    a = train_gpt.arguments(["--quiet", "--steps", "3", "--layers", "1", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    losses = train_gpt.train(a, chunks, optimizer)
    weights = [p.detach().clone().view(torch.uint8).numpy().tobytes() for chunk in chunks for p in chunk.parameters()]
    return (repr(losses).encode(), *weights, torch.get_rng_state().numpy().tobytes())


JOBS = {
    argv: Job(functools.partial(train, argv=argv), ranks, packages=("msprobe_integrations.megatron",))
    for argv, ranks in (("--distopt", 2), ("--tp 2 --bf16", 2))
}
SOME = (
    Trial(Plant("msprobe_integrations.megatron.observer", "TrainingObserver", "after_optimizer"), 1, False),
    Trial(Plant("msprobe_integrations.megatron.source", "MegatronSource", "gradient"), 0, True),
)
_known: set[Plant] = set()


@functools.cache
def wanted(argv: str) -> list[Outcome]:
    """Without a probe."""
    return outcomes(JOBS[argv], None, False)


@pytest.mark.parametrize(("argv", "every"), [("--distopt", False), *(pytest.param(argv, True, marks=pytest.mark.slow) for argv in JOBS)])
@pytest.mark.slow
def test_a_fault_stays_in_the_probe(argv: str, every: bool) -> None:
    """A function of ours raises, on all ranks or on one: the training is the same, bit for bit, and each part that is lost is said
    once."""
    job = JOBS[argv]
    tried = trials(job, reached(job), _known) if every else SOME
    _known.update(trial.plant for trial in tried)
    found = [problem for trial in tried for problem in wrong(job, trial, wanted(argv))]
    assert not found, table(found)


NAMES = (
    *("bucket_groups", "start_grad_sync", "grad_data", "buckets", "prepare_grads", "step_with_ready_grads"),
    *("get_forward_backward_func", "forward_step", "get_megatron_optimizer", "get_tensor_model_parallel_group"),
    *("model_parallel_is_initialized", "should_run_forward_backward"),
)
"""Of the integration's table, those that neither torch nor Python uses."""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions are as of Python 3.11")
@pytest.mark.parametrize("names", [NAMES[:1], pytest.param(NAMES[1:], marks=pytest.mark.slow)], ids=["one", "others"])
@pytest.mark.slow
def test_names_that_megatron_lacks(names: tuple[str, ...]) -> None:
    """Each name of the table in turn is another one in Megatron: the training is the same, bit for bit, nothing fails, and a line names
    what is missing."""
    job = JOBS["--distopt"]
    found = [problem for name in names for problem in lacking(job, "megatron", name, wanted("--distopt"))]
    assert not found, table(found)
