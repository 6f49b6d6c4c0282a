"""The moment before the program closes its tracker's run: until then the run takes numbers.

A loop's last step ends with the next one, which never comes, and a program that closes its tracker right after the loop would have all
steps but that one in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from msprobe_engine.core.log import warn_once
from msprobe_engine.probe.sinks.tracker.open_runs import TRACKERS, open_run
from msprobe_integrations.patching import Patches

_CLOSING = {"wandb": ("finish", "__exit__"), "swanlab": ("finish",), "mlflow": ("end_run",)}
"""Methods of a tracker's run; with MLflow a function."""
_ELSEWHERE = (
    "sinks.tracker: the run is closed on another thread than the training's, which may be in the midst of a step: the last step may not "
    "be in that run (other sinks have it); close it on the thread that trains"
)
_actions: dict[Callable[[], None], int] = {}
_patches = Patches()
_patched: set[str] = set()


def register(action: Callable[[], None]) -> None:
    """Call ``action()``, which must not raise, before a run of W&B, SwanLab or MLflow is closed on this thread; the newest first. One that
    is closed on another thread, while the training may be in the midst of a step, is only said."""
    _actions[action] = threading.get_ident()
    patch_new_trackers()


def unregister(action: Callable[[], None]) -> None:
    """Take back `register`."""
    if _actions.pop(action, None) is not None and not _actions:
        _patches.late_imports()
        _patches.undo()
        _patched.clear()


def patch_new_trackers() -> None:
    """The program may have imported a tracker, or opened a run, since the last look. Takes microseconds while it has not."""
    if not _actions:
        return
    for name in TRACKERS:
        if name in _patched or name not in sys.modules:
            continue
        owner: Any = sys.modules.get("mlflow.tracking.fluent")
        if name != "mlflow":
            owner = None if (run := open_run(name)) is None else type(run)
        if owner is not None:
            _patched.add(name)
            for method in _CLOSING[name]:
                _patches.around(owner, method, _close)
            _patches.early_imports()


def _close(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for action, thread in reversed(list(_actions.items())):
        if thread == threading.get_ident():
            action()
        else:  # the training may be in the midst of a step, which nobody else may end
            warn_once("tracker closed on another thread", _ELSEWHERE)
    return original(*args, **kwargs)
