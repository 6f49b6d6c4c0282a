"""MindSpore names of the existing tool. Re-exports only; that MindSpore is missing, or cannot work here, is said by the first import."""

from msprobe_integrations.mindspore.compat.trainer_mon import TrainerMon
from msprobe_integrations.mindspore.dump.callbacks import MsprobeInitStep, MsprobeStep
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger, module_dump, module_dump_end
from msprobe_integrations.mindspore.graph.single import save, save_grad, step
from msprobe_integrations.mindspore.monitor.model_callback import ProbeCallback
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.randomness.seeds import seed_all, undo_seed_all

__all__ = [
    "MindSporeProbe",
    "MsprobeInitStep",
    "MsprobeStep",
    "PrecisionDebugger",
    "ProbeCallback",
    "TrainerMon",
    "module_dump",
    "module_dump_end",
    "save",
    "save_grad",
    "seed_all",
    "step",
    "undo_seed_all",
]
