"""Dumps and mapping files that are damaged, incomplete or hostile: what can be read is compared, what cannot is said, and the exit code is
3."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import dump, pair, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msprobe_engine.align.mapping.api import _entries
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.mapping_file import texts
from msprobe_engine.report.table.api import compare_dumps

CALL = "Functional.linear.2.forward"
EVIL = "\x1b]0;t\x07\x1b[2J\nforged\r\u202e</script><script>alert(1)</script><img src=x onerror=alert(1)>\x00"
FEW = settings(suppress_health_check=list(HealthCheck))


def commands(target: Path, golden: Path, out: Path) -> list[list[str]]:
    """Every command that takes dumps, in both generations."""
    old = out / "compare.json"
    out.mkdir(parents=True, exist_ok=True)
    old.write_text(json.dumps({"npu_path": str(target / "step0"), "bench_path": str(golden / "step0")}))
    both = ["-tp", str(target), "-gp", str(golden), "-o", str(out)]
    return [
        ["compare", *both, "--csv", "--html"],
        ["compare", *both, "--compat"],
        ["-f", "pytorch", "compare", "-i", str(old), "-o", str(out)],
        ["compare", "-da", *both],
        ["diagnose", str(target), str(golden), "-o", str(out)],
        ["diagnose", str(target), "-o", str(out)],
        ["nan_analyze", "-i", str(target), "-o", str(out)],
    ]


def edit(rank: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the records of a dump."""
    document = json.loads((rank / "dump.json").read_text())
    change(document["data"])
    (rank / "dump.json").write_text(json.dumps(document, indent=1))


def put(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Change an output of the third call."""
    return lambda data: data[CALL]["output"][0].update(fields)


def ends_well(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command: it ends with a code of its own, and nothing that a terminal obeys is printed."""
    code = main(argv)
    shown = "".join(capsys.readouterr())
    assert "This is a bug" not in shown, shown
    assert "unexpected" not in shown, shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert code in (0, 1, 2, 3)
    return code


@given(share=st.floats(0, 1), name=st.sampled_from(["dump.json", "stack.json", "construct.json"]))
@FEW
def test_a_file_that_was_cut_off(share: float, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever: dump.json is said with its name; without stack.json and construct.json the rows are there, and the code is 3."""
    with tempfile.TemporaryDirectory() as root:
        target, golden = pair(Path(root), 1)
        file = target / "step0/rank0" / name
        data = file.read_bytes()
        keep = data[: int(share * len(data))]
        file.write_bytes(keep)
        whole = len(keep) >= len(data.rstrip())
        found = compare_dumps(target, golden, Path(root) / "out")
        assert found.exit_code == (0 if whole else 3)
        assert whole or str(file) in " ".join(found.all_problems)
        assert sum(result.rows for result in found.results) == (0 if name == "dump.json" and not whole else 24)
        code = 0 if whole else 2 if name == "dump.json" else 3
        for argv in commands(target, golden, Path(root) / "out")[5:]:
            assert ends_well(argv, capsys) == code


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(EVIL), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a document."""
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in inside for place in places(child, (*path, key)))]


@pytest.mark.slow
@given(data=st.data(), value=JSON)
@FEW
def test_any_value_at_any_place(data: st.DataObject, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No value anywhere in dump.json, stack.json or construct.json makes a command fail in another way than by a message."""
    with tempfile.TemporaryDirectory() as root:
        target, golden = pair(Path(root), 1, calls=3)
        edit(target / "step0/rank0", lambda records: records.update({"Distributed.all_reduce.0.forward": reduction()}))
        file = target / "step0/rank0" / data.draw(st.sampled_from(["dump.json", "dump.json", "stack.json", "construct.json"]))
        document = json.loads(file.read_text())
        *way, last = data.draw(st.sampled_from(places(document)[1:]))
        node = document
        for key in way:
            node = node[key]
        node[last] = value
        file.write_text(json.dumps(document, indent=1))
        for argv in commands(target, golden, Path(root) / "out"):
            ends_well(argv, capsys)


def reduction() -> dict[str, Any]:
    group = {"type": "torch.ProcessGroup", "group_ranks": [0], "group_id": "x"}
    tags = {"group_ranks": [0], "reduce": "sum"}
    return {"input_args": [tensor(2.0)], "input_kwargs": {"group": group}, "output": [tensor(2.0)], "tags": tags}


def nested(depth: int) -> Any:
    found: Any = tensor(1.0)
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "change",
    [
        put(shape=[10**30, 10**30]),
        put(shape=[-4, 4]),
        put(shape=[[4], [4]]),
        put(shape=["4", "4"]),
        put(shape=[4.5, math.nan]),
        put(shape={"a": 1}),
        put(Max=10**400, Min=-(10**400)),
        put(Max="1.0", Min="-inf", Mean="junk", Norm=[]),
        put(dtype="torch.float8_e4m3fn"),
        put(dtype=EVIL),
        put(data_name="../../../../etc/passwd"),
        put(tags=5, placements="x", full_shape="y", nan_count="x"),
        lambda data: data.update({f"Functional.{EVIL}.0.forward": data.pop(CALL)}),
        lambda data: data.update({"Functional.\ud800.0.forward": data.pop(CALL)}),
        lambda data: data.update({"": data.pop(CALL)}),
        lambda data: data[CALL].update(output=nested(300)),
        lambda data: data.update({"Module.a.L.parameters_grad": {"w": None, "b": [None], "c": 5}}),
    ],
)
def test_odd_values(tmp_path: Path, change: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Impossible shapes, numbers beyond any float, names that would steer a terminal: compared or left out, and said; on either side."""
    target, golden = pair(tmp_path, 1)
    edit(target / "step0/rank0", change)
    for one, other in ((target, golden), (golden, target)):
        for argv in commands(one, other, tmp_path / "out"):
            ends_well(argv, capsys)


@pytest.mark.parametrize("record", [None, 5, [], "x"])
def test_a_record_that_is_none(tmp_path: Path, record: Any) -> None:
    """It is left out and named; the rows of the others are there."""
    target, golden = pair(tmp_path, 1)
    edit(target / "step0/rank0", lambda data: data.update({CALL: record}))
    found = compare_dumps(target, golden, tmp_path / "out")
    assert found.exit_code == 3
    assert CALL in " ".join(found.all_problems)
    assert found.results[0].only_golden == 4
    assert found.results[0].rows == 24


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "nothing", "directory"])
@pytest.mark.parametrize("name", ["stack.json", "construct.json"])
def test_something_else_in_place_of_a_file(tmp_path: Path, kind: str, name: str) -> None:
    """It is not read, and the rows are compared without it."""
    target, golden = pair(tmp_path, 1)
    file = target / "step0/rank0" / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to({"device": "/dev/zero", "loop": name, "nothing": "nowhere"}[kind])
    found = compare_dumps(target, golden, tmp_path / "out")
    assert found.exit_code == 3
    assert str(file) in " ".join(found.all_problems)
    assert found.results[0].rows == 24


def test_names_that_stand_twice(tmp_path: Path) -> None:
    """JSON keeps the last of two; that one is lost is said, however the file is written."""
    rank = dump(tmp_path / "rank0")
    text = (rank / "dump.json").read_text().replace("linear.3.", "linear.2.")
    (rank / "dump.json").write_text(text)
    assert "1 records" in read_side(rank / "dump.json").problems[0]
    (rank / "dump.json").write_text(text.replace("\n", ""))
    assert "1 records" in read_side(rank / "dump.json").problems[0]


def test_a_step_that_was_not_finished(tmp_path: Path) -> None:
    """Its marker is still there: it is compared, and said."""
    target, golden = pair(tmp_path, 1)
    (target / "step0/rank0/.incomplete").write_text("{}")
    found = compare_dumps(target, golden, tmp_path / "out")
    assert found.exit_code == 3
    assert "before this step was whole" in found.all_problems[0]


def test_an_empty_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No record on either side: nothing was compared, which is no success for any command."""
    target, golden = pair(tmp_path, 1)
    for root in (target, golden):
        edit(root / "step0/rank0", lambda data: data.clear())
    codes = [ends_well(argv, capsys) for argv in commands(target, golden, tmp_path / "out")]
    assert codes == [3, 3, 3, 2, 2, 3, 3]


def test_nan_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On both sides it is no difference, and nothing was compared, which is no success; a run alone has it."""
    target, golden = pair(tmp_path, 1)
    nan = dict.fromkeys(("Max", "Min", "Mean", "Norm"), math.nan)
    for root in (target, golden):
        edit(root / "step0/rank0", lambda data: [t.update(nan) for r in data.values() for t in (*r["input_args"], *r["output"])])
    assert [ends_well(argv, capsys) for argv in commands(target, golden, tmp_path / "out")] == [3, 3, 3, 2, 2, 1, 1]


def test_pages_hold_no_markup_of_a_dump(tmp_path: Path) -> None:
    """What a dump calls its records neither ends the script of the table's page nor becomes an element of the diagnosis."""
    target, golden = pair(tmp_path, 1, wrong=2)
    for root in (target, golden):
        edit(root / "step0/rank0", lambda data: [data.update({k.replace("linear", EVIL): data.pop(k)}) for k in list(data)])
    assert main(["compare", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path), "--html"]) == 1
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path)]) == 1
    table = next(tmp_path.glob("compare_result_*.html")).read_text()
    page = (tmp_path / "diagnosis.html").read_text()
    for text in (table, page):
        assert "<script>alert" not in text
        assert "<img" not in text
    assert "alert(1)" in page


def test_other_ranks_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two ranks one is cut off, removed or without its file: the other has its table, and the code is 3 everywhere."""
    for number, spoil in enumerate(
        (
            lambda rank: (rank / "dump.json").write_bytes((rank / "dump.json").read_bytes()[:700]),
            shutil.rmtree,
            lambda rank: (rank / "dump.json").unlink(),
        )
    ):
        target, golden = pair(tmp_path / str(number), 2)
        spoil(target / "step0/rank1")
        found = compare_dumps(target, golden, tmp_path / str(number) / "out")
        assert found.exit_code == 3
        assert len(found.files) == 1
        assert ends_well(["diagnose", str(target), str(golden), "-o", str(tmp_path)], capsys) == 3


def test_both_generations_end_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8.1.1 has one word for what begins and what follows; the exit code knows the difference all the same."""
    target, golden = pair(tmp_path, 1)
    edit(target / "step0/rank0", put(dtype="torch.int64"))
    codes = [ends_well(argv, capsys) for argv in commands(target, golden, tmp_path / "out")]
    assert codes[0] == codes[2] == 1


def _nested() -> list[Any]:
    """A list of 9 lists ... 15 deep, as aliases of a YAML file give it: its text would have 9**15 items."""
    value: list[Any] = ["x"]
    for _ in range(15):
        value = [value] * 9
    return value


@pytest.mark.parametrize("read", [lambda value: texts({"a": value}, "cell mapping"), lambda value: _entries({"a": value}), _entries])
def test_nested_aliases_are_refused_at_once(read: Callable[[Any], Any]) -> None:
    """The message names the place, and never writes the value out."""
    with pytest.raises(UsageError, match="list"):
        read(_nested())
