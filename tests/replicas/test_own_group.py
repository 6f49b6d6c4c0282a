"""Groups of the probe's own, and ranks that do not come."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_integrations.torch.ranks.own_group import check_gloo

pytestmark = pytest.mark.framework


def crowded() -> tuple[str, float]:
    """The process may open hardly any more files than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, before[1]))
    said = ""
    try:
        check_gloo(2)
    except RuntimeError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, float(total)


def test_a_group_leaves_files_to_the_training() -> None:
    """A group opens a connection to each of its ranks. Where the limit of open files does not allow that, and some for the training, there
    is no group, and it says what to do."""
    for said, total in run_ranks(2, crowded):
        assert "ulimit -n" in said
        assert total == 2.0


ENDING = """
import os, sys, time
import torch, torch.distributed as dist
from msprobe_integrations.torch.ranks import step_exchange # which takes groups apart when the process ends
from msprobe_integrations.torch.ranks.group_members import Rendezvous
from msprobe_integrations.torch.ranks.own_group import OwnGroup

ended, answered = os.pipe(), os.pipe()
child = os.fork()
rank = 1 if child else 0
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
store = dist.distributed_c10d._get_default_store()
group, total = OwnGroup(Rendezvous(store, "test", lambda: False), rank, 2, 60), torch.ones(2)


class Last:
    def __del__(self, write=os.write, read=os.read, sleep=time.sleep, ended=ended[1], answered=answered[0]):  # names are gone by then
        write(ended, b"1")
        read(answered, 1)
        sleep(0.2)  # other threads may have the interpreter's lock


for end in (ended[rank], answered[1 - rank]):
    os.close(end)
if rank == 1:
    os.read(ended[0], 1)
work = group.all_reduce(total, dist.ReduceOp.SUM)
if rank == 1:
    work.wait()
    os.write(answered[1], b"1")
    group.close()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
last = Last()
group.close([work, total])
"""


def test_an_exchange_that_ends_while_the_interpreter_does(tmp_path: Path) -> None:
    """A rank has closed a group with an exchange under way, and the others answer only while its interpreter ends: it ends with 0."""
    done = subprocess.run([sys.executable, "-c", ENDING, tmp_path / "init"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
