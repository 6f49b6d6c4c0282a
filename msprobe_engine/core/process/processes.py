"""Which process this is, and whether a process that left its name somewhere still runs.

A process id alone names nobody: ids are used again, and every container counts its own. So a name holds when the process began, and the
machine as the process saw it: the boot of its kernel, its namespace of process ids and its user. Two names of the same machine can be
compared by ``/proc``; about a process of another host or container nothing can be said by its name.
"""

from __future__ import annotations

import functools
import os
import platform
from typing import NamedTuple

OWNER = "MSPROBE_OWNER"
"""Variable that a process with a probe, or one that may get one, sets for the processes it starts, see `Owner`."""
_ENDED = frozenset("ZXx")  # a zombie has been killed already; who should wait for it has not done so yet


class Process(NamedTuple):
    """The name of a process; as text ``HOST:MACHINE:PID:START``.

    Attributes:
        host: name of its host, for people.
        machine: equal for processes that see each other's ids; empty: it cannot be known.
        start: when it began, in ticks since the machine did; empty: unknown.
    """

    host: str
    machine: str
    pid: int
    start: str

    def __str__(self) -> str:
        return ":".join((self.host, self.machine, str(self.pid), self.start))

    def runs(self) -> bool | None:
        """Does it still run? None: that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        return start_time(self.pid) == self.start

    @property
    def where(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


class Owner(NamedTuple):
    """Who has a probe, or may get one, as it tells the processes that it starts; as text ``[?]RANK:PROCESS``.

    Attributes:
        rank: as its launcher says; None: it has none.
        has_probe: False: it was asked for a probe and imports a framework, so it may train from some time on; nobody can know yet.
    """

    process: Process
    rank: int | None
    has_probe: bool = True

    def __str__(self) -> str:
        return f"{'' if self.has_probe else '?'}{'-' if self.rank is None else self.rank}:{self.process}"

    def is_launcher_of(self, rank: int | None) -> bool:
        """Does it start ranks, of which this is one, without being one itself?"""
        return self.rank is None and rank is not None


def this_process() -> Process:
    return Process(_host(), _machine(), os.getpid(), start_time(os.getpid()) or "")


def parse_process(text: str) -> Process | None:
    """The reverse of ``str(process)``; None: the text is of another kind."""
    host, _, rest = text.strip().partition(":")
    machine, _, rest = rest.partition(":")
    pid, separator, start = rest.partition(":")
    if not separator or not pid.isdecimal() or len(pid) > 18 or len(text) > 1000:
        return None
    return Process(host, machine, int(pid), start)


def start_time(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the machine did; None: there is none that runs, or that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
        return None if state in _ENDED else fields[18]  # starttime of proc(5)
    except (OSError, ValueError, IndexError):
        return None


def announce_owner(rank: int | None) -> None:
    """Tell the processes that this one starts from now on that it has a probe."""
    _announce(Owner(this_process(), rank))


def announce_candidate(rank: int | None) -> None:
    """Tell the processes that this one starts from now on that it may get a probe. Not where one further up has told already: what starts
    here is of that training, too."""
    owner, above = _read_owner(), find_living_owner()
    if (owner is None or owner.process != this_process()) and (above is None or above.is_launcher_of(rank)):
        _announce(Owner(this_process(), rank, has_probe=False))


def _announce(owner: Owner) -> None:
    global _inherited
    before = _read_owner()
    if before is None or before.process != owner.process:
        _inherited = os.environ.get(OWNER)
    os.environ[OWNER] = str(owner)


def withdraw_owner() -> None:
    """This process has no probe any more; what one further up has told counts again."""
    owner = _read_owner()
    if owner is None or owner.process != this_process():
        return
    if _inherited is None:
        del os.environ[OWNER]
    else:
        os.environ[OWNER] = _inherited


def find_living_owner() -> Owner | None:
    """A process further up that has a probe, or may get one, and still runs. One that has ended has no children: what it started goes its
    own way. Of another container nothing is known; there the claims in the output directory decide."""
    owner = _read_owner()
    if owner is not None and owner.process == this_process():
        owner = None if _inherited is None else _parse_owner(_inherited)
    return owner if owner is not None and owner.process.runs() else None


def _read_owner() -> Owner | None:
    return _parse_owner(os.environ.get(OWNER, ""))


def _parse_owner(content: str) -> Owner | None:
    rank, separator, text = content.removeprefix("?").partition(":")
    process = parse_process(text)
    if not separator or process is None or not (rank == "-" or (rank.isdecimal() and len(rank) < 10)):
        return None
    return Owner(process, None if rank == "-" else int(rank), has_probe=not content.startswith("?"))


_inherited: str | None = None


@functools.lru_cache(maxsize=1)
def _host() -> str:
    return platform.node().replace(":", "-")


def _machine() -> str:
    return _machine_of(os.getpid())


@functools.lru_cache(maxsize=2)
def _machine_of(_pid: int) -> str:  # a forked child may be the first of a namespace
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip().replace("-", "")[:16]
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except (OSError, ValueError):
        return ""
    return f"{boot}-{namespace}-{os.getuid()}" if boot and namespace else ""
