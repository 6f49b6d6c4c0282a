"""How ranks of a PyTorch job tell each other about an alert, or about changed settings."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from msprobe_engine.probe.incident.notify import DirectoryNotifier, Notifier, StoreNotifier


def find_notifier(output_dir: Path, about: str = "") -> Notifier | None:
    """The default process group's store when there is one, else a directory for jobs that share one; None for a single process.

    Args:
        about: keeps what is announced apart from other announcements; empty: incidents.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: distributed_c10d.Store | None = distributed_c10d._get_default_store()
    if store is None:
        return DirectoryNotifier(output_dir / (about or "incidents") / ".notify", rank=dist.get_rank())
    shared = distributed_c10d.PrefixStore("msprobe", store)
    return StoreNotifier(shared, prefix=f"msprobe/{about}") if about else StoreNotifier(shared)
