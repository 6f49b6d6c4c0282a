"""Streams of a device: what waits for what."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msprobe_integrations.torch.dump import tensor_saver
from msprobe_integrations.torch.statistics import pending, streams
from msprobe_integrations.torch.statistics.checksums import _Block

# Rows of a step leave a device only after every stream that wrote them.


class _Rows(torch.Tensor):
    """Rows whose memory other streams may be told of."""

    def record_stream(self, stream: Any) -> None:
        del stream


def test_rows_are_put_together_behind_all_streams_that_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the rows (to join the chunks of a large step) happens on the side stream, after it waits for each stream that wrote one."""
    done: list[str] = []

    class Stream:
        def __init__(self, name: str = "side", device: Any = None) -> None:
            del device
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        done.append(f"on {stream.name}")
        yield

    module = SimpleNamespace(
        Stream=Stream,
        Event=lambda: SimpleNamespace(record=lambda _: None, query=lambda: True, synchronize=lambda: None),
        current_stream=lambda _: Stream("training"),
        device=lambda _: contextlib.nullcontext(),
        stream=on,
    )
    monkeypatch.setattr(torch, "meta", module, raising=False)
    monkeypatch.setattr(pending, "host_memory", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    monkeypatch.setattr(pending, "side_stream", lambda module, device: Stream(device=(module, device)))

    def filled() -> torch.Tensor:
        done.append("rows are read")
        return torch.full((2, 16), 3.0, dtype=torch.float64).as_subclass(_Rows)

    chunks = [torch.zeros(1).as_subclass(_Rows)]
    source: Any = SimpleNamespace(device=torch.device("meta"), streams={Stream("communication")}, chunks=chunks, join_rows=filled)
    copy = pending._Copy(source)
    read = done.index("rows are read")
    assert set(done[: read - 1]) == {"side waits for communication", "side waits for training"}
    assert done[read - 1] == "on side"
    assert copy.arrive().tolist() == [[3.0] * 16] * 2


# Threads of ours that wait for a device say first that their calls belong to no capture of a graph.

SOURCE = """
static int calls, mode = -1;
int {0}(int *m) {{ calls++; mode = *m; return 0; }}
int seen(void) {{ return calls * 10 + mode + 1; }}
"""
LIBRARIES = {
    "libcudart.so.12": "cudaThreadExchangeStreamCaptureMode",
    "libamdhip64.so.6": "hipThreadExchangeStreamCaptureMode",
    "libascendcl.so": "aclmdlRICaptureThreadExchangeMode",
}
EVENT = SimpleNamespace(synchronize=lambda: None, query=lambda: True)


def _saver() -> None:
    made = object.__new__(tensor_saver._Event)
    made._event = EVENT
    made.wait()


def _checksums() -> None:
    block: Any = SimpleNamespace(_event=EVENT, _host=None, memory=None, parts=[], done=threading.Event())
    _Block.finish(block)
    assert not getattr(block, "error", "")


def _rows() -> None:
    copy = object.__new__(pending._Copy)
    copy.event = EVENT
    assert copy.ready()


WAITS: dict[str, Callable[[], None]] = {
    "any": lambda: streams.wait_for(EVENT),
    "saved tensors": _saver,
    "checksums": _checksums,
    "rows": _rows,
}


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A library of the device's name, in this process, that counts calls."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    place = tmp_path_factory.mktemp("libraries")
    (place / "source.c").write_text(SOURCE.format(LIBRARIES[request.param]))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", place / request.param, place / "source.c"], check=True, timeout=240)
    return ctypes.CDLL(str(Path(place) / request.param))


@pytest.mark.parametrize("wait", WAITS)
def test_our_threads_are_relaxed_once(library: Any, wait: str) -> None:
    """A thread of ours sets mode 2 (relaxed) before it first waits, and not again; other threads, the training's among them, set none."""
    failed: list[BaseException] = []

    def twice() -> None:
        try:
            WAITS[wait]()
            WAITS[wait]()
        except BaseException as error:
            failed.append(error)

    before = library.seen()
    for name, calls in (("MainThread-like", 0), ("msprobe-tensors", 1)):
        thread = threading.Thread(target=twice, name=name)
        thread.start()
        thread.join(30)
        assert failed == []
        now = library.seen()
        assert (now // 10 - before // 10, now % 10 if calls else 3) == (calls, 3)
