"""Functions that the user wants to see as records: `register_custom_api`.

The wrapper stays where it was put until `restore`, also while nothing is dumped: names imported from the module in between are the
wrapper too. Outside a capture it is one call and one question.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.patching import Replacement

_log = get_logger()
_FORBIDDEN = "/\\\0\n"


class ApiRecords(Protocol):
    """What makes records of API calls. One with ``take(function, prefix, api, args, kwargs)`` makes the calls itself, and may give
    something else than their results."""

    def sees(self) -> bool: ...

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: dict[str, Any], /) -> Call | None: ...

    def end_call(self, call: Call | None, result: Any, /, failed: bool = False) -> None: ...

    def aside(self) -> AbstractContextManager[None]: ...

    def forget_written(self, tensors: Any, /) -> None:
        """A function that was not looked into had these: it may have written to any of them."""


class CustomApis:
    """The functions registered in this process.

    Args:
        capture: the API capture of the moment, None when the level has none.
        compiling: is the framework making a program of the code that calls? Then the function is itself.
    """

    def __init__(self, capture: Callable[[], ApiRecords | None], compiling: Callable[[], bool] = lambda: False) -> None:
        self._capture = capture
        self._compiling = compiling
        self._registered: dict[tuple[int, str], Replacement] = {}

    def register(self, owner: Any, name: Any, prefix: Any = None) -> None:
        """Make records ``{prefix}.{name}.{N}.forward`` and ``.backward`` of calls of ``owner.name``, at levels L1 and mix.

        Raises:
            UsageError: there is no such function, or the prefix is no text that can stand in a record name.
        """
        function = _function(owner, name, "register_custom_api")
        prefix = _prefix(owner) if prefix is None else prefix
        if not isinstance(prefix, str) or not prefix.strip(".") or any(c in prefix for c in _FORBIDDEN):
            raise UsageError(f"register_custom_api: api_prefix is {prefix!r}; allowed: a text without / and line breaks, dots may be in it")
        if isinstance(function, type):
            raise UsageError(f"register_custom_api: {name} is a class; allowed: functions and methods")
        self.forget(owner, name)
        static = inspect.getattr_static(owner, name, None)
        wrapper: Any
        if isinstance(owner, type) and isinstance(static, classmethod):
            wrapper = classmethod(self._wrap(static.__func__, prefix, name, skip=1))
        elif isinstance(owner, type) and isinstance(static, staticmethod):
            wrapper = staticmethod(self._wrap(function, prefix, name))
        else:
            wrapper = self._wrap(function, prefix, name)
        try:
            self._registered[id(owner), name] = Replacement(owner, name, wrapper)
        except (AttributeError, TypeError) as error:
            raise UsageError(f"register_custom_api: {prefix}.{name} cannot be replaced: {error}") from error

    def restore(self, owner: Any, name: Any) -> bool:
        """Put the original back; False when the function was not registered.

        Raises:
            UsageError: there is no such function.
        """
        _function(owner, name, "restore_custom_api")
        return self.forget(owner, name)

    def forget(self, owner: Any, name: str) -> bool:
        """`restore` without a check. What somebody else has put in our place meanwhile stays."""
        known = self._registered.pop((id(owner), name), None)
        if known is None:
            return False
        if not known.undo():
            _log.warning("restore_custom_api: %s was replaced by something else meanwhile, which stays", name)
        return True

    def _wrap(self, function: Callable[..., Any], prefix: str, name: str, skip: int = 0) -> Callable[..., Any]:
        find, compiling = self._capture, self._compiling

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # first: what is looked at in a compiled region is guarded, and compiled again when it changes
                return function(*args, **kwargs)
            capture = find()
            if capture is None or not capture.sees():
                return function(*args, **kwargs)
            return record_call(capture, function, prefix, name, args, kwargs, skip)

        return call


def record_call(
    capture: ApiRecords, function: Callable[..., Any], prefix: str, name: str, args: Any, kwargs: dict[str, Any], skip: int = 0
) -> Any:
    """Call `function` as one record ``{prefix}.{name}.{N}``; the first `skip` arguments are no inputs."""
    make_call = getattr(capture, "make_call", None)
    if make_call is not None:
        return make_call(function, prefix, name, args, kwargs)
    note = capture.begin_call(prefix, name, args[skip:], kwargs)
    try:
        with capture.aside():  # calls inside are its own business, as with torch's composite functions
            result = function(*args, **kwargs)
    except BaseException:
        capture.end_call(note, None, failed=True)
        raise
    capture.forget_written((args, kwargs, result))
    capture.end_call(note, result)
    return result


def _prefix(owner: Any) -> str:
    return str(getattr(owner, "__name__", None) or type(owner).__name__)


def _function(owner: Any, name: Any, where: str) -> Any:
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: api is {name!r}; allowed: the name of a function of the module")
    function = getattr(owner, name, None)
    if function is None:
        raise UsageError(f"{where}: {_prefix(owner)} has no attribute '{name}'")
    if not callable(function):
        raise UsageError(f"{where}: {_prefix(owner)}.{name} is a {type(function).__name__}; allowed: functions and methods")
    return function
