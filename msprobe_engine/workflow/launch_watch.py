"""Listens, beside a launch line, to what its processes say of themselves, and says at the end when no training was seen.

``msprobe run`` becomes the launch line, so it cannot speak at its end: a process that it starts before does, and ends with it. That is
nobody's child whom the launch line could wait for, has none of its input and output but the standard error, and reads only what arrives
on its socket (`msprobe_integrations.autoload.report`). That is text, which is counted and shown; anybody on this machine can send some.

What it does not see: processes on other machines, in containers of their own, and interpreters without the probe. Therefore it says
what was seen on this machine, and nothing where files were written all the same.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from msprobe_engine.core.distribution import install_command
from msprobe_engine.core.log import one_line, printable

LAUNCH = "MSPROBE_LAUNCH"
"""As in `msprobe_integrations.autoload.report`."""
_CANCEL = "cancel"
_MOST = 10_000
"""Processes that are told apart."""
_SHOWN = 3
KNOWN = ("torch", "megatron", "mindspeed", "mindspeed_llm", "mindspeed_mm", "deepspeed", "transformers", "accelerate", "lightning",
         "pytorch_lightning", "torchtitan")  # fmt: skip
"""Frameworks whose trainings are found without a word in the program."""


_NO_PROCESS = (
    "put msprobe run where the training starts (inside of the container, the srun or the script), or install msprobe in the Python that "
    "trains; python -S and a changed PYTHONPATH keep it out (docs/guide/launch.md, what does not reach an interpreter)"
)
_NO_FRAMEWORK = "name the program that trains after --; msprobe doctor shows the frameworks of this Python"
_NEAREST = (
    (
        "refused",
        "trained without the probe, because its settings do not fit this job",
        "the error above (the probe is off, training goes on) names the setting; change it and start again",
    ),
    (
        "unfit",
        "runs in a Python that lacks {}",
        f"install it there: {install_command()} in the environment of the program that trains",
    ),
    (
        "pass",
        "began a training (found by integration {}) and made no optimizer step",
        "let it come to the end of its first step; a loop that updates weights without a torch optimizer names its steps with TorchProbe "
        "(docs/frameworks/pytorch.md)",
    ),
    (
        "evaluation",
        "called {} only in evaluation mode (as from_pretrained and model.eval() leave a model), which is not taken for training",
        "call model.train() before the loop. If the model is to stay in evaluation mode, name the steps with TorchProbe "
        "(docs/frameworks/pytorch.md)",
    ),
    (
        "optimizer",
        "made the optimizer {}, and no training pass of a model that it updates was seen",
        "is the model called with gradients on, and in the main thread? A loop that is not found names its steps with "
        "TorchProbe (docs/frameworks/pytorch.md)",
    ),
    (
        "imports",
        "imported {} and made no optimizer",
        "is this the program that trains? A loop without an optimizer of its framework names its steps with TorchProbe "
        "(docs/frameworks/pytorch.md), one of MindSpore with MindSporeProbe (docs/frameworks/mindspore.md); msprobe frameworks says "
        "what is found in which",
    ),
)
"""What is nearest to a training first: an event, what is said of who had it, what to do."""


@dataclass
class Seen:
    """One process of the launch line."""

    program: str
    events: dict[str, list[str]] = field(default_factory=dict)


class LaunchReports:
    """What the processes have said."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    @property
    def trained(self) -> bool:
        """Has any of them made a step that a probe has seen, or a probe of its own?"""
        return any({"step", "user"} & seen.events.keys() for seen in self._seen.values())

    def add_report(self, line: bytes) -> str:
        """Note a report; returns its event, empty for what is none."""
        words = line.decode("utf-8", "replace").split("\0")
        if len(words) != 4 or not words[1].isdecimal() or len(words[1]) > 9:
            return ""
        event, pid, detail, program = words
        if int(pid) not in self._seen and len(self._seen) >= _MOST:
            return event
        seen = self._seen.setdefault(int(pid), Seen(program))
        details = seen.events.setdefault(event, [])
        if detail and detail not in details and len(details) < 20:
            details.append(detail)
        return event

    def describe_outcome(self, written: str, running: Sequence[int] = ()) -> list[str]:
        """The last words, none where a training was seen.

        Args:
            written: the output directory, if something was written there since the launch line began; empty else.
            running: processes that the launch line has started and left behind.
        """
        if self.trained:
            return []
        if running:
            ids = ", ".join(map(str, running[:_SHOWN])) + (", ..." if len(running) > _SHOWN else "")
            return [f"the launch line has ended and has left processes behind ({ids}): whether they train is not known yet"]
        if any("cut" in seen.events for seen in self._seen.values()):
            where = f"; what was seen of it is in {written} (msprobe show {written})" if written else ""
            return [f"a training was found and ended within its first step, before an optimizer step was done{where}"]
        if written:
            return [
                f"no process on this machine has reported a training, and files were written to {written}: by processes that cannot "
                f"report here. msprobe show {written} lists them"
            ]
        seen, what_to_do = self._explain()
        refused = any("refused" in process.events for process in self._seen.values())
        if not refused and any("interrupted" in process.events for process in self._seen.values()):
            return ["the program was interrupted before a training was found: nothing was watched, nothing is written"]
        first = "" if refused else "no training was found on this machine: "
        if code := self._exit_code():
            first = f"the program itself ended with exit code {code}, its error stands above; {first}"
            what_to_do = what_to_do if refused else "mend that error and start again"
        return [f"{first}nothing was watched, nothing is written. {seen}", f"what to do: {what_to_do}"]

    def _exit_code(self) -> str:
        """Of the launch line, if it is known and not 0; empty else."""
        codes = [code for seen in self._seen.values() for code in seen.events.get("end", ())]
        return next((code for code in codes if code.isdecimal() and len(code) < 4), "")

    def _explain(self) -> tuple[str, str]:
        """What was seen that came nearest to a training, and what to do then."""
        processes = list(self._seen.values())
        if not processes:
            return "No Python process with the probe has begun.", _NO_PROCESS
        for event, said, what_to_do in _NEAREST:
            near = [process for process in processes if event in process.events]
            if event == "imports" and near and not any(set(process.events[event]) & set(KNOWN) for process in near):
                said = "imported {}, in which trainings are not found by themselves"
            if near:
                return _list(near, event, said, len(processes)), what_to_do
        who = _names(processes) if len(processes) == 1 else f"{_count(len(processes))} ({_names(processes)})"
        return f"{who} imported none of torch, mindspore, deepspeed, megatron, transformers, lightning.", _NO_FRAMEWORK


def _list(near: Sequence[Seen], event: str, said: str, count: int) -> str:
    names = sorted({detail for process in near for detail in process.events[event]})
    of = ", ".join(map(one_line, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    who = _names(near) if count == 1 else f"{len(near)} of {_count(count)} ({_names(near)})"
    return f"{who} {said.format(of)}."


def _count(number: int) -> str:
    return f"{number} Python process" + ("es" if number != 1 else "")


def _names(processes: Sequence[Seen]) -> str:
    names = list(dict.fromkeys(one_line(process.program) for process in processes))
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def watch_launch(places: Sequence[str], root: str = "") -> str | None:
    """Start to listen; to be called by the process that becomes the launch line, right before it does.

    Args:
        places: directories in which the launch writes, the output directory first.
        root: a directory whose link ``latest`` shall lead to the first of them once a training is seen; empty: none shall.

    Returns:
        what `LAUNCH` has to be in the environment of the launch line; None where this machine has no means for it.
    """
    name = f"msprobe-{secrets.token_hex(8)}"
    try:
        ended = os.pidfd_open(os.getpid())
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(f"\0{name}")
        middle = os.fork()
    except (AttributeError, OSError):
        return None
    if not middle:
        _become_listener(ended, receiver, [os.path.abspath(place) for place in places], root)
    os.waitpid(middle, 0)
    os.close(ended)
    receiver.close()
    return f"{os.getpid()}:{name}"


def cancel(launch: str) -> None:
    """The launch line could not be started: nobody says anything of it.

    Args:
        launch: what `watch_launch` gave.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(f"{_CANCEL}\0{os.getpid()}\0\0".encode(), "\0" + launch.partition(":")[2])


def _become_listener(ended: int, receiver: socket.socket, places: Sequence[str], root: str) -> NoReturn:
    """Be nobody's child, and listen until the launch line has ended."""
    try:
        os.setsid()  # Ctrl-C and the end of the terminal are for the launch line
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        os.chdir("/")
        _collect_reports(ended, receiver, places, root)
    finally:
        os._exit(0)


def _collect_reports(ended: int, receiver: socket.socket, places: Sequence[str], root: str) -> None:
    reports = LaunchReports()
    before = [_read_mtime(place) for place in places]

    def find_written_directory() -> str:
        return next((place for place, time in zip(places, before) if _read_mtime(place) != time), "")

    watched: list[socket.socket | int] = [receiver, ended]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if receiver not in ready:
            _speak(reports, find_written_directory(), _left_behind(receiver))
            return
        line, sender = receiver.recvfrom(4096)
        trained = reports.trained
        event = reports.add_report(line)
        if event == _CANCEL:
            return
        if root and reports.trained and not trained:
            link_latest(root, places[0])
        if event == "end":
            _speak(reports, find_written_directory(), ())
            if sender:
                receiver.sendto(b".", sender)
            return


def _read_mtime(directory: str) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return 0


def _left_behind(receiver: socket.socket) -> list[int]:
    """Processes of this user that have the name of our socket in their environment, as all have that the launch line has started. One that
    becomes another program just now shows no environment: it is looked at again, for a tenth of a second at most."""
    name = os.fsencode(receiver.getsockname())[1:]
    for _ in range(5):
        found, empty = _find_marked_processes(name)
        if found or not empty:
            break
        time.sleep(0.02)
    return sorted(found)


def _find_marked_processes(name: bytes) -> tuple[list[int], bool]:
    """(processes with `name` in their environment, whether there is one that shows no environment)."""
    mark = f"{LAUNCH}=".encode()
    processes, empty = [], False
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                text = file.read()
            if not text:
                os.readlink(f"/proc/{entry}/exe")  # threads of the kernel have none
                empty = True
        except OSError:  # gone, another user's, or the kernel's
            continue
        if any(each.startswith(mark) and each.endswith(b":" + name) for each in text.split(b"\0")):
            processes.append(int(entry))
    return processes, empty


def _speak(reports: LaunchReports, written: str, running: Sequence[int]) -> None:
    text = "".join(printable(f"msprobe run: {line}\n") for line in reports.describe_outcome(written, running))
    if text:
        sys.stderr.write(text)
        sys.stderr.flush()


def link_latest(root: str, directory: str) -> None:
    """``latest`` in `root` leads to `directory` from now on. What is there and no link stays; a link that cannot be made is no harm."""
    link, new = os.path.join(root, "latest"), os.path.join(root, f".latest-{secrets.token_hex(4)}")
    try:
        if os.path.lexists(link) and not os.path.islink(link):
            return
        os.symlink(os.path.relpath(directory, root), new)
        os.replace(new, link)
    except OSError:
        return
