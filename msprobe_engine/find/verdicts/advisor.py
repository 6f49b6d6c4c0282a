"""The text file of advice of version 8.1.1: three lines on the first row of a table whose verdict is bad."""

from __future__ import annotations

from msprobe_engine.measure.columns import ACCURACY, RESULT, TARGET_NAME, Block

NOTHING = "NA"
_BAD = frozenset(("No", "Different", "Warning", "error", "warning"))
_UNSTEADY = ("conv2d", "conv3d", "matmul", "nll_loss", "layer_norm", "lstm")

_FINE = "All data in comparison result meets the accuracy requirements."
_FORWARD_INPUT = (
    "1. Follow the model to where this input comes from.\n"
    "2. See whether a call that works in place has written its result over this input; then that call is at fault.\n"
    "3. If neither is so, memory may have been overwritten."
)
_FORWARD_OUTPUT = "This forward call computes another result. Look at how it is implemented."
_BACKWARD_INPUT = "See whether the forward pass has changed this gradient."
_BACKWARD_OUTPUT = "This backward call computes another result. Look at how it is implemented."
_DETERMINISM = "This call may give another result each time it runs; seed_all(mode=True) makes it deterministic."


def advice(name: str) -> str:
    """What to do about a row, by its name. A row is of a forward call when its name says so, else of a backward one."""
    forward = "forward" in name
    if "input" in name:
        return _FORWARD_INPUT if forward else _BACKWARD_INPUT
    if any(call in name for call in _UNSTEADY):
        return _DETERMINISM
    return _FORWARD_OUTPUT if forward else _BACKWARD_OUTPUT


class Advisor:
    """Looks for the row while a table is written."""

    def __init__(self) -> None:
        self.line: int | None = None
        self.name = NOTHING
        self._rows = 0

    def add_block(self, block: Block) -> None:
        """Look at the next block of the table."""
        verdicts = block[ACCURACY if ACCURACY in block else RESULT]
        if self.line is None:
            for row, verdict in enumerate(verdicts):
                if verdict in _BAD:
                    self.line, self.name = self._rows + row, str(block[TARGET_NAME][row])
                    break
        self._rows += len(block[TARGET_NAME])

    def text(self) -> str:
        """The file: ``Line`` (counted from 0), ``Suspect Nodes``, ``Expert Advice``."""
        line = NOTHING if self.line is None else str(self.line)
        say = _FINE if self.line is None else advice(self.name)
        return f"Line: {line}\nSuspect Nodes: {self.name}\nExpert Advice: {say}\n"
