"""Dumps in notebooks and scripts: `read` opens one, `estimate` says what one will cost."""

from msprobe_engine.formats.dump import read
from msprobe_engine.probe.estimate import estimate

__all__ = ["estimate", "read"]
