"""What the paths of a comparison mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.align.sources import add_calibration, from_json, numbers, pair_paths
from msprobe_engine.core.errors import DumpFormatError, UsageError

NAMES = (("target", "proc1"), ("golden", "proc2"), ("moved", "proc3"))


def make(root: Path, *ranks: str, kind: str = "dump.json") -> Path:
    """Empty dump files at ``step0/rank1`` and so on."""
    for rank in ranks:
        (root / rank).mkdir(parents=True)
        (root / rank / kind).write_text('{"task": "statistics", "data": {}}')
    return root


def test_ranks_go_by_number_and_strays_are_said(tmp_path: Path) -> None:
    """rank10 comes after rank2 and belongs to rank10; a file beside the ranks is left alone and named."""
    a = make(tmp_path / "a/step0", "rank10", "rank2", "rank0")
    b = make(tmp_path / "b/step0", "rank2", "rank10", "rank0")
    (a / "notes.txt").write_text("")
    found = pair_paths(a, b)
    assert [(t.step, t.rank, t.target.parent.name, t.golden.parent.name) for t in found.tasks] == [
        (0, 0, "rank0", "rank0"),
        (0, 2, "rank2", "rank2"),
        (0, 10, "rank10", "rank10"),
    ]
    assert [t.stem for t in found.tasks] == ["compare_result_rank0", "compare_result_rank2", "compare_result_rank10"]
    assert "notes.txt" in found.notes[0]
    assert not found.lost


def test_unequal_numbers_of_ranks_are_said(tmp_path: Path) -> None:
    """The ranks that both have are compared; the others are named as lost."""
    found = pair_paths(make(tmp_path / "a/step0", "rank0", "rank1", "rank2"), make(tmp_path / "b/step0", "rank0", "rank2"))
    assert [t.rank for t in found.tasks] == [0, 2]
    assert any("3 ranks against 2" in note for note in found.notes)
    assert found.lost == ["Step 0: ranks only in the target: 1."]


def test_ranks_of_other_numbers_are_paired_in_order(tmp_path: Path) -> None:
    """Nodes that are compared with another node's ranks: rank8 with rank0, and so on."""
    found = pair_paths(make(tmp_path / "a/step0", "rank8", "rank9", "rank10"), make(tmp_path / "b/step0", "rank0", "rank1", "rank2"))
    assert [(t.target.parent.name, t.golden.parent.name) for t in found.tasks] == [
        ("rank8", "rank0"),
        ("rank9", "rank1"),
        ("rank10", "rank2"),
    ]
    assert "paired in their order" in found.notes[0]


def test_processes_without_ranks(tmp_path: Path) -> None:
    """One directory of a process belongs to one other, whatever the numbers; of several nobody knows which."""
    assert len(pair_paths(make(tmp_path / "a/step0", "proc11"), make(tmp_path / "b/step0", "rank")).tasks) == 1
    with pytest.raises(UsageError, match="cannot be told"):
        pair_paths(make(tmp_path / "c/step0", "proc1", "proc2"), make(tmp_path / "d/step0", "proc3", "proc4"))


def test_single_steps_of_other_numbers_are_said(tmp_path: Path) -> None:
    """Dumps with one step each are compared whatever its number; that the numbers differ is said, and nothing when they do not."""
    a, b = make(tmp_path / "a", "step3/rank0"), make(tmp_path / "b", "step5/rank0")
    found = pair_paths(a, b)
    assert [(t.step, t.golden.parent.parent.name) for t in found.tasks] == [(3, "step5")]
    assert found.notes == ["Step 3 is compared with step 5 of the golden dump: each has one step only."]
    assert not pair_paths(a, make(tmp_path / "c", "step3/rank0")).notes


def test_roots_steps_and_filters(tmp_path: Path) -> None:
    """Of roots all steps that both have are compared, each in its folder; --step and --rank choose."""
    a = make(tmp_path / "a", *(f"step{s}/rank{r}" for s in (0, 2, 10) for r in (0, 1)))
    b = make(tmp_path / "b", *(f"step{s}/rank{r}" for s in (2, 10, 11) for r in (0, 1)))
    assert [t.key for t in pair_paths(a, b).tasks] == [f"step{s}/compare_result_rank{r}" for s in (2, 10) for r in (0, 1)]
    found = pair_paths(a, b, steps={10, 0}, ranks={1})
    assert [t.key for t in found.tasks] == ["step10/compare_result_rank1"]
    assert "Steps 0 were asked for" in found.lost[0]
    assert [t.key for t in pair_paths(a / "step2", b / "step10").tasks] == ["./compare_result_rank0", "./compare_result_rank1"]


def test_mixed_dumps(tmp_path: Path) -> None:
    """The folders of a mixed dump are compared each with its own (26.2.0)."""
    a = make(tmp_path / "a", "graph/step0/rank0", "pynative/step0/rank0")
    b = make(tmp_path / "b", "graph/step0/rank0", "pynative/step0/rank0")
    assert [t.folder for t in pair_paths(a, b).tasks] == ["graph/step0", "pynative/step0"]


def test_files(tmp_path: Path) -> None:
    """Two files are one pair; a file against the directory that holds one too; kinds must be the same."""
    a, b = make(tmp_path / "a", "rank0") / "rank0", make(tmp_path / "b", "rank0") / "rank0"
    assert pair_paths(a / "dump.json", b / "dump.json").tasks[0].stem == "compare_result"
    assert pair_paths(a / "dump.json", b).tasks[0].golden == b / "dump.json"
    (b / "debug.json").write_text("{}")
    with pytest.raises(UsageError, match="two of one kind"):
        pair_paths(a / "dump.json", b / "debug.json")
    with pytest.raises(UsageError, match=r"file and .* a directory"):
        pair_paths(a / "dump.json", tmp_path)
    with pytest.raises(DumpFormatError, match="no such file or directory"):
        pair_paths(tmp_path / "no", b)


def test_json_of_8_1_1(tmp_path: Path) -> None:
    """Keys and types are checked; those of MindSpore's static graphs are empty when the file has none (`test_static_graphs.py`)."""
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"npu_path": "a", "bench_path": "b"}))
    found = from_json(path)
    assert {key: value for key, value in found.items() if value} == {"npu_path": "a", "bench_path": "b", "is_print_compare_log": True}
    for wrong, word in (
        ({"npu_path": "a"}, "bench_path"),
        ([], "list"),
        ({"npu_path": "a", "bench_path": "b", "rank_id": [True]}, "rank_id"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=word):
            from_json(path)


@pytest.mark.parametrize(("text", "expected"), [("0,2,4-6", {0, 2, 4, 5, 6}), ("", set()), (None, set()), (" 7 ", {7})])
def test_numbers(text: str | None, expected: set[int]) -> None:
    """Numbers and ranges."""
    assert numbers(text, "--rank") == expected


@pytest.mark.parametrize("text", ["a", "1-", "-1", "5-3", "1--2", "0-99999999999", "1" * 50])
def test_what_is_no_number_is_refused(text: str) -> None:
    """With the part that is wrong."""
    with pytest.raises(UsageError, match="--rank"):
        numbers(text, "--rank")


@pytest.mark.parametrize("turned", [False, True])
def test_the_directory_of_one_process_is_rank_0(tmp_path: Path, turned: bool) -> None:
    """Beside several ranks too, on either side: rank 0 is compared with it, and the others are said to be on one side only."""
    one, many = make(tmp_path / "a/step0", "proc8519"), make(tmp_path / "b/step0", "rank0", "rank1")
    found = pair_paths(one, many) if turned else pair_paths(many, one)
    assert [task.stem for task in found.tasks] == ["compare_result_rank0"]
    assert [task.rank for task in found.tasks] == [0]
    assert found.lost == [f"Step 0: ranks only in the {'golden' if turned else 'target'}: 1."]
    assert len(pair_paths(one, many, ranks={0}).tasks) == len(pair_paths(many, one, ranks={0}).tasks) == 1


def test_calibration_of_one_process(tmp_path: Path) -> None:
    """The process number is another one in every run; all steps find theirs."""
    target, golden, moved = (make(tmp_path / name, *(f"step{s}/{rank}" for s in range(2))) for name, rank in NAMES)
    sources = pair_paths(target, golden)
    add_calibration(sources, [moved])
    assert [task.calibration for task in sources.tasks] == [(moved / f"step{s}/proc3/dump.json",) for s in range(2)]
    assert not sources.notes
    several = pair_paths(make(tmp_path / "d", "step0/rank0", "step0/rank1"), make(tmp_path / "e", "step0/rank0", "step0/rank1"))
    add_calibration(several, [moved])
    assert [len(task.calibration) for task in several.tasks] == [1, 0]
