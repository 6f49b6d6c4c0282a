"""Parts of an inference step: some forward calls of the model (``token_range``), one request of a batch (``scheduled_tokens``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import SliceSettings

_log = get_logger()


def check_range(token_range: Any) -> tuple[int, int] | None:
    """The first and the last forward call that are wanted, None when all are.

    Raises:
        UsageError: no list of two integers >= 0, or the first is above the second.
    """
    if token_range is None:
        return None
    good = isinstance(token_range, (list, tuple)) and len(token_range) == 2 and all(type(t) is int and t >= 0 for t in token_range)
    if not good or token_range[0] > token_range[1]:
        raise UsageError(f"start(): token_range is {token_range!r}; allowed: [first, last], two integers with 0 <= first <= last")
    return token_range[0], token_range[1]


class ForwardRange:
    """Opens the capture at one forward call of the root model and closes it at another.

    A forward call counts from its start to the start of the next one, so what follows a call (sampling) belongs to it.

    Args:
        hook: has a function called before each forward call of a model, with whatever arguments; what it returns has a ``remove()``.
        open, close: put the capture on and off.
        broken: told of an error inside.
    """

    def __init__(
        self,
        hook: Callable[[Any, Callable[..., None]], Any],
        open: Callable[[], None],
        close: Callable[[], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._put_on = hook
        self._open = open
        self._close = close
        self._broken = broken
        self._hook: Any = None
        self.calls = 0
        self.first = self.last = 0

    @property
    def active(self) -> bool:
        """True between `begin` and `end`."""
        return self._hook is not None

    def begin(self, models: Any, first: int, last: int) -> None:
        """Count forward calls from now on; of a list of models the first one is counted."""
        self.end()
        self.calls, self.first, self.last = 0, first, last
        root = models[0] if isinstance(models, (list, tuple)) else models
        self._hook = self._put_on(root, self._before)

    def end(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before(self, *_: Any) -> None:
        call, self.calls = self.calls, self.calls + 1
        try:
            if call == self.first:
                self._open()
                _log.info("Current token id: %d, start dump infer token.", call)
            elif call == self.last + 1:
                self._close()
                _log.info("Current token id: %d, exceed token_range, early stop dump infer token.", call)
        except Exception as error:
            raise_of_training(error)
            self._broken(error)


def check_tokens(scheduled: Any) -> Mapping[str, int] | None:
    """`scheduled` as it is, when it says how many tokens of each request are in the batch.

    Raises:
        UsageError: it does not.
    """
    if scheduled is None:
        return None
    good = isinstance(scheduled, Mapping) and all(isinstance(k, str) and type(n) is int and n > 0 for k, n in scheduled.items())
    if not good:
        raise UsageError(
            f"start(): scheduled_tokens is {str(scheduled)[:200]}; allowed: a dict from request id to its number of tokens (> 0)"
        )
    return scheduled  # type: ignore[no-any-return]


def part_of(request: str, scheduled: Mapping[str, int]) -> SliceSettings | None:
    """The tokens of one request in a batch that holds the requests one after the other; None when it is not in this batch."""
    if request not in scheduled:
        return None
    ids = list(scheduled)
    begin = sum(scheduled[i] for i in ids[: ids.index(request)])
    return SliceSettings(dim=0, size=sum(scheduled.values()), begin=begin, end=begin + scheduled[request])
