"""Rows of a step leave a device only after every stream that wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msprobe_integrations.torch import pending


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
    source: Any = SimpleNamespace(device=torch.device("meta"), streams={Stream("communication")}, chunks=chunks, filled=filled)
    copy = pending._Copy(source)
    read = done.index("rows are read")
    assert set(done[: read - 1]) == {"side waits for communication", "side waits for training"}
    assert done[read - 1] == "on side"
    assert copy.arrive().tolist() == [[3.0] * 16] * 2
