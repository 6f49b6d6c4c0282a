"""`TrainerMon`: the monitor under the name, arguments and configuration file of the existing tool; what it is for every framework.

monitor = TrainerMon("monitor_config.json")
monitor.set_monitor(model, optimizer, grad_acc_steps=4)
for batch in data:          # nothing else: a step ends when the optimizer has updated the parameters
    train(batch)
monitor.stop()
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.core.log import get_logger, warn_once
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings import text
from msprobe_engine.core.settings.load import load_settings, recognise
from msprobe_engine.core.settings.schema import OPS, ProbeSettings
from msprobe_engine.probe.hot_settings import HotMonitor
from msprobe_engine.probe.sinks.anomaly import AnomalySink
from msprobe_integrations.common.compat.trainer_mon_values import Shown, Values, note_entry, values_of
from msprobe_integrations.common.monitor.hot import hot_monitor
from msprobe_integrations.common.monitor.probe import Probe

Self = TypeVar("Self", bound="TrainerMonitor")
_log = get_logger()
ACTIVATIONS, ACTIVATION_GRADIENTS = ("actv",), ("actv_grad",)
REDUCED, UNREDUCED = ("grad_reduced",), ("grad_unreduced",)


class TrainerMonitor:
    """What `TrainerMon` is for every framework; arguments and errors: the classes of that name."""

    def __init__(
        self, config_file_path: str | Path, process_group: Any = None, params_have_main_grad: bool = True, opt_ty: Any = None
    ) -> None:
        del params_have_main_grad, opt_ty
        self.config_file_path = Path(config_file_path)
        self._kind = _kind(self.config_file_path)
        self._given = load_settings(self.config_file_path, kind=self._kind)
        if self._given.monitor is None:
            raise SettingsError(f"{self.config_file_path}: has no section 'monitor': there is nothing to watch")
        self._of_user()
        self._hot = self._given.monitor.hot
        self._probe = self.probe_type(_at_first(self._given, self._kind))
        self._probe.pipeline.listeners.append(self._keep_frame)
        self._last: Frame | None = None
        self._optimizer: Any = None
        self._follower: HotMonitor | None = None
        self._handles: list[Any] = []
        self._duplicates: Any = None
        self._step = self._first_step = 0
        self._models_given = False
        self._place(process_group)

    def set_monitor(
        self,
        model: Any,
        optimizer: Any,
        grad_acc_steps: int = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Begin to watch.

        Args:
            model: the model, or the list of its virtual pipeline chunks (their index is `vpp_stage`).
            optimizer: what updates its parameters, or a list of them: then the update of the last one ends the step.
            grad_acc_steps: micro batches per update; checked, and not needed: they are counted.
            tp_group, dp_group: where given, reduced gradients are written by one of the ranks that hold the same ones: rank 0 of the
                data-parallel group, and of the tensor-parallel group for what is not split over it.
            start_iteration: number of the first step.

        Raises:
            UsageError: arguments of another kind, or a monitor that is set or stopped.
        """
        models = [model] if self._is_model(model) else list(model) if isinstance(model, (list, tuple)) else []
        if not models or not all(self._is_model(m) for m in models):
            raise UsageError(f"set_monitor: model is a {type(model).__name__}; give the module, or the list of its pipeline chunks")
        if optimizer is None:
            raise UsageError("set_monitor: optimizer is None; give the optimizer that updates the model: its updates are the steps")
        if self._probe.closed:
            raise UsageError("set_monitor: this monitor was stopped; make a new TrainerMon")
        if self._models_given:
            raise UsageError("set_monitor: a model is watched already; stop() this monitor and make a new TrainerMon")
        self._models_given = True
        _count("grad_acc_steps", grad_acc_steps, 1)
        self._step = self._first_step = _count("start_iteration", start_iteration, 0)
        probe = self._probe
        if tp_group is not None or dp_group is not None:
            self._duplicates = self._make_duplicates(tp_group, dp_group)
        probe.attach(models, optimizer, on_update=self._finish_step)
        self._as_known()
        if self._hot:
            first = self._given if self._kind == "monitor" else None
            self._follower = hot_monitor(probe, self.config_file_path, self._kind, first)
            this = weakref.ref(self)
            self._handles += [self._before_forward(chunk, lambda: _forward_begins(this())) for chunk in models]
        probe.begin_step(self._step)

    def stop(self) -> None:
        """Write what is left and take everything off. Of the step in progress, whose update has not come, what was seen so far."""
        if not (self._models_given or self._probe.closed):
            _log.warning("TrainerMon: nothing was watched: call set_monitor(model, optimizer) before the training")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._follower is not None:
            self._follower.close()
        self._probe.close()

    close = stop

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def generate_wgrad_metrics(self, post_grad_dict: Mapping[str, Any] | None = None) -> tuple[Values, Values]:
        """Reduced and unreduced gradients: those of the step in progress where it has any yet, else of the last step. Waits for the device.

        Args:
            post_grad_dict: tag to gradient; their statistics are taken now and stand for the reduced ones.
        """
        reduced, unreduced = self._values(REDUCED), self._values(UNREDUCED)
        return (reduced if post_grad_dict is None else self._values_of_tensors(post_grad_dict)), unreduced

    def generate_xy_metrics(self) -> tuple[Values, Values]:
        """Activations and their gradients: those of the step in progress where it has any yet, else of the last step. Waits for the
        device."""
        return self._values(ACTIVATIONS), self._values(ACTIVATION_GRADIENTS)

    @property
    def ops(self) -> list[str]:
        """Statistics that files show; may be set while the training runs (deprecated: change the file, with DYNAMIC_MONITOR)."""
        return list(self._ops)

    @ops.setter
    def ops(self, value: Sequence[str]) -> None:
        if isinstance(value, str) or not isinstance(value, (list, tuple)) or not value or any(op not in OPS for op in value):
            raise UsageError(f"ops: {value!r} is not allowed; allowed: a list of some of {', '.join(OPS)}")
        shown = tuple(dict.fromkeys(value))
        self._change(ops=(*shown, *(op for op in ("shape", "dtype") if op not in shown)))

    def reload_xy(self, xy_distribution: bool = False) -> None:
        """Watch activations and their gradients, or no longer (deprecated: change the file, with DYNAMIC_MONITOR)."""
        given = self._given.monitor
        assert given is not None
        neither = not (given.activations or given.activation_gradients)
        self._change(
            activations=bool(xy_distribution) and (given.activations or neither),
            activation_gradients=bool(xy_distribution) and (given.activation_gradients or neither),
        )

    def adhoc_check(
        self, target_tensor: Any, module_name: str, tensor_name: str, rank_list: Sequence[int] = (), ops_list: Sequence[str] = ()
    ) -> None:
        """Note any tensor as a sample of this step (family ``other``). No wait.

        Args:
            rank_list: ranks that note it, empty is all.
            ops_list: has no effect: all statistics are taken, files show those of the configuration.
        """
        del ops_list
        if not rank_list or self._rank in rank_list:
            with self._probe.guard("adhoc_check"):
                self._probe.sample("other", module_name, target_tensor, extra={"tag": tensor_name})

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Keep the optimizer for `monitor_gnorm_with_ad` (name of versions before 1.2.2)."""
        self._optimizer = optimizer

    def monitor_gnorm_with_ad(
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: int = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """`set_monitor` under its name of versions before 1.2.2; without an optimizer, that of `set_wrapped_optimizer`."""
        chosen = self._optimizer if optimizer is None else optimizer
        if chosen is None:
            raise UsageError("monitor_gnorm_with_ad: no optimizer; give one, or call set_wrapped_optimizer before")
        self.set_monitor(model, chosen, grad_acc_steps, tp_group, dp_group, start_iteration)

    @property
    def frames(self) -> list[Frame]:
        """Everything that ``format: api`` has kept, one frame per step, oldest first; empty with another format."""
        return self._probe.frames

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._step

    @property
    def _ops(self) -> tuple[str, ...]:
        monitor = self._probe.monitor
        return monitor.ops if monitor is not None else ()

    @property
    def _rank(self) -> int:
        return self._probe.backend.rank() or 0

    def _finish_step(self, skipped: bool) -> None:
        """The optimizer is done: one step is over. Called from inside its hooks, where none may be put on it or taken off."""
        del skipped  # the frame says so
        probe = self._probe
        if probe.closed:
            return
        if self._duplicates is not None:
            with probe.guard("duplicates"):
                self._duplicates.leave_out()
        if self._kind == "monitor":
            with probe.guard("monitor.trainer"):
                note_entry(probe.pipeline.samples)
                if self._step == self._first_step:
                    self._note_first_agreement()
        probe.end_step()
        if self._follower is not None:
            with probe.guard("monitor.hot"):
                changed = self._follower.end_step(self._step)
                if changed is not None and changed.monitor is not None:
                    probe.apply_monitor_settings(changed.monitor, in_update=True)
        self._step += 1
        probe.begin_step(self._step)

    def forward_begins(self) -> None:
        """A chunk of the model is called: outside of the optimizer's hooks, so what new settings want of it is put on here."""
        self._probe.reattach_parameters()
        self._as_known()

    def _as_known(self) -> None:
        """Of several optimizers the last one ends the steps. Reduced gradients are those at the entry of the optimizer's step, as the
        existing tool has them."""
        watches = self._probe.parameters.watches
        for watch in watches[:-1]:
            watch.on_update = None
        for watch in watches if self._kind == "monitor" else ():
            watch.entry_only = True

    def _change(self, **keys: Any) -> None:
        warn_once("trainer_mon change", "changing the monitor by call is deprecated; change its file, with DYNAMIC_MONITOR=True")
        monitor = self._probe.monitor
        assert monitor is not None
        self._probe.apply_monitor_settings(replace(monitor, **keys))
        self._as_known()

    def _keep_frame(self, frame: Frame, _alerts: Any) -> None:
        if frame.samples:
            self._last = frame

    def _values(self, families: Sequence[str]) -> Values:
        probe = self._probe
        if any(sample.family in families for sample in probe.pipeline.samples):
            return values_of(probe.pipeline.samples, probe.backend.so_far(), self._ops, self._rank, families, self._shown)
        probe.pipeline.advance(wait=True)
        return (
            values_of(self._last.samples, self._last.rows, self._ops, self._rank, families, self._shown) if self._last is not None else {}
        )

    def _values_of_tensors(self, tensors: Mapping[str, Any]) -> Values:
        """Statistics of tensors given by tag. Waits for the device; what is no tensor is left out."""
        backend = self._probe.backend_type()
        refs = {tag: backend.reduce(t) for tag, t in tensors.items() if backend.is_tensor(t)}
        rows = backend.finish_step().rows()
        out: Values = {}
        for tag, ref in refs.items():
            samples = [Sample("grad_reduced", tag, ref)]
            for entry in values_of(samples, rows, self._ops, 0, ("grad_reduced",), self._shown).values():
                out[tag] = entry
        return out

    def _place(self, group: Any) -> None:
        stage, mates = 0, [self._rank]
        if group is not None:
            with self._probe.guard("process_group"):
                stage, mates = self._group_of(group)
        for sink in self._probe.session.writer.sinks:
            if isinstance(sink, AnomalySink):
                sink.place(stage, mates)

    # what a framework brings along

    _shown: Shown
    """How values are given in memory."""

    probe_type: type[Probe]

    def _of_user(self) -> None:
        """The user has made this monitor himself."""

    def _is_model(self, model: Any) -> bool:
        """Is this something whose training can be watched?"""
        raise NotImplementedError

    def _make_duplicates(self, tp_group: Any, dp_group: Any) -> Any:
        """What leaves out (``leave_out()``) the reduced gradients that another rank writes, too."""
        raise NotImplementedError

    def _before_forward(self, model: Any, call: Callable[[], None]) -> Any:
        """Call before every call of the model; returns a handle with ``remove``."""
        raise NotImplementedError

    def _note_first_agreement(self) -> None:
        """In the first step of a run there is no first moment; the existing tool writes 1 for every parameter that has a gradient."""

    def _group_of(self, group: Any) -> tuple[int, list[int]]:
        """This rank's place in a group of ranks, and the group's global ranks."""
        raise NotImplementedError


def _forward_begins(monitor: TrainerMonitor | None) -> None:
    if monitor is not None:
        monitor.forward_begins()


def _kind(path: Path) -> str:
    """A file without one key of ``probe.yaml`` is a ``monitor_config.json``, however it is spelled."""
    node = text.read_file(path)
    return "probe" if isinstance(node, Mapping) and node and recognise(node) == "probe" else "monitor"


def _at_first(settings: ProbeSettings, kind: str) -> ProbeSettings:
    """In the dynamic mode of the existing tool nothing happens before the first step boundary."""
    monitor = settings.monitor
    assert monitor is not None
    return replace(settings, monitor=replace(monitor, enabled=False)) if monitor.hot and kind == "monitor" else settings


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"set_monitor: {name} = {value!r} is not allowed; allowed: an integer >= {least}")
    return number
