"""Calls of functions that draw or seed random numbers: how often, from where, and with what arguments.

A call costs a look at the four innermost frames of the program. Calls that agree in them are one line of the record; the whole stack is
taken at the first of them. After `stop` nothing is counted, and whoever replaced the functions puts them back.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np

from msprobe_engine.core import redaction
from msprobe_engine.core.guard import raise_of_training

Replace = Callable[[Any, str, Callable[[Any], Any]], None]
"""``replace(owner, name, wrap)``: put ``wrap(function)`` in place of ``owner.name``, if there is one."""

PYTHON = (
    *("betavariate", "binomialvariate", "choice", "choices", "expovariate", "gammavariate", "gauss", "getrandbits", "lognormvariate"),
    *("normalvariate", "paretovariate", "randbytes", "randint", "random", "randrange", "sample", "shuffle", "triangular", "uniform"),
    *("vonmisesvariate", "weibullvariate", "seed", "setstate"),
)
NUMPY = (
    *("beta", "binomial", "bytes", "chisquare", "choice", "dirichlet", "exponential", "f", "gamma", "geometric", "gumbel"),
    *("hypergeometric", "laplace", "logistic", "lognormal", "logseries", "multinomial", "multivariate_normal", "negative_binomial"),
    *("noncentral_chisquare", "noncentral_f", "normal", "pareto", "permutation", "poisson", "power", "rand", "randint", "randn"),
    *("random", "random_integers", "random_sample", "ranf", "rayleigh", "sample", "shuffle", "standard_cauchy", "standard_exponential"),
    *("standard_gamma", "standard_normal", "standard_t", "triangular", "uniform", "vonmises", "wald", "weibull", "zipf"),
    *("seed", "set_state", "default_rng"),
)
NEAR = 4
"""Frames of the program that tell calls apart."""
MOST_STACKS = 20_000
MOST_SEEDS = 1000
"""Calls of seeding functions whose arguments are kept one by one, for each line of the record."""
_SEEDS = ("seed", "manual_seed", "manual_seed_all", "seed_all", "set_state", "setstate", "set_rng_state", "default_rng", "set_seed")
_LONGEST = 120
_Key = tuple[Any, ...]


class _Line:
    """Calls of one function from one place."""

    __slots__ = ("arguments", "count", "seeds", "stack")

    def __init__(self, stack: list[tuple[CodeType, int]], arguments: str) -> None:
        self.count = 0
        self.stack = stack
        self.arguments = arguments
        self.seeds: list[str] = []


class RandomCalls:
    """The record of one process. Calls from any thread count; those of processes forked off do not.

    Args:
        hides: code whose frames are left out (the framework's plumbing between a program and the function).
        quiet: True while nothing is to be counted (a compiler looks at the program).
    """

    def __init__(self, hides: Callable[[CodeType], bool] | None = None, quiet: Callable[[], bool] | None = None) -> None:
        self.on = False
        self._hides = hides or (lambda code: code.co_filename == __file__)
        self._quiet = quiet or (lambda: False)
        self._hidden: dict[int, tuple[CodeType, bool]] = {}
        self._lines: dict[_Key, _Line] = {}
        self._lock = threading.Lock()
        self._inside = threading.local()
        self.left_out = 0
        """Calls from places beyond `MOST_STACKS`."""
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Count no more."""
        self.on = False

    def replace_all(self, replace: Replace) -> None:
        """Let `replace` put wrappers in place of the functions of ``random`` and ``numpy.random``."""
        for name in PYTHON:
            replace(random, name, functools.partial(self.wrap_function, f"random.{name}"))
        for name in NUMPY:
            replace(np.random, name, functools.partial(self.wrap_function, f"np.random.{name}"))

    def wrap_function(self, name: str, original: Any, draws: Callable[..., bool] | None = None) -> Any:
        """`original`, counted under `name`.

        Args:
            draws: with the call's arguments: does it draw at all? (dropout does not in evaluation)
        """
        add, seeds, quiet = self._add, name.rpartition(".")[2] in _SEEDS, self._quiet

        @functools.wraps(original)
        def count_call(*args: Any, **kwargs: Any) -> Any:
            if not quiet() and self.on:  # a compiler that looks at this sees nothing but the call
                add(name, seeds, draws, args, kwargs, sys._getframe(1))
            return original(*args, **kwargs)

        return count_call

    def _add(
        self,
        name: str,
        seeds: bool,
        draws: Callable[..., bool] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> None:
        hidden = self._hidden
        key: list[Any] = [name]
        near: FrameType | None = frame
        try:
            while near is not None and len(key) <= 2 * NEAR:
                code = near.f_code
                known = hidden.get(id(code)) or self._look_at(code)
                if not known[1]:
                    key += (id(code), near.f_lasti)
                near = near.f_back
            line = self._lines.get(tuple(key))
            if line is None or seeds or draws is not None:
                if getattr(self._inside, "on", False) or (draws is not None and not draws(*args, **kwargs)):
                    return
                line = self._first(tuple(key), seeds, args, kwargs, frame)
            if line is not None:
                line.count += 1
        except Exception as error:  # of what is described for the record; the call itself is the program's
            raise_of_training(error)
            self.left_out += 1

    def _look_at(self, code: CodeType) -> tuple[CodeType, bool]:
        """By identity: code of two files may be equal. What is known is kept alive, so that no other code gets its identity."""
        if len(self._hidden) > 10 * MOST_STACKS:
            raise OverflowError("a program that makes code without end")
        return self._hidden.setdefault(id(code), (code, self._hides(code)))

    def _first(self, key: _Key, seeds: bool, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> _Line | None:
        """A line that is new, or one whose arguments are looked at every time."""
        self._inside.on = True  # what is done in here may draw (the repr of an argument)
        try:
            line = self._lines.get(key)
            if line is None:
                if len(self._lines) >= MOST_STACKS:
                    self.left_out += 1
                    return None
                made = _Line(self._stack(frame), describe_arguments(args, kwargs))
                with self._lock:
                    line = self._lines.setdefault(key, made)
            if seeds and len(line.seeds) < MOST_SEEDS:
                line.seeds.append(describe_arguments(args, kwargs))
            return line
        finally:
            self._inside.on = False

    def _stack(self, frame: FrameType | None) -> list[tuple[CodeType, int]]:
        found = []
        while frame is not None:
            code = frame.f_code
            known = self._hidden.get(id(code)) or self._look_at(code)
            if not known[1]:
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        return found[::-1]

    def __len__(self) -> int:
        return len(self._lines)

    def to_existing_format(self) -> dict[str, list[dict[str, Any]]]:
        """As the existing tool has it: function to ``[{"count", "stack"}]``, outermost frame first."""
        found: dict[str, list[dict[str, Any]]] = {}
        for key, line in list(self._lines.items()):
            found.setdefault(key[0], []).append({"count": line.count, "stack": _texts(line.stack)})
        return found

    def calls(self) -> list[dict[str, Any]]:
        """Each line with ``name``, ``count``, ``where`` (file, line and function of the program's innermost frame), ``arguments`` of the
        first call, and for seeding functions ``seeds``, the arguments of all."""
        shown = []
        hides = redaction.active()
        for key, line in list(self._lines.items()):
            arguments = line.arguments if hides is None else " ".join(("redacted", *hides.of_argument(line.arguments).values()))
            call = {"name": key[0], "count": line.count, "where": _where(line.stack), "arguments": arguments}
            shown.append({**call, "seeds": list(line.seeds)} if line.seeds else call)
        return shown


def _texts(stack: list[tuple[CodeType, int]]) -> list[str]:
    return [
        f"File {os.path.abspath(code.co_filename)}, line {line}, in {code.co_name}, {redaction.source_line(code.co_filename, line)}"
        for code, line in stack
    ]


def _where(stack: list[tuple[CodeType, int]]) -> str:
    return f"{stack[-1][0].co_filename}:{stack[-1][1]} in {stack[-1][0].co_name}" if stack else ""


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Arguments of a call in one line: numbers and short texts as they are, arrays and tensors by shape and type, the rest by class."""
    parts = [*(_describe_value(value) for value in args), *(f"{name}={_describe_value(value)}" for name, value in kwargs.items())]
    text = ", ".join(parts)
    return text if len(text) <= 4 * _LONGEST else f"{text[: 4 * _LONGEST]}..."


def _describe_value(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value if len(value) <= _LONGEST else value[:_LONGEST])
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_describe_value(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__}({tuple(shape)}, {getattr(value, 'dtype', '')})"
    if type(value).__module__ == "torch":  # dtype, device, layout, memory_format: their texts are their values
        return str(value) if type(value).__name__ != "Generator" else "Generator"
    return type(value).__name__
