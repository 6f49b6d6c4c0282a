"""One small model in every parallel layout that torch has, trained on the same data: 8 samples per step, divided over the ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch._dynamo  # every optimizer imports it: once here instead of in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

try:  # public since torch 2.6
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard
try:  # public since torch 2.5
    from torch.distributed.tensor import DTensor
except ImportError:
    from torch.distributed._tensor import DTensor
try:  # since torch 2.4
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
except ImportError:
    PipelineStage = ScheduleGPipe = None
SCALED = ScheduleGPipe is not None and "scale_grads" in inspect.signature(ScheduleGPipe.__init__).parameters
"""Does a pipeline divide gradients by the number of micro batches?"""
WIDTH, BATCH, STEPS = 6, 8, 3
NAN_STEP = 1


class Block(nn.Module):
    """Two linear layers with tanh between, the pair that tensor parallelism divides, and a norm that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.norm = nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.act(self.up(x))))


class Net(nn.Module):
    """Blocks and a head; a pipeline stage has only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second, self.head):
            x = x if part is None else part(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    """All samples of a step."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 + step))


def loss_of(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    return output.square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An Adam whose eps keeps tiny gradients from deciding the direction, so that float32 stays near float64."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.97), eps=1e-2, foreach=False)


class Training:
    """A model in a layout, its optimizer, and one step of training."""

    def __init__(self, model: nn.Module, data_rank: int = 0, data_ranks: int = 1) -> None:
        self.model = model
        self.optimizer = optimizer_of(model)
        self._data = slice(data_rank * BATCH // data_ranks, (data_rank + 1) * BATCH // data_ranks)

    def step(self, number: int, *, nan: bool = False) -> None:
        """One update; `nan`: the input of the first rank has one."""
        x = batch(number)[self._data]
        if nan and self._data.start == 0:
            x[0, 0] = float("nan")
        self.backward(x)
        self.update()
        self.optimizer.zero_grad()

    def backward(self, x: torch.Tensor) -> None:
        loss_of(self.model(x)).backward()

    def update(self) -> None:
        self.optimizer.step()


class Accumulating(Training):
    """Two passes per update; DDP reduces in the second."""

    def backward(self, x: torch.Tensor) -> None:
        for number, part in enumerate(x.chunk(2)):
            waits = number == 0 and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if waits else contextlib.nullcontext():
                (loss_of(self.model(part)) / 2).backward()


class Scaled(Training):
    """A gradient scaler."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def backward(self, x: torch.Tensor) -> None:
        self.scaler.scale(loss_of(self.model(x))).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Pipelined(Training):
    """Two stages, two micro batches (GPipe)."""

    def __init__(self) -> None:
        self.stage = dist.get_rank()
        model = net()
        model.first, model.second, model.head = (model.first, None, None) if self.stage == 0 else (None, model.second, model.head)
        super().__init__(model)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss_of(output, target) / (1 if SCALED else 2)

        example = torch.zeros(BATCH // 2, WIDTH)
        more = {} if SCALED else {"input_args": (example,)}
        self.schedule = ScheduleGPipe(PipelineStage(model, self.stage, 2, torch.device("cpu"), **more), 2, loss_fn=loss)

    def backward(self, x: torch.Tensor) -> None:
        if self.stage == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=torch.zeros(BATCH, 3))


def _tensor_parallel(mesh: DeviceMesh) -> Net:
    model = net()
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sharded(model: Net, mesh: DeviceMesh) -> Net:
    for part in (model.first, model.second, model.head):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp1() -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    return Training(model, dist.get_rank(), 2)


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _both() -> Training:
    mesh = _mesh(2, 2)
    return Training(_sharded(_tensor_parallel(mesh["inner"]), mesh["outer"]), dist.get_rank() // 2, 2)


class Layout(NamedTuple):
    """One row of the table."""

    name: str
    ranks: int
    build: Callable[[], Training]
    copies: tuple[str, ...] = ()
    """A parameter that several ranks hold alike, if there is one: its name."""
    gradient: float = 1.0
    """Gradients inside of the pass over those of the whole batch's loss."""
    phase: str = "reduced"
    hidden: bool = False
    """Modules inside are not seen (compiled)."""
    missing: str = ""
    """Why this torch does not have it."""


_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_NO_FSDP2 = "" if _VERSION >= (2, 7) else "FSDP2 of torch below 2.7 wants the streams of an accelerator, also on a CPU"
_NO_PIPELINING = "" if PipelineStage is not None else "no torch.distributed.pipelining below torch 2.4"
LAYOUTS = (
    Layout("1 rank", 1, lambda: Training(net())),
    Layout("gradient accumulation, 1 rank", 1, lambda: Accumulating(net())),
    Layout("GradScaler, 1 rank", 1, lambda: Scaled(net()), gradient=16.0, phase="unscaled"),
    Layout(
        "torch.compile (compiled modules at their border), 1 rank", 1, lambda: Training(torch.compile(net(), backend="eager")), hidden=True
    ),
    Layout("DDP, 2 ranks", 2, lambda: Training(DistributedDataParallel(net()), dist.get_rank(), 2), ("first.up.weight",), 2.0),
    Layout(
        "DDP with gradient accumulation, 2 ranks",
        2,
        lambda: Accumulating(DistributedDataParallel(net()), dist.get_rank(), 2),
        ("first.up.weight",),
        2.0,
    ),
    Layout("FSDP2, 2 ranks", 2, lambda: Training(_sharded(net(), _mesh(2)), dist.get_rank(), 2), gradient=2.0, missing=_NO_FSDP2),
    Layout("FSDP1, 2 ranks", 2, _fsdp1, gradient=2.0),
    Layout(
        "HSDP 2 x 2, 4 ranks",
        4,
        lambda: Training(_sharded(net(), _mesh(2, 2)), dist.get_rank(), 4),
        ("first.up.weight",),
        4.0,
        missing=_NO_FSDP2,
    ),
    Layout("TP 2, 2 ranks", 2, lambda: Training(_tensor_parallel(_mesh(2))), ("first.down.bias",)),
    Layout("FSDP2 x TP 2, 4 ranks", 4, _both, ("first.down.bias",), 2.0, missing=_NO_FSDP2),
    Layout("PP 2, 2 ranks", 2, Pipelined, gradient=2.0 if SCALED else 1.0, missing=_NO_PIPELINING),
)


def plain(name: str) -> str:
    """A parameter's or module's name without wrappers."""
    for word in ("_fsdp_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(word, "")
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(training: Training) -> Iterator[bytes]:
    """Everything that must not depend on the probe."""
    for p in training.model.parameters():
        yield local(p.detach()).numpy().tobytes()
        for state in training.optimizer.state[p].values():
            yield local(state).numpy().tobytes()
    yield torch.get_rng_state().numpy().tobytes()
