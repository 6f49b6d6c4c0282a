"""job.py in forked children of one interpreter, each in a directory of the name of its end; the children are this program's main module to
its end, the parent prints their exit codes. Arguments: the step, then the ends."""

import json
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 - every optimizer imports it: once here instead of in every child

from msprobe_engine.core.process.processes import OWNER

AT, ENDS = sys.argv[1], sys.argv[2:]
JOB = str(Path(__file__).with_name("job.py"))

codes = {}
for end in ENDS:
    Path(end).mkdir()
    pid = os.fork()
    if not pid:
        os.chdir(end)
        os.environ.pop(OWNER, None)  # each stands for a program of its own, and is no child of a training
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [JOB, end, AT]
        break
    codes[end] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    print(json.dumps(codes))
    sys.exit()
runpy.run_path(JOB, run_name="__main__")
