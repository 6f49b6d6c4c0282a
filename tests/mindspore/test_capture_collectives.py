"""Communication in a capture, on two processes started by msrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


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
