"""Ways to call a collective: each with what has to be recorded of it, told by the arguments alone.

A way is a function that communicates on two ranks and gives the `Call` list it has made, in order: inputs as means before, outputs as
means after. Every tensor of a call holds one number, so a mean says which it was.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed_job import full
from torch.distributed import all_reduce as imported_early
from torch.distributed.nn import functional as differentiable

LATER = {"async": True}
ROOT = 1


class Call(NamedTuple):
    """What a record has to say.

    Attributes:
        name: of the operation.
        before, after: means of the tensors that were read, and of those written (None: none).
        tags: beside the group.
    """

    name: str
    before: list[float]
    after: list[float] | None
    tags: dict[str, Any]


def sums(name: str, **tags: Any) -> list[Call]:
    """Ranks give 1 and 2, all get 3."""
    return [Call(name, [dist.get_rank() + 1.0], [3.0], {"reduce": "sum", **tags})]


def mine() -> torch.Tensor:
    """1 on rank 0, 2 on rank 1."""
    return full(dist.get_rank() + 1)


def zeros(n: int = 2) -> torch.Tensor:
    """A buffer that is only written to."""
    return torch.zeros(n)


WAYS: dict[str, Callable[[], list[Call]]] = {}
Way = Callable[[], list[Call]]


def way(function: Way) -> Way:
    """Registers a way under its name."""
    WAYS[function.__name__] = function
    return function


def _methods(target: Any, wrapped: bool) -> list[Call]:
    """All methods of a process group, or of a backend."""
    rank = dist.get_rank()
    me, both, pair = rank + 1.0, [1.0, 2.0], [float(rank), rank + 1.0]
    calls: list[Call] = []

    def run(name: str, work: Any, before: list[float], after: list[float] | None, **tags: Any) -> None:
        work.wait()
        calls.append(Call(f"c10d_{name}", before, after, tags if name in ("send", "recv") else {**LATER, **tags}))

    add, keep = {"reduce": "sum"}, dist.ReduceOp.MAX
    run("all_reduce", target.allreduce([mine()]), [me], [3.0], **add)
    run("all_reduce", target.allreduce(mine(), keep), [me], [2.0], reduce="max")
    run("all_reduce_coalesced", target.allreduce_coalesced([mine(), full(rank + 2)]), [me, me + 1], [3.0, 5.0], **add)
    run("broadcast", target.broadcast(mine(), ROOT), [me], [2.0], root=ROOT)
    options = dist.ReduceOptions()
    options.rootRank = ROOT
    run("reduce", target.reduce([mine()], options), [me], [3.0] if rank == ROOT else None, root=ROOT, **add)
    run("all_gather", target.allgather([zeros(), zeros()], mine()), [me], both)
    run("all_gather_into_tensor", target._allgather_base(zeros(4), mine()), [me], [1.5])
    run("reduce_scatter", target.reduce_scatter([zeros()], [[full(rank), full(rank + 1)]]), pair, [1.0 if rank == 0 else 3.0], **add)
    run("reduce_scatter_tensor", target._reduce_scatter_base(zeros(), full(me, 4)), [me], [3.0], **add)
    run("all_to_all_single", target.alltoall_base(zeros(), mine(), [], []), [me], [1.5])
    run("all_to_all", target.alltoall([zeros(), zeros()], [mine(), mine()]), [me, me], both)
    if wrapped:
        run("all_gather_into_tensor_coalesced", target.allgather_into_tensor_coalesced([zeros(4)], [mine()]), [me], [1.5])
        run("reduce_scatter_tensor_coalesced", target.reduce_scatter_tensor_coalesced([zeros()], [full(me, 4)]), [me], [3.0], **add)
    if rank == 0:
        run("send", target.send([mine()], 1, 0), [me], None, peer=1)
    else:
        run("recv", target.recv([zeros()], 0, 0), [], [1.0], peer=0)
    return calls


@way
def functions() -> list[Call]:
    """The public function, under the name it has in the module and one imported before."""
    dist.all_reduce(mine())
    imported_early(mine())
    return sums("all_reduce") * 2


@way
def process_group() -> list[Call]:
    """Methods of the process group."""
    return _methods(dist.group.WORLD, wrapped=True)


@way
def backend() -> list[Call]:
    """Methods of the backend below the process group."""
    group: Any = dist.group.WORLD
    return _methods(group._get_backend(torch.device("cpu")), wrapped=False)


class Forwarding(dist.ProcessGroup):
    """A process group in Python that hands on to another, as fault-tolerant frameworks have."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def allreduce(self, *args: Any) -> Any:
        """To the other group."""
        return self.inner.allreduce(*args)

    def getBackendName(self) -> str:  # torch asks for it by this name
        """The kind of group."""
        return "forwarding"


@way
def group_in_python() -> list[Call]:
    """A subclass of `ProcessGroup` that calls another one."""
    Forwarding(dist.group.WORLD).allreduce([mine()]).wait()
    return sums("c10d_all_reduce", **LATER)


@way
def functional_collectives() -> list[Call]:
    """Functional ones; whoever uses the result waits."""
    world, rank = dist.group.WORLD, dist.get_rank()
    me = rank + 1.0
    used = [
        functional.all_reduce(mine(), "sum", world),
        functional.all_gather_tensor(mine(), 0, world),
        functional.reduce_scatter_tensor(full(me, 4), "sum", 0, world),
        functional.all_to_all_single(mine(), None, None, world),
        functional.broadcast(mine(), ROOT, world),
        *functional.all_reduce_coalesced([mine(), full(rank + 2)], "sum", world),
        *functional.all_gather_into_tensor_coalesced([mine(), full(rank + 2)], world),
    ]
    assert [float(t.mean()) for t in used] == [3.0, 1.5, 3.0, 1.5, 2.0, 3.0, 5.0, 1.5, 2.5]
    add = {"reduce": "sum", **LATER}
    return [
        Call("functional_all_reduce", [me], [3.0], add),
        Call("functional_all_gather_into_tensor", [me], [1.5], LATER),
        Call("functional_reduce_scatter_tensor", [me], [3.0], add),
        Call("functional_all_to_all_single", [me], [1.5], LATER),
        Call("functional_broadcast", [me], [2.0], {"root": ROOT, **LATER}),
        Call("functional_all_reduce_coalesced", [me, me + 1], [3.0, 5.0], add),
        Call("functional_all_gather_into_tensor_coalesced", [me, me + 1], [1.5, 2.5], LATER),
    ]


@way
def functional_in_place() -> list[Call]:
    """The functional operator that writes into its input."""
    name = getattr(dist.group.WORLD, "group_name")  # noqa: B009  # an argument of this operator
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce_(mine(), "sum", name))
    return sums("functional_all_reduce", **LATER)


@way
def functional_messages() -> list[Call]:
    """A batch of functional messages; what is received is no input."""
    batch = getattr(functional, "batch_p2p_ops_inplace", None)
    if batch is None:  # new in torch 2.13
        return []
    rank, world = dist.get_rank(), dist.group.WORLD
    sent = batch(["isend", "irecv"], [1 - rank] * 2, [0, 0], [mine(), zeros()], world)
    assert float(sent[1].mean()) == 2.0 - rank
    return [Call("functional_batch_p2p_ops", [rank + 1.0], [2.0 - rank], LATER)]


@way
def functional_gradients() -> list[Call]:
    """Functional ones with gradients: the backward pass communicates too."""
    world, me = dist.group.WORLD, dist.get_rank() + 1.0
    (functional.all_gather_tensor_autograd(mine().requires_grad_(), 0, world) * 2).sum().backward()
    (functional.reduce_scatter_tensor_autograd(full(me, 4).requires_grad_(), "sum", 0, world) * 2).sum().backward()
    (functional.all_to_all_single_autograd(mine().requires_grad_(), None, None, world) * 2).sum().backward()
    gather, scatter, exchange = (f"functional_{n}" for n in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"))
    add = {"reduce": "sum", **LATER}
    return [
        Call(gather, [me], [1.5], LATER),
        Call(scatter, [2.0], [4.0], add),
        Call(scatter, [me], [3.0], add),
        Call(gather, [2.0], [2.0], LATER),
        Call(exchange, [me], [1.5], LATER),
        Call(exchange, [2.0], [2.0], LATER),
    ]


@way
def differentiable_functions() -> list[Call]:
    """`torch.distributed.nn.functional`: forward and backward call the public function."""
    x = mine().requires_grad_()
    (differentiable.all_reduce(x) * 2).sum().backward()
    return [*sums("all_reduce"), Call("all_reduce", [2.0], [4.0], {"reduce": "sum"})]


@way
def coalesced() -> list[Call]:
    """A block that torch makes one operation of; waited for at its end, and by the caller."""
    me, add = dist.get_rank() + 1.0, {"reduce": "sum"}
    for later in (False, True):
        with dist._coalescing_manager(group=dist.group.WORLD, async_ops=later) as manager:
            dist.all_reduce(mine())
            dist.all_reduce(full(me + 1))
        if later:
            manager.wait()
    with dist._coalescing_manager(group=dist.group.WORLD):
        dist.all_gather_into_tensor(zeros(4), mine())
        dist.all_gather_into_tensor(zeros(4), full(me + 1))
    return [
        Call("c10d_all_reduce_coalesced", [me, me + 1], [3.0, 5.0], {**add, "async": False}),
        Call("c10d_all_reduce_coalesced", [me, me + 1], [3.0, 5.0], {**add, "async": True}),
        Call("c10d_all_gather_into_tensor_coalesced", [me, me + 1], [1.5, 2.5], {"async": False}),
    ]


@way
def threads() -> list[Call]:
    """Called in another thread, and waited for in another thread."""
    work: Any = dist.all_reduce(mine(), async_op=True)
    for target in (work.wait, lambda: dist.all_reduce(mine())):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    return [*sums("all_reduce", **LATER), *sums("all_reduce")]


@way
def without_gradients() -> list[Call]:
    """Under `inference_mode` and `no_grad`, where autograd's part of the dispatcher is not passed."""
    with torch.inference_mode():
        dist.all_reduce(mine())
        assert float(functional.all_reduce(mine(), "sum", dist.group.WORLD).mean()) == 3.0
    with torch.no_grad():
        dist.all_reduce(mine())
    return [*sums("all_reduce"), *sums("functional_all_reduce", **LATER), *sums("all_reduce")]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@way
def in_backward() -> list[Call]:
    """Called by the backward pass."""
    (_Backward.apply(full(1).requires_grad_()) * mine()).sum().backward()
    return sums("all_reduce")


def _compiled(backend_: str) -> list[Call]:
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        copy = x.clone()
        dist.all_reduce(copy)
        return total + copy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert float(torch.compile(step, backend=backend_)(mine()).mean()) == 6.0
    return sums("functional_all_reduce", **LATER) * 2


@way
def compiled_eager() -> list[Call]:
    """In code that `torch.compile` hands to Python: what the compiler itself tries out is no call."""
    return _compiled("eager")


@way
def compiled_aot() -> list[Call]:
    """The same behind its autograd."""
    return _compiled("aot_eager")


@way
def tensor_of_a_mesh() -> list[Call]:
    """DTensor redistributes, and is made of and into whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, me = init_device_mesh("cpu", (2,)), dist.get_rank() + 1.0
    partial = DTensor.from_local(mine(), mesh, [Partial()], run_check=False)
    assert float(partial.redistribute(mesh, [Replicate()]).to_local().mean()) == 3.0
    assert float(partial.redistribute(mesh, [Shard(0)]).to_local().mean()) == 3.0
    assert float(DTensor.from_local(mine(), mesh, [Shard(0)], run_check=False).full_tensor().mean()) == 1.5
    add = {"reduce": "sum", **LATER}
    return [
        Call("functional_all_reduce", [me], [3.0], add),
        Call("functional_reduce_scatter_tensor", [me], [3.0], add),
        Call("functional_all_gather_into_tensor", [me], [1.5], LATER),
    ]


@way
def other_groups() -> list[Call]:
    """A group made within the step, with a description and a timeout of its own."""
    import datetime

    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=40), group_desc="described")
    dist.all_reduce(mine(), group=group)
    return sums("all_reduce")


@way
def barriers_and_objects() -> list[Call]:
    """What moves no tensor of the user makes no record."""
    group: Any = dist.group.WORLD
    dist.barrier()
    dist.monitored_barrier()
    group.barrier().wait()
    dist.all_gather_object([None, None], {"rank": dist.get_rank()})
    dist.broadcast_object_list([dist.get_rank()], 0)
    return []


@way
def callbacks() -> list[Call]:
    """The work's future: a callback changes the tensor after it has been recorded."""
    tensor = mine()
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda done: done.value()[0].mul_(100)).wait()
    return sums("all_reduce", **LATER)
