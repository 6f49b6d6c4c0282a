"""Who writes in an output directory now. Two runs in one directory at once, or a training and a process that it has started, are kept
apart: who comes second writes in ``run-2`` below it.

::

    ROOT/.owners/{n}-{launch}/rank{R}    held (`flock`) by the process that writes as rank R, whose name is in it (`processes.Process`)
    ROOT/.owners/lock                    held for the moment in which a launch looks for its place

A launch whose `n` is 1 writes in ROOT itself, others in ``ROOT/run-{n}``, which nobody has written in before: two evaluations that a
training starts one after the other are not one run. Only a launch that its launcher has started again goes on in the last one. A process
whose parent may train, but has not begun to, leaves 1 to it. All ranks of a launch go to the same place: the first one looks whether
anybody else is there, those after it look at the file of their own rank only, so that ten thousand ranks cost one another nothing. A
process that ends takes its file away, and the last one the directory.

What a killed process has left is told by its lock, which the kernel has released, or on the same machine by its name. Its lock alone is
not enough: a child that was forked behind Python's back has it still. Across hosts the lock decides (NFS has them). Where the file system
has none, a file of another host says nothing: it counts as held, because a directory of one's own harms nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from msprobe_engine.core.io.regular_files import DIRECTORY_MODE, make_directories, open_regular
from msprobe_engine.core.log import get_logger, one_line, warn_once
from msprobe_engine.core.process.launch import environment_rank, is_restart, launch_key
from msprobe_engine.core.process.processes import announce_owner, find_living_owner, parse_process, this_process, withdraw_owner

OWNERS = ".owners"
PLACE = "run-{}"
"""Directory of a launch that is not the first in its output directory."""
FURTHER_RUN = re.compile(PLACE.format(r"\d+"), re.ASCII)
EARLIER = "earlier-{}"
"""Directory for what an earlier run has left in an output directory."""
EARLIER_RUN = re.compile(EARLIER.format(r"(\d{1,6})"), re.ASCII)
PATIENCE = 10.0
"""Seconds to wait for another process that looks for its place, which takes milliseconds."""
PARTS = frozenset(("anomaly_detected", "dump", "grad_probe", "incidents", "jsonl", "monitor", "prometheus", "tensorboard", "trend"))
"""Directories in an output directory that are claimed with it."""
_LOCK = "lock"
_LAUNCH = re.compile(r"([1-9][0-9]{0,5})-([0-9a-f]{12})", re.ASCII)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Whoever writes there says so."""
_MOST_TRIES = 1000
_log = get_logger()


class Undecided(Exception):
    """Who else is in the directory could not be found out in time."""


class Claim:
    """What one user in this process has of a directory, until it is released or the process ends.

    Attributes:
        path: where to write: the directory that was asked for, or one below it.
    """

    def __init__(self, root: str, path: Path) -> None:
        self._root, self.path = root, path

    def release(self) -> None:
        """Nothing more is written there by this user."""
        root, self._root = self._root, ""
        if root:
            _release(root)


class _Held:
    """The claim of this process to a directory, whoever in it writes there."""

    def __init__(self, path: Path, made: list[Path], slot: Path | None = None, fd: int = -1) -> None:
        self.path, self.made, self.slot, self.fd, self.users = path, made, slot, fd, 0


_held: dict[str, _Held] = {}
_own_places: set[Path] = set()
"""Where this process has written since it began: a second probe of it goes there, too."""
_guard = threading.RLock()


def claim_directory(root: str | os.PathLike[str], rank: int | None, *, by_process: bool = False) -> Claim:
    """Find out where this process may write below `root`, and keep others away from there. Said when that is not `root` itself.

    A directory that cannot be made or written is no matter of claims: whoever writes there says what is wrong.

    Args:
        root: an output directory; made when it is not there. One of the `PARTS` of a directory that somebody has claimed is claimed
            with that.
        rank: of this process; None: it is not known.
        by_process: without a rank, files are named by the process (``proc{pid}``); else like those of rank 0.
    """
    given = Path(root)
    if given.name in PARTS and (given.parent / OWNERS).is_dir():
        claim = claim_directory(given.parent, rank, by_process=by_process)
        claim.path /= given.name
        return claim
    key = os.path.realpath(root)
    with _guard:
        held = _held.get(key)
        if held is None:
            held = _held[key] = _claim(given, Path(key), rank, by_process)
            announce_owner(environment_rank())
        held.users += 1
        return Claim(key, held.path)


def _claim(given: Path, root: Path, rank: int | None, by_process: bool) -> _Held:
    made = [path for path in (root, *root.parents) if not path.exists()]
    owners, name = root / OWNERS, f"proc{os.getpid()}" if rank is None and by_process else f"rank{rank or 0}"
    try:
        make_directories(os.fspath(owners))
        slot, fd, other = _find_place(owners, name, rank)
    except OSError as error:
        if root.is_dir() and error.errno not in _NO_ROOM:
            place, why = one_line(os.fsdecode(error.filename or owners)), error.strerror or error
            warn_once(f"claim {root}", f"{one_line(str(root))}: whether another run writes here cannot be seen: {place}: {why}")
        return _Held(given, made)
    except Undecided as error:
        path = given / PLACE.format(f"{this_process().host}-{os.getpid()}")
        _log.warning("%s: %s; to be safe, this process writes in %s", one_line(str(given)), error, path.name)
        return _Held(path, made)
    number = slot.parent.name.partition("-")[0]
    if number == "1":
        return _Held(given, made, slot, fd)
    path = given / PLACE.format(number)
    _own_places.add(root / path.name)
    program = one_line(os.path.basename(sys.argv[0])) or "no script"
    _log.warning("%s belongs to %s: this one writes in %s (%s, process %d)", one_line(str(given)), other, path.name, program, os.getpid())
    return _Held(path, made, slot, fd)


def _find_place(owners: Path, name: str, rank: int | None) -> tuple[Path, int, str]:
    """The file of this process, its descriptor, and who is in the way of a better place."""
    owner, other, first = find_living_owner(), "", 1
    if owner is not None and not owner.has_probe:
        if owner.is_launcher_of(rank):
            owner = None
        else:
            first, other = 2, f"{owner.process.where}, which has started this one and may train, too"
    goes_on = owner is None and is_restart()
    base = launch_key(rank) if owner is None else f"{launch_key(rank)};child of {owner.process}"
    for attempt in range(1, _MOST_TRIES):
        key = hashlib.sha256(f"{base};{attempt}".encode()).hexdigest()[:12]
        directory, fd, who = _join_launch(owners, key, name, first, goes_on)
        if fd >= 0:
            return directory / name, fd, other or (f"a run that still goes on ({who or 'its other ranks have found it so'})")
        other = other or (who and f"a run that still goes on ({who})")
    raise Undecided(f"{_MOST_TRIES} launches are there")


def _join_launch(owners: Path, key: str, name: str, first: int, goes_on: bool) -> tuple[Path, int, str]:
    """The directory of this launch (the number of a new one is at least `first`), the descriptor of our file in it (-1: somebody has it),
    and who is in the way."""
    for _ in range(_MOST_TRIES):  # the directory of the launch may go while we come
        directory = _find_launch(owners, key)
        if directory is not None:
            with contextlib.suppress(FileNotFoundError):
                return (directory, *_lock_slot(owners, directory / name))
            continue
        with _hold_lock(owners):
            if _find_launch(owners, key) is None:
                number, who = _find_free_number(owners, first, goes_on)
                directory = owners / f"{number}-{key}"
                directory.mkdir(DIRECTORY_MODE)
                fd, holder = _lock_slot(owners, directory / name)
                return directory, fd, who or holder
    raise Undecided(f"{owners} changes all the time")


def _find_launch(owners: Path, key: str) -> Path | None:
    return next((owners / entry for entry in _launches(owners) if entry.endswith(f"-{key}")), None)


def _launches(owners: Path) -> list[str]:
    """Directories of launches; the parent was just made, and may be gone again."""
    make_directories(os.fspath(owners))
    return sorted(entry for entry in os.listdir(owners) if _LAUNCH.fullmatch(entry))


def _find_free_number(owners: Path, first: int, goes_on: bool) -> tuple[int, str]:
    """The first place, from `first` on, where nobody lives and which nobody but this process has written in, and who lives in place 1;
    what the dead have left of `owners` goes. The lock is held."""
    taken: dict[int, str] = {}
    until = time.monotonic() + PATIENCE / 2
    for entry in _launches(owners):
        if who := _find_living(owners / entry, until):
            taken[int(entry.partition("-")[0])] = who
        else:
            with contextlib.suppress(OSError):
                os.rmdir(owners / entry)
    root = owners.parent
    number = next(n for n in itertools.count(first) if n not in taken and (n == 1 or not _is_of_another_run(root, n, goes_on)))
    return number, taken.get(1, "")


def _is_of_another_run(root: Path, number: int, goes_on: bool) -> bool:
    place = root / PLACE.format(number)
    if place in _own_places or (goes_on and not os.path.lexists(root / PLACE.format(number + 1))):
        return False
    try:
        return place.is_symlink() or any(place.iterdir())
    except FileNotFoundError:
        return False
    except OSError:  # no directory, or one of somebody else
        return True


def _find_living(directory: Path, until: float) -> str:
    """Somebody of a launch who runs; empty: nobody does. Files of others go."""
    for entry in sorted(os.listdir(directory)):
        path = directory / entry
        if time.monotonic() > until:
            raise Undecided(f"too many files are in {directory}; remove it if that run is over")
        try:
            fd = open_regular(path, os.O_RDWR)
        except OSError:
            continue
        try:
            if who := _holder(fd):
                return who
            with contextlib.suppress(OSError):
                os.unlink(path)
        finally:
            os.close(fd)
    return ""


def _holder(fd: int) -> str:
    """Who holds the file behind `fd`, for messages; empty: nobody, and it is locked by us now."""
    process = parse_process(os.pread(fd, 1024, 0).decode("utf-8", "replace"))
    runs = None if process is None else process.runs()
    where = "a process unknown" if process is None else process.where
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            if process is None or runs is False:
                return ""
            return where if runs else f"{where}; the file system has no locks, so whether it runs cannot be seen"
        # A forked child of a process that was killed holds the lock and writes nothing.
        return "" if runs is False else where
    return where if runs else ""


def _lock_slot(owners: Path, path: Path) -> tuple[int, str]:
    """The file of this process, locked; or -1 and who has it.

    Raises:
        FileNotFoundError: its directory has gone.
    """
    for _ in range(_MOST_TRIES):
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            who = _holder(fd)
            if who:
                with _hold_lock(owners):  # nobody only looks whether the file is held
                    who = _holder(fd)
            if who:
                os.close(fd)
                return -1, who
            if os.fstat(fd).st_nlink and _locked_by_us(fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{this_process()}\n".encode(), 0)
                return fd, ""
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        with _hold_lock(owners), contextlib.suppress(FileNotFoundError):  # a child of a dead process has its lock: a new file is needed
            again = open_regular(path, os.O_RDWR)
            try:
                if not _holder(again):
                    os.unlink(path)
            finally:
                os.close(again)
    raise Undecided(f"{path} cannot be had; remove it")


def _locked_by_us(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS
    return True


_depth = 0


@contextlib.contextmanager
def _hold_lock(owners: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Nobody else looks for a place meanwhile. May be entered again by the process that has it.

    Raises:
        Undecided: another process has it for too long.
    """
    global _depth
    if _depth:
        yield
        return
    fd = _lock(owners, time.monotonic() + patience)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        os.close(fd)


def _lock(owners: Path, until: float) -> int:
    path, pause = owners / _LOCK, 0.001
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        except OSError as error:
            if error.errno in NO_LOCKS:
                os.close(fd)
                name = hashlib.sha256(os.fsencode(owners)).hexdigest()[:16]
                owners = Path(tempfile.gettempdir())  # at least the processes of this node take their turns
                path = owners / f"msprobe_{os.getuid()}_{name}.lock"
                continue
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                os.close(fd)
                raise
        os.close(fd)
        if time.monotonic() > until:
            raise Undecided(f"another process looks for its place for more than {PATIENCE:g} s")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def _release(root: str) -> None:
    with _guard:
        if (held := _held.get(root)) is None:
            return
        held.users -= 1
        if held.users > 0:
            return
        del _held[root]
        if not _held:
            withdraw_owner()
        if held.fd >= 0 and held.slot is not None:
            _leave(Path(root), held.slot, held.fd)
        with contextlib.suppress(OSError):
            for path in held.made:
                os.rmdir(path)  # where nothing was written


def _leave(root: Path, slot: Path, fd: int) -> None:
    owners = root / OWNERS
    with contextlib.suppress(OSError, Undecided):
        if os.fstat(fd).st_nlink:
            os.unlink(slot)
        with contextlib.suppress(OSError):
            os.rmdir(slot.parent)
        with _hold_lock(owners, 1.0):
            if os.listdir(owners) == [_LOCK]:
                os.unlink(owners / _LOCK)
                os.rmdir(owners)
    os.close(fd)


def _forget() -> None:
    """In a forked child: it has claimed nothing, and must not hold the locks of its parent."""
    global _guard, _depth
    _guard, _depth = threading.RLock(), 0
    for held in _held.values():
        if held.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(held.fd)
    _held.clear()
    _own_places.clear()


def _release_all() -> None:
    for root, held in list(_held.items()):
        held.users = 1
        _release(root)


os.register_at_fork(after_in_child=_forget)
atexit.register(_release_all)
