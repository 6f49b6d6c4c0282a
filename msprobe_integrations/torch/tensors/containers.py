"""Objects that hold tensors and are no list, tuple or dict: how they are opened. Nothing is opened that has not said how it wants to be
read: a dataclass, a named tuple, a mapping, a class registered with torch's pytree, or a key-value cache of a known library."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils import _pytree

from msprobe_integrations.common.capture import containers as _common
from msprobe_integrations.common.capture.containers import CLASS_KEY, MOST_ITEMS, class_text, finder

__all__ = ["CLASS_KEY", "class_text", "open_object", "tensors_in"]

_CACHES: dict[str, tuple[str, ...]] = {
    # module of the class: attributes that hold keys and values; what is missing in a version is left out
    "transformers.cache_utils": ("key_cache", "value_cache", "layers", "keys", "values", "self_attention_cache", "cross_attention_cache"),
    "megatron.core.inference.contexts.static_context": ("key_value_memory_dict",),
    "megatron.core.inference_params": ("key_value_memory_dict",),
}


def open_object(value: Any) -> dict[str, Any] | None:
    """The members of an object by name; None when it is not one of those that are opened. May raise what the object's code raises."""
    parts = _common.open_object(value)
    kind = type(value)
    if parts is not None or issubclass(kind, tuple):
        return parts
    attributes = _CACHES.get(kind.__module__)
    if attributes is not None:
        return {name: vars(value)[name] for name in attributes if name in vars(value)}
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None and kind.__module__ not in ("builtins", "collections"):
        return _open_registered(value, node)
    return None


tensors_in = finder(torch.Tensor, open_object)


def _open_registered(value: Any, node: Any) -> dict[str, Any]:
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
