"""From dump settings to what saves tensors, for `PrecisionDebugger` and `TorchProbe` alike."""

from __future__ import annotations

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.dump.tensor_files import build_store
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.keep import Keeper, template
from msprobe_integrations.torch.tensors.slices import Slices


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
        before: what the same run used until now, see `build_store`.
    """
    store = build_store(dump, template, faults, writer.lose, None if before is None else before.store)
    return None if store is None else Keeper(backend, store, faults, pipeline.lose, slices)
