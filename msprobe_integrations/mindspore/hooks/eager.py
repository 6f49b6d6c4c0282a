"""Hooks that stay out of compiled graphs.

A hook on a Cell or a Parameter that is met while a graph is compiled (``@jit``, GRAPH_MODE) becomes a part of the graph, or ends the
training when the compiler cannot read it. Where a function has ``__wrapped__`` (`functools.wraps`) the compiler reads that one instead: the
hooks here wrap functions that do nothing. Run on mindspore 2.7 and 2.10.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def _before(cell, args):  # type: ignore[no-untyped-def]  # noqa: ARG001 - the compiler reads this
    return None


def _after(cell, args, output):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return None


def _gradient(grad):  # type: ignore[no-untyped-def]
    return grad


def _do_nothing(*args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return None


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for eager code; where a graph is compiled the call is left out."""

    @functools.wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    eager.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # it is looked for behind __wrapped__
    eager.__wrapped__ = _do_nothing
    return eager


Pre = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
Post = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


def before_call(cell: Any, hook: Pre) -> Any:
    """Call `hook` with cell, positional and keyword arguments before every call of `cell` that is not compiled. Returns the handle."""

    @functools.wraps(_before)
    def call_hook(*given: Any) -> None:
        hook(given[0], given[1], given[2] if len(given) > 2 else {})

    return _register(cell.register_forward_pre_hook, call_hook)


def after_call(cell: Any, hook: Post) -> Any:
    """Call `hook` with cell, positional and keyword arguments and output after every call of `cell` that is not compiled. Returns the
    handle. A hook that gives anything but None would replace the output: what `hook` gives is dropped."""

    @functools.wraps(_after)
    def call_hook(*given: Any) -> None:
        hook(given[0], given[1], given[2] if len(given) > 3 else {}, given[-1])

    return _register(cell.register_forward_hook, call_hook)


def at_gradient(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Call `hook` with the gradient of `parameter` in every backward pass that is not compiled: once, with what has come together there.
    Returns the handle."""

    @functools.wraps(_gradient)
    def call_hook(gradient: Any) -> None:
        hook(gradient)

    return parameter.register_hook(call_hook)


def _register(register: Callable[..., Any], hook: Callable[..., None]) -> Any:
    try:
        return register(hook, with_kwargs=True)
    except TypeError:  # before 2.7: positional arguments only
        return register(hook)
