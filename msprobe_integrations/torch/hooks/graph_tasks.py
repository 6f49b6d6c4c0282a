"""Which backward pass is in progress."""

from __future__ import annotations

from collections.abc import Callable

import torch

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""-1 outside a backward pass."""
