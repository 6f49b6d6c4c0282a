"""Who follows the training of this process. One probe per process: of all the integrations that see the same training (a Trainer that
drives a DeepSpeed engine that drives a torch optimizer), the one that knows most.

Integrations claim when the training begins: at the first training step or pass, not when a model is made. By then it is known what
drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.log import get_logger, warn_once
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.autoload import FRAMEWORKS, report, request
from msprobe_integrations.torch.ranks.job import Job

_log = get_logger()


class Follower(Protocol):
    """A `LoopObserver`, as far as it matters here."""

    def close(self) -> None: ...


Observer = TypeVar("Observer", bound=Follower)
KNOWS = {**{name: knows for name, (_, _, knows) in FRAMEWORKS.items()}, "user": 100}
"""How much an integration knows of the training; ``user``: a probe that the script makes itself."""
_owner: tuple[str, Follower | None] | None = None
_settings: ProbeSettings | None = None
_failed: request.Request | None = None


def claim(name: str, make: Callable[[ProbeSettings, Path], Observer]) -> Observer | None:
    """The observer of integration `name`; made the first time, from the settings that were asked for.

    Args:
        name: one of `KNOWS`: a row of `FRAMEWORKS` in ``autoload/__init__.py``.
        make: ``(settings, file)`` to an observer.

    Returns:
        None: no probe was asked for, its settings are wrong (said once), or somebody who knows more follows this training.
    """
    global _owner
    if name not in KNOWS:
        raise ProbeError(f"integration {name!r} has no row in FRAMEWORKS of msprobe_integrations/autoload/__init__.py; it needs one")
    if _owner is not None:
        held, observer = _owner
        if held == name:
            return observer  # type: ignore[return-value]  # one integration makes one class
        if KNOWS[held] >= KNOWS[name]:
            return None
    asked = request.current()
    if asked is not None and (parent := request.inherited_from(asked, Job().rank())) is not None:
        warn_once(
            "child of a training",
            f"no probe in this process: it was started by {parent.where}, which has one and still runs; "
            f"{request.CHILDREN}=1 gives it one too, with a directory of its own",
        )
        return None
    settings = None if asked is None else _load(asked)
    if asked is None or settings is None:
        return None
    report.report_event("pass", name)
    _hand_over(name)
    made = make(settings, Path(asked.config))
    _owner = (name, made)
    return made


def own(name: str, observer: Follower | None) -> None:
    """`observer`, which a script has made itself (None: a probe of another kind), follows from now on."""
    global _owner
    asked = request.current()
    if name == "user":
        report.report_event("user")
    if name == "user" and asked is not None and request.left_aside(asked):
        _log.warning("the script makes a probe of its own: that of %s is not used (%s)", asked.by, " ".join((asked.config, *asked.changes)))
    _hand_over(name)
    _owner = (name, observer)


def of_user() -> None:
    """The script makes a probe of its own: where one was asked for from outside, that one follows no more."""
    if request.current() is not None:
        own("user", None)


def current() -> Follower | None:
    """Whoever follows now."""
    return None if _owner is None else _owner[1]


def release(observer: Follower | None = None) -> None:
    """`observer` (None: whoever) follows no longer; the next claim counts. Does not close it."""
    global _owner, _settings, _failed
    if observer is None or (_owner is not None and _owner[1] is observer):
        _owner = None
    if observer is None:
        _settings = _failed = None


def _hand_over(name: str) -> None:
    if _owner is None or _owner[1] is None:
        return
    _log.info("the training is followed by integration '%s' from now on, no longer by '%s'", name, _owner[0])
    _owner[1].close()


def _load(asked: request.Request) -> ProbeSettings | None:
    global _settings, _failed
    if _settings is None and _failed != asked:
        try:
            _settings = asked.settings()
        except ProbeError as error:
            _failed = asked
            _log.error("the probe is off, training goes on: %s (asked for by %s)", error, asked.by)
            report.report_event("refused")
    return _settings
