"""What DeepSpeed sends, by its own log of communication and by ours; and layouts with parts of the training on the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks

from msprobe_engine.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
KINDS: dict[int, dict[str, Any]] = {0: {}, 1: {}, 2: {"overlap_comm": True}, 3: {"overlap_comm": True}}


class Log:
    """Calls at the border between DeepSpeed and torch.distributed: its own functions, counted from outside of the probe."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.on = False
        backend = harness.deepspeed.comm.comm.cdb
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"):
            self._count(backend, name)

    def _count(self, backend: Any, name: str) -> None:
        original = getattr(backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += self.on
            return original(*args, **kwargs)

        setattr(backend, name, call)


def sent(stage: int) -> Any:
    harness.deepspeed.init_distributed("gloo", verbose=False)
    log = Log()

    def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
        for x in data:
            log.on = True
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            log.on = False
        return []

    run = jobs.train(
        harness.config(stage, "fp32", zero=KINDS[stage]), "fp32", 1, {"monitor": MonitorSettings(collectives=True, gradients=False)}, body
    )
    (frame,) = run.frames
    seen = Counter(s.name for s in frame.samples if s.family == "other")
    log.calls.clear()
    dump = jobs.train(harness.config(stage, "fp32", zero=KINDS[stage]), "fp32", 1, {"dump": jobs.dump_of("L1")}, body)
    (data,) = dump.dumps.values()
    records = {name: record for name, record in data.items() if name.startswith("Distributed.")}
    groups = {str(record.get("tags")) for record in records.values()}
    return dict(log.calls), dict(seen), Counter(name.split(".")[1] for name in records), groups


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_that_is_sent(stage: int) -> None:
    """Every collective that DeepSpeed hands to torch in a step has a record at L1, under its name and with its ranks, asynchronous ones
    and those of overlapped reductions included; the monitor's family has them, too."""
    for calls, seen, records, _ in run_ranks(2, sent, stage):
        assert sum(calls.values()) > 0
        for name, count in calls.items():
            assert records[name] >= count, (name, calls, records)
            assert any(name in one for one in seen) or name == "broadcast", (name, seen)


VARIANTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "optimizer offloaded": (2, "bf16", {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}),
    "parameters offloaded": (
        3,
        "bf16",
        {
            "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
    ),
    "persistent parameters": (3, "fp16", {"zero": {"stage3_param_persistence_threshold": 20}}),
    "round robin": (1, "fp16", {"zero": {"round_robin_gradients": True}}),
}
MONITOR = MonitorSettings(activations=True, parameters=True, optimizer_states=True, updates=True)


def variant(name: str) -> Any:
    stage, dtype, more = VARIANTS[name]

    def once(sections: dict[str, Any] | None) -> jobs.Run:
        torch.manual_seed(3)
        return jobs.train(harness.config(stage, dtype, 2, 0.05, **more), dtype, 2, sections)

    plain, seen = once(None), once({"monitor": MONITOR})
    families = {s.family for s in seen.frames[0].samples}
    return plain.bits == seen.bits, [f.step for f in seen.frames], families


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants(name: str) -> None:
    """With parts of the training on the host, parameters that are never partitioned, or another order of gradients: the same bits, and
    the families of a run without."""
    for same, steps, families in run_ranks(2, variant, name):
        assert same
        assert steps == [0, 1]
        assert {"actv", "grad_reduced", "param_origin", "param_updated", "exp_avg", "update"} <= families, families


def checked(stage: int) -> Any:
    lines = []

    def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
        for number, x in enumerate(data):
            if number == 1 and harness.deepspeed.comm.get_rank() == 1:
                engine.module.b.weight.data[0, 0] += 1  # one rank drifts away
            engine.backward(engine(x))
            engine.step()
        return []

    from msprobe_engine import log

    logger = log.get_logger()
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    jobs.train(harness.config(stage, "fp32"), "fp32", 3, {"monitor": MonitorSettings(replica_check=ReplicaCheckSettings(interval=1))}, body)
    return lines


@pytest.mark.parametrize("stage", [0])
def test_replicas(stage: int) -> None:
    """A parameter that one rank has changed is named by the replica check of a followed engine."""
    said = [line for lines in run_ranks(2, checked, stage) for line in lines]
    assert any("b.weight" in line for line in said), said
