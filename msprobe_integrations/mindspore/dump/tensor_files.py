"""From dump settings to what saves tensors of MindSpore, for `PrecisionDebugger` and `MindSporeProbe` alike."""

from __future__ import annotations

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.dump.keep import BaseKeeper
from msprobe_integrations.common.dump.tensor_files import build_store
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.dump.keep import SUFFIX, Keeper, template


def build_keeper(
    dump: DumpSettings,
    backend: MindSporeBackend,
    pipeline: Pipeline,
    writer: Writer,
    faults: Faults,
    before: BaseKeeper | None = None,
) -> Keeper | None:
    """What saves tensors as `dump` asks for; None when it does not.

    Args:
        before: what the same run used until now, see `build_store`.
    """
    store = build_store(dump, template, faults, writer.lose, None if before is None else before.store, suffix=SUFFIX)
    return None if store is None else Keeper(backend, store, faults, pipeline.lose)
