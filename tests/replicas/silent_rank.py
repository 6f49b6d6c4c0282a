"""Rank 0 merges rows with a rank 1 that goes away without a word in step 2; run as a program: ``silent_rank.py SIGNAL INIT``.

Prints, as JSON, the slowest submission and the close of the rank that stays, in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch.distributed as dist

from msprobe_engine.core.statistics import rows as R
from msprobe_integrations.torch.ranks.merge import MergeFailed, RowExchange

number, init = signal.Signals[sys.argv[1]], sys.argv[2]
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
exchange = RowExchange()
slowest = 0.0
edits = []
for step in range(12):
    rows = R.empty(1)
    began = time.monotonic()
    edit = exchange.merge(step, ["a"], [0], [{}])
    edit.start(rows)
    edit.ready()
    slowest = max(slowest, time.monotonic() - began)
    edits.append((edit, rows))
    if step == 1:
        edit.wait(30)
        assert edit.merged is not None
        if rank == 1:
            os.kill(os.getpid(), number)
            os._exit(0)
    time.sleep(0.05)
began = time.monotonic()
end = began + 4.0
for edit, rows in edits:
    edit.wait(max(0.0, end - time.monotonic()))
    try:
        edit.apply(rows)
    except MergeFailed as error:
        print(error, file=sys.stderr)
exchange.close()
print(json.dumps({"child": child, "slowest": slowest, "close": time.monotonic() - began}), flush=True)
