"""The dump of one process: which step is open, what captures it, where it is written. `PrecisionDebugger` is its public face."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from msprobe_engine.dump import early
from msprobe_engine.dump.writer import DumpSink
from msprobe_engine.errors import UsageError
from msprobe_engine.guard import Faults
from msprobe_engine.log import get_logger, set_rank
from msprobe_engine.pipeline import Pipeline
from msprobe_engine.records import Frame
from msprobe_engine.rules.base import Alert
from msprobe_engine.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.window import Window
from msprobe_engine.writer import Writer
from msprobe_integrations.torch.backend import CHECKSUMS, TorchBackend
from msprobe_integrations.torch.capture import Capture
from msprobe_integrations.torch.filters import name_filter
from msprobe_integrations.torch.slices import Slices

_log = get_logger()
Models = nn.Module | Sequence[nn.Module]


class DumpRun:
    """Steps, windows and files of a dump. All methods are called on the training thread.

    Args:
        settings: with a dump section.
        dump: that section.
        model: the model, when the constructor of the debugger was given one.
    """

    def __init__(self, settings: ProbeSettings, dump: DumpSettings, model: Models | None = None) -> None:
        self.faults = Faults(settings.strict)
        self.backend = TorchBackend()
        self.writer = Writer([], self.faults)
        self.pipeline = Pipeline(self.backend, [], self.writer, self.faults, [self._log_frame])
        self.model = model
        self.step_number = 0
        self.dumped_steps = 0
        self.ended = False
        self._sink: DumpSink | None = None
        self._sink_rank: int | None = -1
        self._open = False
        self.configure(settings, dump)

    def configure(self, settings: ProbeSettings, dump: DumpSettings) -> None:
        """Take over a configuration; no step is open."""
        if dump.level not in ("L0", "L1", "mix"):
            raise UsageError(f"level '{dump.level}' is not available here yet; use L0, L1 or mix")
        if dump.task not in ("statistics", "structure"):
            raise UsageError(f"task '{dump.task}' is not available here yet; use statistics or structure")
        if dump.tensor_list:
            _log.warning("tensor_list is accepted, but saving tensors is not available here yet; it has no effect")
        self.dump = dump
        self.backend.want_digest = dump.summary_mode == "digest"
        self.backend.want_checksum = CHECKSUMS.get(dump.summary_mode, "")
        self.root = Path(dump.dump_path) if dump.dump_path else Path(settings.output_dir) / "dump"
        self.slices = Slices(self.backend, dump.slice) if dump.slice or dump.request_id is not None else None
        self.capture = Capture(
            self.pipeline,
            dump.level,
            stacks=dump.extra_info,
            data_mode=dump.data_mode,
            wanted=name_filter(dump.scope, dump.list),
            slices=self.slices,
        )
        self.window = Window(dump.rank, dump.step)

    def start(self, model: Models | None, token_range: Sequence[int] | None, rank_id: int | None, tokens: Mapping[str, int] | None) -> None:
        """Begin (or go on with) the dump of the current step, when it is wanted."""
        if self.ended or not self.faults.enabled("dump"):
            return
        if token_range is not None or tokens is not None:
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
            self._begin_step()
            self.capture.open()

    def _begin_step(self) -> None:
        if not self._open:
            assert self._sink is not None
            early.begin(self._sink, self.step_number)
            self._open = True
            _log.info("Dump switch is turned on at step %d. Dump data will be saved in %s", self.step_number, self.root)

    def stop(self) -> None:
        """End collection; gradients of calls that were seen still come until `step`."""
        with self.faults.guard("dump"):
            self.capture.pause()

    def step(self) -> None:
        """The training step is over: write it, count on."""
        with self.faults.guard("dump"):
            if self._open:
                self._finish_step()
        self.step_number += 1
        if not self.ended and self.window.over(self.step_number):
            self.ended = True
            self.capture.close()
            self.writer.flush()
            _log.info("msprobe ends successfully. %d steps are in %s", self.dumped_steps, self.root)
        elif not self.window.wanted(self.step_number, self.backend.rank()):
            self.capture.close()

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

    def at_exit(self) -> None:
        """The process ends: write what is there."""
        with self.faults.guard("dump"):
            if self._open:
                # Not stopped, or ended by an exception: the step is there as far as it came, and says so.
                self._finish_step(complete=not self.capture.on and getattr(sys, "last_value", None) is None)
            self.capture.close()
        with self.faults.guard("closing"):
            self.pipeline.close()

    def forked(self) -> None:
        """In a forked child: workers of a data loader are not the training."""
        self.capture.on = False


def _check_model(model: Any, level: str) -> None:
    if model is None:
        if level in ("L0", "mix"):
            raise UsageError(f"start() at level {level} needs the model: PrecisionDebugger.start(model)")
        return
    for one in model if isinstance(model, (list, tuple)) else [model]:
        if not isinstance(one, nn.Module):
            raise UsageError(f"start(): model is a {type(one).__name__}; allowed: torch.nn.Module or a list of them")
