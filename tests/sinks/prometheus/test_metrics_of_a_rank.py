"""What Prometheus is told about one rank; the table of metrics is what is exported, and what one series of a node is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.metrics_server.families import Family
from msprobe_engine.core.names import layer_of
from msprobe_engine.core.records import Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.probe.sinks.prometheus.layers import _METRICS
from msprobe_engine.probe.sinks.prometheus.metrics import RankMetrics, element_size
from msprobe_engine.probe.sinks.prometheus.names import METRICS, PREFIX, document
from msprobe_engine.probe.sinks.prometheus.node import fold_ranks, node_families, write_snapshot

Flat = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def metrics(max_series: int = 2000, layers: bool = True, clock: Clock | None = None) -> RankMetrics:
    return RankMetrics(3, max_series=max_series, layers=layers, clock=clock or Clock())


def flat(m: RankMetrics) -> Flat:
    """Sample name and labels without the rank (which must be there) to value."""
    out: Flat = {}
    for family in m.families():
        for suffix, labels, value in family.samples:
            assert ("rank", "3") in labels
            key = (family.name + suffix, tuple(x for x in labels if x[0] != "rank"))
            assert key not in out, "the same series twice"
            out[key] = value
    return out


def feed(m: RankMetrics, frame: Frame) -> None:
    m.update(frame, NanInfRule().check(frame))


def test_step_and_scalars() -> None:
    """The last step, the number of steps and the numbers of the step are exported; a NaN loss leaves the last finite one."""
    m = metrics()
    feed(m, frame_of(step=10, scalars={"loss": 2.5, "grad_norm": 0.5, "loss_scale": 8.0, "learning_rate": 0.1, "tokens": 7.0}))
    feed(m, frame_of(step=12, scalars={"loss": math.nan}, lost={"buffer": 4}, complete=False))
    got = flat(m)
    assert got["msprobe_step", ()] == 12
    assert got["msprobe_steps_total", ()] == 2
    assert got["msprobe_incomplete_steps_total", ()] == 1
    assert got["msprobe_loss", ()] == 2.5
    assert got["msprobe_grad_norm", ()] == 0.5
    assert got["msprobe_scalar", (("name", "tokens"),)] == 7.0
    assert got["msprobe_nonfinite_elements_total", (("kind", "loss"),)] == 1
    assert got["msprobe_first_nonfinite_step", (("kind", "loss"),)] == 12
    assert got["msprobe_records_lost_total", (("reason", "buffer"),)] == 4


def test_nonfinite_elements_by_kind() -> None:
    """NaN and Inf are counted by kind from zero on; masks (-Inf in activations) are not."""
    m = metrics()
    assert flat(m)["msprobe_nonfinite_elements_total", (("kind", "grad"),)] == 0
    feed(m, frame_of({"w": [math.nan, math.inf, -math.inf]}, entries={"Functional.softmax.0.forward": [-math.inf, 1.0]}, step=4))
    feed(m, frame_of({"w": [math.nan]}, step=5))
    got = flat(m)
    assert got["msprobe_nonfinite_elements_total", (("kind", "grad"),)] == 4
    assert got["msprobe_nonfinite_elements_total", (("kind", "activation"),)] == 0
    assert got["msprobe_first_nonfinite_step", (("kind", "grad"),)] == 4


def test_alerts() -> None:
    """Alerts are counted with those left out, are active for their step only, and critical ones set the incident."""
    m = metrics()
    alert = Alert("nan_inf", "critical", "grad", "w", 8, 3, math.nan, "", "", extra={"more": 5})
    m.update(frame_of(step=8), [alert])
    pair = (("rule", "nan_inf"), ("kind", "grad"))
    got = flat(m)
    assert got["msprobe_anomalies_total", pair] == 6
    assert got["msprobe_last_anomaly_step", pair] == 8
    assert got["msprobe_alert_active", (*pair, ("severity", "critical"))] == 1
    assert got["msprobe_last_incident_step", ()] == 8
    assert got["msprobe_last_incident_timestamp_seconds", ()] == 1000.0
    m.update(frame_of(step=9), [])
    got = flat(m)
    assert got["msprobe_alert_active", (*pair, ("severity", "critical"))] == 0
    assert got["msprobe_anomalies_total", pair] == 6


def test_step_duration() -> None:
    """The histogram takes step_seconds, else the time between frames divided by the steps between them; it is cumulative."""
    clock = Clock()
    m = metrics(clock=clock)
    feed(m, frame_of(step=1))
    assert ("msprobe_step_duration_seconds_count", ()) not in flat(m)
    clock.now += 4.0
    feed(m, frame_of(step=3))
    feed(m, frame_of(step=4, scalars={"step_seconds": 0.03}))
    got = flat(m)
    assert got["msprobe_step_duration_seconds_sum", ()] == pytest.approx(2.03)
    assert got["msprobe_step_duration_seconds_count", ()] == 2
    assert got["msprobe_step_duration_seconds_bucket", (("le", "0.05"),)] == 1
    assert got["msprobe_step_duration_seconds_bucket", (("le", "2.5"),)] == 2
    assert got["msprobe_step_duration_seconds_bucket", (("le", "+Inf"),)] == 2


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_layers_add_in_quadrature(tensors: list[list[float]]) -> None:
    """Norms of the tensors of a layer add in quadrature, the largest absolute value is the maximum, zeros are a share."""
    m = metrics()
    feed(m, frame_of({f"layers.0.p{i}": v for i, v in enumerate(tensors)}))
    got = flat(m)
    labels = (("layer", "layers.0"), ("phase", "reduced"))
    values = [v for t in tensors for v in t]
    norm = math.sqrt(sum(v * v for v in values))
    assert got["msprobe_layer_grad_norm", labels] == pytest.approx(norm)
    assert got["msprobe_local_grad_norm", (("phase", "reduced"),)] == pytest.approx(norm)
    assert got["msprobe_layer_grad_absmax", labels] == max(abs(v) for v in values)
    assert got["msprobe_layer_grad_zero_ratio", labels] == pytest.approx(sum(v == 0 for v in values) / len(values))


def test_layer_gauge_keeps_its_last_finite_value() -> None:
    """A layer with NaN keeps its gauge; the others go on."""
    m = metrics()
    feed(m, frame_of({"layers.0.w": [1.0], "layers.1.w": [1.0]}))
    feed(m, frame_of({"layers.0.w": [math.nan], "layers.1.w": [2.0]}))
    got = flat(m)
    assert got["msprobe_layer_grad_norm", (("layer", "layers.0"), ("phase", "reduced"))] == 1.0
    assert got["msprobe_layer_grad_norm", (("layer", "layers.1"), ("phase", "reduced"))] == 2.0


def test_micro_steps_are_not_added_up() -> None:
    """Of several micro steps the largest norm counts."""
    import dataclasses

    frame = frame_of({"layers.0.w": [3.0], "layers.0.x": [4.0]}, family="grad_unreduced", phase="accumulated")
    samples = [s._replace(name="layers.0.w", micro_step=i) for i, s in enumerate(frame.samples)]
    m = metrics()
    feed(m, dataclasses.replace(frame, samples=samples))
    assert flat(m)["msprobe_layer_grad_norm", (("layer", "layers.0"), ("phase", "accumulated"))] == 4.0


@given(st.integers(1, 150), st.integers(0, 60))
def test_never_more_series_than_allowed_and_the_cut_is_counted(limit: int, layers: int) -> None:
    """No more series than max_series (the two that count the cut apart), and every one cut is in the count."""
    frame = frame_of({f"layers.{i}.w": [1.0] for i in range(layers)})
    everything = metrics(100_000)
    cut = metrics(limit)
    for m in (everything, cut):
        feed(m, frame)
    whole, some = flat(everything), flat(cut)
    assert len(some) <= max(limit, 2)
    assert some.keys() <= whole.keys()
    layer_series = len([k for k in whole if "layer" in k[0] or "local" in k[0]])
    left = len([k for k in some if "layer" in k[0] or "local" in k[0]])
    if ("msprobe_series_over_limit", ()) in some:
        assert some["msprobe_series_over_limit", ()] == layer_series - left
        assert some.get(("msprobe_series_dropped_total", ()), layer_series - left) == layer_series - left


def test_layers_can_be_left_out() -> None:
    """Without layers there are rank-level series only."""
    m = metrics(layers=False)
    feed(m, frame_of({"layers.0.w": [3.0]}))
    assert not [k for k in flat(m) if k[0].startswith("msprobe_layer")]
    assert flat(m)["msprobe_local_grad_norm", (("phase", "reduced"),)] == 3.0


@pytest.mark.parametrize(
    ("name", "vpp", "layer"),
    [
        ("module.module.decoder.layers.3.mlp.linear_fc1.weight", 0, "decoder.layers.3"),
        ("decoder.layers.3.mlp.experts.local_experts.7.weight", 1, "1:decoder.layers.3"),
        ("embedding.word_embeddings.weight", 0, "embedding.word_embeddings"),
        ("output_layer.weight", 0, "output_layer"),
        ("weight", 0, "weight"),
        (".input", 0, "input"),
        ("", 0, "root"),
    ],
)
def test_layer_of(name: str, vpp: int, layer: str) -> None:
    """A tensor's layer is its name up to the first number."""
    assert layer_of(name, vpp) == layer


def test_losses_of_sinks() -> None:
    """What the writer counts as lost is exported while it goes on counting."""
    m = metrics()
    losses: dict[str, int] = {}
    m.watch_losses(losses)
    losses["csv"] = 2
    assert flat(m)["msprobe_write_errors_total", (("sink", "csv"),)] == 2


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
