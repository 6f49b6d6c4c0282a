"""Megatron-LM and megatron-core: a probe switched on by a launch argument, or by a callback in a loop of one's own.

    torchrun ... -m msprobe_integrations.megatron pretrain_gpt.py --msprobe-config probe.yaml <the script's arguments>

Importing this package imports neither torch nor Megatron: the script comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_integrations.megatron.callback import MegatronCallback

__all__ = ["MegatronCallback"]


def __getattr__(name: str) -> Any:
    if name == "MegatronCallback":
        from msprobe_integrations.megatron.callback import MegatronCallback

        return MegatronCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
