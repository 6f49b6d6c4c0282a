"""Runs of W&B, SwanLab and MLflow that the training program has opened in this process, and how numbers get into them.

A run is joined, never opened, named or finished. Nothing is imported that the program has not imported. Numbers of ours carry the prefix
``msprobe/``, and no counter of the user's run moves: W&B takes them with the program's own next row (``commit=False``; a row of ours
would count up the step that the program's rows are numbered by), MLflow and SwanLab have a step per metric.
"""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

PREFIX = "msprobe/"
STEP = "msprobe/step"
"""W&B: the horizontal axis of what is ours."""
LAST_ALERT = "msprobe/last_alert"
_BATCH = 500
"""Metrics of one request to MLflow; it refuses more than 1000."""
_MLFLOW_NAME = re.compile(r"[^/\w.\- :]")


class OpenRun(ABC):
    """A run of a tracker. `send` is called on one thread, which is not the training thread."""

    tracker: str

    @property
    @abstractmethod
    def open(self) -> bool:
        """Is it still the run of this process?"""

    @abstractmethod
    def send(self, step: int, numbers: Mapping[str, float], alert: str) -> None:
        """Log the numbers of a step.

        Args:
            alert: the latest alert's message; "": none in this step.
        """


class WandbRun(OpenRun):
    tracker = "W&B"

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{PREFIX}*", step_metric=STEP)

    @property
    def open(self) -> bool:
        return self._module.run is self._run

    def send(self, step: int, numbers: Mapping[str, float], alert: str) -> None:
        self._run.log({**numbers, STEP: step}, commit=False)
        if alert:
            self._run.summary[LAST_ALERT] = alert


class SwanlabRun(OpenRun):
    tracker = "SwanLab"

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run

    @property
    def open(self) -> bool:
        return _swanlab(self._module) is self._run

    def send(self, step: int, numbers: Mapping[str, float], alert: str) -> None:
        self._run.log(dict(numbers), step=step)
        if alert:
            self._run.log({LAST_ALERT: self._module.Text(alert)}, step=step)


class MlflowRun(OpenRun):
    tracker = "MLflow"

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._id = module, run.info.run_id
        self._client = module.MlflowClient()  # of the tracking server that is set now, as the run is

    @property
    def open(self) -> bool:
        return True  # a run that has ended still takes metrics, by its name

    def send(self, step: int, numbers: Mapping[str, float], alert: str) -> None:
        now = int(time.time() * 1000)
        metric = self._module.entities.Metric
        metrics = [metric(_MLFLOW_NAME.sub("_", name), value, now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _BATCH])
        if alert:
            self._client.set_tag(self._id, LAST_ALERT, alert[:5000])


def _wandb(module: Any) -> Any:
    return getattr(module, "run", None)


def _swanlab(module: Any) -> Any:
    return module.get_run() if hasattr(module, "has_run") and module.has_run() else None


def _mlflow(module: Any) -> Any:
    return module.active_run() if hasattr(module, "active_run") else None


TRACKERS = {"wandb": (_wandb, WandbRun), "swanlab": (_swanlab, SwanlabRun), "mlflow": (_mlflow, MlflowRun)}


def open_run(name: str) -> Any:
    """The open run of one of `TRACKERS` as the tracker itself has it; None: there is none."""
    module = sys.modules.get(name)
    return TRACKERS[name][0](module) if module is not None else None


class OpenRuns:
    """The runs that are open, looked for anew at each call: a program may open its run late, or a second one."""

    def __init__(self) -> None:
        self._joined: dict[int, tuple[Any, OpenRun]] = {}

    def find(self) -> list[OpenRun]:
        """Called on the training thread: MLflow keeps the open run by thread."""
        joined: dict[int, tuple[Any, OpenRun]] = {}
        for name, (_, kind) in TRACKERS.items():
            if (run := open_run(name)) is not None:
                known = self._joined.get(id(run))
                joined[id(run)] = known if known is not None and known[0] is run else (run, kind(sys.modules[name], run))
        self._joined = joined
        return [one for _, one in joined.values()]
