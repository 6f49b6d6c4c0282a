"""What a tensor is, without reading its data: `describe`, and `resolve`, which finds the tensor that really holds the data.

| tensor | type text | statistics are of | extra |
| --- | --- | --- | --- |
| plain, `Parameter` | ``torch.Tensor`` | all elements in C order | |
| DTensor | its class | the local shard; shape is the local one | device_mesh, placements, global_shape |
| sparse COO, CSR, CSC, BSR, BSC | ``torch.Tensor`` | the stored values (COO: not coalesced) | layout, nnz |
| nested, jagged or strided | its class | the values of all components; shape is that of the values | layout, nested_size |
| quantized | ``torch.Tensor`` | the dequantized values | quantized |
| vmap, grad wrappers | ``BatchedTensor``, ``GradTrackingTensor`` | the inner tensor (vmap: the whole batch) | |
| AsyncCollectiveTensor | its class | the result if it was waited for, else none: waiting here would change the order | pending |
| meta, FakeTensor, functional | ``torch.Tensor`` or its class | none, there is no data | |
| storage freed | ``torch.Tensor`` | none | freed |
| of an Ascend NPU in a private format | ``torch.Tensor`` | a copy in format ND | |
| wrapper with ``dequantize()`` (Transformer Engine, torchao) | its class | what that gives, never its codes | of `quantized.facts` |
| other subclass | its class | its data; a wrapper: its one inner tensor, if that has the wrapper's dtype | |
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import TensorDescription
from msprobe_integrations.common.capture.descriptions import LIMIT, intern
from msprobe_integrations.requirements import need
from msprobe_integrations.torch.ascend import formats as npu_formats
from msprobe_integrations.torch.tensors import quantized
from msprobe_integrations.torch.tensors.devices import is_capturing
from msprobe_integrations.torch.tensors.dtensors import is_dtensor, local

Tensor = torch.Tensor
Key = tuple[Any, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_no_dispatch = torch._C._disabled_torch_dispatch_impl
_fast: dict[Key, TensorDescription] = {}
_parts: dict[tuple[int, tuple[int, ...]], tuple[TensorDescription, TensorDescription]] = {}
CAPTURE = "graph capture"
"""Why there is no data while the current stream records a graph: what would be computed to read them would become part of it."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def describe(tensor: Tensor) -> TensorDescription:
    """The description of a tensor; equal descriptions are the same object. Never reads data, never waits, never raises."""
    try:
        known = _fast.get((type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device))
        if known is not None:
            tensor.data_ptr()  # raises for sparse tensors and functorch wrappers, which look plain otherwise
            return known
    except Exception as error:
        raise_of_training(error)
    cls = type(tensor)
    if quantized.is_quantized(cls):  # `resolve` would make its values
        with torch._C.DisableTorchFunction():
            return of(tensor, class_name(cls), quantized.facts(tensor))
    return resolve(tensor)[1]


def resolve(tensor: Tensor) -> tuple[Tensor | None, TensorDescription, str]:
    """Find the data of a tensor.

    Returns:
        the tensor whose elements are to be reduced (strided, of a plain class; None when there are none to read), the
        description of the tensor given, and why there is no data (``""`` when there is).
    """
    cls = type(tensor)
    with torch._C.DisableTorchFunction():
        try:
            return _resolve(tensor, cls)
        except Exception as error:
            raise_of_training(error)
            return (
                None,
                intern(class_name(cls), str(getattr(tensor, "dtype", "")), (), None, ""),
                f"{class_name(cls)}: {type(error).__name__}",
            )


def _resolve(tensor: Tensor, cls: type) -> tuple[Tensor | None, TensorDescription, str]:
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return _functorch_inner(tensor)
    if cls in _PLAIN or cls.__torch_dispatch__ is _no_dispatch:  # type: ignore[attr-defined]
        return _plain(tensor, cls)
    text = class_name(cls)
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return None, of(tensor, text), "fake"
    name = cls.__name__
    if name == "FunctionalTensor":
        return None, of(tensor, text), "functional"
    if is_dtensor(tensor):
        return _dtensor(tensor, text)
    if name == "AsyncCollectiveTensor":
        if not getattr(tensor, "completed", False):
            return None, of(tensor, text, (("pending", True),)), "pending"
        inner, _, why = resolve(tensor.elem)  # type: ignore[attr-defined]
        return inner, of(tensor, text), why
    if tensor.layout == torch.jagged:
        return _values(tensor._values, tensor, text, "jagged")
    if getattr(cls, "probe_device", False):
        return tensor, of(tensor, text), ""
    return _wrapper(tensor, text)


def _plain(tensor: Tensor, cls: type) -> tuple[Tensor | None, TensorDescription, str]:
    text = "torch.Tensor" if cls in _PLAIN else class_name(cls)
    if tensor.is_nested:
        return _values(tensor.detach().values(), tensor, text, "strided")
    if tensor.layout in _SPARSE:
        values = tensor.detach()._values() if tensor.layout == torch.sparse_coo else tensor.detach().values()
        extra = (("layout", str(tensor.layout).removeprefix("torch.")), ("nnz", int(values.shape[0])))
        return values, of(tensor, text, extra), ""
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return tensor.detach().to_dense(), of(tensor, text, (("layout", layout),)), ""
    if tensor.is_quantized:
        return tensor.detach().dequantize(), of(tensor, text, (("quantized", True),)), ""
    if tensor.device.type == "meta":
        return None, of(tensor, text), "meta"
    if torch._is_functional_tensor(tensor):
        return None, of(tensor, text), "functional"
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return None, of(tensor, text, (("freed", True),)), "freed"
    description = of(tensor, text)
    if len(_fast) > LIMIT:
        _fast.clear()
    _fast[(cls, tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device)] = description
    data: Tensor | None = tensor if cls in _PLAIN else tensor.detach().as_subclass(Tensor)
    why = ""
    if tensor.device.type == "npu" and npu_formats.is_private(tensor):
        data, why = (None, CAPTURE) if is_capturing("npu") else npu_formats.cast_to_nd(tensor)
    if data is not None and (tensor.is_neg() or tensor.is_conj()):
        data = data.detach().resolve_neg().resolve_conj()
    return data, description, why


def _functorch_inner(tensor: Tensor) -> tuple[Tensor | None, TensorDescription, str]:
    if torch._is_functional_tensor(tensor):
        return None, of(tensor, "FunctionalTensor"), "functional"
    text = "BatchedTensor" if _functorch.is_batchedtensor(tensor) else "GradTrackingTensor"
    inner = tensor
    while _functorch.is_functorch_wrapped_tensor(inner):
        inner = _functorch.get_unwrapped(inner)
    found, shown, why = resolve(inner)
    description = intern(text, shown.dtype, shown.shape, tensor.requires_grad, shown.device, shown.extra)
    return found, description, why


def _dtensor(tensor: Any, text: str) -> tuple[Tensor | None, TensorDescription, str]:
    inner, shown, why = resolve(local(tensor))
    mesh = tensor.device_mesh
    known = _meshes.get(id(mesh))
    if known is None or known[0] is not mesh:
        known = _meshes[id(mesh)] = (mesh, mesh.mesh.tolist())  # the rank table lives on the host
    extra = (
        ("device_mesh", known[1]),
        ("placements", [_placement(p) for p in tensor.placements]),
        ("global_shape", list(tensor.shape)),
    )
    return inner, intern(text, shown.dtype, shown.shape, tensor.requires_grad, shown.device, extra + shown.extra), why


_meshes: dict[int, tuple[Any, Any]] = {}


def _placement(placement: Any) -> dict[str, Any]:
    if placement.is_shard():
        return {"Shard": {"dim": placement.dim}}
    if placement.is_partial():
        return {"Partial": {"reduce_op": str(need(placement, "reduce_op", for_="how ranks add up the parts of a DTensor"))}}
    return {type(placement).__name__: {}}


def _values(values: Any, tensor: Tensor, text: str, layout: str) -> tuple[Tensor | None, TensorDescription, str]:
    inner, shown, why = resolve(values.detach())
    extra = (("layout", layout), ("nested_size", int(tensor.size(0))))
    return inner, intern(text, shown.dtype, shown.shape, tensor.requires_grad, shown.device, extra), why


def _wrapper(tensor: Tensor, text: str) -> tuple[Tensor | None, TensorDescription, str]:
    cls = type(tensor)
    if quantized.is_quantized(cls):
        description = of(tensor, text, quantized.facts(tensor))
        if is_capturing(tensor.device.type):
            return None, description, CAPTURE
        try:
            made = tensor.detach().dequantize()
            if not isinstance(made, Tensor) or quantized.is_quantized(type(made)) or made.shape != tensor.shape:
                return None, description, f"no values: {text}, dequantize() gives no tensor of its shape"
            data, _, why = resolve(made)
            return data, description, why
        except Exception as error:  # what Transformer Engine keeps by columns alone has no way back
            raise_of_training(error)
            return None, description, f"no values: {text}, {type(error).__name__}: {str(error)[:80]}"
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        held = [getattr(tensor, name) for name in flatten()[0]]
    elif tensor.data_ptr():
        return tensor.detach().as_subclass(Tensor), of(tensor, text), ""
    else:
        held = [value for value in vars(tensor).values() if isinstance(value, Tensor) and value.shape == tensor.shape]
    if len(held) == 1 and held[0].dtype == tensor.dtype:  # another type: codes, not values
        inner, _, why = resolve(held[0])
        return inner, of(tensor, text), why
    return None, of(tensor, text), f"no data: {text}"


def class_name(cls: type) -> str:
    """Type text of a tensor class, as the existing dump format has it."""
    return "torch.Tensor" if cls in _PLAIN else f"{cls.__module__}.{cls.__qualname__}"


def of(tensor: Tensor, text: str, extra: tuple[tuple[str, Any], ...] = ()) -> TensorDescription:
    """Description by the tensor's own shape, dtype and device; symbolic sizes become -1."""
    shape = tuple(s if type(s) is int else -1 for s in tensor.shape)
    return intern(text, str(tensor.dtype), shape, tensor.requires_grad, str(tensor.device), extra)


def of_part(whole: TensorDescription, shape: tuple[int, ...]) -> TensorDescription:
    """Description of a part of a tensor: its shape, and that of the whole as ``full_shape``."""
    found = _parts.get((id(whole), shape))
    if found is None or found[0] is not whole:
        extra = (*whole.extra, ("full_shape", list(whole.shape)))
        made = intern(whole.type, whole.dtype, shape, whole.requires_grad, whole.device, extra)
        if len(_parts) > LIMIT:
            _parts.clear()
        found = _parts[(id(whole), shape)] = (whole, made)
    return found[1]
