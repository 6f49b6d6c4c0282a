"""From dump settings to what makes files of tensors."""

from __future__ import annotations

from collections.abc import Callable

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.dump.writing.loose_files import Maker
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.selection.patterns import NamePatterns


def build_store(
    dump: DumpSettings,
    make: Maker,
    faults: Faults,
    count: Callable[..., None],
    before: TensorStore | None = None,
    *,
    suffix: str = ".pt",
) -> TensorStore | None:
    """What makes files of tensors as `dump` asks for; None when it asks for none.

    Args:
        make: templates of files, see `TensorStore`.
        count: told of what is lost.
        before: what the same run used until now, under other settings: the disk it took counts on.
    """
    saves = _saves(dump)
    if saves is None:
        return None
    store = TensorStore(
        Options(dump.data_mode, saves, suffix),
        make,
        faults,
        packed=dump.tensor_format == "packed",
        budget=dump.memory_budget_mb << 20,
        quota=int(dump.max_disk_gb * 1e9),
        count=count,
    )
    if before is not None:
        store.quota.used = before.quota.used
    return store


def _saves(dump: DumpSettings) -> Callable[[str], bool] | None:
    if dump.task in ("tensor", "overflow_check"):
        return lambda _: True
    if dump.task == "statistics" and dump.tensor_list and dump.level != "debug":
        return NamePatterns(dump.tensor_list)
    return None
