"""The incident directory: rank files, samples, merge."""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames_of_lists import frame_of

from msprobe_engine.align.sources import pair_paths
from msprobe_engine.cli.options.inputs import warn_same_files
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.statistics import histograms
from msprobe_engine.find.detect import Run
from msprobe_engine.find.nonfinite import incident_samples
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.opened import open_path
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.ring_file import append_step, ring_file, steps_of
from msprobe_engine.formats.monitor.convert.data2db import data2db
from msprobe_engine.formats.run.overview import read_overview
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.files import append_lines, rank_file
from msprobe_engine.probe.incident.merge import combine, merge
from msprobe_engine.probe.incident.pieces import Pieces, read_piece
from msprobe_engine.probe.incident.writer import Capture, write_incident

EVENT = Event("step5-nan_inf", 5, "nan_inf", 1, 7, "rank 1 is NaN")


def write(directory: Path, frame: Any, alert: Any, rank: int, *, world: int = 2, late: bool = False) -> None:
    frames = [frame(step, rank, bad=step == 5) for step in (3, 4, 5)]
    write_incident(
        directory, frames, [alert(5, rank)], event=EVENT, rank=rank, world_size=world, capture=Capture("mix", 8 if late else 7, 1, late)
    )


def strict(path: Path | str) -> Any:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(path if isinstance(path, str) else path.read_text(), parse_constant=refuse)


def piece_of(directory: Path, rank: int) -> dict[str, Any]:
    piece = read_piece(directory / f"samples_rank{rank}.jsonl")
    assert piece is not None
    return piece


def test_what_a_rank_says_is_found_behind_and_before_any_number_of_samples(tmp_path: Path) -> None:
    """The last whole line that says something counts: a line cut off by a kill or a full disk costs itself only, and what is appended later
    is not taken for a part of it."""
    path = rank_file(tmp_path, 0)
    says = {"version": 1, "state": "writing", "event": {"step": 5}, "rank": 0, "world_size": 1}
    samples = [{"step": 5, "order": number, "name": "w" * 100} for number in range(2000)]
    append_lines(path, [says, *samples])
    assert path.stat().st_size > 1 << 17
    assert (read_piece(path) or {})["state"] == "writing"
    with path.open("a") as file:
        file.write(json.dumps(says | {"state": "complete"})[:30])
    assert (read_piece(path) or {})["state"] == "writing"
    append_lines(path, [says | {"state": "complete"}])
    assert (read_piece(path) or {})["state"] == "complete"
    assert [len(trace.calls) for trace in incident_samples.load(Run(tmp_path).samples, []).get(5, {}).values()] == [0]


def test_a_cut_off_step_is_not_read_as_a_whole_one(tmp_path: Path, frame: Any, alert: Any) -> None:
    """The steps of a rank are appended to one file: a process killed in the midst leaves a part of one, which is said when it is read; the
    steps before it are whole, and so is what is appended later."""
    write(tmp_path, frame, alert, 0, world=1)
    path = ring_file(tmp_path, 0)
    text = path.read_bytes()
    ends = [stop for _, stop in steps_of(path).values()]
    for cut in range(0, len(text) - 1, 97):
        path.write_bytes(text[:cut])
        whole = {step for step, end in zip((3, 4, 5), ends) if end - 1 <= cut}  # the last byte is the bracket's, or a line break
        for step in steps_of(path):
            if step in whole:
                assert len(read_side(tmp_path / f"step{step}/rank0/dump.json")) == 2
            else:
                with pytest.raises(DumpFormatError):
                    read_side(tmp_path / f"step{step}/rank0/dump.json")
        append_step(path, 9, [text[slice(*steps_of_text(text)[5])]])
        assert len(read_side(tmp_path / "step9/rank0/dump.json")) == 2


def steps_of_text(text: bytes) -> dict[int, tuple[int, int]]:
    found = [(int(one[1]), one.end(), int(one[2])) for one in re.finditer(rb"\n#msprobe step (\d+), (\d+) bytes\n", text)]
    return {step: (start, start + size) for step, start, size in found}


def test_a_damaged_line_costs_its_step_which_is_said(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Where the line in front of a step is damaged its number is not known: the other steps are read, and the damage is said. A wrong size
    in it costs nothing."""
    write(tmp_path, frame, alert, 0, world=1)
    path = ring_file(tmp_path, 0)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"step 4, ", b"step 4, 1"))
    assert steps_of(path) == steps_of_text(text) | {step: (a + 1, b + 1) for step, (a, b) in steps_of_text(text).items() if step > 3}
    path.write_bytes(text.replace(b"step 4, ", b"step x, "))
    dump = open_dump(tmp_path)
    assert dump.steps == [3, 5]
    (said,) = missing_steps(dump)
    assert str(path) in said
    assert "steps may be missing" in said


def test_steps_in_one_file_and_in_a_file_each_are_read_alike(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Earlier versions wrote a file for each step of the ring. Both layouts have the same steps, ranks and values under the same paths,
    whichever of these is given, and lead to the same answers."""
    for rank in (0, 1):
        write(tmp_path, frame, alert, rank)
    places = ("", "step4", "step4/rank1", "step5/rank0/dump.json")

    def told() -> list[Any]:
        found: list[Any] = [Run(tmp_path).kind, nan_analyze(tmp_path).findings, read_overview(tmp_path).dumps["."].keys()]
        for place in places:
            dump = open_dump(tmp_path / place)
            found += [(step, rank, dump.load(step, rank)) for step in dump.steps for rank in dump.ranks(step)]
            found += [(task.target, task.step, task.rank, task.size) for task in pair_paths(tmp_path / place, tmp_path / place).tasks]
            found += [missing_steps(dump), *(missing_ranks(dump, step) for step in dump.steps)]
            found.append(warn_same_files(tmp_path / place, tmp_path / place))
        found += [read_overview(tmp_path / "step4").text(), repr(open_path(tmp_path / places[-1]))]
        (made,) = data2db(tmp_path / f"db{len(list(tmp_path.glob('db*')))}", tmp_path / "step4", "dump")
        found += [made.rows, made.problems]
        return [str(one) for one in found]

    packed = told()
    for rank in (0, 1):
        path = ring_file(tmp_path, rank)
        text = path.read_bytes()
        path.unlink()
        for step, (start, stop) in steps_of_text(text).items():
            file = tmp_path / f"step{step}/rank{rank}/dump.json"
            file.parent.mkdir(parents=True)
            file.write_bytes(text[start:stop])
    assert packed == told()
    assert sum("DumpedTensor" in one for one in packed) == 6 + 2 + 1 + 1


def test_what_takes_the_place_of_kept_steps(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A directory without a dump takes nothing away from what the ring had kept; a dump in it counts, and is listed once. They hold no
    other file. A file that a killed run has only created is said, and with exit code 3 where the directory is listed. What rings hold is
    the same through a link."""
    for name in ("a", "b"):
        write(tmp_path / name, frame, alert, 0, world=1)
    place = tmp_path / "a/step5/rank0"
    place.mkdir(parents=True)
    assert open_dump(tmp_path / "a").ranks(5) == [0]
    assert len(read_side(place / "dump.json")) == 2
    assert "step 5: rank0\n" in read_overview(tmp_path / "a").text() + "\n"
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L0", "data": {}}))
    assert len(read_side(place / "dump.json")) == 0
    assert "step 5: rank0\n" in read_overview(tmp_path / "a").text() + "\n"
    assert not warn_same_files(tmp_path / "a/step4", tmp_path / "b/step4")
    ring_file(tmp_path / "b", 0).unlink()
    ring_file(tmp_path / "b", 0).symlink_to(ring_file(tmp_path / "a", 0))
    assert warn_same_files(tmp_path / "a/step4", tmp_path / "b/step4")
    assert not warn_same_files(tmp_path / "a/step4", tmp_path / "b/step3")
    for root in ("a", "b"):
        for name in ("step3/rank0/debug.json", "step5/rank0/debug.json", "step3/rank1/dump.json"):
            with pytest.raises(DumpFormatError, match="no such file"):
                _ = Run(tmp_path / root / name).kind
    ring_file(tmp_path / "a", 1).touch()
    (said,) = missing_steps(open_dump(tmp_path / "a/step4"))
    assert f"{ring_file(tmp_path / 'a', 1)}: is empty" in said
    assert read_overview(tmp_path / "a").lost == [said]


def test_files_of_one_rank(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A rank writes its steps into one file, samples as strict JSON lines, its rank file and the merged files, mode 0640."""
    write(tmp_path / "i", frame, alert, 0)
    assert {p.name for p in (tmp_path / "i").iterdir()} == {
        "ring_rank0.steps", "samples_rank0.jsonl", "finished", "incident.json", "summary.md",
    }  # fmt: skip
    dump = open_dump(tmp_path / "i")
    assert dump.steps == [3, 4, 5]
    assert list(dump.load(5).entries) == ["Module.fc.Linear.forward.0"]
    *lines, piece = (strict(line) for line in (tmp_path / "i/samples_rank0.jsonl").read_text().splitlines())
    assert lines.pop(0)["state"] == "writing"
    assert [line["step"] for line in lines if "name" in line] == [3, 4, 5]
    assert lines[-1]["statistics"]["nans"] == 1
    assert lines[-2]["scalars"]["loss"] == "NaN"
    assert piece["state"] == "complete"
    assert (tmp_path / "i/incident.json").stat().st_mode & 0o777 == 0o640


def test_rows_without_a_name_are_no_worst_records(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Rows that belong to no record (histograms, whose words are counts) push none of the records out of the list of the worst."""
    bad = frame(5, 0, bad=True)
    counts = histograms.to_rows(np.full(50, 9), 10)
    bad = replace(bad, rows=np.concatenate([bad.rows, *[counts] * 20]))
    write_incident(tmp_path, [bad], [alert(5, 0)], event=EVENT, rank=0, world_size=1, capture=Capture("mix", 7, 1, False))
    worst = piece_of(tmp_path, 0)["worst"]
    assert [record["name"] for record in worst][:2] == ["Module.fc.Linear.forward.0.output.0", "grad_reduced/fc.weight"]


def test_missing_and_late_ranks_are_named(tmp_path: Path, frame: Any, alert: Any) -> None:
    """incident.json and summary.md name ranks that wrote nothing, that did not finish, and that were late."""
    write(tmp_path, frame, alert, 0, world=4)
    write(tmp_path, frame, alert, 2, world=4, late=True)
    (tmp_path / "samples_rank3.jsonl").write_text(json.dumps({**piece_of(tmp_path, 0), "rank": 3, "state": "writing"}) + "\n")
    merge(tmp_path)
    incident = strict(tmp_path / "incident.json")
    assert (incident["ranks_complete"], incident["ranks_writing"], incident["ranks_missing"]) == ([0, 2], [3], [1])
    assert incident["ranks_late"] == [2]
    assert incident["first_nonfinite"][0]["name"] == "Module.fc.Linear.forward.0.output.0"
    assert incident["capture"]["first_step"] == 7
    text = (tmp_path / "summary.md").read_text()
    assert "ranks 1: wrote nothing" in text
    assert "msprobe diagnose " in text


def test_merge_is_idempotent(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Merging again changes no byte, and the order in which ranks came does not matter."""
    write(tmp_path / "a", frame, alert, 0)
    write(tmp_path / "a", frame, alert, 1)
    write(tmp_path / "b", frame, alert, 1)
    write(tmp_path / "b", frame, alert, 0)
    before = (tmp_path / "a/incident.json").read_bytes()
    merge(tmp_path / "a")
    assert (tmp_path / "a/incident.json").read_bytes() == before == (tmp_path / "b/incident.json").read_bytes()


def test_ranks_race(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Whatever the interleaving, the last merged file has seen all ranks."""
    threads = [threading.Thread(target=write, args=(tmp_path, frame, alert, rank), kwargs={"world": 8}) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strict(tmp_path / "incident.json")["ranks_complete"] == list(range(8))
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(
    "changes",
    [
        None, {"event": 5}, {"event": {"step": "x"}}, {"world_size": 10**12}, {"world_size": "x"}, {"steps": ["x"]}, {"steps": 5},
        {"levels": [1]}, {"alerts": [5]}, {"alerts": [{"rule": "x", "step": 1}]}, {"worst": [{"name": "x"}]}, {"lost": {"x": "y"}},
        {"first_nonfinite": {"step": "x"}}, {"capture": {"level": "mix"}}, {"rerun": {"differences": 5}},
    ],
)  # fmt: skip
def test_foreign_rank_files(tmp_path: Path, frame: Any, alert: Any, changes: dict[str, Any] | None) -> None:
    """A torn or foreign rank file, or one with values of other types, does not stop the merge; a million ranks are no job."""
    write(tmp_path, frame, alert, 0)
    line = json.dumps(piece_of(tmp_path, 0) | (changes or {})) + "\n"
    (tmp_path / "samples_rank1.jsonl").write_text(line[: len(line) // 2] if changes is None else line)
    merge(tmp_path)
    assert list(Pieces(tmp_path).read()) == [0]
    assert combine(Pieces(tmp_path).read())["ranks_missing"] == [1]


def test_samples_only(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Frames without calls make no dump directory."""
    write_incident(tmp_path, [frame(1, entries=False)], [alert(1)], event=EVENT, rank=0, world_size=1)
    assert not (tmp_path / "step1").exists()
    assert strict(tmp_path / "incident.json")["levels"] == []


def test_a_mask_is_not_where_it_began(tmp_path: Path) -> None:
    """The -Inf of an attention mask in an earlier step is passed over; the first NaN that the rule fires for is named."""
    mask = {"Tensor.masked_fill.0.forward": [0.0, -math.inf]}
    frames = [frame_of(entries=mask, step=4), frame_of(entries={**mask, "Torch.log.0.forward": [math.nan]}, step=5)]
    write_incident(tmp_path, frames, [], event=EVENT, rank=1, world_size=2)
    (first,) = strict(tmp_path / "incident.json")["first_nonfinite"]
    assert (first["step"], first["name"]) == (5, "Torch.log.0.forward.output.0")
    text = (tmp_path / "summary.md").read_text()
    assert "- complete: 1 of 2 ranks (rank 1)" in text
    assert f"msprobe diagnose {tmp_path}\n" in text
