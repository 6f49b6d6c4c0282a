"""`PrecisionDebugger`: dumps under the names users already type.

debugger = PrecisionDebugger("config.json")
for batch in data:
    debugger.start(model)
    loss = train(batch)
    debugger.stop()
    debugger.step()
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from msprobe_engine.dump import early
from msprobe_engine.dump.writer import DumpSink
from msprobe_engine.errors import UsageError
from msprobe_engine.guard import Faults
from msprobe_engine.log import get_logger, set_rank
from msprobe_engine.pipeline import Pipeline
from msprobe_engine.records import Frame
from msprobe_engine.rules.base import Alert
from msprobe_engine.settings.load import load_settings
from msprobe_engine.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.window import Window
from msprobe_engine.writer import Writer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture import Capture
from msprobe_integrations.torch.filters import name_filter

_log = get_logger()


class PrecisionDebugger:
    """One per process: a second construction returns the first object. All methods but the constructor are class methods, so any
    file of a program may call ``PrecisionDebugger.start()``.

    Args:
        config_path: ``config.json`` (or ``probe.yaml`` with a ``dump`` section).
        task, dump_path, level, step, rank: override the file.

    Raises:
        SettingsError: the configuration is wrong; the message names every wrong key.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _built = False

    def __new__(cls, *_: Any, **__: Any) -> PrecisionDebugger:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        step: Sequence[int | str] | None = None,
        rank: Sequence[int | str] | None = None,
    ) -> None:
        if self._built:
            if any(v is not None for v in (config_path, task, dump_path, level, step, rank)):
                _log.warning("PrecisionDebugger exists already: the arguments of this second construction are not used")
            return
        arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step, "rank": rank}
        overrides: dict[str, Any] = {k: v for k, v in arguments.items() if v is not None}
        try:
            source: Any = config_path if config_path is not None else {"dump": {}}
            settings = load_settings(source, **overrides)
            if settings.dump is None:
                raise UsageError(f"{config_path} has no 'dump' section: PrecisionDebugger has nothing to do")
            self._build(settings, settings.dump, model)
        except BaseException:
            type(self)._instance = None
            raise

    def _build(self, settings: ProbeSettings, dump: DumpSettings, model: nn.Module | Sequence[nn.Module] | None) -> None:
        if dump.level not in ("L0", "L1", "mix"):
            raise UsageError(f"level '{dump.level}' is not available here yet; use L0, L1 or mix")
        if dump.task not in ("statistics", "structure"):
            raise UsageError(f"task '{dump.task}' is not available here yet; use statistics or structure")
        if dump.summary_mode in ("md5", "xor"):
            raise UsageError(
                f"summary_mode '{dump.summary_mode}' is not available here yet; use digest (statistics and a 64-bit digest "
                "that tells whether two tensors are equal) or statistics"
            )
        if dump.tensor_list:
            _log.warning("tensor_list is accepted, but saving tensors is not available here yet; it has no effect")
        self.dump = dump
        self.backend = TorchBackend()
        self.backend.want_digest = dump.summary_mode == "digest"
        self.faults = Faults(settings.strict)
        self.writer = Writer([], self.faults)
        self.pipeline = Pipeline(self.backend, [], self.writer, self.faults, [self._log_frame])
        self.root = Path(dump.dump_path) if dump.dump_path else Path(settings.output_dir) / "dump"
        self.capture = Capture(
            self.pipeline, dump.level, stacks=dump.extra_info, data_mode=dump.data_mode, wanted=name_filter(dump.scope, dump.list)
        )
        self.window = Window(dump.rank, dump.step)
        self.model = model
        self.step_number = 0
        self.dumped_steps = 0
        self._sink: DumpSink | None = None
        self._sink_rank: int | None = -1
        self._open = False
        self._ended = False
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)
        self._built = True

    @classmethod
    def start(
        cls, model: nn.Module | Sequence[nn.Module] | None = None, token_range: Sequence[int] | None = None, rank_id: int | None = None
    ) -> None:
        """Begin (or go on with) the dump of the current step, when it is wanted.

        Args:
            model: the model, or a list of models; needed once for levels L0 and mix.
            token_range: not available yet.
            rank_id: rank to use in file names when there is no process group.

        Raises:
            UsageError: no model at level L0 or mix, or something that is no module.
        """
        self = cls._get()
        if self._ended or not self.faults.enabled("dump"):
            return
        if token_range is not None:
            raise UsageError("token_range is not available here yet")
        model = model if model is not None else self.model
        _check_model(model, self.dump.level)
        rank = self.backend.rank() if rank_id is None else rank_id
        if not self.window.wanted(self.step_number, rank):
            return
        with self.faults.guard("dump"):
            self._use_sink(rank)
            if model is not None:
                self.capture.attach(model)
            if not self._open:
                assert self._sink is not None
                early.begin(self._sink, self.step_number)
                self._open = True
                _log.info("Dump switch is turned on at step %d. Dump data will be saved in %s", self.step_number, self.root)
            self.capture.open()

    @classmethod
    def stop(cls) -> None:
        """End collection; gradients of calls that were seen still come until `step`."""
        self = cls._get()
        with self.faults.guard("dump"):
            self.capture.pause()

    @classmethod
    def step(cls) -> None:
        """The training step is over: write it, count on."""
        self = cls._get()
        with self.faults.guard("dump"):
            if self._open:
                self._finish_step()
        self.step_number += 1
        if not self._ended and self.window.over(self.step_number):
            self._ended = True
            self.capture.close()
            self.writer.flush()
            _log.info("msprobe ends successfully. %d steps are in %s", self.dumped_steps, self.root)
        elif not self.window.wanted(self.step_number, self.backend.rank()):
            self.capture.close()

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Set the step counter; call it before the loop.

        Raises:
            UsageError: `step` is no int or negative.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"set_init_step: step is {step!r}; allowed: an int >= 0")
        cls._get().step_number = step

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if cls._instance is None or not cls._instance._built:
            raise UsageError("PrecisionDebugger instance is not created: construct it first, PrecisionDebugger('config.json')")
        return cls._instance

    def _use_sink(self, rank: int | None) -> None:
        """The sink of this rank. The process group may come up after the first steps: later steps go to the rank's directory."""
        if self._sink is not None and rank == self._sink_rank:
            return
        if self._sink is not None:  # what is on its way still belongs to the old directory
            self.pipeline.advance(wait=True)
            self.writer.flush()
        if rank is not None:
            set_rank(rank)
        self._sink = DumpSink(
            self.root,
            task=self.dump.task,
            level=self.dump.level,
            framework=self.backend.framework,
            extra_info=self.dump.extra_info,
            rank=rank,
            data_mode=self.dump.data_mode,
            summary_mode=self.dump.summary_mode,
        )
        self._sink_rank = rank
        self.writer.sinks[:] = [self._sink]

    def _finish_step(self, complete: bool = True) -> None:
        self.capture.pause()
        stacks = self.capture.end_step()
        self._open = False
        self.dumped_steps += 1
        if not self.pipeline.entries:
            _log.warning(
                "step %d: nothing was captured; is the model used between start() and stop(), do scope and list match?", self.step_number
            )
        self.pipeline.end_step(self.step_number, stacks, complete)

    def _log_frame(self, frame: Frame, _alerts: Sequence[Alert]) -> None:
        if self._sink is not None:
            early.log(self._sink, frame)

    def _at_exit(self) -> None:
        with self.faults.guard("dump"):
            if self._open:
                # Not stopped, or ended by an exception: the step is there as far as it came, and says so.
                self._finish_step(complete=not self.capture.on and getattr(sys, "last_value", None) is None)
            self.capture.close()
        with self.faults.guard("closing"):
            self.pipeline.close()

    def _forked(self) -> None:
        self.capture.on = False  # workers of a data loader are not the training
        atexit.unregister(self._at_exit)


def _check_model(model: Any, level: str) -> None:
    if model is None:
        if level in ("L0", "mix"):
            raise UsageError(f"start() at level {level} needs the model: PrecisionDebugger.start(model)")
        return
    for one in model if isinstance(model, (list, tuple)) else [model]:
        if not isinstance(one, nn.Module):
            raise UsageError(f"start(): model is a {type(one).__name__}; allowed: torch.nn.Module or a list of them")
