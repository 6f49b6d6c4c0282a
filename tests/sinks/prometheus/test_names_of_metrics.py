"""The table of metrics is what is exported, and what one series of a node is."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.metrics_server.families import Family
from msprobe_engine.core.records import Sample, TensorDescription, TensorRef
from msprobe_engine.probe.sinks.prometheus.layers import _METRICS
from msprobe_engine.probe.sinks.prometheus.metrics import RankMetrics, element_size
from msprobe_engine.probe.sinks.prometheus.names import METRICS, PREFIX, document
from msprobe_engine.probe.sinks.prometheus.node import fold_ranks, node_families, write_snapshot


def test_the_page_is_made_from_the_code() -> None:
    """docs/reference/metrics.md is what `document` gives."""
    assert (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text() == document()


def everything(rank: int = 0) -> RankMetrics:
    """Metrics of a rank that has seen a sample of every family that has a metric, an alert of each severity, every scalar."""
    metrics = RankMetrics(rank, max_series=10_000, layers=True, info={"local_rank": "0"}, clock=lambda: 1000.0)
    metrics.watch_losses({"csv": 1})
    metrics.watch_cost({"seconds": 0.5})
    metrics.watch_missing({"Bucket.grad_data": "reduced gradients"})
    frame = frame_of({f"layers.{i}.w": [1.0, 2.0] for i in range(len(_METRICS) + 1)}, step=3, lost={"buffer": 1})
    for i, ((family, column), sample) in enumerate(zip(_METRICS, list(frame.samples))):
        extra = {"tag": column} if family == "other" else {"column": column} if column else {}
        frame.samples[i] = sample._replace(family=family, name=f"layers.0.{i}.output", extra=extra)
    frame.samples[-1] = frame.samples[-1]._replace(family="other", name="all_reduce", extra={"call": 0, "tag": "all_reduce/rank0/post_0_0"})
    frame.scalars.update(dict.fromkeys(("loss", "grad_norm", "learning_rate", "loss_scale", "param_norm", "update_norm", "tokens"), 1.0))
    frame.scalars.update(step_seconds=0.1, skipped=1.0, lm_loss=float("nan"))
    metrics.update(frame, [Alert("nan_inf", "critical", "grad", "w", 3, 0, 1.0, "", "")])
    return metrics


def test_what_is_exported_is_in_the_table_and_the_other_way_round(tmp_path: Path) -> None:
    """Every family that is exported has its line in the table with that type and those labels, and every line of the table is exported."""
    write_snapshot(tmp_path, 1, everything(1).families(), 1000.0)
    families = node_families(everything().families(), [tmp_path], range(1, 3), 1001.0)
    assert {f.name.removeprefix(PREFIX) for f in families} == set(METRICS)
    for family in families:
        metric = METRICS[family.name.removeprefix(PREFIX)]
        assert (family.type, family.help) == (metric.type, metric.help)
        for _, labels, _ in family.samples:
            assert {name for name, _ in labels} - {"rank", "le"} <= set(metric.labels)


def test_one_series_per_node() -> None:
    """Folded, counters are sums, the step is that of the slowest rank, norms the largest, and alerts keep their rank."""
    families = []
    for rank, step, norm, steps in ((4, 9, 1.0, 5.0), (5, 7, 3.0, 5.0)):
        who = (("rank", str(rank)),)
        families.append([
            Family("msprobe_step", "gauge", "", [("", who, step)]),
            Family("msprobe_grad_norm", "gauge", "", [("", who, norm)]),
            Family("msprobe_records_lost", "counter", "", [("_total", (*who, ("reason", "x")), steps)]),
            Family("msprobe_anomalies", "counter", "", [("_total", (*who, ("rule", "nan_inf"), ("kind", "grad")), 1.0)]),
        ])  # fmt: skip
    joined = [a._replace(samples=a.samples + b.samples) for a, b in zip(*families)]
    got = {f.name: f.samples for f in fold_ranks(joined, 4)}
    node = ("node", "4")
    assert got["msprobe_step"] == [("", (node,), 7)]
    assert got["msprobe_grad_norm"] == [("", (node,), 3.0)]
    assert got["msprobe_records_lost"] == [("_total", (node, ("reason", "x")), 10.0)]
    assert [dict(labels)["rank"] for _, labels, _ in got["msprobe_anomalies"]] == ["4", "5"]


def test_collectives_are_counted_by_call_and_output() -> None:
    """Two outputs of one call are one call; inputs add no bytes; every frame adds up."""
    metrics = RankMetrics(0, max_series=100, layers=False, clock=lambda: 0.0)
    frame = frame_of(step=0)
    ref = TensorRef(-1, TensorDescription("torch.Tensor", "torch.bfloat16", (4, 3), None))
    frame.samples[:] = [
        Sample("other", "all_gather", ref, extra={"call": 0, "tag": f"all_gather/rank0/{place}"})
        for place in ("pre_0_0", "post_0_0", "post_0_1")
    ]
    metrics.update(frame, [])
    metrics.update(frame, [])
    got = {f.name: f.samples[0][2] for f in metrics.families() if "collective" in f.name}
    assert got == {"msprobe_collective_calls": 2.0, "msprobe_collective_bytes": 2 * 2 * 12 * 2.0}


@pytest.mark.parametrize(("dtype", "size"), [("torch.float32", 4), ("torch.bool", 1), ("torch.float8_e4m3fn", 1), ("torch.complex64", 8)])
def test_element_size(dtype: str, size: float) -> None:
    """Bytes of an element by the name of its type."""
    assert element_size(dtype) == size
