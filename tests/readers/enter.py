"""What reads a file in other places than a command that only reads: each takes the arguments and returns the exit code that a command
would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.directory.layout import read_note
from msprobe_engine.accuracy.online.tcp.frames import Frame, FrameReader, Kind, Need, parse_header
from msprobe_engine.accuracy.precheck.calls import read_calls, remarks_on_lists, why_not, without_repeats
from msprobe_engine.accuracy.result_files import read_results
from msprobe_engine.accuracy.settings import PrecheckSettings, load_precheck_settings
from msprobe_engine.config.collect.repository import state
from msprobe_engine.core.errors import DumpFormatError, ProbeError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.metrics_server.request import Request
from msprobe_engine.core.process.user_key import read_key
from msprobe_engine.formats.monitor.losses import read_losses
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.merge import combine, summary
from msprobe_engine.probe.incident.pieces import Pieces
from msprobe_engine.probe.sinks.prometheus.node import read_snapshot
from msprobe_engine.probe.sinks.resume import last_step, read_header, whole_lines

Enter = Callable[[Sequence[str]], int]


def _reads(read: Callable[..., Any], *told: type[Exception]) -> Enter:
    """`read` of the paths; `told` are the errors that its caller takes, besides those of this project."""

    def enter(argv: Sequence[str]) -> int:
        try:
            read(*map(Path, argv))
        except (ProbeError, *told) as error:
            print(error)
            return 3
        return 0

    return enter


def _calls(path: Path) -> None:
    """What `acc_check` takes from a dump. The command itself runs the calls in processes of their own, which import torch first: 17 inputs
    a minute."""
    found = without_repeats(read_calls(path).calls)
    settings = PrecheckSettings()
    for call in found:
        why_not(call, settings)
    remarks_on_lists(found, settings)


def _incident(directory: Path) -> None:
    pieces = Pieces(directory).read()
    if not pieces:
        raise DumpFormatError(f"{directory}: no file of a rank")
    summary(combine(pieces), str(directory))


def _message(path: Path) -> None:
    data = read_input(path, 1 << 20)
    reader = FrameReader((Kind.HELLO, Kind.MESSAGE), 1 << 20)
    at = 0
    while at < len(data):
        target = reader.target()
        count = min(len(target), len(data) - at)
        target[:count] = data[at : at + count]
        at += count
        while True:
            frames = list(reader.parse_received(count))
            for frame in frames:
                if isinstance(frame, Frame) and frame.kind is Kind.MESSAGE:
                    messages.parse_message(parse_header(frame.header), frame.payload)
            if not frames or not isinstance(frames[-1], Need):
                break
            reader.give(memoryview(bytearray(frames[-1].payload)))
            count = 0


def _http_request(path: Path) -> None:
    request = Request(read_input(path, 1 << 20), frozenset(("localhost",)))
    assert isinstance(request.accept + request.accept_encoding, str)


def _resumed(directory: Path) -> None:
    last_step(directory)
    for path in directory.glob("*.csv"):
        read_header(path)
        whole_lines(path)


def _formulas(path: Path) -> None:
    from msprobe_integrations.torch.op_tools.accuracy.operators.custom import read_formulas

    read_formulas(str(path), {})


calls = _reads(_calls)
event = _reads(lambda path: Event.from_json(parse_json(read_input(path, 1 << 20))), OSError)
formulas = _reads(_formulas)
precheck_settings = _reads(load_precheck_settings)
precheck_results = _reads(lambda *paths: list(read_results(*paths)))
incident = _reads(_incident)
losses = _reads(read_losses)
snapshot = _reads(lambda path: read_snapshot(path, 1), OSError, ValueError)
note = _reads(read_note)
key = _reads(lambda path: read_key(path, {}))
git_state = _reads(state)
message = _reads(_message, OSError)
http_request = _reads(_http_request, OSError)
resumed = _reads(_resumed)
