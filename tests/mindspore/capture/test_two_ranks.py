"""Two processes started by msrun: communication in a capture, files per rank, collectives, and replicas that drift apart."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn

from msprobe.mindspore import MindSporeProbe
from msprobe_integrations.mindspore.monitor.collectives import CollectiveWatch

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ranks(two_ranks: Path) -> list[Any]:
    """What each of two ranks has recorded."""
    return [json.loads((two_ranks / f"records{rank}.json").read_text()) for rank in (0, 1)]


def test_in_place_functions_show_their_arguments_before_and_after(ranks: list[Any]) -> None:
    """The input is what the rank has given, the output what all have made of it; tags say who took part and how."""
    for rank, found in enumerate(ranks):
        record = found["records"]["MintDistributed.all_reduce.0.forward"]
        assert (record["input_args"], record["output"]) == ([rank + 1.0], [3.0])
        assert record["tags"] == {"group_ranks": [0, 1], "reduce": "SUM", "async": False}
        assert "MintDistributed.all_reduce.0.backward" not in found["records"]


def test_what_is_only_written_is_null_before(ranks: list[Any]) -> None:
    """The buffers of all_gather hold nothing before; they have values afterwards."""
    record = ranks[0]["records"]["MintDistributed.all_gather.0.forward"]
    assert record["input_args"] == [None, 6.0]
    assert record["output"] == [[6.0, 6.0], 6.0]


def test_asynchronous_functions_have_their_output_when_it_is_waited_for(ranks: list[Any]) -> None:
    """Nothing waits earlier than the program does; what nobody waits for has no values and is marked."""
    for found in ranks:
        record = found["records"]["MintDistributed.all_reduce.1.forward"]
        assert found["waited"] == [True]
        assert (record["input_args"], record["output"]) == ([3.0], [6.0, True])
        assert record["tags"]["async"] is True
        left = found["records"]["MintDistributed.all_reduce.2.forward"]
        assert left["tags"] == {"group_ranks": [0, 1], "reduce": "MAX", "async": True, "incomplete": True}
        assert left["output"][0] == {"in_flight": True}


def test_operators_of_cells_communicate_in_both_directions(ranks: list[Any]) -> None:
    """AllReduce as a member of a Cell is a primitive with a backward record; the gradients in front of it are those of all ranks."""
    for found in ranks:
        records = found["records"]
        assert "Primitive.ar.AllReduce.0.forward" in records
        assert records["Primitive.ar.AllReduce.0.backward"]["output"] == [2.0]
        assert records["Cell.fc.Dense.backward.0"]["input"] == [2.0]


@pytest.fixture
def out(two_ranks: Path) -> Path:
    """What two ranks have written."""
    return two_ranks / "out"


def table(out: Path, rank: int, family: str) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    (path,) = (out / "monitor").glob(f"*-rank{rank}-*/{family}_0-99.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_rank_has_its_files(out: Path) -> None:
    """Reduced gradients are the same on both ranks, those before the reduction are not."""
    reduced = [[row["norm"] for row in table(out, rank, "grad_reduced")] for rank in (0, 1)]
    before = [[row["norm"] for row in table(out, rank, "grad_unreduced")] for rank in (0, 1)]
    assert len(reduced[0]) == 72
    assert reduced[0][:12] == reduced[1][:12]
    assert before[0] != before[1]


def test_collectives(out: Path) -> None:
    """Operators and functions have a row for what goes in and what comes out, and say where they were called."""
    rows = [row for row in table(out, 0, "other") if row["step"] == "0"]
    tags = [row["tag"] for row in rows]
    assert tags[:2] == ["all_reduce/rank0/pre_0_0", "all_reduce/rank0/post_0_0"]
    assert tags[-2:] == ["all_reduce/rank0/pre_6_0", "all_reduce/rank0/post_6_0"]
    assert len(tags) == 14
    step = json.loads((out / "jsonl/rank0.jsonl").read_text().splitlines()[1])
    extra = [sample["extra"] for sample in step["samples"] if sample["family"] == "other"]
    assert all("ranks_program.py[" in facts["site"] for facts in extra)
    assert {facts["group"] for facts in extra} == {"0-1"}


def test_replicas_that_drift_apart(out: Path) -> None:
    """The weight that one rank has changed is named, by the lowest rank, from that step on; gradients were the same."""
    first = [json.loads(line) for line in next((out / "monitor").glob("*-rank0-*/alerts.jsonl")).read_text().splitlines()]
    found = [alert for alert in first if alert["rule"] == "replica_mismatch"]
    assert [(a["name"], a["step"]) for a in found][:1] == [("second.bias", 2)]
    assert "param" in found[0]["kind"]
    assert not list((out / "monitor").glob("*-rank1-*/alerts.jsonl"))
    assert not (out / "replicas").exists()


def test_all_ranks_write_the_incident(out: Path) -> None:
    """An alert of rank 0 makes both ranks write their last steps into one directory."""
    (incident,) = [path for path in (out / "incidents").iterdir() if path.name.startswith("step")]
    assert {path.name for path in incident.glob("samples_rank*")} == {"samples_rank0.jsonl", "samples_rank1.jsonl"}


@pytest.mark.parametrize("setting", ["collectives: true, collective_sites: [nowhere]", "collective_stacks: true"])
def test_a_call_without_a_sample_hides_no_later_ones(setting: str, tmp_path: Path) -> None:
    """While such a function runs its operators are left out; behind it, calls are looked at again."""
    file = tmp_path / "probe.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmonitor: {{enabled: true, {setting}}}\n")
    probe = MindSporeProbe.from_config(file)
    try:
        probe.attach(nn.Dense(3, 2))
        probe.begin_step(0)
        assert probe._watch is not None
        watch = CollectiveWatch(probe._watch)
        watch._installed = True  # as it is where ranks are joined
        note = watch.begin_call("MintDistributed", "all_reduce", (ms.Tensor([1.0]),), {})
        assert not watch.sees()
        watch.end_call(note, None)
        assert watch.sees()
    finally:
        probe.close()
