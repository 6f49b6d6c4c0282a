"""Every way to make a NaN or an Inf of numbers that are in order, each once; dumped by whoever runs this."""

import sys

import torch
import torch.nn.functional as F

from msprobe.pytorch import PrecisionDebugger

debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=sys.argv[1], step=[0])
x = torch.tensor([-2.0, 0.0, 3.0])
positive = torch.tensor([0.0, 2.0])
scores = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]])
half = torch.full((8, 8), 300.0, dtype=torch.float16)
leaf = torch.tensor([0.0, 1.0], requires_grad=True)
debugger.start()
torch.log(x)
torch.log(positive)
torch.sqrt(x)
torch.rsqrt(positive)
torch.zeros(2) / torch.zeros(2)
torch.div(torch.ones(2), positive)
torch.exp(torch.tensor([100.0]))
torch.pow(x, 0.5)
torch.pow(positive, -1.0)
F.cross_entropy(torch.ones(2, 3), torch.full((2,), -100))
F.cross_entropy(torch.ones(2, 3), torch.full((2,), 1), ignore_index=1)
F.cross_entropy(torch.ones(2, 3), torch.full((2,), -100), reduction="sum") / torch.zeros(())
torch.softmax(scores, -1)
torch.mean(torch.zeros(0))
torch.std(torch.ones(1))
torch.layer_norm(torch.ones(2, 4), (4,), eps=0.0)
torch.layer_norm(torch.tensor([[1e30, 2e30]]), (2,))
torch.matmul(half, half)
torch.full((2,), 1e6).to(torch.float16)
torch.sub(torch.tensor([torch.inf]), torch.tensor([torch.inf]))
torch.sqrt(leaf).sum().backward()
torch.acos(x)
torch.acos(leaf).sum().backward()
torch.std(torch.ones(1, 8), 0)
torch.sub(torch.ones(2), torch.inf)
torch.mul(half, 400.0)
F.cross_entropy(torch.tensor([[1.0, -torch.inf]]), torch.tensor([1]))
F.mse_loss(torch.tensor([1e30]), torch.zeros(1))
debugger.stop()
debugger.step()
