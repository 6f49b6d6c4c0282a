"""Operators that torch does not know: the user says by which function a recorded name is run, and by which it is checked."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.errors import UsageError

Function = Callable[..., Any]
InputMaker = Callable[[list[Any], dict[str, Any]], tuple[list[Any], dict[str, Any]]]


class Custom(NamedTuple):
    """What is known of one name.

    Attributes:
        function: the operator under test; None: what torch has under this name.
        reference: the same in plain torch operations; it runs on the bench, in its types. None: `function` there too.
        inputs: changes drawn arguments to ones that the operator takes.
    """

    function: Function | None
    reference: Function | None
    inputs: InputMaker | None


_registered: dict[str, Custom] = {}


def register_operator(
    name: str, function: Function | None = None, reference: Function | None = None, inputs: InputMaker | None = None
) -> None:
    """Have the operator accuracy check run the records ``{name}.{N}`` by `function` and judge them by `reference`.

    Args:
        name: the recorded name without its number: ``"NPU.npu_swiglu"``, ``"my_kernels.rms_norm"``.
        function: the operator under test, called with the recorded arguments on the target's device. None: what torch has under
            this name, or, where it has nothing, what was recorded on the device, if the dump has its tensors.
        reference: gives the same results (of the same structure) by operations that torch has everywhere; called with the arguments in
            the bench's wider types. None: `function` runs on the bench too.
        inputs: gets the positional and keyword arguments that were drawn from statistics (tensors on the CPU) and returns those to be
            used: for operators that need more than the recorded extremes say. Not called when the dump has the tensors.

    Raises:
        UsageError: the name is no recorded name, or neither function nor reference is given.
    """
    if not isinstance(name, str) or "." not in name.strip(".") or any(c in name for c in "/\\\0\n"):
        raise UsageError(
            f"register_operator: name is {name!r}; allowed: the name of a record without its number, such as 'my_kernels.rms_norm'"
        )
    if function is None and reference is None:
        raise UsageError(f"register_operator: {name} has neither function nor reference; give at least one")
    for what, value in (("function", function), ("reference", reference), ("inputs", inputs)):
        if value is not None and not callable(value):
            raise UsageError(f"register_operator: {what} of {name} is a {type(value).__name__}; allowed: functions")
    _registered[name] = Custom(function, reference, inputs)


def forget_operator(name: str) -> bool:
    """Take a registration back; False when there is none."""
    return _registered.pop(name, None) is not None


def custom(name: str) -> Custom | None:
    """What was registered for the record ``{name}.{N}``."""
    return _registered.get(name)


def registered() -> tuple[str, ...]:
    """All names that were registered."""
    return tuple(_registered)


def load_operators(source: str) -> None:
    """Run a Python file, or import a module, that calls `register_operator`: for the processes of a check.

    Raises:
        UsageError: there is no such file or module, or it fails.
    """
    try:
        if not source.endswith(".py"):
            importlib.import_module(source)
            return
        path = Path(source).resolve()
        name = f"msprobe_operators_{abs(hash(str(path)))}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UsageError(f"operators: {source} is no Python file")
        if str(path.parent) not in sys.path:  # as Python does for a script: what it imports may lie beside it
            sys.path.append(str(path.parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:  # whatever the user's code does
        raise UsageError(f"operators: {source} cannot be loaded ({type(error).__name__}: {str(error)[:200]})") from error
