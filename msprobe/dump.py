"""Dumps in notebooks and scripts: `read` opens one, `estimate` says what one will cost, `open_dump` is the plain reader below `read`, and
`not_saved` says which tensors a rank could not save."""

from msprobe_engine.formats.dump import read
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.tensors.reader import not_saved
from msprobe_engine.probe.estimate import estimate

__all__ = ["estimate", "not_saved", "open_dump", "read"]
