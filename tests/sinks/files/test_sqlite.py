"""The trend data base while the training runs."""

from __future__ import annotations

import math
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import frames_of_lists
import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.settings.schema import SqliteSettings
from msprobe_engine.formats.monitor.convert.dump2db import record_tags
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.formats.monitor.trend_db import parameter_tags
from msprobe_engine.probe.sinks.sqlite import SqliteSink


def sink(root: Path, rank: int = 0) -> SqliteSink:
    return SqliteSink(SqliteSettings(ops=("norm", "max")), None, output_dir=root, rank=rank)


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def test_tables_that_the_viewer_reads(tmp_path: Path) -> None:
    """Targets, metrics, tags, global numbers and clamped statistics as the existing tool has them; what that loses is beside."""
    one = sink(tmp_path)
    one.write(frame_of({"layers.3.w": [3.0, 4.0], "b": [math.nan], "c": [-math.inf, 1e12]}, step=5, rank=0), [])
    one.write(frame_of({"layers.3.w": [1.0]}, step=9, family="actv", phase="", micro_step=1), [])
    one.close()
    assert one.path == tmp_path / "trend" / "rank0.trend.db"
    assert one.path.stat().st_mode & 0o777 == 0o640
    left = sorted(p.name for p in one.path.parent.iterdir())
    assert left == ["rank0.losses.json", "rank0.trend.db"], "nothing of SQLite's but the file is left after closing"
    targets = rows(one.path, "SELECT target_name, vpp_stage, micro_step FROM monitoring_targets")
    assert targets == [("layers.3.w", 0, 0), ("b", 0, 0), ("c", 0, 0), ("layers.3.w", 0, 1)]
    assert rows(one.path, "SELECT metric_name FROM monitoring_metrics") == [("grad_reduced",), ("actv",)]
    assert rows(one.path, "SELECT * FROM global_stats") == [(5, 9, 0, "norm,max", "norm,max")]
    joined = "SELECT step, target_name, norm, max FROM trend_data JOIN monitoring_targets USING (target_id) ORDER BY step, target_id"
    assert rows(one.path, joined) == [
        (5, "layers.3.w", 5.0, 4.0),
        (5, "b", None, None),
        (5, "c", 1e9 + 1, 1e9),
        (9, "layers.3.w", 1.0, 1.0),
    ]
    exact = rows(one.path, "SELECT statistic, value FROM exact_values ORDER BY target_id, statistic")
    assert exact == [("max", "nan"), ("norm", "nan"), ("max", "1000000000000.0"), ("norm", "inf")]
    tags = rows(one.path, "SELECT tag_name, category FROM monitoring_tags WHERE metric_id = 2 ORDER BY tag_name")
    assert tags == [("layers", "module"), ("layers.3", "layer"), ("w", "module")]


def test_goes_on_and_replaces(tmp_path: Path) -> None:
    """A second run goes on in the file; of a step that is written again the first run's numbers go, also of what the second has not."""
    for value in (1.0, 2.0):
        one = sink(tmp_path)
        one.write(frame_of({"w": [value], f"only{value}": [1.0]}, step=0), [])
        one.close()
    found = open_run(tmp_path).series(0, "grad_reduced", "norm")
    assert {key.name: s.values.tolist() for key, s in found.items()} == {"w": [2.0], "only2.0": [1.0]}


def test_phases_have_metrics_of_their_own(tmp_path: Path) -> None:
    """Gradients before and after clipping are two metrics; none takes the other's rows."""
    one = sink(tmp_path)
    for phase, value in (("reduced", 4.0), ("clipped", 1.0)):
        one.write(frame_of({"w": [value]}, phase=phase), [])
    one.close()
    assert rows(one.path, "SELECT metric_name FROM monitoring_metrics") == [("grad_reduced",), ("grad_reduced_clipped",)]
    found = open_run(tmp_path).series(0, "grad_reduced", "norm")
    assert {key.phase: s.values.tolist() for key, s in found.items()} == {"reduced": [4.0], "clipped": [1.0]}


def test_ranks_are_one_run(tmp_path: Path) -> None:
    """The files of several ranks in a directory are read together."""
    for rank in (0, 2):
        one = sink(tmp_path, rank)
        one.write(frame_of({"w": [float(rank)]}, rank=rank), [])
        one.close()
    run = open_run(tmp_path)
    assert run.ranks == [0, 2]
    assert [next(iter(run.series(r, "grad_reduced", "norm").values())).values.tolist() for r in run.ranks] == [[0.0], [2.0]]


def test_a_frame_is_there_completely_or_not_at_all(tmp_path: Path) -> None:
    """When the disk is full the frame is an error and leaves nothing; the next one that fits is complete."""
    one = sink(tmp_path)
    one.write(frame_of({"w": [1.0]}, step=0), [])
    (pages,) = one._db._db.execute("PRAGMA page_count").fetchone()
    one._db._db.execute(f"PRAGMA max_page_count = {pages}")
    big = {f"{'x' * 200}{i}": [1.0] for i in range(2000)}
    with pytest.raises(SinkError, match=r"full.*free some space"):
        one.write(frame_of(big, step=1), [])
    one._db._db.execute("PRAGMA max_page_count = 1000000")
    one.write(frame_of({**big, "w": [3.0]}, step=2), [])
    one.close()
    assert rows(one.path, "SELECT step, count(*) FROM trend_data GROUP BY step") == [(0, 1), (2, 2001)]
    assert rows(one.path, "PRAGMA integrity_check") == [("ok",)]


def test_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    """After kill -9 the file is sound and holds every step that was written, each completely."""
    code = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(frames_of_lists.__file__).parent)!r})
from frames_of_lists import frame_of
from msprobe_engine.probe.sinks.sqlite import SqliteSink
from msprobe_engine.core.settings.schema import SqliteSettings
sink = SqliteSink(SqliteSettings(), None, output_dir=Path({str(tmp_path)!r}), rank=0)
for step in range(10**9):
    sink.write(frame_of({{f"p{{i}}": [1.0] for i in range(50)}}, step=step), [])
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(20)][-1]
        process.send_signal(signal.SIGKILL)
    counts = dict(rows(tmp_path / "trend" / "rank0.trend.db", "SELECT step, count(*) FROM trend_data GROUP BY step"))
    assert counts.keys() >= set(range(last + 1))
    assert set(counts.values()) == {50}


def test_what_is_no_data_base(tmp_path: Path) -> None:
    """Another file, or a link, in its place is an error that says so, and stays as it is."""
    place = tmp_path / "trend" / "rank0.trend.db"
    place.parent.mkdir()
    place.write_text("hello " * 100)
    with pytest.raises(SinkError, match="cannot open the data base"):
        sink(tmp_path)
    assert place.read_text() == "hello " * 100
    place.rename(tmp_path / "other")
    place.symlink_to(tmp_path / "other")
    with pytest.raises(SinkError, match="cannot open the data base"):
        sink(tmp_path)


def test_names_that_utf8_cannot_hold(tmp_path: Path) -> None:
    """A lone surrogate in a name costs neither the step nor the tensor, also when it comes again and after a restart."""
    for step in range(2):
        one = sink(tmp_path)
        for again in range(2):
            one.write(frame_of({"w\ud800": [1.0], "v": [2.0]}, step=2 * step + again, scalars={"\udfff": 1.0}), [])
        one.close()
    place = tmp_path / "trend" / "rank0.trend.db"
    assert rows(place, "SELECT step, count(*) FROM trend_data GROUP BY step") == [(step, 2) for step in range(4)]
    assert rows(place, "SELECT count(DISTINCT target_name) FROM monitoring_targets") == [(2,)]
    assert rows(place, "SELECT count(*) FROM scalars") == [(4,)]


def test_a_data_base_that_is_deleted(tmp_path: Path) -> None:
    """What would go into a file that nobody can see any more is an error."""
    one = sink(tmp_path)
    one.write(frame_of({"w": [1.0]}, step=0), [])
    (tmp_path / "trend" / "rank0.trend.db").unlink()
    with pytest.raises(SinkError, match="was deleted"):
        one.write(frame_of({"w": [1.0]}, step=1), [])
    one.close()


def test_tags() -> None:
    """Words and layers of parameters; index, layer, module, function and default of records."""
    assert parameter_tags("a.0.1.b") == {("a", "module"), ("a.0", "layer"), ("b", "module")}
    assert parameter_tags("3.w") == {("w", "module")}
    assert record_tags("Torch.add.input.0") == {("input.0", "index"), ("Torch.add", "function")}
    assert record_tags("Module.fc.Linear.parameters.weight") == {
        ("parameters.weight", "index"), ("parameters", "default"), ("Module", "default"), ("fc.Linear", "module"),
    }  # fmt: skip
    assert record_tags("a.b") == set()


@pytest.mark.parametrize("statements", [(), ("PRAGMA journal_mode=WAL",)], ids=["opened", "before its first transaction"])
def test_a_run_that_was_killed_before_its_first_step_has_written_nothing(tmp_path: Path, statements: tuple[str, ...]) -> None:
    """Readers say so; it is no damaged file."""
    path = tmp_path / "trend" / "rank0.trend.db"
    path.parent.mkdir()
    path.touch()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)
    run = open_run(tmp_path)
    assert run.ranks == [0]
    assert run.recorded_steps(0) == (frozenset(), frozenset())
    assert [said.removeprefix(f"{path}: ")[:32] for said in run.problems] == ["its run has written nothing to i"]


@pytest.mark.parametrize("content", [b"no data base at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000], ids=["text", "damaged"])
def test_what_is_no_data_base_is_to_be_moved_away(tmp_path: Path, content: bytes) -> None:
    """It is not removed, and nobody is told to remove it."""
    path = tmp_path / "trend" / "rank0.trend.db"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SinkError, match=r"cannot open the data base .*rank0.trend.db: .*: move the file away or name another place"):
        sink(tmp_path)
    assert path.read_bytes() == content
