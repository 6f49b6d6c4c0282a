"""The reader takes what there is, and says what it could not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.monitor.reader import Key, open_run
from msprobe_engine.formats.monitor.run_layout import Stamp, between, parse_stamp

RANK = "Dec03_21-34-40-rank0-0123abcd"
HEADER = "vpp_stage,name,step,norm,min,shape,dtype"


def write(root: Path, name: str, text: str, directory: str = RANK) -> Path:
    path = root / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_of_the_existing_tool(tmp_path: Path) -> None:
    """Tables as 8.1.1 and 26.2 write them, missing values and squashed names as they are."""
    write(
        tmp_path,
        "actv_0-0.csv",
        "vpp_stage,name,step,micro_step,norm,min,max,mean,nans,zeros,shape,dtype\n"
        '0,0.attn.output,0,0,9.138189,-1.31106,1.523079,0.041495,0,0.0,"[2, 8, 16]",torch.float32\n'
        "0,.input,0,0,nan,nan,nan,nan,nan,nan,nan,nan\n",
    )
    write(tmp_path, "attention_hook_0-0.csv", "vpp_stage,name,step,micro_step,entropy,softmax_max\n0,attn,0,0,0.5,1.0\n")
    write(tmp_path, "stack_info.csv", "module_name,stack_info\nfc,here\n")
    run = open_run(tmp_path)
    assert run.families(0) == ["actv", "attention_hook"]
    assert run.ops(0, "actv") == ["norm", "min", "max", "mean", "nans", "zeros"]
    assert run.series(0, "actv", "max")[Key(0, "0.attn.output", 0)].values.tolist() == [1.523079]
    assert list(run.series(0, "actv", "max")) == [Key(0, "0.attn.output", 0), Key(0, ".input", 0)]
    assert run.series(0, "attention_hook", "entropy")[Key(0, "attn", 0)].values.tolist() == [0.5]
    assert (run.problems, run.info(0), run.alerts(0), run.scalars(0)) == ({}, {}, [], {})


def test_a_module_that_is_called_twice_has_a_series_for_each_call(tmp_path: Path) -> None:
    """Rows of one name and step that were written together are calls, in their order; what a restart writes again replaces its call."""
    head = "vpp_stage,name,step,micro_step,norm\n"
    first = "".join(f"0,drop.output,{step},0,{step}.5\n0,mlp.output,{step},0,7\n0,drop.output,{step},0,{step}.75\n" for step in (0, 1))
    write(tmp_path, "actv_0-9.csv", head + first)
    write(tmp_path, "grad_reduced_0-9.csv", "vpp_stage,name,step,norm\n0,w,0,1\n0,w,0,2\n")
    later = tmp_path / "Dec04_21-34-40-rank0-89abcdef"
    later.mkdir()
    (later / "actv_0-9.csv").write_text(head + "0,drop.output,1,0,2.5\n0,mlp.output,1,0,7\n0,drop.output,1,0,2.75\n")
    run = open_run(tmp_path)
    norms = {key.name: series.values.tolist() for key, series in run.series(0, "actv", "norm").items()}
    assert norms == {"drop.output": [0.5, 2.5], "mlp.output": [7.0, 7.0], "drop.output #2": [0.75, 2.75]}
    assert list(norms) == ["drop.output", "mlp.output", "drop.output #2"]
    assert run.series(0, "grad_reduced", "norm")[Key(0, "w")].values.tolist() == [2.0]
    assert run.problems == {
        "rank 0 actv: row written again, the later one counts": 3,
        "rank 0 grad_reduced: row written again, the later one counts": 1,
    }


def test_second_monitor_of_the_existing_tool(tmp_path: Path) -> None:
    """Directories ``rank_{R}`` with a scope column are read under the families that the first monitor has for them."""
    place = tmp_path / "rank_3"
    place.mkdir()
    (place / "module_step0-0.csv").write_text(
        "vpp_stage,step,module_name,scope,micro_step,min,norm\n-1,0,fc.input.0,forward,0,1.5,2.5\n-1,0,fc.grad_output.0,backward,0,3.5,4.5\n"
    )
    (place / "cc_step0-0.csv").write_text("vpp_stage,step,module_name,scope,norm\n,0,all_reduce/rank3/pre_0,comm,7.0\n")
    run = open_run(tmp_path)
    assert run.ranks == [3]
    assert run.families(3) == ["actv", "actv_grad", "other"]
    assert run.series(3, "actv_grad", "norm")[Key(0, "fc.grad_output.0", 0)].values.tolist() == [4.5]
    assert run.series(3, "actv", "min")[Key(0, "fc.input.0", 0)].values.tolist() == [1.5]
    assert list(run.series(3, "other", "norm")) == [Key(0, "all_reduce/rank3/pre_0")]
    assert run.problems == {}


def test_damage_is_counted(tmp_path: Path) -> None:
    """Rows with other cells than the header, no numbers, a cut last line, NUL, huge fields: the good rows are read, the rest is counted."""
    write(
        tmp_path,
        "grad_reduced_0-9.csv",
        f'{HEADER}\n0,w,0,1.0,2.0,"[4]",f\nall_reduce,3.7,1,1.0,1.0,nan,nan,11.1,3.0\n0,w,x,1,1,s,d\n0,w,1,abc,2.5,s,d\n'
        f'0,{"a" * 200_000},2,1,1,s,d\ny,w,3,1,1,s,d\n0,w,99999999999999999999,1,1,s,d\n0,w,4.0,5.0,,s,d\n0,w,5,1.0,2.0,"[4]",tor',
    )
    run = open_run(tmp_path)
    (series,) = run.series(0, "grad_reduced", "norm").values()
    assert series.steps.tolist() == [0, 1, 4]
    assert series.values.tolist()[::2] == [1.0, 5.0]
    assert run.series(0, "grad_reduced", "min")[Key(0, "w")].values.tolist()[:2] == [2.0, 2.5]
    counts = {what.partition(".csv: ")[2]: n for what, n in run.problems.items()}
    assert counts == {
        "row with another number of cells than the header": 1,
        "row whose step is no whole number": 2,
        "cell of norm that is no number": 1,
        "line that is no CSV (field larger than field limit (131072))": 1,
        "row whose vpp_stage, micro_step or scope is unknown": 1,
        "last line is cut": 1,
    }


@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No content of any file makes the reader raise."""
    root = tmp_path_factory.mktemp("run")
    place = root / RANK
    place.mkdir()
    for name in ("grad_reduced_0-9.csv", "scalars_0-9.csv", "alerts.jsonl", "run.json"):
        (place / name).write_bytes(data)
    (place / "exp_avg_0-9.csv").write_bytes(HEADER.encode() + b"\n" + data)
    (root / "rank5.jsonl").write_bytes(b'{"step": 1, "samples": ' + data + b"}\n" + data + b"\n")
    run = open_run(root)
    for path in (place / "grad_reduced_0-9.csv", root / "rank5.jsonl"):
        run = open_run(root if path.suffix == ".csv" else path)
        for rank in run.ranks:
            for family in run.families(rank):
                for op in run.ops(rank, family):
                    run.series(rank, family, op)
            assert isinstance((run.scalars(rank), run.alerts(rank), run.info(rank), run.problems), tuple)


def test_data_base_that_is_none(tmp_path: Path) -> None:
    """A damaged data base is that of its rank, of which nothing can be read, and a problem."""
    (tmp_path / "rank0.trend.db").write_bytes(b"no data base" * 100)
    run = open_run(tmp_path)
    assert run.ranks == [0]
    assert [what for what in run.problems if "cannot be read" in what]


def test_directories_of_a_rank(tmp_path: Path) -> None:
    """Several directories of one rank are one run, the later one counts; a range of stamps chooses, over New Year too."""
    for stamp, value, when in (("Dec30_10-00-00", 1.0, 1_767_000_000), ("Jan02_10-00-00", 2.0, 1_767_400_000)):
        path = write(tmp_path, "exp_avg_0-9.csv", f"{HEADER}\n0,w,0,{value},0,s,d\n0,{stamp},1,0,0,s,d\n", f"{stamp}-rank0-aa")
        os.utime(path.parent, (when, when))
    run = open_run(tmp_path)
    assert run.series(0, "exp_avg", "norm")[Key(0, "w")].values.tolist() == [2.0]
    assert list(run.problems.values()) == [1]
    assert [path.name[:5] for path in run.paths(0)] == ["Dec30", "Jan02"]
    assert len(open_run(tmp_path, since="Dec29_00-00-00", until="Jan03_00-00-00").paths(0)) == 2
    assert [p.name[:5] for p in open_run(tmp_path, since="Dec29_00-00-00", until="Jan01_00-00-00").paths(0)] == ["Dec30"]
    with pytest.raises(UsageError, match=r"Dec30_10-00-00, Jan02_10-00-00"):
        open_run(tmp_path, since="May01_00-00-00", until="May02_00-00-00")
    with pytest.raises(UsageError, match="since: 'yesterday' is no time stamp"):
        open_run(tmp_path, since="yesterday")


def test_nothing_there(tmp_path: Path) -> None:
    """A path without a run is an error that says what is there."""
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError, match="found: photos"):
        open_run(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        open_run(tmp_path / "nowhere")


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link in place of a table or of a rank's directory is left alone; a table that is not read is said."""
    secret = tmp_path / "secret.csv"
    secret.write_text(f"{HEADER}\n0,w,0,1,1,s,d\n")
    write(tmp_path / "run", "exp_avg_0-9.csv", f"{HEADER}\n0,w,0,1,1,s,d\n")
    (tmp_path / "run" / RANK / "param_origin_0-9.csv").symlink_to(secret)
    (tmp_path / "run" / "Dec04_21-34-40-rank1-0123abcd").symlink_to(tmp_path / "run" / RANK)
    run = open_run(tmp_path / "run")
    assert (run.ranks, run.families(0)) == ([0], ["exp_avg"])
    link = tmp_path / "run" / RANK / "param_origin_0-9.csv"
    assert run.problems == {f"{link}: is no regular file (links are not followed)": 1}
    assert run.left_out == 1


def test_stamps() -> None:
    """A stamp is a time without a year; a range whose end is earlier in the year goes over New Year."""
    assert parse_stamp("Dec03_21-34-40") == Stamp(12, 3, 21, 34, 40)
    assert [parse_stamp(t) for t in ("Foo03_21-34-40", "Dec33_21-34-40", "Dec03_24-00-00", "", "Dec03_21-34-40-rank0")] == [None] * 5
    first, last = Stamp(12, 30, 0, 0, 0), Stamp(1, 2, 0, 0, 0)
    inside = [Stamp(12, 31, 0, 0, 0), Stamp(1, 1, 0, 0, 0), first, last]
    assert all(between(s, first, last) for s in inside)
    assert not between(Stamp(6, 1, 0, 0, 0), first, last)
    assert between(Stamp(6, 1, 0, 0, 0), last, first)
    assert between(Stamp(6, 1, 0, 0, 0), None, None)
