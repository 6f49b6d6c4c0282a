"""`TrainerMonitorV2`: the monitor under the name, configuration and files of the existing tool's monitor_v2.

monitor = TrainerMonitorV2("config.json", fr="pytorch")
monitor.start(model=model, optimizer=optimizer, grad_acc_steps=4)
...                                # a step ends with the optimizer's update; without an optimizer call monitor.step()
monitor.stop()
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.settings.existing.monitor_v2 import read_v2
from msprobe_engine.probe.sinks.csv.monitor_v2 import CsvV2Sink
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training import owner


class TrainerMonitorV2:
    """Writes ``{output_dir}/rank_{R}/{monitor}_step{a}-{b}.csv``.

    Args:
        config_path: JSON file with ``monitors`` and the schedule.
        fr: framework: ``pytorch``, ``pt`` or ``torch``; None: as the file says.

    Raises:
        SettingsError: the file cannot be read or is wrong; all mistakes, one line each.
        SinkError: the directory cannot be created.
    """

    def __init__(self, config_path: str | Path, fr: str | None = None) -> None:
        self.config_path = Path(config_path)
        self._settings = read_v2(self.config_path, fr)
        owner.of_user()
        self._probe: TorchProbe | None = None
        self._by_optimizer = False
        self._stopped = False
        self.current_step = 0

    def start(self, model: Any = None, optimizer: Any = None, **context: Any) -> None:
        """Begin to watch.

        Args:
            model: the model, or the list of its pipeline chunks.
            optimizer: what updates its parameters; needed by the monitors weight_grad, optimizer and param.
            context: ``grad_acc_steps`` or ``micro_batch_number``, ``model``, ``optimizer``.

        Raises:
            UsageError: no model, a monitor that needs an optimizer without one, or started twice.
        """
        settings = self._settings
        model = context.get("model") if model is None else model
        optimizer = context.get("optimizer") if optimizer is None else optimizer
        models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, (list, tuple)) else []
        if not models or not all(isinstance(m, nn.Module) for m in models):
            raise UsageError(f"start: model is a {type(model).__name__}; give the module, or the list of its pipeline chunks")
        without = [name for name in ("weight_grad", "optimizer", "param") if name in settings.ops]
        if optimizer is None and without:
            raise UsageError(f"start: no optimizer, but the configuration has {', '.join(without)}; give optimizer=")
        if self._probe is not None or self._stopped:
            raise UsageError("start: this monitor was started already; make a new one")
        given = context.get("micro_batch_number") or context.get("grad_acc_steps") or 1
        probe = TorchProbe(settings.probe)
        rank = probe.backend.rank() or 0
        monitor = settings.probe.monitor
        if monitor is not None and (not monitor.rank or rank in monitor.rank):
            sink = CsvV2Sink(
                output_dir=probe.outputs.claim(settings.output_dir, probe.backend.rank()),
                rank=rank,
                ops=settings.ops,
                start_step=settings.start_step,
                steps_per_file=settings.steps_per_file,
                chunks=isinstance(model, (list, tuple)),
                micro_batches=settings.micro_batches or int(given),
                cc_ranks=settings.cc_ranks,
            )
            probe.session.writer.sinks.append(sink)
        self._probe = probe
        patch = settings.patch_optimizer_step
        self._by_optimizer = optimizer is not None and patch is not False
        probe.attach(models, optimizer, on_update=self._advance_step if self._by_optimizer else None)
        probe.begin_step(self.current_step)

    def step(self) -> None:
        """End a step, where the optimizer does not (``patch_optimizer_step: false``, or no optimizer)."""
        if self._by_optimizer:
            warn_once("monitor_v2 step", "step() has no effect: the optimizer ends the steps; patch_optimizer_step: false leaves it to you")
            return
        self._advance_step(False)

    def stop(self) -> None:
        """Write what is left and take everything off."""
        self._stopped = True
        if self._probe is not None:
            self._probe.close()

    close = stop

    def __enter__(self) -> TrainerMonitorV2:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _advance_step(self, skipped: bool) -> None:
        del skipped
        if self._probe is None or self._probe.closed:
            return
        self._probe.end_step()
        self.current_step += 1
        self._probe.begin_step(self.current_step)
