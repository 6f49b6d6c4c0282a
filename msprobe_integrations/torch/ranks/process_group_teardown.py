"""The moment before a training takes its process group apart: until then ranks are known and can be reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from msprobe_integrations.patching import shared_patch


def before_ranks_end(action: Callable[[], Any]) -> Callable[[], None]:
    """Call ``action()``, which must not raise, before every `destroy_process_group` of the default group; returns what ends that."""
    if not dist.is_available():
        return lambda: None
    patches = [shared_patch(owner, "destroy_process_group") for owner in (dist, dist.distributed_c10d)]

    def destroy(following: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is None or group is dist.group.WORLD:
            action()
        return following(*args, **kwargs)

    for patch in patches:
        patch.add(destroy)

    def remove_patches() -> None:
        for patch in patches:
            patch.discard(destroy)

    return remove_patches
