"""Quota, memory budget and failing disks: the limits hold, what is not saved is listed, and the training goes on."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from keeping import FORMATS, Keeping

from msprobe_engine.core.records import Entry
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing import loose_files
from msprobe_engine.formats.dump.writing.step_files import StepFiles
from msprobe_engine.formats.tensors.reader import not_saved


def on_disk(root: Path) -> int:
    """Bytes of all tensor files, those with several names once."""
    found = {p.stat().st_ino: p.stat().st_size for p in root.rglob("dump_tensor_data/*")}
    return sum(found.values())


@given(
    form=st.sampled_from(FORMATS),
    quota=st.integers(1000, 60_000),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 3)), max_size=8), min_size=1, max_size=3),
    links=st.booleans(),
)
def test_the_quota_is_never_exceeded(form: str, quota: int, steps: list[list[tuple[int, int]]], links: bool) -> None:
    """Whatever is saved, over all steps, with and without links: the files never take more; every name has its file or is listed."""
    root = Path(tempfile.mkdtemp())
    try:
        keeping = Keeping(root, form, quota=quota)
        asked: list[set[str]] = []
        link, StepFiles.link = StepFiles.link, StepFiles.link if links else no_links  # type: ignore[method-assign]
        try:
            for step, records in enumerate(steps):
                keeping.begin(step)
                asked.append(set())
                for i, (elements, names) in enumerate(records):
                    tensor = torch.full((elements,), float(i))
                    for k in range(names):
                        keeping.save(f"Functional.f{k}.{i}.forward", tensor)
                        asked[-1].add(f"Functional.f{k}.{i}.forward.output.0.pt")
                result = keeping.end(step)
                assert on_disk(root) <= keeping.store.quota.used <= quota
                there, listed = set(keeping.files(step).names()), {item["name"] for item in not_saved(keeping.directory(step))}
                assert there | listed == asked[-1]
                assert not there & listed
                assert bool(listed) == bool(keeping.lost_now() or result.late)
        finally:
            StepFiles.link = link  # type: ignore[method-assign]
        for step, records in enumerate(steps):
            for name, tensor in keeping.load(step).items():
                i = int(name.split(".")[2])
                assert tensor.shape == (records[i][0],)
                assert (tensor == i).all()
    finally:
        shutil.rmtree(root)


def no_links(_self: StepFiles, _old: str, _new: str) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("form", FORMATS)
def test_a_quota_that_is_used_up(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; smaller tensors that still fit are saved; each one that does not is listed with its size and the reason."""
    keeping = Keeping(tmp_path, form, quota=100_000)
    keeping.begin()
    with caplog.at_level(logging.WARNING, "msprobe"):
        for i, elements in enumerate((20_000, 20_000, 20_000, 100)):
            keeping.save(f"Functional.f.{i}.forward", torch.ones(elements))
        keeping.end()
    assert keeping.files().names() == ["Functional.f.0.forward.output.0.pt", "Functional.f.3.forward.output.0.pt"]
    why = "max_disk_gb 0.0001 is used up"
    listed = [{"name": f"Functional.f.{i}.forward.output.0.pt", "bytes": 80_000, "reason": why} for i in (1, 2)]
    assert not_saved(keeping.directory(0)) == listed
    assert keeping.lost == {"tensors over max_disk_gb": 2}
    assert [r.getMessage() for r in caplog.records] == [f"{why}: tensors that do not fit are left out and listed in not_saved.json"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("elements", [100, 60_000, 1 << 20], ids=["small", "medium", "larger than the budget"])
def test_a_small_budget_loses_nothing(tmp_path: Path, form: str, elements: int) -> None:
    """With 1 MiB of memory everything arrives, also names that come late, and tensors that are larger than the budget."""
    keeping = Keeping(tmp_path, form, budget=1 << 20)
    keeping.begin()
    refs = [keeping.keeper.reduce(torch.full((elements,), float(i))) for i in range(40)]  # all before the first name
    for i, ref in enumerate(refs):
        keeping.entries.append(Entry(f"Functional.f.{i}.forward", {"output": [ref]}))
    result = keeping.end()
    assert (keeping.lost, result.late) == ({}, {})
    found = keeping.load()
    assert len(found) == 40
    for i in range(40):
        tensor = found[f"Functional.f.{i}.forward.output.0.pt"]
        assert tensor.shape == (elements,)
        assert (tensor == i).all()
    assert keeping.store.memory.held <= 1 << 20


def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is written for a while and the budget is used up, tensors are given up instead of the training waiting for ever."""
    hang = threading.Event()
    write = loose_files.write_files
    monkeypatch.setattr(loose_files, "write_files", lambda *a: (hang.wait(20), write(*a))[1])
    keeping = Keeping(tmp_path, "files", budget=1 << 20, patience=0.1)
    keeping.begin()
    for i in range(12):
        keeping.save(f"Functional.f.{i}.forward", torch.ones(60_000))
    hang.set()
    result = keeping.end()
    lost = keeping.lost["tensors without host memory"]
    assert 0 < lost < 12
    assert len(keeping.load()) == 12 - lost
    assert "no tensor was written for 0.1 s" in not_saved(keeping.directory(0))[0]["reason"]
    assert result.waited >= 0.1 * lost


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk(small: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """What fits is there and whole; the rest is counted, listed as far as the list itself fits, and said once with what to do."""
    keeping = Keeping(small, form, strict=False, budget=1 << 20)
    keeping.begin()
    with caplog.at_level(logging.ERROR, "msprobe"):
        for i in range(30):
            keeping.save(f"Functional.f.{i}.forward", torch.full((25_000,), float(i)))
        result = keeping.end()
    found = keeping.load()
    assert 0 < len(found) < 30
    for name, tensor in found.items():
        assert (tensor == int(name.split(".")[2])).all()
    lost = result.late["tensor files not written"]
    assert lost + len(found) == 30
    assert result.rows.sum() == len(found)
    assert keeping.counted["tensor files"] >= lost
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert "free some space" in messages[0]
    assert not list(keeping.directory(0).rglob("*.tmp"))
    listed = keeping.directory(0) / "not_saved.json"
    if listed.exists():
        assert {item["reason"] for item in json.loads(listed.read_text())["not_saved"]} == {"No space left on device"}


def test_strict_mode_raises_in_the_training(small: Path) -> None:
    """With strict a failing disk stops the training at the next tensor."""
    keeping = Keeping(small, "files", budget=1 << 20)
    keeping.begin()

    def train() -> None:
        for i in range(100):
            keeping.save(f"Functional.f.{i}.forward", torch.ones(25_000))

    with pytest.raises(layout.DumpWriteError, match="No space left"):
        train()


def test_a_record_seen_twice(tmp_path: Path) -> None:
    """Of two records with one name the later one has the file, in both formats and whatever thread was faster."""
    for form in FORMATS:
        keeping = Keeping(tmp_path / form, form)
        keeping.begin()
        x, y = torch.zeros(3), torch.ones(3)
        keeping.save("Functional.a.0.forward", x)
        keeping.save("Functional.b.0.forward", x)
        keeping.save("Functional.a.0.forward", y)
        keeping.end()
        found = {name.split(".")[1]: t.tolist() for name, t in keeping.load().items()}
        assert found == {"a": y.tolist(), "b": x.tolist()}


def test_the_next_step_does_not_wait_for_the_last(tmp_path: Path) -> None:
    """Steps overlap: one is still written while the next is taken, and each has its own files."""
    keeping = Keeping(tmp_path, "files")
    for step in range(4):
        keeping.begin(step)
        keeping.save("Functional.f.0.forward", torch.full((1000,), float(step)))
        keeping.keeper.end_step(keeping.entries)
        keeping.backend.finish_step()
    for step in range(4):
        keeping.store.finish(step)
        assert keeping.load(step)["Functional.f.0.forward.output.0.pt"][0].item() == step


def test_memory_goes_when_the_window_is_over(tmp_path: Path) -> None:
    """Between dumped steps memory is kept, after them it is given back, and the threads end by themselves."""
    keeping = Keeping(tmp_path, "files")
    for step in range(2):
        keeping.begin(step)
        keeping.save("Functional.f.0.forward", torch.ones(1 << 20))
        keeping.end(step)
        assert keeping.store.memory.held > 0
    keeping.keeper.rest()
    assert keeping.store.memory.held == 0


@pytest.mark.parametrize("form", FORMATS)
def test_no_threads(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where no thread can be started (limits, a process that ends) everything is written all the same, and that is said once."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    keeping = Keeping(tmp_path, form, budget=1 << 20)
    with caplog.at_level(logging.WARNING, "msprobe"):
        for step in range(2):
            keeping.begin(step)
            for i in range(40):
                keeping.save(f"Functional.f.{i}.forward", torch.full((60_000,), float(i)))
            keeping.end(step)
    assert keeping.store.drain()
    assert keeping.lost == {}
    found = keeping.load(1)
    assert all((found[f"Functional.f.{i}.forward.output.0.pt"] == i).all() for i in range(40))
    assert len([r for r in caplog.records if "thread" in r.getMessage()]) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_what_no_record_names_goes(tmp_path: Path, form: str) -> None:
    """A copy whose record never came (a call that was cut off) leaves no file and takes nothing of the quota."""
    keeping = Keeping(tmp_path, form, quota=1_000_000, budget=1 << 16)
    keeping.begin()
    for _ in range(8):
        keeping.keeper.reduce(torch.ones(3000))
    keeping.end()
    assert keeping.files().names() == []
    assert on_disk(tmp_path) == keeping.store.quota.used == 0


@pytest.mark.parametrize("form", FORMATS)
def test_the_quota_counts_what_is_there(tmp_path: Path, form: str) -> None:
    """At the end of a step the bytes counted are those of the files, with and without a limit."""
    for quota in (0, 10_000_000):
        keeping = Keeping(tmp_path / str(quota), form, quota=quota)
        keeping.begin()
        for i in range(20):
            keeping.save(f"Functional.f.{i}.forward", torch.ones(i * 100), torch.ones(7, dtype=torch.complex128))
        keeping.end()
        assert keeping.store.quota.used == on_disk(tmp_path / str(quota))
