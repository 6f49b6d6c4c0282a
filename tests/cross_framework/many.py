"""Runs ``main`` of a training program several times, each in a process of its own that begins with the framework imported already:
``many.py PROGRAM JOBS.json``, with a list of lists of arguments."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def run(program: str, jobs: list[list[str]]) -> int:
    """Number of runs that failed; each one's output is in ``OUT.log``."""
    module = importlib.import_module(program)
    failed = 0
    for job in jobs:
        child = os.fork()
        if not child:
            code = 1
            try:
                with open(f"{job[0]}.log", "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    module.main(*job[:4], int(job[4]), *job[5:])
                    code = 0
            except BaseException:
                traceback.print_exc()
            atexit._run_exitfuncs()  # the dumps are finished there; a forked child ends without
            sys.stdout.flush()
            os._exit(code)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
