"""PyTorch names of the existing tool. Re-exports only."""

from importlib.util import find_spec

from msprobe_engine.core.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("torch", "torch", "msprobe.pytorch")

from msprobe.pytorch.compare.distributed_compare import compare_distributed  # the package before the function that takes its name
from msprobe.pytorch.compare.pt_compare import compare
from msprobe_engine.report.table.single_save import SingleComparator
from msprobe_integrations.common.dump.single_save import SingleSave
from msprobe_integrations.torch.ascend.graph_modes import AclGraphDumper, acl_save, set_fx_dump_config, set_ge_dump_config
from msprobe_integrations.torch.compat.trainer_mon import TrainerMon
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger, module_dump, module_dump_end, save
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import register_operator
from msprobe_integrations.torch.randomness.seeds import random_save, random_save_end, seed_all, undo_seed_all

__all__ = [
    "AclGraphDumper",
    "PrecisionDebugger",
    "SingleComparator",
    "SingleSave",
    "TorchProbe",
    "TrainerMon",
    "acl_save",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "random_save",
    "random_save_end",
    "register_operator",
    "save",
    "seed_all",
    "set_fx_dump_config",
    "set_ge_dump_config",
    "undo_seed_all",
]
