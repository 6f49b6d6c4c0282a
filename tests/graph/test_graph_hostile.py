"""``msprobe graph`` of dumps that no training writes: it draws what it can, and nothing of them stops it."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from graph_dumps import call, graph, tensor

from msprobe_engine.cli.main import main

FORMATS = "html,db,vis,model_explorer"


def _plain(root: Path) -> Path:
    graph(root, {"Functional.relu.0.forward": call([tensor()], [tensor()])})
    return root


def test_half_a_surrogate_pair_is_an_escape(tmp_path: Path) -> None:
    """A name that UTF-8 cannot hold is drawn by every format; in the data base it is the same wherever it stands."""
    outer, inner = "Module.a\ud800.A.forward.0", "Functional.\udfff.0.forward"
    records = {inner: call([tensor()], [tensor()]), outer: call([tensor()], [tensor()])}
    for side in ("target", "golden"):
        graph(tmp_path / side, records, {inner: outer})
    assert main(["graph", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out"), "--format", FORMATS]) == 0
    (file,) = (tmp_path / "out").glob("*.vis.db")
    with closing(sqlite3.connect(file)) as db:
        found = db.execute("SELECT sub_nodes, matched_node_link FROM tb_nodes WHERE node_name = ?", ("Module.a\\ud800.A.forward.0",))
        below, link = found.fetchone()
    assert json.loads(below) == ["Functional.\\udfff.0.forward"]
    assert json.loads(link)[-1] == "Module.a\\ud800.A.forward.0"


@pytest.mark.parametrize("number", [32_768, 10**30])
def test_a_micro_step_beyond_all_is_none(number: int, tmp_path: Path) -> None:
    """A number of a micro step that no training has is as if construct.json said nothing of it."""
    root = _plain(tmp_path / "run")
    place = root / "step0" / "rank0" / "construct.json"
    place.write_text(json.dumps({"Functional.relu.0.forward": [None, number]}))
    assert main(["graph", str(root), "-o", str(tmp_path / "out"), "--format", FORMATS]) == 0


def test_gradients_of_no_module_are_a_record_like_others(tmp_path: Path) -> None:
    """A record that is called parameters_grad and says of no class is compared like any other."""
    name = "Module.x.parameters_grad"
    for side in ("target", "golden"):
        graph(tmp_path / side, {"Functional.relu.0.forward": call([tensor()], [tensor()]), name: {"weight": [tensor()]}})
    assert main(["graph", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out"), "--format", "html"]) == 0


def test_no_job_has_a_billion_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number of ranks beyond all is refused before anything is made for each of them."""
    words = ["--rank_size", str(10**12), "--tp", "1", "--pp", "1"]
    assert main(["graph", str(_plain(tmp_path / "run")), "-o", str(tmp_path / "out"), *words]) == 2
    assert "more than 1000000 ranks" in capsys.readouterr().err


def test_what_a_killed_run_has_left_is_taken_away(tmp_path: Path) -> None:
    """Temporary files of a run whose process is gone are removed by the next one; those of a run that goes on are not."""
    out = tmp_path / "out"
    out.mkdir()
    gone, going = "20200101000000", "20200101000001"
    left = {
        stamp: [out / f".graph_{stamp}.lock", out / f".build_{stamp}.vis.db.abc.tmp", out / f".graph_{stamp}_xyz"]
        for stamp in (gone, going)
    }
    for lock, file, directory in left.values():
        lock.touch()
        file.touch()
        directory.mkdir()
        (directory / "0_0").touch()
        os.utime(lock, (0, 0))
    with open(left[going][0]) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["graph", str(_plain(tmp_path / "run")), "-o", str(out), "--format", "html"]) == 0
    assert not any(path.exists() for path in left[gone])
    assert all(path.exists() for path in left[going])
    assert sorted(path.name for path in out.iterdir() if path not in left[going])[0].startswith("graph_")


def test_lines_on_the_console_come_to_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape of 100,000 dimensions, or a name of 100 kB, does not bury what the console says."""
    for side, dims in (("target", 100_000), ("golden", 2)):
        name = f"Functional.{'x' * 100_000}.0.forward"
        graph(tmp_path / side, {name: call([tensor()], [tensor(shape=[1] * dims)])})
    assert main(["graph", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out"), "--format", "html"]) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) < 6_000
    assert "  file  " in said
