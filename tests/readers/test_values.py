"""Values of another type than a reader expects: the record is left out, the command says so and ends with 3, or names the file."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attack import Attack
from mutate import SCALARS
from targets import TARGETS

from msprobe_engine.cli.analysis import show
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, SettingsError, TextError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.json_text import MAX_DEPTH, MAX_DIGITS, parse_json, unique_keys
from msprobe_engine.core.io.npy_file import map_array
from msprobe_engine.core.io.yaml_text import parse_foreign_yaml, parse_yaml
from msprobe_engine.core.settings.changes import apply_changes

BY_NAME = {target.name: target for target in TARGETS}
Change = Callable[[Any], Any]


def run(name: str, root: Path, file: str, content: bytes) -> Attack:
    """The command of a target, with one file of its sample changed."""
    attack = Attack(BY_NAME[name], root)
    assert attack.fault({file: content}) == ""
    return attack


def json_of(name: str, root: Path, file: str) -> Any:
    """A file of the sample."""
    return json.loads(Attack(BY_NAME[name], root / "plain").files[file])


@pytest.mark.parametrize("frame", [5, None, [], {"a": 1}, True])
@pytest.mark.parametrize("target", ["diagnose-two", "diagnose-one", "compare", "nan_analyze", "graph", "compare-first-difference"])
def test_a_stack_with_a_frame_that_is_no_text_is_left_out(tmp_path: Path, target: str, frame: Any) -> None:
    """Both layouts of stack.json; the numbers are looked at all the same."""
    stack = json_of(target, tmp_path, "a/step0/rank0/stack.json")
    stack = {key: [value[0], [frame, *value[1]]] for key, value in stack.items()}
    found = run(target, tmp_path, "a/step0/rank0/stack.json", json.dumps(stack).encode())
    assert found.code in (1, 3), found.said


def test_stacks_that_are_left_out_are_said(tmp_path: Path) -> None:
    """Not a word about it would look as if the dump had no stacks."""
    found = run("nan_analyze", tmp_path, "a/step0/rank0/stack.json", b'{"0": [["x"], [1]], "y": [2]}')
    assert "2 stacks are no lists of lines of text and are left out" in found.said


@pytest.mark.parametrize("shape", [5, "x", [[2]], [None], [True], [2.5]])
def test_a_shape_of_another_type_is_said(tmp_path: Path, shape: Any) -> None:
    """In every tensor of the dump: the numbers are looked at all the same."""
    document = json_of("nan_analyze", tmp_path, "a/step0/rank0/dump.json")
    text = json.dumps(document)

    def put(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: shape if key == "shape" and "dtype" in node else put(value) for key, value in node.items()}
        return [put(child) for child in node] if isinstance(node, list) else node

    assert '"shape"' in text
    found = run("nan_analyze", tmp_path, "a/step0/rank0/dump.json", json.dumps(put(document)).encode())
    assert found.code == 1  # the NaN of the dump
    assert "have a shape that is no list of integers" in found.said


def left_out(said: str) -> str:
    """What a page of a run says is not on it. The exit code is 1 all the same: the samples hold alerts, or a NaN."""
    return "\n".join(line for line in said.splitlines() if line.startswith(("  note: ", "  not read: ")))


SAMPLE = {"family": "actv", "name": "layers.1", "norm": 1.0}


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "samples": [{**SAMPLE, "name": 5}]},
        {"step": 1, "samples": [{**SAMPLE, "name": ["x"]}]},
        {"step": 1, "samples": [{**SAMPLE, "family": 5}]},
        {"step": 1, "samples": [{**SAMPLE, "family": None}]},
        {"step": 1, "samples": [{**SAMPLE, "phase": 3}]},
        {"step": 1, "samples": [{**SAMPLE, "state": {}}]},
        {"step": 1, "samples": [{**SAMPLE, "vpp_stage": float("inf")}]},
        {"step": 1, "samples": [{**SAMPLE, "micro_step": 10**30}]},
        {"step": 1, "samples": 0.5},
        {"step": 1, "scalars": 0.5},
        {"step": 1, "scalars": {"loss": []}},
        {"step": 1, "alerts": 0.5},
        {"step": 1, "alerts": [5]},
        {"step": 1, "alerts": [{"rule": "x", "rank": "y"}]},
        {"step": 1, "alerts": [{"rule": "x", "micro_step": float("inf")}]},
        {"step": "x"},
    ],
)
@pytest.mark.parametrize("target", ["trends-jsonl", "report-jsonl"])
def test_a_line_of_another_type_is_left_out_and_counted(tmp_path: Path, target: str, line: dict[str, Any]) -> None:
    """One bad line costs itself; the page is written, and it is said that something is not on it."""
    good = Attack(BY_NAME[target], tmp_path / "plain").files["jsonl/rank0.jsonl"]
    found = run(target, tmp_path, "jsonl/rank0.jsonl", good + json.dumps(line).encode() + b"\n")
    assert found.code == 1, found.said
    assert "rank0.jsonl" in left_out(found.said), found.said


@pytest.mark.parametrize(("table", "column"), [("trend_data", "step"), ("monitoring_targets", "vpp_stage"), ("row_keys", "micro_step")])
@pytest.mark.parametrize("value", [float("inf"), b"\xff", 0.5])
@pytest.mark.parametrize("target", ["trends-db", "report-db"])
def test_a_row_of_a_data_base_with_another_type_is_left_out(tmp_path: Path, target: str, table: str, column: str, value: Any) -> None:
    """SQLite keeps anything in any column."""
    made = tmp_path / "a.db"
    made.write_bytes(Attack(BY_NAME[target], tmp_path / "plain").files["trend/monitor_data.trend.db"])
    first = "step" if table == "trend_data" else "target_id"
    with closing(sqlite3.connect(made)) as db, db:
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {first} = (SELECT max({first}) FROM {table})", (value,))
    found = run(target, tmp_path, "trend/monitor_data.trend.db", made.read_bytes())
    assert found.code == 1, found.said
    assert "monitor_data.trend.db" in left_out(found.said), found.said


@pytest.mark.slow
def test_rows_that_a_data_base_lacks(tmp_path: Path) -> None:
    """data2db ends with 3 when it has left out rows; the rest is in the data base."""
    file = "monitor/Dec03_21-34-40-rank0-1a2b3c4d/grad_reduced_0-9.csv"
    good = Attack(BY_NAME["data2db"], tmp_path / "plain").files[file]
    for processes in ("1", "2"):
        attack = Attack(BY_NAME["data2db"], tmp_path / processes)
        attack.target = replace(attack.target, argv=(*attack.target.argv, "--process_num", processes))
        assert attack.fault({file: good + b"0,layers.1.w,x,1,1,1,0\n0,layers.2.w\n"}) == ""
        assert attack.code == 3, attack.said
        assert "24 rows" in attack.said
        assert "not read" in attack.said
        assert attack.fault({}) == ""
        assert attack.code == 0, attack.said


def test_lines_that_were_not_learned_from(tmp_path: Path) -> None:
    """monitor learn ends with 3 and names the file; a last line that is cut, as a killed run leaves it, is no damage."""
    good = Attack(BY_NAME["learn"], tmp_path / "plain").files["jsonl/rank0.jsonl"]
    found = run("learn", tmp_path, "jsonl/rank0.jsonl", good + b'{"step": "x"}\n')
    assert found.code == 3, found.said
    assert "rank0.jsonl" in found.said
    assert run("learn", tmp_path / "cut", "jsonl/rank0.jsonl", good + b'{"step": 24, "sam').code == 0


def test_stacks_are_read_alike_everywhere(tmp_path: Path) -> None:
    """What one command leaves out, and says, no other takes for an error of the dump."""
    found = run("estimate", tmp_path, "a/step0/rank0/stack.json", b'{"0": [["x"], [1]], "y": [2], "z": 3, "good": ["line"]}')
    assert found.code == 0, found.said
    assert "3 stacks are no lists of lines of text and are left out" in found.said


@pytest.mark.parametrize("key", ["rank", "stamp", "started_unix", "world_size"])
@pytest.mark.parametrize("target", ["analyze-csv", "report-csv", "trends-csv", "show"])
def test_numbers_of_400_digits_in_run_json(tmp_path: Path, target: str, key: str) -> None:
    """float() of such a number overflows; the file counts as damaged."""
    file = "monitor/Dec03_21-34-40-rank0-1a2b3c4d/run.json"
    info = json_of(target, tmp_path, file)
    found = run(target, tmp_path, file, json.dumps({**info, key: 10**400}).encode())
    assert found.code in ((0, 1) if target == "show" else (1, 3)), found.said


@pytest.mark.parametrize(
    "change",
    [
        {"step": "x"},
        {"step": float("inf")},
        {"rank": float("nan")},
        {"micro_step": float("inf")},
        {"name": 5},
        {"severity": []},
        {"rule": 1},
    ],
)
def test_an_alert_of_another_type_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    """Sorting steps of two types, or NaN in the page's JSON, ended the report."""
    file = "monitor/Dec03_21-34-40-rank0-1a2b3c4d/alerts.jsonl"
    good = Attack(BY_NAME["report-csv"], tmp_path / "plain").files[file]
    alert = {**json.loads(good.splitlines()[0]), **change}
    found = run("report-csv", tmp_path, file, good + json.dumps(alert).encode() + b"\n")
    assert found.code == 1, found.said
    assert "alerts.jsonl" in left_out(found.said)


def test_an_alert_whose_value_is_infinite_is_shown(tmp_path: Path) -> None:
    """The value of an alert is often NaN or infinite: that is what it is about."""
    file = "monitor/Dec03_21-34-40-rank0-1a2b3c4d/alerts.jsonl"
    good = Attack(BY_NAME["report-csv"], tmp_path / "plain").files[file]
    alert = {**json.loads(good.splitlines()[0]), "value": float("inf")}
    found = run("report-csv", tmp_path, file, good + json.dumps(alert).encode() + b"\n")
    assert (found.code, left_out(found.said)) == (1, "")


@pytest.mark.parametrize("name", ["data", "api", "cell", "layer", "post"])
def test_scalars_that_yaml_cannot_build_in_a_mapping(tmp_path: Path, name: str) -> None:
    """Every one is a sentence with the file in it, or a mapping that can be used."""
    attack = Attack(BY_NAME[f"compare-{name}-mapping"], tmp_path)
    for scalar in SCALARS:
        assert attack.fault({f"{name}.yaml": f"a: {scalar}\n".encode()}) == "", scalar
        assert attack.code in (0, 1, 2), attack.said
        assert attack.code != 2 or name in attack.said


def test_scalars_that_yaml_cannot_build_in_settings_of_merge_result(tmp_path: Path) -> None:
    """As in mappings."""
    attack = Attack(BY_NAME["merge_result"], tmp_path)
    for scalar in SCALARS:
        assert attack.fault({"merge.yaml": f"api: [x]\ncompare_index: {scalar}\n".encode()}) == "", scalar
        assert attack.code == 2


@pytest.mark.parametrize("scalar", SCALARS)
def test_scalars_that_yaml_cannot_build_in_a_change_of_a_setting(scalar: str) -> None:
    """``--set`` takes YAML."""
    try:
        apply_changes({}, [f"a={scalar}"], "probe.yaml")
    except SettingsError as error:
        assert "the value is not YAML" in str(error)  # noqa: PT017 - both outcomes are right


def test_an_entry_without_a_name_is_left_out_of_a_pack(tmp_path: Path) -> None:
    """What it holds has no place; the rest is compared, and it is said."""
    attack = Attack(BY_NAME["config_check"], tmp_path)
    made = tmp_path / "a.zip"
    made.write_bytes(attack.files["a.zip"])
    with zipfile.ZipFile(made, "a") as archive:
        info = zipfile.ZipInfo("x")
        info.filename = ""
        archive.writestr(info, "x")
    assert attack.fault({"a.zip": made.read_bytes()}) == ""
    assert "1 entries have no name and are left out" in attack.said


def _nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("{", "property name"),
        ('{"a": 1,}', "comma stands before"),
        ("[" * 100_000, "nested too deeply"),
        (_nested(MAX_DEPTH + 1), "nested too deeply"),
        ("[" + "]" * 10_000, "Extra data"),
        ("1" * (MAX_DIGITS + 1), "digits"),
        ('{"a": 1, "a": 2}', "appears twice"),
        (b"\xff", "UTF-8"),
    ],
)
def test_json_that_is_none_or_too_much(text: str | bytes, what: str) -> None:
    """One error, which says what it is."""
    with pytest.raises(TextError, match=what):
        parse_json(text, unique_keys)


def test_json_within_the_limits() -> None:
    """Brackets in texts are no levels, and NaN is a number here."""
    assert parse_json(_nested(MAX_DEPTH))
    assert parse_json(json.dumps(["[" * 1000, '"' + "{" * 1000])) == ["[" * 1000, '"' + "{" * 1000]
    assert parse_json(b"[NaN, Infinity, -1, 1e400]")[1:] == [float("inf"), -1, float("inf")]


@pytest.mark.parametrize("parse", [parse_yaml, parse_foreign_yaml])
@pytest.mark.slow
def test_yaml_is_data_or_one_error(parse: Callable[[str], Any]) -> None:
    """Whatever PyYAML raises; bombs of aliases and numbers without an end are refused."""
    aliases = "\n".join(["a0: &a0 [1, 1, 1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
    for bomb in (aliases, "1:" * 100_000 + "1", "&a [*a]", "[" * 5000, "!!int ''", "2026-99-99", "9" * 5000):
        with pytest.raises(TextError):
            parse(bomb)
    for scalar in SCALARS:
        try:
            parse(scalar)
        except TextError as error:
            assert len(str(error)) < 500  # noqa: PT017 - both outcomes are right


def test_a_header_of_an_array_that_python_cannot_read(tmp_path: Path) -> None:
    """It is Python text; the tokenizer's error is none of numpy's."""
    head = b"{'descr': '|b1', 'fortran_order': False, 'shape': (3,"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(DumpFormatError, match=r"a\.npy: is no numpy file or is damaged"):
        map_array(tmp_path / "a.npy")


def test_what_no_reader_has_thought_of_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 3 and the file; the same error outside of a reader is a bug and stays one."""

    def reads(_: Any) -> int:
        with guard_reading("x/dump.json", "a dump"):
            raise KeyError("shape")

    monkeypatch.setattr(show, "run", reads)
    assert main(["show", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "x/dump.json: cannot be read as a dump (KeyError: 'shape')" in said
    assert "This is a bug" not in said

    def errs(_: Any) -> int:
        raise KeyError("shape")

    monkeypatch.setattr(show, "run", errs)
    assert main(["show", str(tmp_path)]) == 4
    assert "This is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("count", [10**9, 2**62])
@pytest.mark.parametrize(("file", "key"), [("mp_rank_00_model_states.pt", "mp_world_size"), ("zero_pp_rank_0", "partition_count")])
def test_more_ranks_than_a_job_can_have(tmp_path: Path, file: str, key: str, count: int) -> None:
    """Names of all the files of which none is there took time and memory without end."""
    import torch

    attack = Attack(BY_NAME["ckpt-deepspeed"], tmp_path)
    name = next(name for name in attack.files if name.startswith("a/") and file in name)
    tree = torch.load(attack.source / name, weights_only=False)
    tree.get("optimizer_state_dict", tree)[key] = [count] if key == "partition_count" else count
    torch.save(tree, tmp_path / "made.pt")
    assert attack.fault({name: (tmp_path / "made.pt").read_bytes()}) == ""
    assert attack.code == 2
    assert "no job has so many" in attack.said


@pytest.mark.parametrize("name", ["host/client.crt", "host/crl.pem"])
def test_a_certificate_that_is_no_file_is_no_missing_one(tmp_path: Path, name: str) -> None:
    """A list of what was revoked that cannot be read is not the same as none."""
    attack = Attack(BY_NAME["certs-show"], tmp_path)
    (attack.source / name).unlink()
    (attack.source / name).mkdir()
    assert attack._run() == ""
    assert attack.code == 3
    assert name in attack.said


def test_half_a_surrogate_pair_in_the_name_of_a_tensor(tmp_path: Path) -> None:
    """A pickle may hold one; no file and no terminal can."""
    import torch

    attack = Attack(BY_NAME["ckpt-torch"], tmp_path)
    torch.save({"w\ud800": torch.ones(3, 4), "text": "\ud800"}, tmp_path / "made.pt")
    assert attack.fault(dict.fromkeys(attack.files, (tmp_path / "made.pt").read_bytes())) == ""
    assert attack.code == 0


def test_half_a_surrogate_pair_as_an_argument_of_a_call(tmp_path: Path) -> None:
    """With checksums, that of an argument is made of its text."""
    attack = Attack(BY_NAME["compare"], tmp_path)
    file = "a/step0/rank0/dump.json"
    tensor = {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0,
        "requires_grad": True, "md5": "aabbccdd",
    }  # fmt: skip
    record = {"input_args": [tensor, {"type": "str", "value": "\ud800"}], "input_kwargs": {}, "output": [tensor]}
    content = json.dumps({"task": "statistics", "level": "L1", "data": {"Functional.linear.0.forward": record}}, indent=1).encode()
    assert attack.fault({file: content, file.replace("a/", "b/", 1): content}) == ""
