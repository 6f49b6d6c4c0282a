"""Operators that torch does not know: the user says by which function a recorded name is run, and by which it is checked.

YAML files that say by which functions operators are checked, in the form of the existing tool's ``fusion_operator_config.yaml``::

    operators:
      npu_example:                     # last part of recorded names, or a whole one: my_kernels.rms_norm
        forward: npu_example           # the function
        backward: npu_example_backward # checks the operator of this name
        description: text

A file is data: nothing of it is run, and nothing is imported because of it. A function is one of a Python file or module that was named
beside it (``--operators formulas.py operators.yaml``), or a formula that is here already.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.core.settings import text
from msprobe_integrations.torch.op_tools.accuracy import references

SUFFIXES = (".yaml", ".yml")
_KEYS = ("forward", "backward", "description")


def read_formulas(source: str, modules: Mapping[str, ModuleType]) -> dict[str, Function]:
    """Formulas by the name of the operator that each checks.

    Args:
        modules: in which functions are looked up: by name of the file without ``.py``, or of the module.

    Raises:
        UsageError: the file cannot be read, has another form, or names a function that is not there.
    """
    try:
        node = text.read_file(Path(source))
    except SettingsError as error:
        raise UsageError(f"operators: {error}") from None
    operators = node.get("operators") if isinstance(node, Mapping) else None
    if not isinstance(operators, Mapping):
        raise UsageError(f"operators: {source} has no mapping 'operators' at the top")
    formulas: dict[str, Function] = {}
    for name, entry in operators.items():
        where = f"operators: {source}: {name}"
        functions = _entry(where, name, entry)
        if "forward" in functions:
            formulas[name] = _function(where, functions["forward"], modules)
        if "backward" in functions:
            formulas[functions["backward"].replace(":", ".").rpartition(".")[2]] = _function(where, functions["backward"], modules)
    return formulas


def _entry(where: str, name: Any, entry: Any) -> dict[str, str]:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{where}: is no name of an operator, such as npu_swiglu or my_kernels.rms_norm")
    if not isinstance(entry, Mapping) or not all(key in _KEYS and isinstance(value, str) for key, value in entry.items()):
        raise UsageError(f"{where}: must have texts by the keys {', '.join(_KEYS)} and nothing else")
    functions = {key: entry[key] for key in ("forward", "backward") if key in entry}
    if not functions:
        raise UsageError(f"{where}: has neither forward nor backward")
    return functions


def _function(where: str, name: str, modules: Mapping[str, ModuleType]) -> Function:
    module, _, last = name.replace(":", ".").rpartition(".")
    if module and module not in modules:
        raise UsageError(f"{where}: {name}: {module} is not among --operators; name its file or module there, before or behind this one")
    places: Sequence[ModuleType] = (modules[module],) if module else tuple(modules.values())
    function: Any = next((value for place in places if (value := vars(place).get(last)) is not None), None)
    if function is None and not module:
        function = references.FORMULAS.get(last)
    if not callable(function):
        looked = ", ".join(modules) or "no file or module beside this one"
        raise UsageError(f"{where}: there is no function {last!r} (looked in: {module or looked}; formulas that are here already)")
    made: Function = function
    return made


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
_formulas: dict[str, Function] = {}
"""By the last part of a name, from files of formulas."""
_modules: dict[str, ModuleType] = {}
"""What `load_operators` has loaded, by name of the file or module."""


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
    for parameter, value in (("function", function), ("reference", reference), ("inputs", inputs)):
        if value is not None and not callable(value):
            raise UsageError(f"register_operator: {parameter} of {name} is a {type(value).__name__}; allowed: functions")
    _registered[name] = Custom(function, reference, inputs)


def forget_operator(name: str) -> bool:
    """Take a registration, or a formula of a file, back; False when there is none."""
    return _registered.pop(name, None) is not None or _formulas.pop(name, None) is not None


def custom(name: str) -> Custom | None:
    """What was registered for the record ``{name}.{N}``."""
    return _registered.get(name)


def formula(api: str) -> Function | None:
    """What a file of formulas has for the records whose name ends in `api`."""
    return _formulas.get(api)


def list_registered_names() -> tuple[str, ...]:
    """All names that were registered, those of files of formulas without a first part."""
    return (*_registered, *_formulas)


def load_operators(*sources: str) -> None:
    """Run Python files, or import modules, that call `register_operator`, then read files of formulas (`formula_files`): for the
    processes of a check.

    Raises:
        UsageError: there is no such file or module, or it fails.
    """
    for source in sources:
        if not source.endswith(SUFFIXES):
            _load_module(source)
    for source in sources:
        if source.endswith(SUFFIXES):
            for name, function in read_formulas(source, _modules).items():
                if "." in name:
                    known = custom(name) or Custom(None, None, None)
                    register_operator(name, known.function, function, known.inputs)
                else:
                    _formulas[name] = function


def _load_module(source: str) -> None:
    try:
        if not source.endswith(".py"):
            _modules[source] = importlib.import_module(source)
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
        _modules[path.stem] = module
    except UsageError:
        raise
    except Exception as error:  # whatever the user's code does
        raise UsageError(f"operators: {source} cannot be loaded ({type(error).__name__}: {str(error)[:200]})") from error
