"""Objects that hold tensors and are no list, tuple or dict: how they are opened. Nothing is opened that has not said how it wants to be
read: a dataclass, a named tuple, a mapping, a class registered with torch's pytree, or a key-value cache of a known library."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

CLASS_KEY = "class_type"
"""Key under which the class of an opened object is written, as the existing tool does for point-to-point operations."""

MOST_ITEMS = 4096
_PLAIN = ("dict", "OrderedDict", "defaultdict", "mappingproxy")
_CACHES: dict[str, tuple[str, ...]] = {
    # module of the class: attributes that hold keys and values; what is missing in a version is left out
    "transformers.cache_utils": ("key_cache", "value_cache", "layers", "keys", "values", "self_attention_cache", "cross_attention_cache"),
    "megatron.core.inference.contexts.static_context": ("key_value_memory_dict",),
    "megatron.core.inference_params": ("key_value_memory_dict",),
}


def opened(value: Any) -> dict[str, Any] | None:
    """The members of an object by name; None when it is not one of those that are opened. May raise what the object's code raises."""
    kind = type(value)
    if issubclass(kind, Mapping):  # of the type: script objects such as Work have no class that isinstance could ask
        return {str(k): v for k, v in itertools.islice(value.items(), MOST_ITEMS)}
    if issubclass(kind, tuple):
        fields = getattr(value, "_fields", None)
        return None if fields is None else dict(zip(fields, value))
    if dataclasses.is_dataclass(kind):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    attributes = _CACHES.get(kind.__module__)
    if attributes is not None:
        return {name: vars(value)[name] for name in attributes if name in vars(value)}
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None and kind.__module__ not in ("builtins", "collections"):
        return _registered(value, node)
    return None


def _registered(value: Any, node: Any) -> dict[str, Any]:
    if node.flatten_with_keys_fn is not None:
        keyed, _ = node.flatten_with_keys_fn(value)
        return {_key(key): child for key, child in itertools.islice(keyed, MOST_ITEMS)}
    children, _ = node.flatten_fn(value)
    return {str(i): child for i, child in enumerate(itertools.islice(children, MOST_ITEMS))}


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def class_text(value: Any) -> str | None:
    """The class of an opened object as text; None for plain dicts."""
    kind = type(value)
    return None if kind.__name__ in _PLAIN else f"{kind.__module__}.{kind.__qualname__}"


def tensors_in(value: Any, found: list[torch.Tensor], left: int = 8) -> None:
    """Append the tensors inside a nested argument or result, in the order in which records have them. Never raises."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    kind = type(value)
    if left == 0 or value is None or kind in (int, float, bool, str):
        return
    members: Iterable[Any] | None
    if kind in (list, tuple):
        members = value
    else:
        try:
            inside = opened(value)
        except Exception:  # the object's own code
            return
        if inside is not None:
            members = inside.values()
        else:
            members = value if isinstance(value, (list, tuple, set, frozenset, deque)) else None
    if members is not None:
        for member in itertools.islice(members, MOST_ITEMS):
            tensors_in(member, found, left - 1)
