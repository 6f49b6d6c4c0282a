"""Which way a rank learns of incidents: ranks of a large job do not ask the store each."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # registers the backend
from msprobe_integrations.torch.ranks.notify import find_notifier
dist.init_process_group("fake", store=dist.HashStore(), rank={rank}, world_size={world})
notifier = find_notifier(Path("."))
print(type(notifier).__name__, notifier.lead_steps, getattr(notifier, "_first", None))
notifier.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rank", "local", "said"),
    [
        (64, 3, "3", "StoreNotifier 2 None"),
        (65, 8, "0", "NodeNotifier 3 True"),
        (10_240, 10_239, "7", "NodeNotifier 3 False"),
        (10_240, 5, None, "NodeNotifier 3 True"),
    ],
)
def test_the_way_follows_the_size_of_the_job(world: int, rank: int, local: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of each node asks in a job of more than 64; where no launcher says which one that is, every rank."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(rank=rank, world=world)], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == said, done.stderr
