"""How ranks of a PyTorch job tell each other about an alert, or about changed settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from msprobe_engine.probe.incident.node_notify import NodeNotifier
from msprobe_engine.probe.incident.notify import DirectoryNotifier, Notifier, StoreNotifier

MOST_ASKING = 64
"""In a job of more ranks only one of each node asks the store."""
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Of torchrun, Slurm and Open MPI."""


def find_notifier(output_dir: Path, about: str = "") -> Notifier | None:
    """The default process group's store when there is one, else a directory for jobs that share one; None for a single process.

    Args:
        about: keeps what is announced apart from other announcements; empty: incidents.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: distributed_c10d.Store | None = distributed_c10d._get_default_store()
    if store is None:
        return DirectoryNotifier(output_dir / (about or "incidents") / ".notify")
    shared: Any = distributed_c10d.PrefixStore("msprobe", store)
    prefix = f"msprobe/{about or 'incident'}"
    if dist.get_world_size() <= MOST_ASKING:
        return StoreNotifier(shared, prefix=prefix)
    node, first = _node()
    return NodeNotifier(shared, node, first=first, prefix=prefix, watched=_another_connection(shared) if first else None)


def _another_connection(store: Any) -> Any:
    """The same store, on which may be waited without holding up the training's requests; None where that cannot be had."""
    try:
        return store.clone()  # since torch 2.5
    except Exception:
        return None


def _node() -> tuple[str, bool]:
    """The name of this node, and whether this is its first rank. Where no launcher says so every rank is a node."""
    place = next((os.environ[name] for name in _LOCAL_RANK if name in os.environ), None)
    if place is None:
        return f"rank{dist.get_rank()}", True
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}", place == "0"
