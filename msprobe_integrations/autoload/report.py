"""Tells the command that was typed (``msprobe run``) what the processes of its launch line do: that they have begun, which frameworks they
import, what of a training is seen. It says at the end when no training was.

One datagram each, to a socket of this machine that `msprobe_engine.workflow.launch_watch` listens to. Nobody waits for an answer but the
process that is the launch line itself, at its end, so that the last word comes before the shell's prompt. A report that does not arrive
costs nothing. Every interpreter below ``msprobe run`` reads this file, so it imports little.
"""

from __future__ import annotations

import os
import sys

LAUNCH = "MSPROBE_LAUNCH"
"""``PID:NAME``: the process that is the launch line, and the abstract name of the socket."""
_LONGEST = 200
_told: set[tuple[str, str]] = set()
_pid = 0


def report_event(event: str, detail: str = "") -> None:
    """Report something of this process, once.

    Args:
        event: ``began``, ``imports``, ``optimizer``, ``evaluation``, ``pass``, ``refused``, ``step``, ``interrupted``, ``end``.
        detail: a name that goes with it; of ``end`` the exit code, as far as it is known and not 0.
    """
    global _pid
    launch = os.environ.get(LAUNCH, "")
    if not launch:
        return
    if _pid != os.getpid():  # a fork is another process
        _pid = os.getpid()
        _told.clear()
    if (event, detail) in _told:
        return
    _told.add((event, detail))
    try:
        _send(launch, event, detail)
    except Exception:  # nobody listens: another machine, another container, or the command has been killed
        return


def _send(launch: str, event: str, detail: str) -> None:
    import _socket

    name = launch.partition(":")[2]
    line = "\0".join((event, str(os.getpid()), detail[:_LONGEST], os.path.basename(_program())[:_LONGEST]))
    sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        sender.settimeout(0.2)
        if event == "end":
            sender.bind(b"")  # a name of its own, for the answer
        sender.connect(b"\0" + name.encode())
        sender.send(line.encode("utf-8", "replace"))
        if event == "end":
            sender.settimeout(2.0)
            sender.recv(1)
    finally:
        sender.close()


def report_start() -> None:
    """This interpreter has begun; that it was interrupted is reported at its end, and of the launch line itself every end."""
    report_event("began")
    if os.environ.get(LAUNCH, ""):
        import atexit

        atexit.register(_report_end, os.getpid(), _code_of_missing_script())


def _report_end(pid: int, code: str) -> None:
    if os.getpid() != pid:  # a fork
        return
    if _was_interrupted():
        report_event("interrupted")
    if os.environ.get(LAUNCH, "").partition(":")[0] == str(pid):
        report_event("end", code or _code_of_exception())


def _was_interrupted() -> bool:
    """Ctrl-C, or a signal that torchrun has turned into an exception (``SignalException``)."""
    value = getattr(sys, "last_value", None)
    return isinstance(value, KeyboardInterrupt) or hasattr(value, "sigval")


def _code_of_missing_script() -> str:
    """``2``, which Python ends with, if the script is not there; empty else."""
    script = _program()
    return "2" if script.endswith(".py") and not os.path.exists(script) else ""


def _code_of_exception() -> str:
    """``1`` if an exception ends the program, other than Ctrl-C; empty else. The code of `sys.exit` is not known here."""
    return "1" if isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1") else ""


def _program() -> str:
    """The script or module, as far as it is known when the interpreter begins."""
    words: list[str] = getattr(sys, "orig_argv", None) or sys.argv
    for before, word in zip(["", *words], words):
        if before == "-m" or (before and not word.startswith("-") and before not in ("-c", "-W", "-X") and word != words[0]):
            return word
        if word == "-c":
            return "python -c"
    return words[0] if words else "python"
