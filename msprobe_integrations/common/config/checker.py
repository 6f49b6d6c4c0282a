"""`ConfigChecker`, what it is for every framework: the first forward passes of a training become a pack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msprobe_engine.config.pack.background import BackgroundWriter
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import error, info, one_line, warning
from msprobe_integrations.common.config.run import collected_environment

PATIENCE = 30.0
"""Seconds that the end of a process waits for its pack."""


class ConfigCheck(ABC):
    """Arguments and errors: `msprobe_integrations.config_checker.ConfigChecker`."""

    kind: ClassVar[type[Any]]
    """Of a model."""
    kind_names: ClassVar[tuple[str, str]]
    """That type and several of it, in messages."""
    unseen: ClassVar[str]
    """What is said when no pass was seen."""

    def __init__(
        self,
        model: Any,
        static: Mapping[str, Any],
        output_zip_path: str | Path,
        *,
        micro_steps: int | Sequence[int] | str = 1,
        evaluation: bool = False,
        statistics: bool = True,
        environment: Sequence[str] = (),
        key_file: str | Path | None = None,
    ) -> None:
        self._models = self.models_of(model)
        self._micro_steps = MicroSteps(micro_steps)
        self._evaluation, self._statistics = evaluation, statistics
        self._writer = self._make_writer(output_zip_path)
        self.rank = self._writer.rank
        self._background = BackgroundWriter(self._writer)
        self._step, self._first = 0, True
        self._take_off: Callable[[], None] | None = None
        self._environment = collected_environment(environment, key_file)
        self._writer.add({**self._start(), **(static if self.rank == 0 else {})})
        if self.rank == 0:
            info(f"config check: the pack is {one_line(str(self._writer.path))}")
        if self._models and not self._micro_steps.last(-1):
            self._take_off = self._put_on()

    # what a framework says

    @abstractmethod
    def _make_writer(self, path: str | Path) -> PackWriter:
        """What writes the pack."""

    @abstractmethod
    def _start(self) -> Mapping[str, Any]:
        """Entries of what is known before the first pass."""

    @abstractmethod
    def _put_on(self) -> Callable[[], None] | None:
        """Call `_before_forward` before passes of the first model; what ends that, None where no pass will be seen."""

    @abstractmethod
    def _is_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Is this a forward pass of the training?"""

    @abstractmethod
    def _collect(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a pass begins with becomes entries."""

    # what is the same for all

    def close(self) -> None:
        """Take the hook off and finish the pack; done at the end of the process too."""
        if self._take_off is not None and self._first:
            warning(f"config check: {self.unseen}")
        self._remove()
        self._background.close(PATIENCE)

    def flush(self) -> None:
        """Wait until what was collected is in the pack."""
        self._background.flush()

    def _remove(self) -> None:
        take_off, self._take_off = self._take_off, None
        if take_off is not None:
            take_off()

    def _fail(self, fault: Exception) -> None:
        kind = "" if isinstance(fault, ProbeError) else f"{type(fault).__name__}: "
        error(f"config check: nothing more is collected, the training goes on: {kind}{one_line(str(fault)[:500])}")
        self._remove()

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of the (first) model: one forward pass begins."""
        try:
            if self._take_off is None or not self._is_pass(model, args, kwargs):
                return
            step, self._step = self._step, self._step + 1
            if step in self._micro_steps:
                self._collect(step, args, kwargs)
            if self._micro_steps.last(step):
                self._remove()
        except Exception as fault:
            raise_of_training(fault)
            self._fail(fault)

    @classmethod
    def models_of(cls, model: Any) -> list[Any]:
        """The model, or the chunks of one.

        Raises:
            UsageError: it is neither a model nor a list or tuple of models.
        """
        if model is None:
            return []
        several = list(model) if isinstance(model, (list, tuple)) else [model]
        wrong = next((model_part for model_part in several if not isinstance(model_part, cls.kind)), None)
        if wrong is not None:
            raise UsageError(
                f"ConfigChecker: model is {'a list with ' if isinstance(model, (list, tuple)) else ''}{type(wrong).__name__}; allowed: a "
                f"{cls.kind_names[0]}, a list or tuple of {cls.kind_names[1]}, or None for a pack without weights and inputs"
            )
        return several


class MicroSteps:
    """Which forward passes are collected.

    Args:
        wanted: a number n: the first n; numbers: these, from 0; ``"all"``: every one.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, wanted: int | Sequence[int] | str) -> None:
        self._every = wanted == "all"
        self._those: frozenset[int] = frozenset()
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            self._those = frozenset(range(min(wanted, 1_000_000)))
        elif not isinstance(wanted, (str, bool, int)) and all(type(n) is int and n >= 0 for n in wanted):
            self._those = frozenset(wanted)
        elif not self._every:
            raise UsageError(f"micro_steps is {wanted!r}; allowed: how many of the first forward passes, a list of their numbers, or 'all'")

    def __contains__(self, step: int) -> bool:
        return self._every or step in self._those

    def last(self, step: int) -> bool:
        """Is there none to come after `step`?"""
        return not self._every and all(one <= step for one in self._those)
