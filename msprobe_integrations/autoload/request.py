"""What was asked for on the command line or in the environment: which settings file, with which changes.

Read in every interpreter of an environment that has the probe, so it imports nothing that is not there anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from msprobe_engine.core.process.processes import Process
    from msprobe_engine.core.settings.schema import ProbeSettings

CONFIG = "MSPROBE_CONFIG"
CHANGES = "MSPROBE_SET"
"""``key=value`` pairs, one per line: changes to the file, ``dump.step=[5]``."""
SWITCH = "MSPROBE_AUTOLOAD"
"""``0``: the interpreter is left alone, whatever else is set."""
CHILDREN = "MSPROBE_CHILDREN"
"""``1``: also processes that a training has started, and that train something themselves, get the probe of the environment, in a directory
of their own."""
FLAG = "--msprobe-"
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("accelerate", "accelerate.commands.launch", "msrun"),
)
"""Programs and modules that start ranks and train nothing."""


class Request:
    """A probe that somebody wants in this process.

    Args:
        config: settings file; absolute, the script may go elsewhere.
        changes: ``key=value`` pairs on top of the file.
        by: where it was asked for, for messages.
    """

    __slots__ = ("by", "changes", "config")

    def __init__(self, config: str, changes: tuple[str, ...] = (), by: str = CONFIG) -> None:
        self.config, self.changes, self.by = config, changes, by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and (self.config, self.changes) == (other.config, other.changes)

    def __hash__(self) -> int:
        return hash((self.config, self.changes))

    def settings(self) -> ProbeSettings:
        """Read and check the file.

        Raises:
            SettingsError: all mistakes, one line each.
        """
        from msprobe_engine.core.settings.load import load_settings

        return load_settings(self.config, changes=self.changes)


def inherited_from(asked: Request, rank: int | None) -> Process | None:
    """The process that has a probe already and has only handed on its own request to this one, which it has started: an evaluation, a
    reward model, a conversion. None: there is none, the request is this process' own, or it is a rank that a process without a rank has
    started.

    Args:
        asked: what holds for this process.
        rank: of this process, None when it has none.
    """
    if asked is _told or os.environ.get(CHILDREN, "") == "1":
        return None
    from msprobe_engine.core.process.processes import find_living_owner

    owner = find_living_owner()
    return owner.process if owner is not None and owner.has_probe and not owner.is_launcher_of(rank) else None


_told: Request | None = None
_used: set[Request] = set()


def request_probe(config: str, changes: tuple[str, ...] = (), by: str = CONFIG) -> Request:
    """A launch argument or a framework's own configuration asks for the probe; it counts more than the environment, whose changes hold
    where `changes` has them first (`environment_changes`)."""
    global _told
    _told = Request(os.path.abspath(config), changes, by)
    return _told


def forget() -> None:
    """Only the environment counts again (tests)."""
    global _told
    _told = None
    _used.clear()


def of_script(file: str | os.PathLike[str]) -> ProbeSettings:
    """Settings of a file that a script names itself. Where the launch line asks for the same file, its changes count too.

    Raises:
        SettingsError: all mistakes, one line each.
    """
    from msprobe_engine.core.settings.load import load_settings

    asked = current()
    if asked is None or os.path.realpath(file) != os.path.realpath(asked.config):
        return load_settings(os.fspath(file))
    _used.add(asked)
    return asked.settings()


def left_aside(asked: Request) -> bool:
    """The script makes a probe of its own. True the first time, unless it has taken over what was asked for."""
    if asked in _used:
        return False
    _used.add(asked)
    return True


def current() -> Request | None:
    """What holds for this process now; None: nothing was asked for."""
    if _told is not None:
        return _told
    config = os.environ.get(CONFIG, "")
    return Request(os.path.abspath(config), environment_changes()) if config and not off() else None


def fix_config_path() -> Request | None:
    """As `current`, at the start of an interpreter: a relative file name is made absolute for it and its children, which may begin
    somewhere else."""
    asked = current()
    if asked is not None and os.environ.get(CONFIG) != asked.config:
        os.environ[CONFIG] = asked.config
    return asked


def off() -> bool:
    """Has the user switched loading by itself off?"""
    return os.environ.get(SWITCH, "") == "0"


def has_probe_argument() -> bool:
    """Does the command line have an argument of ours, which the framework's own parser has to know?"""
    return any(argument.startswith(FLAG) for argument in sys.argv[1:])


def may_be_mistyped() -> bool:
    """Is there a variable that may be meant for us, whether we know it or not? A look at names only: every interpreter pays for it."""
    return any("MSP" in name or "PROBE" in name for name in map(str.upper, os.environ))


def is_helper() -> bool:
    """Does this process only start those that train, or has `multiprocessing` started it for one of them?"""
    from itertools import pairwise

    words = getattr(sys, "orig_argv", sys.argv)
    program = next((word for before, word in pairwise(words) if not word.startswith("-") and before not in ("-W", "-X")), "")
    return program.rpartition("/")[2] in _LAUNCHERS or "--multiprocessing-fork" in words


def environment_changes() -> tuple[str, ...]:
    """Those of ``MSPROBE_SET``."""
    return tuple(line for line in os.environ.get(CHANGES, "").split("\n") if line.strip())
