"""The order of alerts is that of execution, total, and does not depend on the order of reading."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.formats.monitor.alert_order import Moment, in_order, merge_equal_alerts
from msprobe_engine.formats.monitor.anomalies import Anomaly, pipelines_of

WORDS = (
    "param_origin", "actv", "loss", "actv_grad", "pre_grad", "acc_grad", "post_grad", "unscaled_grad", "clipped_grad", "exp_avg",
    "update", "param_updated", "step", "collective", "linear_hook", "something else",
)  # fmt: skip
ANOMALIES = st.lists(
    st.builds(
        Anomaly,
        rank=st.integers(0, 3),
        step=st.integers(0, 2),
        name=st.sampled_from(("w", "b", "grad_norm")),
        word=st.sampled_from(WORDS),
        micro_step=st.integers(-1, 2),
        pp_stage=st.integers(0, 1),
        vpp_stage=st.integers(0, 1),
        call=st.integers(-1, 6),
        op=st.sampled_from(("", "norm", "mean")),
        rule=st.sampled_from(("nan_inf", "turbulence")),
        value=st.sampled_from((1.0, float("nan"), float("inf"))),
    ),
    max_size=25,
)


def anomaly(word: str, **fields: Any) -> Anomaly:
    return Anomaly(**{"rank": 0, "step": 0, "name": "w", "word": word, "rule": "nan_inf", **fields})


@given(ANOMALIES, st.randoms(use_true_random=False))
def test_total_and_invariant(anomalies: list[Anomaly], random: Any) -> None:
    """Shuffled alerts come out in the same order, alerts of equal place that differ are never equal, and nothing is lost."""
    once = in_order(anomalies)
    shuffled = list(anomalies)
    random.shuffle(shuffled)
    again = in_order(shuffled)
    assert [repr(located) for located in once] == [repr(located) for located in again]
    assert sorted(map(repr, anomalies)) == sorted(repr(located.anomaly) for located in once)
    for a, b in pairwise(once):
        assert a.key < b.key or repr(a.anomaly) == repr(b.anomaly)


def test_places_that_look_equal_have_an_order() -> None:
    """A field that the place does not show still tells two alerts apart."""
    first, second = anomaly("post_grad", micro_step=0), anomaly("post_grad", micro_step=1)
    assert [o.anomaly for o in in_order([second, first])] == [first, second]


@given(ANOMALIES)
def test_steps_ascend_and_groups_keep_the_order(anomalies: list[Anomaly]) -> None:
    """Steps never go back; folding keeps the order of first members and every rank."""
    ordered = in_order(anomalies)
    assert [o.place.step for o in ordered] == sorted(a.step for a in anomalies)
    groups = merge_equal_alerts(ordered)
    assert [g.place for g in groups] == sorted(g.place for g in groups)
    assert {a.rank for a in anomalies} == {rank for g in groups for rank in g.ranks}


def test_a_step_from_its_beginning_to_its_end() -> None:
    """Parameters as they were, forward, loss, backward, reduction, unscaling, norm, clipping, states, update, new parameters."""
    expected = [
        anomaly("param_origin"), anomaly("actv", micro_step=0), anomaly("loss"), anomaly("actv_grad", micro_step=0),
        anomaly("pre_grad", micro_step=0), anomaly("actv", micro_step=1), anomaly("actv_grad", micro_step=1), anomaly("acc_grad"),
        anomaly("post_grad"), anomaly("unscaled_grad"), anomaly("step", name="grad_norm"), anomaly("clipped_grad"), anomaly("exp_avg"),
        anomaly("update"), anomaly("param_updated"), anomaly("step", name="step_seconds"), anomaly("param_origin", step=1),
    ]  # fmt: skip
    expected[4] = replace(expected[4], call=7)
    expected[3] = replace(expected[3], call=6)
    assert [o.anomaly for o in in_order(reversed(expected))] == expected


def test_parameters_belong_before_the_forward_pass() -> None:
    """A parameter that the update of step 0 broke is reported after it in step 0, and in step 1 before everything that used it."""
    order = in_order([anomaly("actv", step=1), anomaly("param_origin", step=1), anomaly("param_updated"), anomaly("post_grad")])
    assert [(o.anomaly.step, o.anomaly.word) for o in order] == [
        (0, "post_grad"), (0, "param_updated"), (1, "param_origin"), (1, "actv"),
    ]  # fmt: skip


@pytest.mark.parametrize(("word", "order"), [
    ("actv", [(0, 0), (0, 1), (1, 0), (1, 1)]), ("actv_grad", [(1, 1), (1, 0), (0, 1), (0, 0)]),
])  # fmt: skip
def test_pipeline(word: str, order: list[tuple[int, int]]) -> None:
    """Forward goes up through the stages, once per virtual stage; backward comes down. Call orders of other ranks do not matter."""
    alerts = [anomaly(word, rank=pp, vpp_stage=vpp, pp_stage=pp, call=10 - 5 * pp) for vpp in (0, 1) for pp in (1, 0)]
    assert [(o.anomaly.vpp_stage, o.anomaly.pp_stage) for o in in_order(alerts)] == order


def test_call_order_within_a_stage() -> None:
    """Within a stage the order of the calls counts; unknown calls come last."""
    calls = [o.anomaly.call for o in in_order([anomaly("actv", call=c, name=f"m{c}") for c in (5, -1, 2, 9)])]
    assert calls == [2, 5, 9, -1]


def test_loss_comes_before_what_it_makes() -> None:
    """The loss of a step is as early as the first micro batch that has anything wrong, behind its forward pass."""
    order = in_order([anomaly("actv_grad", micro_step=2), anomaly("loss"), anomaly("actv", micro_step=2)])
    assert [o.anomaly.word for o in order] == ["actv", "loss", "actv_grad"]


def test_collectives_stay_beside_their_neighbours() -> None:
    """A collective has the place of what its rank did just before it; without neighbours that of the reduction."""
    order = in_order([anomaly("actv", call=1), anomaly("collective", call=4, name="all_reduce"), anomaly("actv_grad", call=8)])
    assert [o.anomaly.word for o in order] == ["actv", "collective", "actv_grad"]
    (alone,) = in_order([anomaly("collective", call=4)])
    assert alone.place.moment is Moment.REDUCED


def test_calls_that_follow_the_backward_pass() -> None:
    """A reduction and the norm behind the backward pass come after the backward pass of another rank, which has sent them their NaN."""
    after = [anomaly(word, rank=1, call=call, micro_step=0, after_backward=True) for call, word in ((6, "collective"), (7, "actv"))]
    order = in_order([*after, anomaly("actv_grad", rank=0, call=8, micro_step=0), anomaly("post_grad", rank=1)])
    assert [(o.anomaly.rank, o.anomaly.word) for o in order] == [(0, "actv_grad"), (1, "collective"), (1, "actv"), (1, "post_grad")]


def test_ranks_that_agree_are_one() -> None:
    """Equal alerts of data-parallel ranks are one group; another stage, rule or statistic is another."""
    alerts = [anomaly("actv", rank=r, pp_stage=r // 4, call=3) for r in range(8)]
    groups = merge_equal_alerts(in_order([*alerts, replace(alerts[1], rule="turbulence")]))
    assert [(g.first.rule, g.first.pp_stage, g.ranks) for g in groups] == [
        ("nan_inf", 0, [0, 1, 2, 3]), ("turbulence", 0, [1]), ("nan_inf", 1, [4, 5, 6, 7]),
    ]  # fmt: skip
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert ranks_text([3]) == "rank 3"


def test_ranks_without_pipeline_stages_are_no_pipeline() -> None:
    """Ranks of DDP, which say nothing about stages, stand alone; with stages, those that differ in nothing else belong together."""
    assert pipelines_of({0: {}, 1: {}, 2: {"dp": 0}}) == {0: (0, (0,)), 1: (0, (1,)), 2: (0, (2,))}
    stages = {rank: {"pp": rank // 2, "dp": rank % 2} for rank in range(4)}
    assert pipelines_of(stages) == {0: (0, (0, 2)), 1: (0, (1, 3)), 2: (1, (0, 2)), 3: (1, (1, 3))}
