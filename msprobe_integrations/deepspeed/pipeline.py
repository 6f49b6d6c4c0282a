"""The pipeline engine: micro batches by the instructions of its schedule.

`_exec_schedule` looks its methods up in the table `_INSTRUCTION_MAP` of the class, so wrapping the methods has no effect. The followed
engine gets a table of its own; the class keeps its one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_integrations.deepspeed.engine import EngineObserver

_TABLE = "_INSTRUCTION_MAP"
_PASSES = ("ForwardPass", "BackwardPass")


def is_pipeline(engine: Any) -> bool:
    """Does this engine run schedules?"""
    return isinstance(getattr(type(engine), _TABLE, None), dict)


class Instructions:
    """Tells the observer which micro batch a pass is of: forward and backward passes of different ones alternate."""

    def __init__(self, engine: Any, observer: EngineObserver) -> None:
        self._engine = engine
        self._observer = observer
        self._passes: dict[tuple[str, Any], int] = {}
        self._step = -1
        self._mine: dict[Any, Callable[..., Any]] = {}

    def put_on(self) -> None:
        """The engine gets its own table."""
        table = getattr(self._engine, _TABLE)
        self._mine = {kind: self._wrapped(kind.__name__, method) if kind.__name__ in _PASSES else method for kind, method in table.items()}
        setattr(self._engine, _TABLE, self._mine)

    def take_off(self) -> None:
        """It uses its class's again."""
        if vars(self._engine).get(_TABLE) is self._mine:
            delattr(self._engine, _TABLE)

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def instruction(*args: Any, **kwargs: Any) -> Any:
            observer = self._observer
            if observer.is_driven:  # else an evaluation
                with observer.safely("micro batch"):
                    if observer.step != self._step:
                        self._step = observer.step
                        self._passes.clear()
                    place = (name, kwargs.get("phase"))
                    number = self._passes.get(place, 0)
                    self._passes[place] = number + 1
                    observer.micro_batch(number)
            return method(*args, **kwargs)

        return instruction
