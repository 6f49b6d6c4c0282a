"""Watches MindSpore's compiler: probes are on the Cells while a graph is compiled, and at no other time.

`CompileWatch` stands in front of ``GraphExecutor_.compile`` (GRAPH_MODE) and ``JitExecutor_.compile`` (``jit``, gradients in GRAPH_MODE),
which are called for a graph that is not known yet. When the compiler refuses what the probes made of a program, it is asked again with
less of them, at last without: the training goes on, and what is missing is said.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mindspore import _c_expression, nn

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.mindspore.environment import api_module
from msprobe_integrations.patching import FunctionPatches

GRADIENTS = "gradients"
_EXECUTORS = ("GraphExecutor_", "JitExecutor_")
_OPTIMIZERS = ("mindspore.nn.optim.", "mindspore.experimental.optim.", "mindspore.mint.optim.")
"""Begin of the names that ``jit`` gives to their graphs: the module of the function."""


class Instrument(Protocol):
    """What is put on Cells for the time of a compilation."""

    def put_on(self, backward: bool) -> None:
        """Change the Cells; `backward`: for gradients too."""
        ...

    def take_off(self) -> None:
        """Change them back."""
        ...

    def note_graph(self, has: Sequence[str], refused: Exception | None) -> None:
        """A graph is there that `has` probes for these; `refused`: what the compiler had against more of them."""
        ...


class CompileWatch:
    """See the text of the module.

    Args:
        instrument: goes on the Cells.
        ways: of trying, the best first: with gradients, without.
    """

    def __init__(self, instrument: Instrument, ways: Sequence[bool]) -> None:
        self._instrument = instrument
        self._ways = list(ways)
        self._patches = FunctionPatches()
        self._busy = False

    @property
    def installed(self) -> bool:
        return bool(self._patches)

    def install(self) -> None:
        if self._patches:
            return
        for name in _EXECUTORS:
            executor = getattr(_c_expression, name, None)
            if executor is not None and "compile" in vars(executor):
                self._patches.add(executor, "compile", self._watch_compilation)

    def remove(self) -> None:
        """Stop watching. Graphs that are compiled stay as they are."""
        self._patches.close()

    def _watch_compilation(self, following: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._busy:  # a graph inside of another one
            return following(executor, *args, **kwargs)
        return self._compile(lambda: following(executor, *args, **kwargs))

    def _compile(self, make: Callable[[], Any]) -> Any:
        self._busy = True
        refused: Exception | None = None
        try:
            for backward in self._ways:
                try:
                    self._instrument.put_on(backward)
                    made = make()
                except Exception as error:
                    raise_of_training(error)
                    refused = refused or error
                    continue
                finally:
                    self._instrument.take_off()
                self._instrument.note_graph(["forward calls", GRADIENTS] if backward else ["forward calls"], refused)
                return made
            made = make()  # what it raises now is the program's own
            if refused is not None:
                self._instrument.note_graph([], refused)
            return made
        finally:
            self._busy = False


def forget_graphs(cells: Sequence[Any]) -> int:
    """Have everything compiled again that may contain one of these Cells; returns how many graphs that are at most. MindSpore's optimizers
    contain none; what else a compiled function calls is known to nobody."""
    wanted = {id(cell) for cell in cells}
    count = 0
    for made in gc.get_objects():
        if not isinstance(type(made), type) or not issubclass(type(made), nn.Cell):
            continue
        cache = made.__dict__.get("compile_cache") if hasattr(made, "__dict__") else None
        if cache and any(id(cell) in wanted for _, cell in made.cells_and_names()):
            count += len(cache)
            cache.clear()
    functions: set[str] = getattr(api_module(), "ms_compile_cache", set())
    forgotten = [phase for phase in functions if not phase.startswith(_OPTIMIZERS)]
    if forgotten:
        count += len(forgotten)
        functions.difference_update(forgotten)
        executor = getattr(api_module(), "_pynative_executor", None)
        if executor is not None:
            executor.clear_res()  # it keeps what it has differentiated
    return count
