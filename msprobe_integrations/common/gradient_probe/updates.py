"""The gradient probe, as far as it knows no framework: which updates are wanted, what becomes of the gradients of one, and the end."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import NothingCapturedError, UsageError
from msprobe_engine.core.guard import Faults, Guard
from msprobe_engine.core.log import get_logger, warn_once
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import nearest
from msprobe_engine.core.window import Window
from msprobe_engine.formats.grad_probe.background import Background
from msprobe_engine.formats.grad_probe.files import StepFiles
from msprobe_engine.formats.grad_probe.layout import SUMMARY
from msprobe_engine.probe.output_claims import OutputClaims
from msprobe_integrations.common.gradient_probe.step import GradientStep

PART = "grad_probe"
_log = get_logger()


class GradientUpdates:
    """One per process.

    Args:
        settings: with a section ``grad_probe``.
        backend: takes the rows; its own, no other probe's.
        at_once: hooks go with the last wanted update, from inside of its hooks; False: at the next `settle`.

    Attributes:
        step: number of the newest update, from 0; -1 before the first.
        root: where ``rank{R}`` is.
    """

    def __init__(self, settings: ProbeSettings, backend: Any, *, at_once: bool = True) -> None:
        assert settings.grad_probe is not None
        self.settings = settings.grad_probe
        self._at_once = at_once
        self._over = False
        self.root = root_of(settings)
        self._outputs = OutputClaims()
        self.faults = Faults(settings.strict, PART)
        self.backend = backend
        self.backend.want_checksum = "crc32" if self.settings.grad_level == "L0" else ""
        self.step = -1
        self._wanted = frozenset(bare(name) for name in self.settings.param_list)
        self._window = Window(self.settings.rank, self.settings.step)
        self._background = Background(self.faults, f"{PART} files", self.settings.memory_budget_mb << 20)
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._open: GradientStep[Any] | None = None
        self._taken: set[int] = set()
        self._undo: list[Callable[[], Any]] = []
        self._files: StepFiles | None = None
        self._begun = self._empty = 0
        self._off = False
        self._concluded: tuple[int, int, int] | None = None

    # what a framework brings along

    step_type: type[GradientStep[Any]]

    @property
    def _watching(self) -> bool:
        """Was anything given to watch?"""
        raise NotImplementedError

    def _why(self) -> str:
        """Why nothing was written, when updates of others are all that was seen."""
        raise NotImplementedError

    def remove_finished_hooks(self) -> None:
        """Outside of any update: take the hooks off if no update is wanted any more."""
        if self._over and self._undo:
            self._take_off()

    def close(self) -> None:
        """Take the hooks off, write what is there, say what was written. Updates after this are not seen until `monitor` is called."""
        self._take_off()
        with self.faults.guard(PART):
            self._finish()
        self._stepped.clear()
        self._background.close()
        self._conclude()
        self._outputs.release()

    def stop_in_fork(self) -> None:
        """In a forked child: it is not the training."""
        self._off = True

    def _check_names(self, every: Collection[str], several: bool, where: str) -> None:
        """What of ``param_list`` is there?

        Args:
            several: further ranks may have the others.
        """
        missing = [name for name in self.settings.param_list if bare(name) not in every]
        if not missing:
            return
        near = nearest(missing[0], every)
        text = f"param_list: there is no parameter '{missing[0]}'" + (f"; did you mean '{near}'?" if near else "")
        if len(missing) == len(self.settings.param_list) and not several:
            raise UsageError(f"monitor(): {text}; none of the list is there. Names are those of {where}")
        _log.warning("grad_probe: %s (%d of %d names are not there on this rank)", text, len(missing), len(self.settings.param_list))

    def add_gradient(self, name: str, gradient: Any, shard: str = "") -> bool:
        """Take one gradient of the open step. False: there is no memory, the step is given up."""
        step = self._open
        if step is None:
            return False
        try:
            step.add_gradient(name, gradient, shard)
        except TimeoutError as error:
            self._open = None
            self.backend.finish_step()
            self._background.give_up(step.nbytes, error)
            return False
        return True

    def is_listed(self, name: str) -> bool:
        """Is this parameter in ``param_list``, or is that empty? The names of wrappers in front make no difference."""
        return not self._wanted or bare(name) in self._wanted

    @property
    def wants(self) -> bool:
        """Are gradients to be taken now?"""
        return self._open is not None and not self._off and self.faults.is_enabled(PART)

    def guard(self) -> Guard:
        """Around what is done in a hook."""
        return self.faults.guard(PART)

    def begin_update(self, optimizer: Any) -> GradientStep[Any] | None:
        """`optimizer` is about to update: the open step, None when it is not wanted (or all of it was taken)."""
        if optimizer in self._stepped:
            self._finish()
            self._stepped.clear()
        if not self._stepped:
            self.step += 1
            self._taken.clear()
            if self._window.is_wanted(self.step, self.backend.rank()):
                self._begin_step()
        self._stepped.add(optimizer)
        return self._open

    def _begin_step(self) -> None:
        level = self.settings.grad_level
        self._begun += 1
        bounds = tuple(self.settings.bounds) if level == "L2" else ()
        self._open = self.step_type(self.backend, level != "L0", bounds, self._background.reserve)

    def _finish(self) -> None:
        """All of the open step was taken: it goes to the writer."""
        taken, self._open = self._open, None
        if taken is None:
            return
        if not taken.count:
            self._empty += 1
            self.backend.finish_step()
            return
        for name, why in taken.left_out.items():
            warn_once(f"grad_probe {name}", f"grad_probe: the gradient of {name} is left out: {why}")
        write, files, step = taken.finish(), self._directory(), self.step
        self._background.submit(lambda: write(files, step), taken.nbytes)
        self._over = self._window.over(self.step + 1)
        if self._over and self._at_once:
            self._take_off()

    def _take_off(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _directory(self) -> StepFiles:
        if self._files is None:
            self.root = self._outputs.claim_part(self.root, self.backend.rank(), of_output_dir=not self.settings.dump_path)
            directory = self.root / f"rank{self.backend.rank() or 0}"
            if directory.is_dir() and any(SUMMARY.fullmatch(entry) for entry in os.listdir(directory)):
                _log.warning("%s holds files of an earlier run: equal steps are replaced, other ones stay", directory)
            settings = self.settings
            self._files = StepFiles(directory, settings.grad_level, settings.bounds, settings.direction_format == "files")
        return self._files

    def _conclude(self) -> None:
        """Say what was written, or why nothing was."""
        written, lost = self._background.done, self._background.lost
        if not self._watching or self._off or self._concluded == (written, lost, self.step):
            return
        self._concluded = written, lost, self.step
        if written or lost:
            how = f", {lost} are lost" if lost else ""
            (_log.warning if lost else _log.info)("grad_probe: gradients of %d updates are in %s%s", written, self.root, how)
        elif self._window.is_wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            error = NothingCapturedError(f"grad_probe wrote nothing to {self.root}: {self._reason()}")
            _log.error("%s", error)
            if self.faults.strict:
                raise error

    def _reason(self) -> str:
        if not self.faults.is_enabled(PART):
            return "a fault switched it off, see the message above"
        if self.step >= 0 and not self._empty:
            return f"{self.step + 1} updates were seen, none of them is in 'step' of the settings: {list(self.settings.step)[:5]}"
        return self._why()


def bare(name: str) -> str:
    """A parameter's name without the names of wrappers in front."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def root_of(settings: ProbeSettings) -> Path:
    """Where the rank directories are."""
    assert settings.grad_probe is not None
    root = settings.grad_probe.dump_path or os.path.join(settings.output_dir, "grad_probe")
    return Path(os.path.abspath(os.path.expanduser(root)))  # the program may change its working directory
