"""Messages of a pipeline as torch_npu sends them: it puts a function of its own in place of ``batch_isend_irecv``, which hands the whole
batch to a method of HCCL's backend, or, with newer versions of CANN, each message to torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

FILE = "site-packages/torch_npu/distributed/distributed_c10d.py"
WAYS = {
    "backend": """
def _batch_isend_irecv(p2p_op_list):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    kinds, tensors = [op.op.__name__ for op in p2p_op_list], [op.tensor for op in p2p_op_list]
    return [backend.batch_isend_irecv(kinds, tensors, [op.peer for op in p2p_op_list])]
""",
    "messages": """
def _batch_isend_irecv(p2p_op_list):
    return [op.op(op.tensor, op.peer) for op in p2p_op_list]
""",
}
"""The function's two ways. Records tell it by the file it is in."""


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self.works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def _stage(way: str) -> dict[str, Any]:
    """Rank 0 sends two tensors, rank 1 receives them and uses one; what was recorded."""
    from capturing import capture, entries, stat

    kind = type(dist.group.WORLD._get_backend(torch.device("cpu")))  # type: ignore[union-attr]
    send, receive = kind.send, kind.recv

    def batch(backend: Any, kinds: list[str], tensors: list[Any], peers: list[int]) -> Any:
        return _Works([(send if k == "isend" else receive)(backend, [t], p, 0) for k, t, p in zip(kinds, tensors, peers)])

    kind.batch_isend_irecv = batch
    names: dict[str, Any] = {"dist": dist, "torch": torch}
    exec(compile(WAYS[way], FILE, "exec"), names)
    rank = dist.get_rank()

    def work() -> None:
        if rank == 0:
            made = [torch.full((4,), 3.0), torch.full((4,), 5.0)]
            operations = [dist.P2POp(dist.isend, tensor, 1) for tensor in made]
        else:
            made = [torch.empty(4), torch.empty(4)]
            operations = [dist.P2POp(dist.irecv, tensor, 0) for tensor in made]
        for handle in names["_batch_isend_irecv"](operations):
            handle.wait()
        if rank:
            torch.neg(made[1])

    try:
        frame = capture(None, work, "L1")[0]
    finally:
        del kind.batch_isend_irecv
    found = entries(frame)
    assert "Distributed.batch_isend_irecv.0.forward" in found, sorted(found)
    record = found["Distributed.batch_isend_irecv.0.forward"]
    messages = record.sections["input_args" if rank == 0 else "output"][0]
    told = {"names": [name for name in found if name.startswith("Distributed.")]}
    told["max"] = [stat(frame, message["tensor"]).max for message in messages]
    if rank:
        told["used"] = stat(frame, found["Torch.neg.0.forward"].sections["input_args"][0]).max
    return told


@pytest.mark.parametrize("way", ["backend", "messages"])
def test_a_batch_is_one_record_and_what_was_received_has_numbers(way: str) -> None:
    """Both ways give the record that a GPU gives, with the values of every message, and the next call has them as input."""
    first, second = run_ranks(2, _stage, way)
    assert first == {"names": ["Distributed.batch_isend_irecv.0.forward"], "max": [3.0, 5.0]}
    assert second == {"names": ["Distributed.batch_isend_irecv.0.forward"], "max": [3.0, 5.0], "used": 5.0}
