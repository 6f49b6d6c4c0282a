"""What a probe has left behind: names of frameworks, registrations, hooks and handlers of the process, compared by identity.

    before = snapshot(model, optimizer)
    ...attach a probe, train, close it...
    assert before.changed() == []

Looked at are the modules of frameworks that are imported when the picture is taken: their attributes, the attributes of their classes, the
contents of their tables (dictionaries, lists and sets that hold something that can be called), registered operators and kernels, and what
the process has one of (see `_process`). Objects given to `snapshot` are looked at with their own attributes and those of their children.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import logging
import operator
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msprobe_engine.core.io.claims
import msprobe_engine.probe.incident.notify  # noqa: F401 - these wait for the end of the process from their import on
import msprobe_integrations.common.ranks.step_exchange  # noqa: F401

ROOTS = (
    "torch",
    "megatron",
    "mindspeed",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "torchtitan",
    "numpy.random",
    "random",
)
"""Packages whose names are watched, as far as they are imported."""
_NOISE = (
    "__warningregistry__",
    "__annotations__",
    "__annotations_cache__",
    "__abstractmethods__",
    "_abc_impl",
    "__dataclass_params__",
    "__static_attributes__",
)
_CACHES = (
    "torch._dynamo.",
    "torch._inductor.",
    "torch.fx.",
    "torch._functorch.",
    "torch._subclasses.",
    "torch._guards.",
    "torch.ops.",
    "torch._ops.",
    "torch._opaque_base.",
    "torch.classes.",
    "torch.distributed.tensor._op_schema.",
    "torch.distributed.tensor._ops.",
    "torch.distributed.tensor._api.DTensor._op_dispatcher",
    "torch.library._impls",  # said by `_kernels`
    "torch.utils._pytree.",
)
"""Places that torch fills while it works, on its own account."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = types.SimpleNamespace(name="missing")
_TABLES = (dict, list, set)


class Snapshot:
    """Everything watched, as it is now.

    Args:
        objects: models, optimizers, engines whose own attributes are watched as well.
        alone: look at nothing else.
    """

    def __init__(self, *objects: Any, alone: bool = False) -> None:
        self._look = lambda: dict(_of_objects(objects) if alone else _everything(objects))
        self._taken = self._look()

    def changed(self, ignore: Callable[[str], bool] = lambda _: False) -> list[str]:
        """What differs now, sorted: ``torch.distributed.all_reduce: replaced (was ..., is ...)``, ``added``, ``removed``.

        Args:
            ignore: says of a place (``torch.optim.Optimizer.step``) that it may differ.
        """
        now = self._look()
        found = []
        for place, before in self._taken.items():
            if place.startswith(_CACHES) or place not in now:
                continue  # modules that are gone take their names with them
            after = now[place]
            if before.keys() == after.keys() and all(map(operator.is_, before.values(), after.values())):
                continue  # most of what there is
            for name in sorted({*before, *after}, key=str):
                one, other = before.get(name, _MISSING), after.get(name, _MISSING)
                where = f"{place}.{name}" if name != "" else place
                if _equal(one, other) or where.startswith(_CACHES) or _harmless(place, one, other) or ignore(where):
                    continue
                what = "added" if one is _MISSING else "removed" if other is _MISSING else "replaced"
                found.append(f"{where}: {what} ({_difference(one, other)})")
        return sorted(found)


class _AtExit:
    """Functions of this project that wait for the end of the process; `atexit` does not tell (its count takes in those taken back)."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self.register, self.unregister  # type: ignore[assignment]

    def register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `atexit.register`."""
        if self._name(function):
            self.running.append(self._name(function))
        return self._register(function, *args, **kwargs)

    def unregister(self, function: Callable[..., Any]) -> None:
        """As `atexit.unregister`."""
        if self._name(function) in self.running:
            self.running.remove(self._name(function))
        self._unregister(function)

    @staticmethod
    def _name(function: Any) -> str:
        return f"{function.__module__}.{function.__qualname__}" if str(getattr(function, "__module__", "")).startswith("msprobe") else ""


_at_exit = _AtExit()


def snapshot(*objects: Any) -> Snapshot:
    """A picture of what is there now; see `Snapshot.changed`. Modules that torch itself imports late, and that register operators, are
    imported before it."""
    if "torch" in sys.modules:
        importlib.import_module("torch.distributed._functional_collectives")
        importlib.import_module("torch.distributed.tensor")
        importlib.import_module("torch._dynamo")
    return Snapshot(*objects)


def _everything(objects: tuple[Any, ...]) -> Iterator[tuple[str, dict[Any, Any]]]:
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if module is None or not _watched(name) or f"{name}.".startswith(_CACHES) or not isinstance(module, types.ModuleType):
            continue
        own = vars(module)
        yield name, _names(own)
        yield from _tables(name, own)
        for value in list(own.values()):
            if isinstance(value, type) and id(value) not in seen and _watched(getattr(value, "__module__", "") or ""):
                seen.add(id(value))
                yield from _of_class(value, seen)
    yield from _kernels()
    yield "process", _process()
    yield from _of_objects(objects)


def _of_objects(objects: tuple[Any, ...]) -> Iterator[tuple[str, dict[Any, Any]]]:
    for i, one in enumerate(objects):
        yield from _of_object(f"object {i} ({type(one).__name__})", one)


def _watched(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ROOTS)


def _of_class(cls: type[Any], seen: set[int]) -> Iterator[tuple[str, dict[Any, Any]]]:
    place = f"{cls.__module__}.{cls.__qualname__}#{id(cls):x}" if "<locals>" in cls.__qualname__ else f"{cls.__module__}.{cls.__qualname__}"
    if f"{place}.".startswith(_CACHES):
        return
    own = dict(vars(cls))
    yield place, _names(own)
    yield from _tables(place, own)
    for value in own.values():
        if isinstance(value, type) and id(value) not in seen and _watched(getattr(value, "__module__", "") or ""):
            seen.add(id(value))
            yield from _of_class(value, seen)


def _names(own: dict[str, Any]) -> dict[Any, Any]:
    found = dict(own)
    for name in _NOISE:
        found.pop(name, None)
    return found


def _tables(place: str, own: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Contents of tables of functions: lists of hooks, registries."""
    for name, value in list(own.items()):
        kind = type(value)
        if not issubclass(kind, _TABLES) or kind.__module__ not in ("builtins", "collections"):
            continue
        if name in _NOISE or name == "__builtins__":
            continue
        if isinstance(value, dict):
            yield f"{place}.{name}", {_key(k): v for k, v in list(value.items()) if callable(v)}
        else:
            yield f"{place}.{name}", {_key(v): v for v in list(value) if callable(v)}


def _key(value: Any) -> str:
    if isinstance(value, (str, int)):
        return repr(value)
    return f"{getattr(value, '__qualname__', type(value).__name__)}#{id(value):x}"


def _of_object(place: str, one: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Attributes of an object; of a module also those of all its children, with their hooks; of tensors their hooks."""
    import torch

    children = list(one.named_modules()) if isinstance(one, torch.nn.Module) else [("", one)]
    for name, child in children:
        own = getattr(child, "__dict__", {})
        where = f"{place}.{name}" if name else place
        functions = {k: v for k, v in own.items() if callable(v) and not isinstance(v, torch.Tensor)}
        yield where, {**functions, "__class__": type(child)}
        for key, value in own.items():
            if isinstance(value, _TABLES) and "hook" in key:
                items = value.values() if isinstance(value, dict) else value
                yield f"{where}.{key}", {_key(v): v for v in items}
    if isinstance(one, torch.nn.Module):
        for name, parameter in one.named_parameters():
            yield f"{place}.{name}", _of_tensor(parameter)


def _of_tensor(parameter: Any) -> dict[Any, Any]:
    kept = {"_backward_hooks": parameter._backward_hooks, "_post_accumulate_grad_hooks": parameter._post_accumulate_grad_hooks}
    return {name: tuple(_key(v) for v in (table or {}).values()) for name, table in kept.items()} | {
        k: v for k, v in vars(parameter).items() if callable(v)
    }


def _kernels() -> Iterator[tuple[str, dict[Any, Any]]]:
    """Operators of the dispatcher with all kernels they have."""
    torch = sys.modules.get("torch")
    if torch is not None:
        names = torch._C._dispatch_get_all_op_names()
        yield "kernel", {name: torch._C._dispatch_dump(name) for name in names}


def _process() -> dict[Any, Any]:
    """What there is one of in a process."""
    found: dict[Any, Any] = {
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "sys.displayhook": sys.displayhook,
        "threading.excepthook": threading.excepthook,
        "sys.meta_path": tuple(map(id, sys.meta_path)),
        "sys.path_hooks": tuple(map(id, sys.path_hooks)),
        "sys.path": tuple(sys.path),
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "trace": sys.gettrace(),
        "profile": sys.getprofile(),
        "atexit": tuple(_at_exit.running),
        "gc.callbacks": tuple(map(id, gc.callbacks)),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "warnings.showwarning": warnings.showwarning,
        "threads": tuple(sorted(t.name for t in threading.enumerate() if not t.name.startswith("QueueFeederThread"))),
        "environment": tuple(sorted((k, v) for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST")),
        "working directory": os.getcwd(),
        "umask": _umask(),
        "random state": random.getstate(),
        "root log handlers": tuple(map(id, logging.getLogger().handlers)),
    }
    found |= {f"builtins.{name}": value for name, value in vars(builtins).items() if callable(value)}
    found |= {f"signal {s.name}": signal.getsignal(s) for s in signal.valid_signals() if isinstance(s, signal.Signals)}
    torch = sys.modules.get("torch")
    if torch is not None:
        found |= {
            "torch function modes": torch._C._len_torch_function_stack(),
            "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
            "random state of torch": torch.get_rng_state().numpy().tobytes(),
            "default dtype": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "deterministic cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
            "gradients enabled": torch.is_grad_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "threads of torch": torch.get_num_threads(),
        }
        hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # since torch 2.5
        found["saved tensor hooks"] = hooks(True) if hooks is not None else None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["random state of numpy"] = repr(numpy.random.get_state(legacy=False))
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (*_PLAIN, tuple, types.BuiltinMethodType)) and type(one) is type(other):
        return bool(one == other)
    return isinstance(one, types.MethodType) and isinstance(other, types.MethodType) and one == other


def _harmless(place: str, one: Any, other: Any) -> bool:
    """A submodule that was imported meanwhile is a new attribute of its package, and so may be a class of it; what is neither a function
    nor one of the facts of the process are counters and caches."""
    if isinstance(other, types.ModuleType) or (one is _MISSING and isinstance(other, type) and _watched(other.__module__)):
        return True
    if place.startswith(("process", "kernel", "object ")):
        return False
    return not any(callable(v) or isinstance(v, (property, staticmethod, classmethod)) for v in (one, other))


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, str) and isinstance(other, str) and "\n" in one:
        lines, others = one.splitlines(), other.splitlines()
        return "; ".join([f"- {line}" for line in lines if line not in others] + [f"+ {line}" for line in others if line not in lines])
    if isinstance(one, tuple) and isinstance(other, tuple) and len(repr((one, other))) > 300:
        return f"{[v for v in one if v not in other]!r:.200} -> {[v for v in other if v not in one]!r:.200}"
    return f"{_text(one)} -> {_text(other)}"


def _text(value: Any) -> str:
    return "" if value is _MISSING else repr(value)[:120]
