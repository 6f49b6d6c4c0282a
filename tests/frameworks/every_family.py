"""Monitor settings with everything on, for tests that want it all; what a test adds or leaves out it says itself."""

from __future__ import annotations

from dataclasses import replace

from msprobe_engine.core.settings.schema import MonitorSettings

PARAMETER_FAMILIES = MonitorSettings(
    gradients=True,
    gradient_phases=("reduced", "unscaled", "clipped"),
    unreduced_gradients=True,
    parameters=True,
    optimizer_states=True,
)
"""What there is of a parameter, without updates."""
EVERY_FAMILY = replace(PARAMETER_FAMILIES, updates=True, momentum_agreement=True, activations=True, activation_gradients=True)
