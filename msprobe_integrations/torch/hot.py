"""The settings file that is followed while the training runs, in a PyTorch job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from msprobe_engine.incident.notify import DirectoryNotifier, Notifier, StoreNotifier
from msprobe_engine.monitor.hot import HotMonitor
from msprobe_engine.settings.schema import ProbeSettings

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe


def hot_monitor(probe: TorchProbe, path: Path, kind: str | None, first: ProbeSettings | None = None) -> HotMonitor:
    """Follows `path`; ranks of an initialised process group change together.

    Args:
        probe: what holds now.
        kind: as for `load_settings`.
        first: settings that are to hold from the first step boundary on.
    """
    rank, world = probe.backend.rank() or 0, probe.backend.world_size()
    notifier = _notifier(Path(probe.settings.output_dir), rank) if world > 1 else None
    return HotMonitor(path, probe.settings, kind=kind, rank=rank, world_size=world, notifier=notifier, first=first)


def _notifier(output_dir: Path, rank: int) -> Notifier | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    store: distributed_c10d.Store | None = distributed_c10d._get_default_store()
    if store is None:
        return DirectoryNotifier(output_dir / "hot" / ".notify", rank=rank)
    return StoreNotifier(distributed_c10d.PrefixStore("msprobe", store), prefix="msprobe/hot")
