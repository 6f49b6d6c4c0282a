"""API level (L1): calls of MindSpore's functions and of tensors' methods, on the thread that opened the capture.

Only the outermost call is a record, as in the existing format: what a function calls inside is its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import NODE_ONLY, Entry
from msprobe_integrations.common.capture.calls import ALWAYS, Call
from msprobe_integrations.mindspore.capture.api_names import COLLECTIVES
from msprobe_integrations.mindspore.capture.collectives import Waiting, find_unread_argument
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.hooks.wrappers import WRAPPERS, Names

_DEPTH = 3  # recorder.begin_call, begin_call, the wrapper: the user's frame is the next


class Note:
    """A call between `ApiCapture.begin_call` and `ApiCapture.end_call`.

    Attributes:
        call: its record; None where there is none.
        collective: (prefix, api, args, kwargs) of communication.
    """

    __slots__ = ("call", "collective")

    def __init__(self, call: Call | None, collective: tuple[str, str, Any, Mapping[str, Any]] | None = None) -> None:
        self.call = call
        self.collective = collective


class ApiCapture:
    """Sees the calls of APIs while it is installed.

    Args:
        is_on: one cheap call that says whether the current moment is inside the capture window.
    """

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool]) -> None:
        self._recorder = recorder
        self._on = is_on
        self._thread = -1
        self._inside = False
        self._cells: Sequence[Any] = ()
        self._owners: list[Names] = []
        self.installed = False
        self.waiting = Waiting(recorder, self._fail)

    def install(self, cells: Sequence[Any] = ()) -> None:
        """Start seeing calls, also of functions that `cells` keep as attributes."""
        if not self.installed:
            self.installed = True
            self._inside = False
            self._thread = threading.get_ident()
            WRAPPERS.add(self)
            if cells is not self._cells:
                self._cells, self._owners = cells, [Names(vars(cell)) for cell in cells]
            WRAPPERS.members(self._owners)

    def remove(self) -> None:
        """Stop seeing calls."""
        if self.installed:
            self.installed = False
            WRAPPERS.discard(self)

    def sees(self) -> bool:
        """Is a call made now to be recorded?"""
        return not self._inside and self.installed and self._on() and threading.get_ident() == self._thread

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See nothing of what this thread calls meanwhile."""
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: Mapping[str, Any]) -> Note:
        """A call begins; the caller's caller is the user. Until `end_call` nothing else of this thread is seen."""
        self._inside = True
        recorder = self._recorder
        try:
            base = f"{prefix}.{api}"
            n = recorder.numbers.take_number(base)
            calls = recorder.stack.calls
            kept = recorder.kept
            parent = calls[-1] if calls else None
            kind = ALWAYS
            if kept is not None:
                kind = kept.api(base)
                if kept.range is None and not kind.possible and not (parent is not None and parent.inside):
                    if kept.nodes:
                        above = parent.name if parent is not None else None
                        node = Entry(f"{base}.{n}.forward", {}, above, -1, recorder.micro_step, NODE_ONLY)
                        recorder.pipeline.entries.append(node)
                    return Note(None)
            call = Call(f"{base}.{n}.forward", f"{base}.{n}.backward", self, parent, kind)
            if prefix not in COLLECTIVES:
                recorder.begin_call(call, args, kwargs, _DEPTH)
                return Note(call)
            recorder.begin_call(call, args, kwargs, _DEPTH, find_unread_argument(prefix, api, len(args)))
            call.watch = False
            return Note(call, (prefix, api, args, kwargs))
        except Exception as error:
            raise_of_training(error)
            self._inside = False
            self._fail(error)
            self._inside = True
            return Note(None)

    def end_call(self, note: Note | None, result: Any, failed: bool = False) -> None:
        """The call has given `result`, or has raised."""
        try:
            if note is not None and note.call is not None:
                self._recorder.pop(note.call)
                if note.collective is None or failed:
                    self._recorder.end_call(note.call, result, None, failed=failed)
                else:
                    self.waiting.finish(note.call, *note.collective, result)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
        finally:
            self._inside = False

    def forget_written(self, tensors: Any) -> None:
        """Nothing to do: no row is taken for the present value of a tensor without reading it."""

    def around(
        self, prefix: str, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], skip: int = 0
    ) -> Any:
        """Call `function` between `begin_call` and `end_call`; the first `skip` arguments are no inputs."""
        note = self.begin_call(prefix, api, args[skip:], kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self.end_call(note, None, failed=True)
            raise
        self.end_call(note, result)
        return result

    def _fail(self, error: Exception) -> None:
        self._recorder.pipeline.faults.fail("API capture", error)
        self._on = _never


def _never() -> bool:
    return False
