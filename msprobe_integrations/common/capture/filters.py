"""Which records are kept: ``scope``, ``list`` and ``risk_level`` of the dump settings, asked by the recorder call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.probe.selection import risk
from msprobe_engine.probe.selection.patterns import NamePatterns
from msprobe_integrations.common.capture.calls import ALWAYS, NEVER, Base, Call

FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD


class RecordFilter:
    """The filter of one capture.

    Args:
        scope: [first, last] record names or nothing. What happens between the start of the first and the end of the last is kept:
            a record that starts before has no inputs, one that ends after has no output.
        names: elements of ``list``, see `msprobe_engine.probe.selection.patterns`.
        level: at ``mix`` everything inside the call of a listed module is kept too.
        risk_level: class of APIs, when there is neither scope nor list.
        graph_task: number of the backward pass in progress, -1 outside of one. Gradients of weights belong to the pass whose record
            closes the range.
    """

    def __init__(
        self,
        scope: Sequence[str] = (),
        names: Sequence[str] = (),
        level: str = "mix",
        risk_level: str = "ALL",
        graph_task: Callable[[], int] = lambda: -1,
    ) -> None:
        self.range = Range(scope[0], scope[1], graph_task) if scope else None
        self.names = NamePatterns(names) if names else None
        self.expands = level == "mix" and bool(names)
        self.risk_level = risk_level if not scope and not names else "ALL"
        self.nodes = level == "mix" and self.risk_level != "ALL"
        """Calls that the risk level leaves out are nodes of construct.json, as in the existing tool."""
        self._modules: dict[str, Base] = {}
        self._apis: dict[str, Base] = {}

    def module(self, base: str) -> Base:
        """Calls of the module ``Module.{path}.{Class}``."""
        if self.names is None:
            return ALWAYS
        found = self._modules.get(base)
        if found is None:
            found = self._modules[base] = Base(*self.names.module(base))
        return found

    def api(self, base: str) -> Base:
        """Calls of the API ``{Prefix}.{api}``."""
        found = self._apis.get(base)
        if found is None:
            found = self._apis[base] = self._api(base)
        return found

    def _api(self, base: str) -> Base:
        if self.names is not None:
            return Base(*self.names.api(base))
        prefix, _, api = base.rpartition(".")
        return ALWAYS if risk.is_recorded(self.risk_level, prefix, api) else NEVER

    @property
    def keeps_apis(self) -> bool:
        """Can an API be kept for its own name?"""
        return self.names is None or not self.names.only_modules

    def bounds(self, base: str) -> bool:
        """Can a call of the module `base` be an end of the range?"""
        return self.range is not None and self.range.bounded_by(base)

    def directions(self, base: Base, name: str, backward_name: str) -> int:
        """Which records of a call its own name keeps: `FORWARD`, `BACKWARD`, both or 0."""
        if base.certain or self.names is None:
            return BOTH if base.possible else 0
        if not base.possible:
            return 0
        return (FORWARD if self.names(name) else 0) | (BACKWARD if self.names(backward_name) else 0)

    def starts(self, name: str) -> bool:
        """A record starts. Is the range open, or is this its begin?"""
        return self.range is None or self.range.starts(name)

    def ends(self, name: str) -> bool:
        """A record ends. Was the range open until now?"""
        return self.range is None or self.range.ends(name)

    def wants(self, name: str, inside: bool = False) -> bool:
        """Is a record kept that has no duration (a collective)? `inside`: because an enclosing call was asked for."""
        started = self.starts(name)
        return self.ends(name) and started and (inside or self.names is None or self.names(name))

    def end_step(self) -> None:
        """Names start anew."""
        if self.range is not None:
            self.range.reset()


class Range:
    """Open from the start of the record `first` to the end of the record `last`; both may be the same, or lie inside each other."""

    def __init__(self, first: str, last: str, graph_task: Callable[[], int] = lambda: -1) -> None:
        self._first, self._last = first, last
        self._graph_task = graph_task
        self.open = False
        self._closed_by: tuple[Call, int] | None = None

    def reset(self) -> None:
        """A new step begins."""
        self.open = False
        self._closed_by = None

    def bounded_by(self, base: str) -> bool:
        """Is a call of the module `base` one of the ends?"""
        return self._first.startswith(f"{base}.") or self._last.startswith(f"{base}.")

    def starts(self, name: str) -> bool:
        if name == self._first:
            self.open = True
        return self.open

    def ends(self, name: str, call: Call | None = None) -> bool:
        """A record ends; `call`: it is that of a backward pass through this call."""
        was = self.open
        if was and name == self._last:
            self.open = False
            self._closed_by = None if call is None else (call, self._graph_task())
        return was

    def holds(self, call: Call | None, path: str = "") -> bool:
        """Is a gradient in the range that arrives now, for something inside `call`, or for a parameter of the module `path`?

        Gradients of weights arrive after those of inputs: after the backward record that closes the range, and belong to it."""
        if self.open or self._closed_by is None or self._closed_by[1] != self._graph_task():
            return self.open
        last = self._closed_by[0]
        if path:
            return last.is_module and f"{path}.".startswith(f"{last.owner.path}.")
        while call is not None and call is not last:
            call = call.parent
        return call is last


def record_filter(dump: DumpSettings, graph_task: Callable[[], int]) -> RecordFilter | None:
    """The filter of dump settings; None when everything is kept."""
    if not dump.scope and not dump.list and dump.risk_level == "ALL":
        return None
    return RecordFilter(dump.scope, dump.list, dump.level, dump.risk_level, graph_task)
