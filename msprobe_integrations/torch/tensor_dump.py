"""From dump settings to what saves tensors, for `PrecisionDebugger` and `TorchProbe` alike."""

from __future__ import annotations

from collections.abc import Callable

from msprobe_engine.dump.patterns import NamePatterns
from msprobe_engine.dump.template import Options
from msprobe_engine.dump.tensors import TensorStore
from msprobe_engine.guard import Faults
from msprobe_engine.pipeline import Pipeline
from msprobe_engine.settings.schema import DumpSettings
from msprobe_engine.writer import Writer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.keep import Keeper, sample
from msprobe_integrations.torch.slices import Slices


def build_keeper(
    dump: DumpSettings,
    backend: TorchBackend,
    pipeline: Pipeline,
    writer: Writer,
    faults: Faults,
    slices: Slices | None = None,
    before: Keeper | None = None,
) -> Keeper | None:
    """What saves tensors as `dump` asks for; None when it does not.

    Args:
        before: what the same run used until now, under other settings: the disk it took counts on.
    """
    saves = _saves(dump)
    if saves is None:
        return None
    store = TensorStore(
        Options(dump.data_mode, saves),
        sample,
        faults,
        packed=dump.tensor_format == "packed",
        budget=dump.memory_budget_mb << 20,
        quota=int(dump.max_disk_gb * 1e9),
        count=writer.lose,
    )
    if before is not None:
        store.quota.used = before.store.quota.used
    return Keeper(backend, store, faults, pipeline.lose, slices)


def _saves(dump: DumpSettings) -> Callable[[str], bool] | None:
    if dump.task in ("tensor", "overflow_check"):
        return lambda _: True
    if dump.task == "statistics" and dump.tensor_list and dump.level != "debug":
        return NamePatterns(dump.tensor_list)
    return None
