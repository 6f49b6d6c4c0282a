"""The pack: many processes write one zip, and it can be read whatever happened to them."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.pack import equal_entries, file
from msprobe_engine.config.pack import writer as pack
from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import DumpFormatError, SinkError, UsageError
from msprobe_engine.core.io import archives
from msprobe_engine.formats.pack import entries

RANKS, STEPS = 6, 8


def _write(path: Path, rank: int, run: str | None) -> None:
    writer = PackWriter(path, rank=rank, world_size=RANKS, framework="pytorch", run=run)
    for step in range(STEPS):
        writer.add({entries.of_step("weights", step, rank): {"w": {"digest": f"{rank}-{step}"}}})


def _in_ranks(path: Path, run: str) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(path, rank, run)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_all_ranks_write_into_one_pack_and_the_next_run_begins_a_new_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Entries of all ranks that write at the same time are there; a second run leaves nothing of the first, and says so."""
    path = tmp_path / "deep" / "pack.zip"
    for run in ("first", "second"):
        _in_ranks(path, run)
        found = read_pack(path)
        assert found.problems == []
        assert found.ranks == list(range(RANKS))
        assert len(found.by_step("weights")) == RANKS * STEPS
        assert found.json(entries.of_step("weights", 3, 5)) == {"w": {"digest": "5-3"}}
        assert found.meta["run"] == run
        assert found.meta["world_size"] == RANKS
        assert zipfile.ZipFile(path).testzip() is None
        assert len(zipfile.ZipFile(path).namelist()) == len(set(zipfile.ZipFile(path).namelist()))
    assert capfd.readouterr().err.count("replaced by a new one") == 1
    assert os.stat(path).st_mode & 0o777 == 0o640 & ~_umask()
    assert {info.external_attr >> 16 for info in zipfile.ZipFile(path).infolist()} == {0o600}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_same_rank_in_another_process_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a common name for the run, a rank that has written before in another process tells that this is a new run."""
    path = tmp_path / "pack.zip"
    monkeypatch.setenv("WORLD_SIZE", "2")  # by a launcher that says the same every time
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=_write, args=(path, 0, None))
        process.start()
        process.join(60)
        assert len(zipfile.ZipFile(path).namelist()) == STEPS + 2


def test_the_previous_pack_is_kept_when_asked_for(tmp_path: Path) -> None:
    """keep_previous: what is replaced has another name beside it."""
    path = tmp_path / "pack.zip"
    PackWriter(path, run="a").add({"env": {"A": "1"}})
    PackWriter(path, run="b", keep_previous=True).add({"env": {"A": "2"}})
    assert read_pack(path).json("env") == {"A": "2"}
    assert read_pack(tmp_path / "pack.previous.zip").json("env") == {"A": "1"}


def test_an_entry_that_is_added_again_is_replaced(tmp_path: Path) -> None:
    """One entry per name, with the last content."""
    writer = PackWriter(tmp_path / "pack.zip")
    for n in range(3):
        writer.add({"env": {"N": str(n)}, "pip": f"a={n}\n"})
    found = read_pack(writer.path)
    assert found.json("env") == {"N": "2"}
    assert found.packages() == {"a": ["2"]}
    assert found.problems == []


@given(cut=st.integers(1, 4000))
def test_a_process_that_was_killed_while_it_wrote_costs_no_entry_that_was_whole(tmp_path: Path, cut: int) -> None:
    """Wherever the file ends, entries in front are read, the loss is said, and the next writer goes on from there."""
    path = tmp_path / "pack.zip"
    path.unlink(missing_ok=True)
    writer = PackWriter(path)
    writer.add({"env": {"A": "b" * 50}})
    writer.add({entries.of_step("weights", k, 0): {"w": os.urandom(40).hex()} for k in range(8)})
    whole = path.read_bytes()
    names = read_pack(path).names
    path.write_bytes(whole[: max(1, len(whole) - cut)])
    try:
        found = read_pack(path)
    except DumpFormatError:  # not one entry is left
        return
    assert set(found.names) <= set(names)
    assert found.problems
    for name in found.names:
        assert found.json(name)
    if entries.META in found and entries.of_rank("ranks", 0) in found:
        writer.add({"pip": "a=1\n"})
        again = read_pack(path)
        assert again.problems == []
        assert set(again.names) == {*found.names, "pip"}


def test_a_full_disk_leaves_the_pack_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the new entries do not fit, the old ones are still there, and the error says what to do."""
    writer = PackWriter(tmp_path / "pack.zip")
    writer.add({"env": {"A": "1"}})
    before = writer.path.read_bytes()
    real, written = os.pwrite, []

    def pwrite(fd: int, data: Any, at: int) -> int:
        if not written:
            written.append(real(fd, bytes(data)[:10], at))
            return written[0]
        if len(written) == 1:
            written.append(0)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(SinkError, match="free some space"):
        writer.add({"pip": "a=1"})
    assert writer.path.read_bytes() == before


def test_without_locks_every_node_has_a_pack_and_they_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system refuses locks, nodes write beside each other; reading the named path gives the entries of all."""
    real = fcntl.flock
    path = tmp_path / "pack.zip"

    def flock(fd: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSYS, "Function not implemented")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    for rank, host in enumerate(("node-a", "node-b")):
        monkeypatch.setattr(pack.job.platform, "node", lambda host=host: host)
        writer = PackWriter(path, rank=rank, world_size=2, run="one")
        writer.add({entries.of_rank("env", rank): {"R": str(rank)}})
        writer.add({entries.of_rank("system", rank): {"host": host}})
        assert writer.path.name == f"pack@{host}.zip"
    monkeypatch.setattr(pack.job.platform, "node", lambda: "node-c")
    PackWriter(path, rank=2, world_size=2, run="another").add({entries.of_rank("env", 2): {}})
    found = read_pack(path)
    assert found.ranks == [0, 1]
    assert found.json(entries.of_rank("system", 1)) == {"host": "node-b"}
    assert any("pack@node-c.zip" in problem for problem in found.problems)


def test_blocks_of_a_large_job_write_packs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank takes the lock of, or reads, what more than its block has written; the named path has the entries of all. What a larger job
    has left there before is no problem, and what is replaced is kept together."""
    seen: list[int] = []
    real = pack.pack_file.append
    monkeypatch.setattr(
        pack.pack_file, "append", lambda fd, new, before: seen.append(len(before.entries) if before else 0) or real(fd, new, before)
    )
    path = tmp_path / "pack.zip"
    for run, ranks in (("earlier", 160), ("now", 96)):
        for rank in range(ranks):
            writer = PackWriter(path, rank=rank, world_size=ranks, run=run, keep_previous=True)
            writer.add({entries.of_rank("env", rank): {"RUN": run}})
            writer.add({entries.of_rank("system", rank): {"rank": rank}})
        found = read_pack(path)
        assert (found.ranks, found.problems) == (list(range(ranks)), [])
        assert found.json(entries.of_rank("system", ranks - 1)) == {"rank": ranks - 1}
    assert {file.name for file in tmp_path.glob("pack@*")} == {f"pack@ranks{n}-{n + 15}.zip" for n in range(16, 160, 16)}
    assert max(seen) <= 16 * 3 + 1
    before = read_pack(tmp_path / "pack.previous.zip")
    assert before.ranks == list(range(96))
    assert before.json(entries.of_rank("env", 95)) == {"RUN": "earlier"}


def test_ranks_of_a_large_job_store_what_they_have_in_common_once(tmp_path: Path) -> None:
    """The entry of one rank stands for those of others, and each rank reads as it wrote; where it becomes another one, the others keep
    theirs."""
    path, settings = tmp_path / "pack.zip", {"lr": 0.1, "layers": list(range(100))}
    writers = [PackWriter(path, rank=rank, world_size=128, run="now") for rank in range(32)]
    for rank, writer in enumerate(writers):
        writer.add({entries.of_rank("hyperparameters", rank): settings, entries.of_rank("env", rank): {"RANK": str(rank)}})
        writer.add({entries.of_rank("system", rank): {"cpus": 8}})
    stored = [name for file in tmp_path.glob("*.zip") for name in zipfile.ZipFile(file).namelist()]
    assert [sum(part in name for name in stored) for part in ("/hyperparameters/", "/system/", "/env/")] == [2, 2, 32], "once a block"
    writers[0].add({entries.of_rank("hyperparameters", 0): {"lr": 0.2}})
    writers[3].add({entries.of_rank("hyperparameters", 3): {"lr": 0.3}})
    found = read_pack(path)
    assert (found.ranks, found.problems) == (list(range(32)), [])
    assert [len(found.by_rank(part)) for part in ("hyperparameters", "system", "env")] == [32, 32, 32]
    rates = [found.json(entries.of_rank("hyperparameters", rank))["lr"] for rank in range(32)]
    assert rates == [0.2, 0.1, 0.1, 0.3, *[0.1] * 28]
    assert all(found.json(entries.of_rank("system", rank)) == {"cpus": 8} for rank in range(32))


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"env": "env"}', b'{"msprobe/env/rank1.json": 5}', b'{"msprobe/env/rank1.json": "../x"}']
)
def test_what_is_no_list_of_equal_entries_is_none(content: bytes) -> None:
    """An entry stands for one of the same part only."""
    assert equal_entries.of_entry(content) == {}
    other = entries.of_rank("system", 1), entries.of_rank("env", 0)
    assert equal_entries.of_entry(json.dumps(dict([other])).encode()) == {}


def test_files_that_are_no_packs_are_left_alone(tmp_path: Path) -> None:
    """A zip of something else, a text and a link are not written over, and the message says what to do."""
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("thesis.tex", "years of work")
    text = tmp_path / "text.zip"
    text.write_text("not a zip at all")
    link = tmp_path / "link.zip"
    link.symlink_to(other)
    for path in (other, text, link):
        before = path.read_bytes()
        with pytest.raises(SinkError, match=r"move it away|a link is not followed"):
            PackWriter(path).add({"env": {}})
        assert path.read_bytes() == before
    with pytest.raises(UsageError, match=r"must end in \.zip"):
        PackWriter(tmp_path / "pack.tar")
    with pytest.raises(SinkError, match="cannot create directory"):
        PackWriter(text / "below" / "pack.zip")


def _zip(path: Path, **contents: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name.replace("__", "/"), content)
    return path


@pytest.mark.parametrize("name", ["../env", "/env", "a/../../env", "..\\env", "C:env"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    """Zip slip: nothing of such a file is read, and nothing is unpacked anyway."""
    path = tmp_path / "pack.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("env", "{}")
        entry = zipfile.ZipInfo("x")
        entry.filename = name
        archive.writestr(entry, "{}")
    with pytest.raises(DumpFormatError, match="leads out of it"):
        read_pack(path)


def test_a_bomb_is_refused_by_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that unpacks to more than deflate can make of it, and one beyond the limit."""
    path = _zip(tmp_path / "pack.zip", env="{}", pip="a" * (1 << 25))
    monkeypatch.setattr(archives, "MOST_PACKED", 500)
    with pytest.raises(DumpFormatError, match="unpacks from"):
        read_pack(path)
    monkeypatch.setattr(archives, "MOST_PACKED", 5000)
    monkeypatch.setattr(pack.pack_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(DumpFormatError, match="unpacks to"):
        read_pack(path)


def test_what_is_damaged_or_strange_is_an_error_with_the_entry_in_it(tmp_path: Path) -> None:
    """No zip, no pack, no JSON, no object, too deep, wrong CRC: one sentence each, no traceback of a library."""
    cases = {
        "no.zip": (lambda p: p.write_bytes(b"hello"), "is no zip"),
        "empty.zip": (lambda p: p.write_bytes(b""), "is no zip"),
        "other.zip": (lambda p: _zip(p, notes="x"), "no pack of a config check"),
    }
    for name, (make, message) in cases.items():
        make(tmp_path / name)
        with pytest.raises(DumpFormatError, match=message):
            read_pack(tmp_path / name)
    with pytest.raises(DumpFormatError, match="No such file"):
        read_pack(tmp_path / "absent.zip")
    with pytest.raises(DumpFormatError, match=r"no config_check_pack\.zip in"):
        read_pack(tmp_path)
    odd = read_pack(_zip(tmp_path / "odd.zip", env="{", pip="ok=1", random__rank0_json="x", msprobe__env__rank0="[" * 100_000))
    with pytest.raises(DumpFormatError, match="is no JSON"):
        odd.json("env")
    with pytest.raises(DumpFormatError, match="nested too deeply"):
        odd.json("msprobe/env/rank0")
    with pytest.raises(DumpFormatError, match="has no entry"):
        odd.json("nothing")
    listed = read_pack(_zip(tmp_path / "list.zip", env="[1]"))
    with pytest.raises(DumpFormatError, match="holds list"):
        listed.mapping("env")
    data = bytearray(_zip(tmp_path / "crc.zip", env=json.dumps({"A": "x" * 500})).read_bytes())
    data[40] ^= 0xFF
    (tmp_path / "crc.zip").write_bytes(data)
    with pytest.raises(DumpFormatError, match="take the pack again"):
        read_pack(tmp_path / "crc.zip").json("env")


def test_entries_that_are_there_twice_are_said(tmp_path: Path) -> None:
    """The existing tool appends to a pack that is there: the last entry counts, and it is said that steps may be stale."""
    path = tmp_path / "pack.zip"
    for value in ("1", "2"):
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate") if value == "2" else _nothing():
            archive.writestr("env", json.dumps({"A": value}))
    found = read_pack(path)
    assert found.json("env") == {"A": "2"}
    assert "more than once" in found.problems[0]
    assert not found.ours


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_pack_that_is_locked_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that keeps the lock for ever does not keep this one for ever."""
    writer = PackWriter(tmp_path / "pack.zip")
    writer.add({"env": {}})
    monkeypatch.setattr(file, "PATIENCE", 0.05)
    with open(writer.path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SinkError, match="locked by another process"):
            writer.add({"pip": ""})
    writer.add({"pip": "a=1\n"})
