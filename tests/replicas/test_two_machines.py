"""Ranks that reach each other over a network only: two network namespaces, which have the loopback interface for themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.framework, pytest.mark.slow]
RANK = """
import json, os, sys, time
from datetime import timedelta
import torch.distributed as dist
from msprobe_engine.core.statistics import rows as R
from msprobe_integrations.torch.ranks.merge import RowExchange

rank = int(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = f"probe{rank}"  # for the training's own group
store = dist.TCPStore("10.77.0.1", 29777, 2, rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
del os.environ["GLOO_SOCKET_IFNAME"]
exchange, found = RowExchange(), []
for step in range(3):
    rows = R.empty(1)
    R.as_int64(rows)[0, R.COUNT] = 1 + rank
    edit = exchange.merge(step, ["a"], [0])
    edit.start(rows)
    edit.wait(30)
    found.append(None if edit.merged is None else int(R.as_int64(edit.merged)[0, R.COUNT]))
print(json.dumps({"found": found, "address": exchange._loop._address.split(" ")[3:]}), flush=True)
dist.barrier()
exchange.close()
dist.barrier()
"""
NETWORK = """
set -e
ip link set lo up
unshare --net sleep 100 & other=$!
trap "kill $other" EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add probe0 type veth peer name probe1
ip link set probe1 netns $other
ip addr add 10.77.0.1/24 dev probe0
ip link set probe0 up
nsenter -t $other --net ip addr add 10.77.0.2/24 dev probe1
nsenter -t $other --net ip link set probe1 up
nsenter -t $other --net ip link set lo up
{python} {program} 0 & first=$!
nsenter -t $other --net {python} {program} 1
wait $first
"""


def test_ranks_of_two_machines(tmp_path: Path) -> None:
    """They find each other by the address that each has towards the job's store, and merge their rows."""
    tools = [shutil.which(name) for name in ("ip", "unshare", "nsenter")]
    if not all(tools) or subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    (tmp_path / "rank.py").write_text(RANK)
    script = NETWORK.replace("{python}", sys.executable).replace("{program}", str(tmp_path / "rank.py"))
    done = subprocess.run(["unshare", "--net", "bash", "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["found"] for each in said] == [[3, 3, 3]] * 2
    assert sorted(each["address"][:1] for each in said) == [[], ["10.77.0.1"]]  # who has no rank below listens to nobody
