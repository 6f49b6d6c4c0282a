"""A3: tensors that are no plain memory have the numbers of the values that they stand for, never of codes, or say why they have none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.torch.backend import TorchBackend

_SCALE = 1 / 512
Made = tuple[Any, torch.Tensor | None]
"""A tensor, and its values on the CPU; None: it has to be without numbers."""


def run(device: Device) -> Iterator[Line]:
    """A line per kind of tensor."""
    for name, make in CASES.items():
        try:
            tensor, values = make(device)
        except _NotHere as error:
            yield Line(name, "skipped", why=str(error))
            continue
        except Exception as error:  # this version of torch, or this device, has no such tensors
            yield Line(name, "skipped", why=f"cannot be made here: {type(error).__name__}: {str(error)[:150]}")
            continue
        yield _check(name, tensor, values)


class _NotHere(Exception):
    """Why a kind of tensor does not exist here."""


def _check(name: str, tensor: Any, values: torch.Tensor | None) -> Line:
    backend = TorchBackend()
    row = backend.reduce(tensor).row
    rows = backend.finish_step().rows()
    if row < 0:
        why = ", ".join(backend.unsupported)
        silent = values is not None or not why
        return Line(
            name, "WRONG" if silent else "ok", "no numbers", "a row" if values is not None else "a reason", why or "no reason given"
        )
    seen = _rows.read_row(rows[row])
    figure = f"max {seen.max}, norm {seen.norm}"
    if values is None:
        return Line(name, "WRONG", figure, "no numbers, and a reason", "these are numbers of codes")
    wide = values.double()
    expected = float(wide.max()), float(torch.linalg.vector_norm(wide))
    right = all(
        target is not None and abs(target - golden) <= 1e-6 * abs(golden) for target, golden in zip((seen.max, seen.norm), expected)
    )
    return Line(name, "ok" if right else "WRONG", figure, f"max {expected[0]}, norm {expected[1]}")


class Quantized(torch.Tensor):
    """The form of Transformer Engine's tensors: a wrapper whose members are codes (uint8) and scales."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shape: tuple[int, ...], device: torch.device, **members: Any) -> Quantized:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Quantized = make(cls, shape, dtype=torch.bfloat16, device=device)
        vars(made).update(members)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(tuple(args[0].shape), args[0].device, **vars(args[0]))
        raise NotImplementedError(str(func))

    def dequantize(self) -> torch.Tensor:
        members: dict[str, Any] = vars(self)
        codes: Any = members.get("_data", members.get("_rowwise_data"))
        scale = members.get("_scale_inv", members.get("_rowwise_scale_inv"))
        made: torch.Tensor = (codes.view(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
        return made


def _values(device: Device) -> torch.Tensor:
    values = torch.linspace(-0.5, 0.25, 64 * 128).view(64, 128)
    codes = (values / _SCALE).to(torch.float8_e4m3fn)
    return (codes.float() * _SCALE).to(torch.bfloat16).to(device.device)


def _codes(device: Device) -> torch.Tensor:
    return (_values(device).float() / _SCALE).to(torch.float8_e4m3fn).view(torch.uint8)


def _one_scale(device: Device) -> Made:
    codes = _codes(device)
    scale = torch.tensor([_SCALE], device=device.device)
    return Quantized((64, 128), device.device, _data=codes, _scale_inv=scale, _transpose=codes.t().contiguous()), _values(device).cpu()


def _block_scales(device: Device) -> Made:
    codes, scale = _codes(device), torch.full((64, 1), _SCALE, device=device.device)
    made = Quantized((64, 128), device.device, _rowwise_data=codes, _rowwise_scale_inv=scale, _columnwise_data=codes.clone())
    return made, _values(device).cpu()


def _no_way_back(device: Device) -> Made:
    class Refuses(Quantized):
        def dequantize(self) -> torch.Tensor:
            raise NotImplementedError("no way back from the transpose")

    return Refuses((64, 128), device.device, _data=None, _transpose=_codes(device).t().contiguous()), None


def _float4(device: Device) -> Made:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        raise _NotHere(f"torch {torch.__version__} does not have it")
    return torch.full((64,), 0x77, dtype=torch.uint8, device=device.device).view(kind), None


def _sparse(layout: str) -> Callable[[Device], Made]:
    def make_tensors(device: Device) -> Made:
        dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, -1.0]])
        moved = dense.to(device.device)
        return (moved.to_sparse() if layout == "coo" else moved.to_sparse_csr()), dense

    return make_tensors


def _make_nested(layout: torch.layout) -> Callable[[Device], Made]:
    def make_tensors(device: Device) -> Made:
        parts = [torch.ones(2), torch.full((3,), 5.0)]
        moved = [part.to(device.device) for part in parts]
        return torch.nested.nested_tensor(moved, layout=layout), torch.cat(parts)

    return make_tensors


def _dtensor(device: Device) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not dist.is_initialized():
        from torch._C._distributed_c10d import HashStore

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    values = torch.arange(12.0).view(3, 4)
    return DTensor.from_local(values.to(device.device), init_device_mesh(device.type, (1,)), [Shard(0)], run_check=False), values


def _private_format(device: Device) -> Made:
    if device.type != "npu":
        raise _NotHere("needs an NPU")
    npu: Any = importlib.import_module("torch_npu")
    values = torch.arange(64.0 * 64).view(64, 64) * 1e-3
    return npu.npu_format_cast(values.half().to(device.device), 29), values.half().float()


CASES: dict[str, Callable[[Device], Made]] = {
    "codes with one scale (form of Float8Tensor)": _one_scale,
    "codes with scales of blocks (form of MXFP8Tensor)": _block_scales,
    "codes that cannot be dequantized": _no_way_back,
    "float4_e2m1fn_x2": _float4,
    "sparse COO": _sparse("coo"),
    "sparse CSR": _sparse("csr"),
    "nested, jagged": _make_nested(torch.jagged),
    "nested, strided": _make_nested(torch.strided),
    "DTensor": _dtensor,
    "FRACTAL_NZ": _private_format,
}
"""Kinds of tensors. Those of Transformer Engine itself: check E1."""
