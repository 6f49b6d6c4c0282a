"""Two ranks that call every function of `torch.distributed` under this project and under the existing tool 26.2.0.

    python tests/distributed/existing_distributed.py RANK INIT_FILE OUT_DIR

The script uses public names only and runs unchanged under both.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def train(rank: int, init: str, out: str) -> None:
    """One step of calls."""
    import torch
    import torch.distributed as dist

    from msprobe.pytorch import PrecisionDebugger

    warnings.filterwarnings("ignore")
    config = Path(out) / f"config{rank}.json"
    config.write_text(
        json.dumps({"task": "statistics", "dump_path": f"{out}/dump", "rank": [], "step": [], "level": "L1", "statistics": {}})
    )
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
    debugger = PrecisionDebugger(config_path=str(config))
    pair, solo = dist.new_group([0, 1]), dist.new_group([1])
    debugger.start()
    r, peer = float(rank), 1 - rank

    def full(value: float, n: int = 2) -> torch.Tensor:
        return torch.full((n,), float(value))

    def zeros(n: int = 2) -> torch.Tensor:
        return torch.zeros(n)

    def two() -> list[torch.Tensor]:
        return [zeros(), zeros()]

    dist.all_reduce(full(r + 1))
    dist.all_reduce(full(r), dist.ReduceOp.MAX, pair, False)
    dist.all_reduce(tensor=full(r, 3), op=dist.ReduceOp.SUM, group=pair)
    dist.all_reduce(full(r, 3), async_op=True).wait()
    dist.all_reduce(full(r), group=solo)
    dist.all_reduce(torch.full((2,), r + 1 + 1j))
    dist.broadcast(full(r + 5), 1)
    dist.broadcast(full(r + 5), src=0, group=pair)
    dist.broadcast(full(r + 5), group_src=0, group=pair)
    dist.reduce(full(r + 5), 1)
    dist.all_gather(two(), full(r + 1))
    dist.all_gather_into_tensor(zeros(4), full(r + 1))
    dist._all_gather_base(zeros(4), full(r + 1))
    dist.reduce_scatter(zeros(), [full(r), full(r)])
    dist.reduce_scatter_tensor(zeros(), torch.arange(4.0))
    dist._reduce_scatter_base(zeros(), torch.arange(4.0))
    dist.all_to_all_single(zeros(), full(r))
    dist.all_to_all(two(), [full(r), full(r + 7)])
    dist.gather(full(r), two() if rank == 0 else None, 0)
    dist.scatter(zeros(), [full(1), full(2)] if rank == 0 else None, 0)
    if rank == 0:
        dist.send(full(1), 1)
        dist.recv(zeros(), 1)
    else:
        dist.recv(zeros(), 0)
        dist.send(full(2), dst=0)
    for request in (dist.isend(full(r + 3), peer), dist.irecv(zeros(), src=peer)):
        request.wait()
    ring = [dist.P2POp(dist.isend, full(r + 8), peer), dist.P2POp(dist.irecv, zeros(), peer)]
    for request in dist.batch_isend_irecv(ring):
        request.wait()
    dist.all_gather_object([None, None], {"rank": rank})
    dist.all_gather(two(), full(r + 9))
    dist.barrier()
    dist.all_gather_into_tensor(output_tensor=zeros(4), input_tensor=full(r + 1))
    never = dist.all_reduce(full(r + 2), async_op=True)
    dist.barrier()
    debugger.stop()
    debugger.step()
    assert never is not None
    never.wait()
    dist.destroy_process_group()


def run(python: Path | str, out: Path) -> Path:
    """Run both ranks with `python`; returns the dump directory."""
    out.mkdir(parents=True)
    from existing_environment import environment_of  # not at the top: the existing tool's Python runs this file too

    env = environment_of(python)
    logs = [open(out / f"log{rank}", "w+", encoding="utf-8") for rank in range(2)]  # noqa: SIM115 - closed below
    command = [str(python), str(HERE)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(out / "init"), str(out)], stdout=log, stderr=log, cwd=out, env=env)
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(timeout=180) for process in ranks]
    for log in logs:
        log.seek(0)
    texts = [log.read() for log in logs]
    for log in logs:
        log.close()
    assert codes == [0, 0], texts
    return out / "dump"


def same(a: Any, b: Any) -> bool:
    """Do two structures of dump.json say the same, as far as both tools write it? One takes sums in float32, the other in float64."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() & b.keys() if "dtype" in a else a.keys() | b.keys()
        if "complex" in a.get("dtype", ""):
            keys -= {"Norm"}  # the other one has none
        return all(key in a and key in b and same(a[key], b[key]) for key in keys)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5)
    return bool(a == b)


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2], sys.argv[3])
