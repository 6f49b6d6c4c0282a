"""Ranks that differ in nothing but the ranks they name are read and walked once, and everything is found as if each had been."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.difference.divergence import diverge
from msprobe_engine.find.findings import finite_json
from msprobe_engine.find.nonfinite import first_over_ranks
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.replicas import reader, template
from msprobe_engine.formats.dump.replicas.reader import ReplicaReader
from msprobe_engine.formats.dump.replicas.shared_columns import SharedColumns, own_columns
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps

RANKS = 8
NAN = float("nan")


def _tensor(value: float) -> dict[str, Any]:
    numbers = {"Max": value, "Min": -value, "Mean": value / 2, "Norm": value * 1.5}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "requires_grad": True} | numbers


def _run(root: Path, off: dict[int, float], ranks: int = RANKS, **header: Any) -> Path:
    """Ranks compute, sum over their pair, and send around a ring; on ranks of `off` the result of the first call is another one."""
    for rank in range(ranks):
        pair = [rank & ~1, rank | 1]
        group = {"type": "torch.ProcessGroup", "group_ranks": pair, "group_id": f"g{rank // 2}"}
        peer = {"class_type": "torch.distributed.P2POp", "op": "isend", "peer": (rank + 1) % ranks, "tag": 0, "group_id": f"g{rank // 2}"}
        made = _tensor(off.get(rank, 2.0))
        records = {
            "Functional.relu.0.forward": {"input_args": [_tensor(1.0)], "input_kwargs": {}, "output": [made]},
            "Distributed.all_reduce.0.forward": {
                "input_args": [made],
                "input_kwargs": {"group": group},
                "output": [_tensor(off.get(rank, 2.0) + off.get(rank ^ 1, 2.0))],
                "tags": {"group_ranks": pair, "reduce": "sum"},
            },
            "Distributed.batch_isend_irecv.0.forward": {
                "input_args": [[{**peer, "tensor": _tensor(3.0)}]],
                "input_kwargs": {},
                "output": [],
            },
        }
        directory = root / "step0" / f"rank{rank}"
        directory.mkdir(parents=True)
        text = json.dumps({"task": "statistics", "level": "mix", "rank": rank, "world_size": ranks, **header, "data": records}, indent=1)
        (directory / "dump.json").write_text(text)
        (directory / "construct.json").write_text(json.dumps(dict.fromkeys(records)))
        (directory / "stack.json").write_text("{}")
    return root


def _read(root: Path, reader: ReplicaReader, ranks: int = RANKS) -> dict[int, DumpTable]:
    return {rank: reader.read(root / "step0" / f"rank{rank}" / "dump.json") for rank in range(ranks)}


def test_a_view_says_what_the_file_says(tmp_path: Path) -> None:
    """Every column of every rank, its own groups and peers among them, is that of the file read for itself."""
    tables = _read(_run(tmp_path, {3: 2.5}), ReplicaReader(SharedColumns()))
    for rank, view in tables.items():
        alone = read_side(view.path)
        assert view.template is not None
        for field in dataclasses.fields(DumpTable):
            if field.name not in ("template", "named_ranks"):
                mine, its = getattr(view, field.name), getattr(alone, field.name)
                mine = type(its)(mine) if isinstance(its, (dict, list)) else mine
                assert repr(mine) == repr(its), (rank, field.name)
        assert view.construct == alone.construct


def test_memory_follows_the_ranks_that_differ(tmp_path: Path) -> None:
    """Eight ranks of which one is off: two templates, and views hold no columns of their own."""
    tables = _read(_run(tmp_path, {3: 2.5}), ReplicaReader(SharedColumns()))
    assert len({id(table.template) for table in tables.values()}) == 3, "rank 2 gets another sum"
    assert all(table.numbers is tables[0].numbers and table.name is tables[0].name for table in (tables[1], tables[7]))
    assert tables[0].named_ranks != tables[4].named_ranks


def test_ranks_are_walked_once(tmp_path: Path) -> None:
    reader = ReplicaReader(SharedColumns())
    target, golden = _read(_run(tmp_path / "run", {3: 2.5}), reader), _read(_run(tmp_path / "golden", {}), reader)
    found = diverge(target, golden)
    assert len({id(walker) for walker in found.walkers.values()}) == 3
    assert sorted(found.walks) == list(range(RANKS))


@pytest.mark.parametrize(
    "off",
    [
        {3: 2.5},
        dict.fromkeys(range(RANKS), 2.5),
        {3: NAN},
        dict.fromkeys(range(RANKS), NAN),
        {2: 2.5, 3: 2.25, 7: 2.25},
        {},
    ],
)
def test_the_diagnosis_is_that_of_all_ranks_read(off: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ranks a difference is on, how many records differ, what is said: all as without replicas."""
    target, golden = _run(tmp_path / "run", off), _run(tmp_path / "golden", {})
    once = diagnose(target, golden)
    alone = diagnose(target)
    monkeypatch.setattr(template, "MOST_BYTES", 0)
    assert finite_json(once.as_json()) == finite_json(diagnose(target, golden).as_json())
    assert finite_json(alone.as_json()) == finite_json(diagnose(target).as_json())


def test_other_groups_are_no_replicas_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose collective has other members than on the golden side is named; the others are not."""
    target, golden = _run(tmp_path / "run", {}), _run(tmp_path / "golden", {})
    file = target / "step0" / "rank5" / "dump.json"
    file.write_text(json.dumps(_with_group(json.loads(file.read_text()), [4, 5, 6]), indent=1))
    found = diagnose(target, golden)
    assert [(suspect.rank, suspect.kind) for suspect in found.suspects] == [(5, "group")]
    monkeypatch.setattr(template, "MOST_BYTES", 0)
    assert found.as_json() == diagnose(target, golden).as_json()


def _with_group(document: dict[str, Any], group: list[int]) -> dict[str, Any]:
    document["data"]["Distributed.all_reduce.0.forward"]["tags"]["group_ranks"] = group
    return document


def test_what_is_missing_of_a_replica_is_said_of_it(tmp_path: Path) -> None:
    """A rank whose file is cut off, one that lost records and one without construct.json are named, each by itself."""
    target, golden = _run(tmp_path / "run", {}, written_with=["stack.json", "construct.json"]), _run(tmp_path / "golden", {})
    places = [target / "step0" / f"rank{rank}" for rank in (1, 2, 3)]
    text = (places[0] / "dump.json").read_text()
    (places[0] / "dump.json").write_text(text[: len(text) // 2])
    (places[1] / "dump.json").write_text((places[1] / "dump.json").read_text().replace('"level"', '"lost": {"queue full": 3},\n "level"'))
    (places[2] / "construct.json").unlink()
    problems = diagnose(target, golden).problems
    for place, words in zip(places, ("ends in the middle", "queue full 3", "construct.json")):
        assert any(str(place) in problem and words in problem for problem in problems), (words, problems)


def test_texts_that_look_like_marks_are_read_for_themselves(tmp_path: Path) -> None:
    """A file that holds the words with which places are marked is no template."""
    root = _run(tmp_path, {}, ranks=2)
    file = root / "step0" / "rank0" / "dump.json"
    file.write_text(file.read_text().replace('"g0"', '"#msprobe rank 0"'))
    view = ReplicaReader(SharedColumns()).read(file)
    assert view.template is None
    assert view.collectives == read_side(file).collectives


def test_a_view_can_be_made_a_table_of_its_own(tmp_path: Path) -> None:
    tables = _read(_run(tmp_path, {}), ReplicaReader(SharedColumns()))
    own_columns(tables[0])
    tables[0].values.clear()
    tables[0].collectives[1]["tags"]["reduce"] = "max"
    assert tables[1].values
    assert tables[1].collectives[1]["tags"]["reduce"] == "sum"


def test_a_nan_of_very_many_ranks_is_one_suspect(tmp_path: Path) -> None:
    """It says on which ranks it is the same; another place is another suspect."""
    found = diagnose(_run(tmp_path, dict.fromkeys(range(0, 48, 2), NAN), ranks=48))
    assert [(suspect.rank, suspect.record) for suspect in found.suspects] == [(0, "Functional.relu.0.forward")]
    assert any("the same on ranks 0, 2, 4" in line for line in found.evidence)


def test_ranks_are_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many times as there are different ranks, with what comes to them from others; where a collective brings a NaN to a rank of every
    pair, that is not said to be born there."""
    scanned: list[int] = []
    scan = first_over_ranks.scan
    monkeypatch.setattr(first_over_ranks, "scan", lambda trace, *rest, **more: scanned.append(trace.rank) or scan(trace, *rest, **more))
    result = nan_analyze(_run(tmp_path, {2: NAN}))
    assert [(item["rank"], item["op_name"]) for item in result.findings] == [(2, "Functional.relu.0.forward")]
    assert scanned == [0, 2, 3]


@pytest.mark.parametrize("command", ["diagnose", "compare"])
def test_a_file_is_read_once_though_it_is_looked_at_again(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the finding both runs are searched for what is not finite, of which a mask has some; compare tells equal ranks by what the
    diagnosis reads. The result is that of two looks."""
    off = {3: 2.5}
    target, golden = _run(tmp_path / "run", off), _run(tmp_path / "golden", {})
    for side in (target, golden):
        _put(side, 7, "Functional.mask.0.forward", {"Max": 0.0, "Min": -math.inf, "Mean": -math.inf, "Norm": math.inf})
    opened: list[Path] = []
    read = template.read_step_file

    def counted(path: Path, most: int) -> bytes:
        opened.append(path)
        return read(path, most)

    monkeypatch.setattr(template, "read_step_file", counted)
    monkeypatch.setattr("msprobe_engine.report.table.same_ranks.MANY", 0)

    def look() -> Any:
        if command == "diagnose":
            return finite_json(diagnose(target, golden).as_json())
        found = compare_dumps(target, golden, tmp_path / "out", CompareOptions(scheduler="serial", memory_mb=0)).diagnosis
        assert found is not None
        return finite_json(found.as_json())

    once = look()
    dumps = [path for path in opened if path.name == "dump.json"]
    assert len(dumps) == len(set(dumps)) == 2 * RANKS
    monkeypatch.setattr(reader.StepTables.__init__, "__defaults__", (0, ""))
    monkeypatch.setattr("msprobe_engine.find.run.KEPT", 0)
    opened.clear()
    assert look() == once
    assert len(opened) > 2 * RANKS


def _put(root: Path, rank: int, name: str, numbers: dict[str, float]) -> None:
    file = root / "step0" / f"rank{rank}" / "dump.json"
    document = json.loads(file.read_text())
    document["data"][name] = {"input_args": [_tensor(1.0)], "input_kwargs": {}, "output": [_tensor(1.0) | numbers]}
    file.write_text(json.dumps(document, indent=1))
