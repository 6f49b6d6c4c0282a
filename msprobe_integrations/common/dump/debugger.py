"""What `PrecisionDebugger` is in every framework: one object per process, class methods, forks, the end of the process."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.hot import HotSwitch
from msprobe_engine.core.settings.load import load_settings, read_settings
from msprobe_engine.core.settings.output_paths import check_directory
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.dump.checks import check, check_place
from msprobe_integrations.common.dump.end import differences
from msprobe_integrations.common.dump.run import DumpRun
from msprobe_integrations.common.gradient_probe.updates import PART, root_of
from msprobe_integrations.common.shutdown import at_exit, signal_shutdown

_log = log.get_logger()
_PART = "dump"
_WITHOUT = "the training goes on without it; strict: true stops here"


class Debugger(ABC):
    """What `PrecisionDebugger` is for every framework: a framework's class has that name, and an ``_instance`` of its own; its arguments
    and errors stand there. A place that cannot be written is no wrong setting: it is said once and the training goes on without the dump
    (``strict: true`` raises)."""

    _instance: ClassVar[Any] = None
    _built = False
    _foreign = False
    """This is a forked child of the process that built the object."""
    _run: Any
    gradients: Any
    """The gradient probe, with task grad_probe."""
    _started = False

    def __new__(cls, *_: Any, **__: Any) -> Any:
        if cls._instance is None or cls._instance._foreign:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        step: Sequence[int | str] | None = None,
        rank: Sequence[int | str] | None = None,
        model: Any = None,
    ) -> None:
        try:
            arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step, "rank": rank}
            given: dict[str, Any] = {k: v for k, v in arguments.items() if v is not None}
            source: Any = config_path if config_path is not None else {"dump": {}}
            if self._built:
                self._say_ignored(source, given, config_path is not None)
                return
            settings = load_settings(source, **given)
            self.claim()
            self.gradients = self._run = None
            if settings.grad_probe is not None:
                self.gradients = self.gradient_probe(settings)
                key = "dump_path" if settings.grad_probe.dump_path else "output_dir"
                try:
                    check_directory(root_of(settings), _name(config_path), key)
                except SettingsError as error:
                    self.gradients.faults.fail(PART, error, hint=_WITHOUT)
            if settings.grad_probe is None or settings.dump is not None:
                self.check(settings, _name(config_path))
                self._run = self.make_run(settings, model, self._hot_switch(config_path, given, settings))
                try:
                    check_place(settings, _name(config_path))
                except SettingsError as error:
                    self._run.switch_off(error, _WITHOUT)
        except BaseException:
            if not self._built:
                type(self)._instance = None
            raise
        at_exit.register(self._at_exit)
        signal_shutdown.at_signal(self._at_exit, settings.exit_patience)
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _stop_in_fork(this()))
        self._built = True

    # ---- what a framework has of its own ----

    @staticmethod
    @abstractmethod
    def make_run(settings: ProbeSettings, model: Any, hot: HotSwitch | None) -> DumpRun:
        """The dump of this process."""

    gradient_probe: ClassVar[type[Any]]
    """The `GradientWatch` of task grad_probe, made with the settings."""

    @staticmethod
    def check(settings: ProbeSettings, source: str) -> None:
        """Can these settings be dumped with here?

        Raises:
            SettingsError: they cannot; `source` says where they come from.
        """
        check(settings, source)

    @staticmethod  # a framework need not have such a probe
    def claim() -> None:
        """The script makes a probe of its own: one that was asked for from outside follows the training no more."""

    # ---- what it is made of ----

    @property
    def run(self) -> Any:
        """The dump behind this object.

        Raises:
            UsageError: there is none, the task is grad_probe.
        """
        if self._run is None:
            raise UsageError("the task is grad_probe: there is no dump")
        return self._run

    @property
    def dump(self) -> DumpSettings:
        """The settings in use."""
        made: DumpSettings = self.run.dump
        return made

    @property
    def capture(self) -> Any:
        """What sees the calls of a step.

        Raises:
            UsageError: at level debug nothing does.
        """
        if self.run.capture is None:
            raise UsageError(f"level {self.run.dump.level} has no capture")
        return self.run.capture

    @property
    def pipeline(self) -> Pipeline:
        """What a step has shown so far."""
        made: Pipeline = self.run.pipeline
        return made

    @property
    def writer(self) -> Writer:
        """The background thread that writes finished steps."""
        made: Writer = self.run.files.writer
        return made

    @property
    def faults(self) -> Faults:
        """What failed inside the probe."""
        made: Faults = self.run.faults
        return made

    @classmethod
    def start(
        cls,
        model: Any = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Begin (or go on with) the dump of the current step, when it is wanted.

        Args:
            model: the model, or a list of models; needed once for levels L0 and mix.
            token_range: [first, last]: record only these forward calls of the model, counted from 0 at each ``start``.
            rank_id: rank of this process from now on, in file names and for ``rank``, instead of that of the process group.
            scheduled_tokens: inference serving: how many tokens of each request are in this batch, in their order. With
                ``request_id`` in the settings, batches without that request are left out, and tensors are cut to its tokens.

        Raises:
            UsageError: no model at level L0 or mix or with `token_range`, or an argument that cannot work.
        """
        if (run := cls._get("start")) is not None:
            with run.faults.outward(_PART):
                run.start(model, token_range, rank_id, scheduled_tokens)

    @classmethod
    def stop(cls) -> None:
        """End collection; gradients of calls that were seen still come until `step`."""
        if (run := cls._get("stop")) is not None:
            with run.faults.outward(_PART):
                run.stop()

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """The old name of `stop`."""
        cls.stop()

    @classmethod
    def step(cls) -> None:
        """The training step is over: write it, count on. Once per step, also for steps that are not dumped."""
        if (run := cls._get("step")) is not None:
            with run.faults.outward(_PART):
                run.step()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Save a variable into debug.json (and, task tensor, into files); level debug only. ``start`` is not needed.

        Args:
            variable: a tensor, number, string or numpy array, or dicts, lists and tuples of them. Anything else is left out with a
                warning; inside a container it is written as its type.
            name: the record is ``{name}.{N}.debug``, N counts the calls with this name in the step.
            save_backward: also make ``{name}_grad.{N}.debug``, filled when the gradients of the tensors arrive.
        """
        if (run := cls._get("save")) is not None:
            with run.faults.outward(_PART):
                run.save(variable, name, save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Set the step counter; call it before the loop.

        Raises:
            UsageError: `step` is no int or negative.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"set_init_step: step is {step!r}; allowed: an int >= 0")
        if (run := cls._get("set_init_step")) is not None:
            with run.faults.outward(_PART):
                run.set_step(step)

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Make records of the calls of ``module.api``, at levels L1 and mix: ``{api_prefix}.{api}.{N}.forward`` and ``.backward``.

        Args:
            module: a module, class or object.
            api: name of a function in it.
            api_prefix: dots are allowed; None: the name of the module.

        Raises:
            UsageError: there is no such function, or it cannot be replaced.
        """
        if (run := cls._get("register_custom_api")) is not None:
            with run.faults.outward(_PART):
                run.custom.register(module, api, api_prefix)

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Put the original of a registered function back.

        Raises:
            UsageError: there is no such function.
        """
        if (run := cls._get("restore_custom_api")) is not None and not run.custom.restore(module, api):
            _log.warning("restore_custom_api: %s was not registered", api)

    @classmethod
    def _watch(cls) -> Any:
        """The gradient probe for a call of ``monitor()``, None when it has no effect.

        Raises:
            UsageError: there is no debugger.
        """
        this = cls._get_instance()
        if this._foreign:
            log.warn_once("debugger in a fork", "monitor() has no effect in a forked process")
            return None
        if this.gradients is None:
            log.warn_once("monitor task", "PrecisionDebugger.monitor has no effect: the task is not grad_probe")
        return this.gradients

    @classmethod
    def _begin_module_dump(cls, module: Any, name: str) -> None:
        if (run := cls._get("module_dump")) is not None:
            run.module_dump(module, name)

    @classmethod
    def _end_module_dump(cls) -> None:
        if (run := cls._get("module_dump_end")) is not None:
            run.module_dump_end()

    @classmethod
    def _get_instance(cls) -> Any:
        if cls._instance is None or not cls._instance._built:
            raise UsageError("PrecisionDebugger instance is not created: construct it first, PrecisionDebugger('config.json')")
        return cls._instance

    @classmethod
    def _get(cls, what: str) -> Any:
        this = cls._get_instance()
        if this._foreign:
            log.warn_once("debugger in a fork", f"{what}() has no effect in a forked process; construct PrecisionDebugger in it to dump it")
            return None
        this._started |= what == "start"
        if this._run is None and this.gradients is not None:
            if what == "stop" and not this._started:
                this.gradients.close()
            else:
                log.warn_once(f"{what} of grad_probe", f"{what}() has no effect: the task is grad_probe, which begins with monitor(model)")
        return this._run

    def _say_ignored(self, source: Any, given: Mapping[str, Any], whole: bool) -> None:
        """A second construction: what of its arguments is not what is in use?"""
        if not whole and not given:
            return
        try:
            other = read_settings(source, **given)[0].dump or DumpSettings()
        except SettingsError as error:
            _log.warning("PrecisionDebugger exists already: this second construction is not used, and is wrong: %s", error)
            return
        if self._run is None:
            _log.warning("PrecisionDebugger exists already, with task grad_probe: this second construction is not used")
            return
        different = [d for d in differences(self.dump, other) if whole or d.split()[0] in given]
        if different:
            _log.warning(
                "PrecisionDebugger exists already: the arguments of this second construction are not used. They would change: %s",
                "; ".join(different),
            )
        else:
            _log.info("PrecisionDebugger exists already, with the same settings: this second construction is not used")

    def _hot_switch(self, config_path: Any, given: Mapping[str, Any], settings: ProbeSettings) -> HotSwitch | None:
        if settings.dump is None or settings.dump.dump_enable is None:
            return None
        if not isinstance(config_path, (str, Path)):
            if not settings.dump.dump_enable:
                _log.warning("dump_enable is false and there is no file to watch: nothing is dumped in this run")
            return None

        def check_all(read: ProbeSettings) -> None:
            self.check(read, str(config_path))
            check_place(read, str(config_path))

        return HotSwitch(Path(config_path).absolute(), given, settings, check_all)

    def _at_exit(self) -> None:
        try:
            if self._run is not None:
                with self._run.faults.outward(_PART):
                    self._run.at_exit()
            if self.gradients is not None:
                self.gradients.close()
        finally:
            signal_shutdown.forget(self._at_exit)


def _name(config_path: Any) -> str:
    return "arguments" if config_path is None else str(config_path) if isinstance(config_path, (str, Path)) else "settings"


def _stop_in_fork(debugger: Debugger | None) -> None:
    if debugger is not None and not debugger._foreign:
        debugger._foreign = True
        if debugger._run is not None:
            debugger._run.stop_in_fork()
        if debugger.gradients is not None:
            debugger.gradients.stop_in_fork()
        at_exit.unregister(debugger._at_exit)
