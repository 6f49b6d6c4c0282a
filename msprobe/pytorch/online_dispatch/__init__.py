"""Names of the existing tool (8.1.1). Re-exports only."""

from msprobe_integrations.torch.op_tools.dispatch_compare.mode import PtdbgDispatch

__all__ = ["PtdbgDispatch"]
