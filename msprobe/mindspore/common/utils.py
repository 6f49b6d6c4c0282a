"""Names that the documents of the existing tool import from here. Re-exports only."""

from msprobe_integrations.mindspore.dump.callbacks import MsprobeInitStep, MsprobeStep
from msprobe_integrations.mindspore.randomness.seeds import seed_all

__all__ = ["MsprobeInitStep", "MsprobeStep", "seed_all"]
