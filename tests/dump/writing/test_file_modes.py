"""Who may read what is written, also when the process's mask is generous."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.files import write_text
from msprobe_engine.probe.incident.writer import write_incident
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink


@pytest.fixture(autouse=True)
def _generous() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {p.relative_to(root).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in root.rglob("*")}


def test_every_new_directory_and_file_is_closed_to_others(tmp_path: Path) -> None:
    """Parents that have to be made are 0750 as well, files 0640."""
    DumpSink(tmp_path / "a" / "b", level="L0", rank=0).begin_step(3)
    write_incident(tmp_path / "c" / "incidents" / "x", [], [], event=Event("x", 0, "nan_inf", 0, 2), rank=0, world_size=1)
    for name, mode in modes(tmp_path).items():
        assert mode == (0o750 if (tmp_path / name).is_dir() else 0o640), name


def test_directories_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    """A file in the way, or a working directory that is gone, ends in an OSError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_directories(str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        make_directories(str(tmp_path / "file" / "below" / "it"))
    with pytest.raises(FileNotFoundError):
        make_directories("")


def test_file_systems_that_refuse_new_names_are_errors() -> None:
    """/proc answers mkdir as if the parent were missing; that ends in its error and not in a search without end."""
    with pytest.raises(FileNotFoundError, match="/proc/no_such_place"):
        make_directories("/proc/no_such_place/step0/rank0")


def test_names_that_utf8_cannot_hold_are_written(tmp_path: Path) -> None:
    """Half a surrogate pair in a name costs the character, not the file."""
    write_text(tmp_path / "summary.md", "a\udcffb")
    assert (tmp_path / "summary.md").read_text() == "a\\udcffb"
