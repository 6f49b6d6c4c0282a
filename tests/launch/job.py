"""A training script that knows nothing of the probe. Arguments: how it ends (``done``, ``exit``, ``raise``, ``interrupt``, ``wait``,
``thread``), and in which step."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END, AT = sys.argv[1], int(sys.argv[2])


def end() -> None:
    if END == "exit":
        sys.exit(5)
    if END == "raise":
        raise RuntimeError("theirs")
    if END == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if END == "thread":
        threading.Thread(target=lambda: 1 / 0).start()
    if END == "wait":
        print("waiting", flush=True)
        time.sleep(60)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
    workers = int(os.environ.get("JOB_WORKERS", "0"))
    for step, (x, y) in enumerate(DataLoader(data, batch_size=2, num_workers=workers)):
        loss = nn.functional.mse_loss(model(x), y)
        if step == AT:
            end()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
