"""The spool of the online pre-check: what is safe, what can be checked when, what an interrupted host finds again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.events import Peer
from msprobe_engine.accuracy.online.queue_dir.spool import Spool
from msprobe_engine.accuracy.online.queue_dir.step import SpoolCall, SpoolStep
from msprobe_engine.accuracy.online.sender import MOST_OPEN, NOT_SENT, CallStore, SentStep
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, TensorDescription, TensorRef
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.writing.step_text import StepText
from msprobe_engine.formats.dump.writing.template import Options

SESSION = "ab" * 16
Message = tuple[dict[str, Any], bytes]


def tensor(name: str) -> dict[str, Any]:
    """A tensor of a record, before its statistics are known."""
    statistics = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], **statistics, "requires_grad": True, "data_name": name}


def record(name: str) -> dict[str, Any]:
    """A record with one tensor in and one out."""
    if name.endswith("backward"):
        return {"input": [tensor(f"{name}.input.0.pt")], "output": [tensor(f"{name}.output.0.pt")]}
    return {"input_args": [tensor(f"{name}.input.0.pt")], "input_kwargs": {}, "output": [tensor(f"{name}.output.0.pt")]}


def data_names(names: Iterable[str]) -> list[str]:
    """All tensors of these records."""
    return [f"{name}.{place}.0.pt" for name in names for place in ("input", "output")]


def calls(number: int, *names: str, step: int = 0, without: tuple[str, ...] = ()) -> Message:
    """A message of finished calls; contents `without` are missing."""
    contents = {n: np.ones(4, np.float32) for n in data_names(names) if n not in without}
    text = json.dumps({"calls": {n: record(n) for n in names}, "names": {n: n for n in data_names(names)}, "sources": {}}).encode()
    header = {"kind": "calls", "rank": 0, "step": step, "number": number, "calls": len(text)}
    return header, text + save(contents, {"format": "pt", "step": str(step)})


def step_over(*names: str, step: int = 0) -> Message:
    """The end of a step."""
    head = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": "", "tensor_format": "packed"}
    files = {
        "names.json": json.dumps({n: n for n in data_names(names)}),
        "stack.json": "{}",
        "construct.json": "{}",
        "dump.json": json.dumps({**head, "data": {n: record(n) for n in names}}, indent=1),
    }
    header = {"kind": "step", "rank": 0, "step": step, "complete": True, "files": {name: len(text) for name, text in files.items()}}
    return header, "".join(files.values()).encode()


def put(spool: Spool, number: int, message: Message, session: str = SESSION) -> list[str]:
    """Names of the calls that can be checked after this message."""
    return [call.name for call in take(spool, number, message, session)]


def take(spool: Spool, number: int, message: Message, session: str = SESSION) -> list[SpoolCall]:
    """The calls that can be checked after this message."""
    return spool.add(Peer(session, 0, number), message[0], memoryview(message[1]))


FORWARD, BACKWARD = "Torch.exp.0.forward", "Torch.exp.0.backward"
OTHER = "Torch.exp.1.forward"


def test_a_call_is_given_out_when_it_is_complete(tmp_path: Path) -> None:
    """A call with a backward record when that is here, one without when the step is over; each once."""
    spool = Spool(tmp_path / "spool")
    assert put(spool, 1, calls(0, FORWARD, OTHER)) == []
    assert put(spool, 2, calls(1, BACKWARD)) == ["Torch.exp.0"]
    assert put(spool, 3, step_over(FORWARD, OTHER, BACKWARD)) == ["Torch.exp.1"]
    assert spool.waiting == 2


def test_a_further_backward_pass_is_a_call_of_its_own(tmp_path: Path) -> None:
    """With retain_graph a call has several backward records: each is checked with the forward record of the call."""
    again = "Torch.exp.1000000.backward"
    spool = Spool(tmp_path / "spool")
    assert put(spool, 1, calls(0, FORWARD)) == []
    assert put(spool, 2, calls(1, BACKWARD)) == ["Torch.exp.0"]
    (call,) = take(spool, 3, calls(2, again))
    message = call.message()
    assert (message["name"], message["record"], message["backward"]) == ("Torch.exp.1000000", record(FORWARD), record(again))
    assert {f"{FORWARD}.input.0.pt", f"{again}.input.0.pt"} <= set(message["tensors"])
    put(spool, 4, step_over(FORWARD, BACKWARD, again))
    assert (spool.waiting, spool.alone) == (2, 0)


def test_a_further_backward_pass_may_come_before_its_call(tmp_path: Path) -> None:
    """In a spool that is found again messages have any order; a pass of a call that never came is counted."""
    spool = Spool(tmp_path / "spool")
    assert put(spool, 1, calls(0, "Torch.exp.1000000.backward", "Torch.sin.1000000.backward")) == []
    assert put(spool, 2, calls(1, FORWARD, BACKWARD)) == ["Torch.exp.0"]
    assert put(spool, 3, step_over(FORWARD, BACKWARD)) == ["Torch.exp.1000000"]
    assert spool._steps[0, 0].alone == 1


def test_a_message_that_comes_again_changes_nothing(tmp_path: Path) -> None:
    """A host that was killed before it could acknowledge gets the same message again."""
    spool = Spool(tmp_path / "spool")
    assert put(spool, 1, calls(0, FORWARD, BACKWARD)) == ["Torch.exp.0"]
    before = spool.bytes
    assert put(spool, 1, calls(0, FORWARD, BACKWARD)) == []
    assert (spool.bytes, spool.waiting, spool.last(Peer(SESSION, 0))) == (before, 1, 1)


def test_what_a_killed_host_had_is_found_again(tmp_path: Path) -> None:
    """Calls without results are given out again, those with results are not, and the last safe message is known."""
    first = Spool(tmp_path / "spool")
    put(first, 1, calls(0, FORWARD, BACKWARD, OTHER))
    second = Spool(tmp_path / "spool")
    assert [call.name for call in second.recover(lambda _step: ["Torch.exp.0"])] == []
    assert second.last(Peer(SESSION, 0)) == 1
    (call,) = take(second, 2, step_over(FORWARD, BACKWARD, OTHER))
    assert call.message()["tensors"].keys() == set(data_names([OTHER]))
    second.mark_checked(call)
    assert not (tmp_path / "spool/step0").exists(), "a step of which all is checked goes"


def test_tensors_that_did_not_arrive_are_listed(tmp_path: Path) -> None:
    """A content that is missing has no place, and the dump says why it is not there."""
    spool = Spool(tmp_path / "spool", keep=True)
    lost = f"{FORWARD}.input.0.pt"
    put(spool, 1, calls(0, FORWARD, without=(lost,)))
    (call,) = take(spool, 2, step_over(FORWARD))
    assert lost not in call.message()["tensors"]
    listed = json.loads((tmp_path / "spool/step0/rank0/not_saved.json").read_text())["not_saved"]
    assert [item["name"] for item in listed] == [lost]


def test_a_step_without_an_end_is_a_dump_that_says_so(tmp_path: Path) -> None:
    """A training that was killed leaves what it has sent: records without statistics, marked as incomplete."""
    spool = Spool(tmp_path / "spool", keep=True)
    put(spool, 1, calls(0, FORWARD))
    (call,) = spool.end_session(SESSION)
    spool.mark_checked(call)
    dump = open_dump(tmp_path / "spool").load(0, 0)
    assert list(dump.entries) == [FORWARD]
    assert dump.header["complete"] is False
    assert (tmp_path / "spool/step0/rank0/.incomplete").exists()
    left = {path.name for path in (tmp_path / "spool/step0/rank0").iterdir()}
    assert not [name for name in left if name.startswith(".calls-") or name in (SpoolStep.SESSION, SpoolStep.RESULTS)], left


def test_a_step_ends_with_the_next_one(tmp_path: Path) -> None:
    """The end of a step was lost: the first message of a later one ends it."""
    spool = Spool(tmp_path / "spool")
    put(spool, 1, calls(0, FORWARD))
    header = {"kind": "run", "version": 1, "rank": 0, "world": 1, "framework": "pytorch"}
    assert put(spool, 2, (header, b"")) == []
    assert put(spool, 3, calls(0, FORWARD, step=1)) == ["Torch.exp.0"]


def test_steps_may_overlap(tmp_path: Path) -> None:
    """Calls of the next step may be there before the last ones of a step; what is open says that these still come."""
    spool = Spool(tmp_path / "spool")
    put(spool, 1, calls(0, FORWARD, OTHER))
    header, payload = calls(0, FORWARD, step=1)
    assert put(spool, 2, ({**header, "open": 0}, payload)) == []
    assert put(spool, 3, calls(1, BACKWARD)) == ["Torch.exp.0"], "with its gradients"
    assert put(spool, 4, step_over(FORWARD, OTHER, BACKWARD)) == ["Torch.exp.1"]


def test_a_sender_says_which_step_is_open() -> None:
    """A step is open until its end is sent, whatever begins meanwhile; one whose end never comes does not stay open for ever."""
    text = StepText(Options(("all",), lambda _: True, ".pt"), level="L1", task="tensor")
    nothing = SimpleNamespace(send=lambda *_, **__: True)
    store = CallStore(text, nothing, 0, list, Faults(), budget=1 << 20, count=lambda *_: None, patience=0.0)
    store.begin_step(3, "")
    store.begin_step(5, "")
    assert store.oldest == 3
    store.over(3)
    assert store.oldest == 5
    for step in range(6, 6 + MOST_OPEN):
        store.begin_step(step, "")
    assert store.oldest == 6
    store.close()


def test_another_training_takes_the_place_of_a_step(tmp_path: Path) -> None:
    """A training that was started again sends its steps again: calls of the first that are not checked are skipped, and counted."""
    spool = Spool(tmp_path / "spool")
    (old,) = take(spool, 1, calls(0, FORWARD, BACKWARD))
    (new,) = take(spool, 1, calls(0, FORWARD, BACKWARD), "cd" * 16)
    assert spool.replaced == 1
    assert "another training" in old.message()["skip"]
    assert new.message()["record"]["input_args"]


def test_a_full_spool_gives_calls_out_without_gradients(tmp_path: Path) -> None:
    """Nothing that waits for a backward record may hold the room that it needs to come."""
    spool = Spool(tmp_path / "spool")
    put(spool, 1, calls(0, FORWARD, OTHER))
    assert [call.name for call in spool.press()] == ["Torch.exp.0", "Torch.exp.1"]
    assert put(spool, 2, calls(1, BACKWARD)) == []


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """A spool is emptied when it is done, so it must be one."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="is not empty and no spool"):
        Spool(tmp_path)


@pytest.mark.parametrize(("change", "says"), [
    ({"kind": "code"}, "kind 'code'"), ({"rank": 1}, "rank 1 comes from rank 0"), ({"rank": -1}, "rank: '-1'"),
    ({"step": True}, "step: 'True'"),
    ({"number": 10**10}, "number"), ({"calls": 10**9}, "shorter than it says"), ({"calls": 5}, "no JSON"),
])  # fmt: skip
def test_messages_that_cannot_be(tmp_path: Path, change: Mapping[str, Any], says: str) -> None:
    """A message of another form is refused with what is wrong in it, and leaves nothing behind."""
    spool = Spool(tmp_path / "spool")
    header, payload = calls(0, FORWARD)
    with pytest.raises(DumpFormatError, match=says):
        spool.add(Peer(SESSION, 0, 1), {**header, **change}, memoryview(payload))
    assert not list((tmp_path / "spool").glob("step*"))


def test_names_that_are_paths_are_refused(tmp_path: Path) -> None:
    """No name in a message can point out of the spool."""
    for place in ("names", "step"):
        spool = Spool(tmp_path / place)
        text = json.dumps({"calls": {}, "names": {"../../x.pt": "a"}, "sources": {}}).encode()
        header = {"kind": "calls", "rank": 0, "step": 0, "number": 0, "calls": len(text)}
        if place == "step":
            header, text = {"kind": "step", "rank": 0, "step": 0, "files": {"../dump.json": 1}}, b"x"
        with pytest.raises(DumpFormatError):
            spool.add(Peer(SESSION, 0, 1), header, memoryview(text))


WHOLE = calls(0, FORWARD, BACKWARD)[1]


@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(WHOLE)))
def test_damaged_messages_do_no_harm(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int) -> None:
    """Whatever byte is wrong, wherever it ends: the message is taken or refused, and the calls of it can be asked for."""
    spool = Spool(tmp_path_factory.mktemp("fuzz") / "spool")
    header, payload = calls(0, FORWARD, BACKWARD)
    damaged = payload[:at] + bytes([byte]) + payload[at + 1 :]
    with contextlib.suppress(DumpFormatError):
        for call in spool.add(Peer(SESSION, 0, 1), header, memoryview(damaged[: max(cut, 1)])):
            assert call.message()["name"] == call.name
    for call in spool.end_session(SESSION):
        assert call.message()["name"] == call.name


def test_a_record_of_any_depth_is_skipped(tmp_path: Path) -> None:
    """A record that is nested too deep costs its own row only."""
    spool = Spool(tmp_path / "spool")
    nested = "[" * 900 + "]" * 900
    text = f'{{"calls": {{"{FORWARD}": {{"input_args": {nested}}}, "{BACKWARD}": {{}}}}, "names": {{}}, "sources": {{}}}}'.encode()
    header = {"kind": "calls", "rank": 0, "step": 0, "number": 0, "calls": len(text)}
    for call in spool.add(Peer(SESSION, 0, 1), header, memoryview(text)):
        assert "nested too deep" in call.message().get("skip", "nested too deep")
    assert [call.name for call in Spool(tmp_path / "spool").recover()] == ["Torch.exp.0"], "also after a restart"


def test_versions_must_agree(tmp_path: Path) -> None:
    """A training with another version of the messages is told to use the same one."""
    header = {"kind": messages.RUN, "version": messages.VERSION + 1, "rank": 0, "world": 1}
    with pytest.raises(DumpFormatError, match="use the same msprobe"):
        Spool(tmp_path / "spool").add(Peer(SESSION, 0, 1), header, memoryview(b""))


def test_steps_are_found_by_what_stands_in_them(tmp_path: Path) -> None:
    """A directory of the spool that is damaged costs its own calls, not the start."""
    first = Spool(tmp_path / "spool")
    put(first, 1, calls(0, FORWARD, BACKWARD))
    put(first, 2, calls(0, FORWARD, BACKWARD, step=1))
    (tmp_path / "spool/step0/rank0/.calls-00000.json").write_text("{")
    found = Spool(tmp_path / "spool").recover()
    assert [(call.name, call.step.number) for call in found] == [("Torch.exp.0", 1)]
    assert isinstance(found[0].step, SpoolStep)


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
@pytest.mark.parametrize("place", ["step0/rank0/.calls-00000.json", f"step0/rank0/{SpoolStep.SESSION}"])
def test_odd_files_in_a_spool_are_not_waited_for(tmp_path: Path, place: str, kind: str) -> None:
    """What an earlier run has left may lie where others write: nothing is read from a pipe, and no link is followed; that step is lost, the
    others are found."""
    first = Spool(tmp_path / "spool")
    put(first, 1, calls(0, FORWARD, BACKWARD))
    put(first, 2, calls(0, FORWARD, BACKWARD, step=1))
    path = tmp_path / "spool" / place
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert [(call.name, call.step.number) for call in Spool(tmp_path / "spool").recover()] == [("Torch.exp.0", 1)]


@pytest.mark.parametrize("sent", [True, False])
def test_what_is_not_sent_is_counted_and_listed(sent: bool) -> None:
    """A message that the transport gives up: the call and its tensors are lost, and the end of the step says so."""
    text = StepText(Options(("all",), lambda _: True, ".pt"), level="L1", task="tensor")
    counts: dict[str, int] = {}
    nothing = SimpleNamespace(send=lambda *_, **__: sent)
    store = CallStore(text, nothing, 0, list, Faults(strict=True), budget=1 << 20, count=counts.__setitem__, patience=0.0)
    store.begin_step(0, "")
    files = store.step(0)
    assert isinstance(files, SentStep)
    payload = store.place(files, 0, "torch.float32", (4,), 16)
    store.add(files, payload)
    ref = TensorRef(0, TensorDescription("torch.Tensor", "torch.float32", (4,), False))
    store.hand_over(files, Entry(FORWARD, {"output": [ref]}))
    store.end_step(files, [])
    store.finish(0)
    store.close()
    listed = [(item["name"], item["bytes"]) for item in json.loads(files.not_saved() or '{"not_saved": []}')["not_saved"]]
    assert (store.calls, counts, listed) == ((1, {}, []) if sent else (0, {NOT_SENT: 1}, [(f"{FORWARD}.output.0.pt", 16)]))
