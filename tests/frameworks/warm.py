"""Programs in processes of their own that find torch imported: a server that has imported it forks one for each, in 0.1 s, not 2 s.
In an environment that has no torch it is MindSpore.

A program is what ``python -c`` would run: it is ``__main__``, has its own arguments, environment and directory, exceptions go through
``sys.excepthook``, and at its end its threads are waited for, exit handlers run and what it holds is collected. What the server has
imported is not taken down (`ending`). Not for tests of what happens before or while torch or the probe is imported,
the environment comes too late for that, nor of the very last moments of an interpreter.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ending

RUNS = 99
"""Answer of the server for a process that has not ended; no exit code of a test's."""


class _Server:
    """The process that forks. It answers each line of JSON with a number."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._owner = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        """In the process that started it: a forked child that runs what is registered here would wait for a server that goes on."""
        if os.getpid() == self._owner:
            self._process.communicate()

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server of warm programs ended with {self._process.wait()}; what it said is above"
        return int(answer)


_server = functools.cache(_Server)
"""One for all tests; it ends with this process, which holds its stdin."""


class Program:
    """A program that was started.

    Attributes:
        pid: of its process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code = RUNS

    def wait(self, timeout: float = 240) -> int:
        """The exit code, negative: the signal.

        Raises:
            TimeoutError: it did not end in `timeout` seconds.
        """
        if self._code == RUNS:
            self._code = _server().ask(wait=self.pid, timeout=timeout)
        if self._code == RUNS:
            raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
        return self._code

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._code == RUNS:
            os.kill(self.pid, signal.SIGKILL)  # its parent waits for nobody until it is asked: the number is still its own
            self.wait()


def _start(code: str, arguments: tuple[object, ...], cwd: Path | None, env: Mapping[str, str] | None, out: Path, err: Path) -> Program:
    argv = ["-c", *map(str, arguments)]
    environment = dict(os.environ if env is None else env)
    return Program(_server().ask(code=code, argv=argv, cwd=str(cwd or Path.cwd()), env=environment, out=str(out), err=str(err)))


@contextmanager
def started(code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A program that runs beside the test; it is killed at the end if it has not ended. What it says goes nowhere."""
    program = _start(code, arguments, cwd, env, Path(os.devnull), Path(os.devnull))
    try:
        yield program
    finally:
        program.kill()


def run(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Raises:
        TimeoutError: it did not end in `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        program = _start(code, arguments, cwd, env, out, err)
        try:
            returned = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess([sys.executable, "-c", code], returned, out.read_text(), err.read_text())


def script(program: Path) -> str:
    """Code that runs this file as ``python program`` does, for `run` and the others."""
    return f"import runpy, sys\nsys.path[0] = {str(program.parent)!r}\nrunpy.run_path({str(program)!r}, run_name='__main__')\n"


def together(
    environments: Sequence[Mapping[str, str]], code: str, *arguments: object, cwd: Path | None = None, timeout: float = 240
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program once in each environment, beside each other, and wait for all.

    Raises:
        TimeoutError: one did not end in `timeout` seconds; all were killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        files = [(Path(directory, f"out{k}"), Path(directory, f"err{k}")) for k in range(len(environments))]
        programs: list[Program] = []
        try:
            for environment, (out, err) in zip(environments, files):
                programs.append(_start(code, arguments, cwd, environment, out, err))
            ended = [program.wait(timeout) for program in programs]
        finally:
            for program in programs:
                program.kill()
        command = [sys.executable, "-c", code]
        return [subprocess.CompletedProcess(command, end, *(f.read_text() for f in said)) for end, said in zip(ended, files)]


def ranks(
    number: int, code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as every rank of a job, with the environment that torchrun gives to it, and wait for all, as `together` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    job = dict(os.environ if env is None else env) | {key: str(value) for key, value in job.items()}
    each = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return together(each, code, *arguments, cwd=cwd, timeout=timeout)


def _wait(pid: int, timeout: float) -> int:
    end = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return RUNS
        time.sleep(0.005)


def _become(request: dict[str, Any]) -> None:
    """What a new process has: its place, environment, arguments and streams."""
    for stream, name, flags in ((0, os.devnull, os.O_RDONLY), (1, request["out"], os.O_WRONLY), (2, request["err"], os.O_WRONLY)):
        opened = os.open(name, flags | os.O_CREAT | os.O_TRUNC if flags else flags)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path[0] = ""


def _serve() -> dict[str, Any] | None:
    """Answer requests; in a forked process returns the one it is for, at the end of the requests None."""
    installed = importlib.util.find_spec("torch")  # a folder of that name on the path is none: it has no origin
    if installed is None or installed.origin is None:
        import mindspore  # noqa: F401 - has no threads before its first operator
    else:
        import torch._dynamo  # noqa: F401 - every optimizer imports it

        import msprobe.pytorch  # noqa: F401

    ending.freeze()
    while line := sys.stdin.readline():
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                _become(request)
                return request
        print(answer, flush=True)
    return None


def _program(code: str) -> None:
    """Run this as ``__main__``."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    exec(compile(code, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    _request = _serve()
    ending.run(lambda: _request and _program(_request["code"]))
