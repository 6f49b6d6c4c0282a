"""What `PrecisionDebugger` refuses before anything runs: settings that cannot work and wrong arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.output_paths import check_directory
from msprobe_engine.core.settings.schema import ProbeSettings

_log = get_logger()


class ModelKind:
    """What a model is in a framework.

    Args:
        text: name of the class, for messages.
    """

    def __init__(self, kind: type, text: str) -> None:
        self._kind = kind
        self.text = text

    def is_model(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def check(self, model: Any) -> None:
        """Raises:
        UsageError: `model` is no module and no list of modules.
        """
        many = isinstance(model, (list, tuple))
        if many and not model:
            raise UsageError(f"model is an empty list; allowed: {self.text} or a list of them")
        for one in model if many else [model]:
            if not self.is_model(one):
                raise UsageError(f"model is a {type(one).__name__}; allowed: {self.text} or a list of them")

    def or_steps(self, model: Any, step: Any) -> tuple[Any, Any]:
        """The fifth argument of the constructor is the model in torch's 8.1.1 and the list of steps elsewhere: (model, steps) as it is
        meant here.

        Raises:
            UsageError: it is neither, or steps are given twice.
        """
        if model is None:
            return None, step
        if isinstance(model, (list, tuple)) and all(isinstance(s, (int, str)) for s in model):
            if step is not None:
                raise UsageError(f"PrecisionDebugger: model is {model!r}; allowed: {self.text} or a list of them")
            return None, model
        self.check(model)
        return model, step


def root_of(settings: ProbeSettings) -> Path:
    """Where the step directories are."""
    assert settings.dump is not None
    root = settings.dump.dump_path or os.path.join(settings.output_dir, "dump")
    return Path(os.path.abspath(os.path.expanduser(root)))  # the program may change its working directory


def check(settings: ProbeSettings, source: str) -> None:
    """Can these settings be dumped with?

    Raises:
        SettingsError: they cannot; `source` says where they come from.
    """
    dump = settings.dump
    if dump is None:
        raise SettingsError(f"{source}: has no 'dump' section, so PrecisionDebugger has nothing to do")
    if dump.tensor_list and (dump.task != "statistics" or dump.level == "debug"):
        _log.warning("tensor_list has no effect with task %s and level %s; it adds tensors to task statistics", dump.task, dump.level)


def check_place(settings: ProbeSettings, source: str) -> None:
    """Can the dump be written where these settings want it? Apart from `check`, since it is no fault of the configuration: the place may
    have been fine on another node, or yesterday.

    Raises:
        SettingsError: it cannot; `source` says where the settings come from.
    """
    dump = settings.dump
    assert dump is not None
    check_directory(root_of(settings), source, "dump_path" if dump.dump_path else "output_dir")


def check_rank(rank_id: Any) -> None:
    """Raises:
    UsageError: `rank_id` of ``start()`` is no int >= 0.
    """
    if rank_id is not None and (type(rank_id) is not int or rank_id < 0):
        raise UsageError(f"start(): rank_id is {rank_id!r}; allowed: an int >= 0")
