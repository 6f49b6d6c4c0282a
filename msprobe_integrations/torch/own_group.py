"""A gloo group of the probe's own: no communicator of the training is used, and no random number is drawn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msprobe_integrations.torch.collectives import own_groups


class OwnGroup:
    """Building it is a collective call of its ranks. The monitor of collectives leaves it out.

    Args:
        ranks: global ranks.
        patience: seconds that ranks wait for each other while it is built.
        timeout: seconds until an exchange over it counts as failed; 0: as `patience`.

    Attributes:
        group: for `torch.distributed`; None once it is closed.

    Raises:
        RuntimeError: gloo is missing, or a rank did not come in time.
    """

    def __init__(self, ranks: Sequence[int], patience: float, timeout: float = 0.0) -> None:
        made: Any = dist.new_group(list(ranks), timeout=timedelta(seconds=patience), backend="gloo", use_local_synchronization=True)
        self.group: Any = made
        own_groups.add(made.group_name)
        if timeout:
            change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # torch 2.1 and earlier have none: `patience` holds
            if change is not None:
                change(timedelta(seconds=timeout), made)

    def close(self, under_way: list[Any] | None = None) -> None:
        """Take the group apart. A gloo group that lives until the interpreter exits may abort the process there.

        Args:
            under_way: the only references to exchanges that have not ended; taken over. Gloo waits for them, as long as the time
                limit says, when the last reference goes: that happens on a thread of its own then.
        """
        group, self.group = self.group, None
        if group is None:
            return
        own_groups.discard(group.group_name)
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # gone with the training's own groups
                dist.destroy_process_group(group)
        if under_way:
            under_way.append(group)
            del group
            threading.Thread(target=under_way.clear, name="msprobe-group", daemon=True).start()
