"""YAML files that say by which functions operators are checked, in the form of the existing tool's ``fusion_operator_config.yaml``::

    operators:
      npu_example:                     # last part of recorded names, or a whole one: my_kernels.rms_norm
        forward: npu_example           # the function
        backward: npu_example_backward # checks the operator of this name
        description: text

A file is data: nothing of it is run, and nothing is imported because of it. A function is one of a Python file or module that was named
beside it (``--operators formulas.py operators.yaml``), or a formula that is here already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.core.settings import text
from msprobe_integrations.torch.op_tools.accuracy import references

SUFFIXES = (".yaml", ".yml")
_KEYS = ("forward", "backward", "description")

Function = Callable[..., Any]


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
    found: dict[str, Function] = {}
    for name, entry in operators.items():
        where = f"operators: {source}: {name}"
        functions = _entry(where, name, entry)
        if "forward" in functions:
            found[name] = _function(where, functions["forward"], modules)
        if "backward" in functions:
            found[functions["backward"].replace(":", ".").rpartition(".")[2]] = _function(where, functions["backward"], modules)
    return found


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
