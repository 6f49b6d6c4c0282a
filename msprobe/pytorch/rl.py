"""Reinforcement learning with PyTorch. Re-exports only."""

from msprobe_engine.accuracy.rl.mismatch import Mismatch
from msprobe_integrations.torch.op_tools.log_probs import LogProbMonitor

__all__ = ["LogProbMonitor", "Mismatch"]
