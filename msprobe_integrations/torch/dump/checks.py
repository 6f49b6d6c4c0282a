"""What `PrecisionDebugger` takes for a model of torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from msprobe_integrations.common.dump.checks import ModelKind

Models = nn.Module | Sequence[nn.Module]
MODELS = ModelKind(nn.Module, "torch.nn.Module")
