"""The dump of one process: which step is open, what captures it, where it is written. `PrecisionDebugger` is its public face."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core import log, redaction
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults, is_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Entry
from msprobe_engine.core.settings.hot import HotSwitch
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.core.window import Window
from msprobe_integrations.common.dump import debug_save
from msprobe_integrations.common.dump.checks import check_rank, root_of
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.common.dump.dump_plugins import DumpPlugins
from msprobe_integrations.common.dump.end import LastWords, Story, differences, why_nothing
from msprobe_integrations.common.dump.files import DumpFiles
from msprobe_integrations.common.dump.forward_range import ForwardRange, check_range, check_tokens, part_of
from msprobe_integrations.common.dump.module_selection import ModuleSelection
from msprobe_integrations.common.dump.parts import DumpParts
from msprobe_integrations.common.dump.settings_pack import SettingsPack
from msprobe_integrations.common.ranks.shutdown_deadline import ShutdownDeadline, has_raised
from msprobe_integrations.common.shutdown import signal_shutdown
from msprobe_integrations.common.statistics.row_options import CHECKSUMS

_log = get_logger()


class DumpRun(DumpParts):
    """Steps, windows and files of a dump. All methods are called on the training thread. Frameworks inherit, see `DumpParts`.

    Args:
        settings: with a dump section that `dump.checks.check` has nothing against.
        model: the model, when the constructor of the debugger was given one.
        hot: the hot switch, when ``dump_enable`` asks for one.
    """

    def __init__(self, settings: ProbeSettings, model: Any = None, hot: HotSwitch | None = None) -> None:
        self.faults = Faults(settings.strict)
        self.backend = self.backend_type()
        self.files = DumpFiles(self.backend, self.faults)
        self.pipeline = self.files.pipeline
        self.model = model
        self.hot = hot
        self.step_number = 0
        self.story = Story()
        self.capture = self.keeper = self.slices = None
        self.focus: ModuleSelection | None = None
        self.saved: SavedVariables | None = None
        self._saving = threading.RLock()  # a program may save from several threads
        self.extras = DumpPlugins(DumpSettings(), self.files.tally.skip)
        self.custom = self.make_custom_apis()
        self.tokens = ForwardRange(
            self.before_forward,
            lambda: self._switch_capture(True, inside=True),
            lambda: self._switch_capture(False),
            lambda error: self.faults.fail("token_range", error),
        )
        self.started = SettingsPack(self.config_type)
        self.files.before_rename, self.files.wrote_in = self.started.close, self._wrote_in
        self._open = False
        self._seeing = False
        self._reloaded = False
        self._last_words = LastWords(self.faults)
        self.configure(settings)

    # ---- configuration ----

    def configure(self, settings: ProbeSettings) -> None:
        """Take over a configuration; no step is open. May be called again between steps: what the last one made is closed here."""
        dump = settings.dump
        assert dump is not None
        redaction.demand(settings.redact)
        self._settings = settings
        root = root_of(settings)
        if dump.task == "free_benchmark" or dump.level == "L2":  # these write at other times than a step's
            root = self.files.claim(dump, root)
        extras = DumpPlugins(dump, self.files.tally.skip, self.make_extras(dump, root))
        self._take_off()
        self.extras.close()
        self.extras = extras
        self.files.configure(dump, root, extras.sink)
        self.dump = dump
        self.on = dump.dump_enable is not False
        self.backend.want_digest = dump.summary_mode == "digest"
        self.backend.want_checksum = CHECKSUMS.get(dump.summary_mode, "")
        chosen = self.focus.chosen if self.focus is not None else []
        self.saved = self.capture = self.focus = None
        self.slices = self.make_slices(dump) if dump.slice or dump.request_id is not None else None
        self.keeper = self.make_keeper(dump, self.keeper) if extras.dumps else None
        self.files.tensors = self.keeper.store if self.keeper is not None else None
        if extras.dumps and dump.level == "debug":
            reduce = self.keeper.reduce if self.keeper is not None else self.backend.reduce
            self.saved = self.saved_type(self.pipeline, reduce, self._save_entry, lambda error: self.faults.fail("save", error))
        elif extras.dumps:
            self.capture = self.make_capture(dump)
            self.focus = self.make_focus()
            for module, name in chosen:
                self.focus.add(module, name)
        self.window = Window(dump.rank, dump.step)
        self.ended = self.window.over(self.step_number)

    def switch_off(self, error: Exception, hint: str) -> None:
        """Nothing can be written: say so once and leave the training alone.

        Raises:
            Exception: `error`, in strict mode.
        """
        self.faults.fail("dump", error, hint=hint)
        self.faults.disabled["save"] = self.faults.disabled["dump"]
        self.on = False

    def _poll(self) -> None:
        """Between steps: has the configuration file changed?"""
        if self.hot is None or self._open:
            return
        with self.faults.guard("hot switch"):
            settings = self.hot.poll()
            if settings is None:
                return
            before = self.dump
            self.configure(settings)
            self._reloaded = True
            _log.info(
                "PrecisionDebugger detected config change and reloaded runtime settings. The dump is %s from step %d on. Changed: %s",
                "on" if self.on else "off",
                self.step_number,
                "; ".join(differences(before, self.dump)) or "nothing that concerns the dump",
            )

    # ---- the calls of the debugger ----

    def start(self, model: Any, token_range: Any, rank_id: Any, scheduled_tokens: Any) -> None:
        """Begin (or go on with) the dump of the current step, when it is wanted."""
        tokens, scheduled = check_range(token_range), check_tokens(scheduled_tokens)
        check_rank(rank_id)
        if model is not None:
            self.models.check(model)
            self.model = model
        if rank_id is not None:
            self.backend.assigned_rank = rank_id
        self._poll()
        if self.on and self.model is not None:
            self.prepare(self.model)
        if self.model is None and (tokens is not None or self.dump.level in ("L0", "mix")):
            self._without_model(tokens is not None)
            return
        self.story.starts += 1
        if self.on:
            self.files.settle_rank()
            self.extras.begin(self.model, self.step_number, self.backend.rank())
        if self.ended or not self.on or self.capture is None or not self.faults.is_enabled("dump"):
            return
        if not self._is_step_wanted():
            return
        self.tokens.end()
        if not self._is_request_scheduled(scheduled):
            self._switch_capture(False)
            return
        with self.faults.guard("dump"):
            if self.model is not None:
                self.capture.attach(self.model, anew=not self._open)
            self._begin_step()
            if tokens is None:
                self._switch_capture(True)
            else:
                assert self.model is not None
                self._switch_capture(False)
                self.tokens.begin(self.model, *tokens)

    def stop(self) -> None:
        """End collection; gradients of calls that were seen still come until `step`."""
        if not self.story.starts:
            log.warn_once("stop before start", "PrecisionDebugger.stop() has no effect before the first start()")
        with self.faults.guard("dump"):
            self._end_tokens()
            self._switch_capture(False)
            self.extras.pause()
        self._poll()

    def step(self) -> None:
        """The training step is over: write it, count on."""
        with self.faults.guard("dump"):
            if self._open:
                self._finish_step()
            self.extras.end_step(self.step_number + 1)
        self.story.steps.add(self.step_number)
        self.story.off += not self.on
        self.step_number += 1
        self._poll()
        if not self.ended and (self.window.over(self.step_number) or self.extras.ended):
            self.ended = True
            self._take_off()
            self.files.wait()
            self._conclude()
        elif not self.window.is_wanted(self.step_number, self.backend.rank()) or not self.faults.is_enabled("dump"):
            self.rest()

    def set_step(self, step: int) -> None:
        """Count from `step` on."""
        if self._open:
            with self.faults.guard("dump"):
                self._finish_step()
        self.step_number = step
        self.ended = self.window.over(step)

    def save(self, variable: Any, name: Any, save_backward: Any) -> None:
        """Save a variable into the current step, when it is wanted and the level is debug."""
        if self.dump.task == "structure":
            log.warn_once("save task", "PrecisionDebugger.save has no effect in task structure; set task to 'statistics' or 'tensor'")
            return
        if self.saved is None:
            log.warn_once("save level", f"PrecisionDebugger.save has no effect at level {self.dump.level}; set level to 'debug'")
            return
        self.story.saves += 1
        if self.ended or not self.on or not self.faults.is_enabled("save"):
            return
        if why := self.saved.problem(variable, name, save_backward):
            debug_save.warn(why)
            self.files.tally.skip("calls of save()")
            return
        if self._is_step_wanted():
            with self._saving, self.faults.guard("save"):
                self._begin_step()
                self.saved.save(variable, name, save_backward)

    def module_dump(self, module: Any, name: str) -> None:
        """Record only `module`, as ``Module.{name}``, until `module_dump_end`."""
        if self.focus is None:
            log.warn_once("module_dump level", "module_dump has no effect at level debug")
            return
        with self.faults.guard("dump"):
            self.focus.add(module, name)
            self._switch_capture(self._seeing)

    def module_dump_end(self) -> None:
        """Record again what the level says."""
        if self.focus is not None:
            with self.faults.guard("dump"):
                self.focus.clear()
                self._switch_capture(self._seeing)

    # ---- the parts of a step ----

    def _is_step_wanted(self) -> bool:
        """Is the current step wanted on this rank? The rank may have become known since the last step."""
        self.files.settle_rank()
        self.files.say_missing_ranks()
        return self.window.is_wanted(self.step_number, self.backend.rank())

    def _wrote_in(self, directory: Path) -> None:
        with self.faults.guard("config check"):
            self.started.wrote(directory)

    def _begin_step(self) -> None:
        if not self._open:
            self.files.begin_step(self.step_number)
            with self.faults.guard("config check"):
                self.started.begin(self._settings, self.backend.rank(), self.model, self.step_number, sys._getframe())
            if self.keeper is not None:
                self.keeper.begin_step(self.step_number)
            self._open = True
            self.story.begun += 1

    def _switch_capture(self, on: bool, inside: bool = False) -> None:
        """Put the capture on or off; between `module_dump` and its end the chosen modules take its place."""
        self._seeing = on
        if self.capture is None or self.focus is None:
            return
        if not on:
            self.focus.pause()
            self.capture.pause()
        elif self.focus.active:
            self.open_capture(self.capture, inside)
            self.capture.pause()
            self.focus.open()
        else:
            self.focus.pause()
            self.open_capture(self.capture, inside)

    def _end_tokens(self) -> None:
        if self.tokens.active:
            if self.tokens.calls <= self.tokens.first:
                self.story.forwards = max(self.story.forwards, self.tokens.calls)
            self.tokens.end()

    def _is_request_scheduled(self, scheduled: Mapping[str, int] | None) -> bool:
        """Is the request of ``request_id`` in this batch? If so, tensors are cut to its part."""
        request = self.dump.request_id
        if self.slices is None:
            return True
        self.slices.extra = None
        if request is None or scheduled is None:
            return True
        self.slices.extra = part_of(request, scheduled)
        if self.slices.extra is None:
            self.story.elsewhere += 1
            self.files.tally.skip(f"batches without request {log.one_line(request)}")
            _log.debug("request %s is not scheduled in step %d, which is not dumped", request, self.step_number)
        return self.slices.extra is not None

    def _finish_step(self, complete: bool = True) -> None:
        self._end_tokens()
        self._switch_capture(False)
        self.files.settle_rank()
        stacks: list[list[str]] = []
        if self.capture is not None and self.focus is not None:
            self.focus.end_step()
            stacks = self.capture.end_step()
        if self.saved is not None:
            self.saved.end_step()
            self.pipeline.level = self.dump.level
            if self.keeper is not None:
                self.keeper.end_step(self.pipeline.entries)
        self._open = False
        self.story.records += len(self.pipeline.entries)
        if not self.pipeline.entries:
            _log.warning(
                "step %d: nothing was captured; %s",
                self.step_number,
                why_nothing(self.story, self.dump, self.backend.rank(), self.backend.name),
            )
        self.pipeline.end_step(self.step_number, stacks, complete)

    def _save_entry(self, entry: Entry) -> None:
        if self.keeper is not None:
            self.keeper.hand_over(entry)

    def rest(self) -> None:
        """The next step is not dumped; a later one may be."""
        self._take_off()

    def _take_off(self) -> None:
        self.tokens.end()
        self._seeing = False
        if self.focus is not None:
            self.focus.close()
        if self.capture is not None:
            self.capture.close()

    # ---- the end ----

    def at_exit(self) -> None:
        """The process ends: write what is there."""
        broken = has_raised() or signal_shutdown.get_seconds_left() < math.inf
        self.pipeline.patience = ShutdownDeadline().left()
        with self.faults.guard("dump"):
            if self._open:
                # Not stopped, or ended by an exception: the step is there as far as it came, and says so.
                try:
                    self._finish_step(complete=not self._seeing and not broken)
                except Exception as error:
                    if not is_of_training(error):
                        raise
                    _log.error("an operator of the training has failed, and nobody waited for it: %s", log.one_line(str(error)))
                    self._finish_step(complete=False)  # a failure is told once
        with self.faults.guard("closing"):
            self._take_off()
            self.extras.close()
            self.pipeline.close()
        with self.faults.guard("config check"):
            self.started.close(ShutdownDeadline().left())
        self._conclude()
        self.files.release()

    def stop_in_fork(self) -> None:
        """In a forked child: workers of a data loader are not the training."""
        self._seeing = False
        self.tokens.end()
        self.extras.pause()
        if self.focus is not None:
            self.focus.pause()
        if self.capture is not None:
            self.capture.on = False

    def _conclude(self) -> None:
        """Say what was written, or why nothing was."""
        if self.extras.dumps:
            self._last_words.report_end(self.story, self.dump, self.files, self.backend)

    def _without_model(self, tokens: bool) -> None:
        """No model is known and one is needed. Who changed the configuration is told; who calls the API wrongly gets an error."""
        if tokens or not self._reloaded:
            what = "with token_range" if tokens else f"at level {self.dump.level}"
            raise UsageError(f"start() {what} needs the model: PrecisionDebugger.start(model)")
        why = f"the dump stays off: level {self.dump.level} needs the model, and start() is called without; change the level"
        log.warn_once(f"model for level {self.dump.level}", why)
