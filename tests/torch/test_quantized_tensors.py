"""Tensors that hold codes and scales: what counts is the values that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msprobe_integrations.torch import describe
from msprobe_integrations.torch.backend import TorchBackend


class Quantized(torch.Tensor):
    """The form of Transformer Engine's tensors: a wrapper whose members are codes (uint8) and scales, without ``__tensor_flatten__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, shape: tuple[int, ...], **members: Any) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device="cpu")  # type: ignore[attr-defined]
        vars(made).update(members)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return cls(tuple(args[0].shape), **vars(args[0]))


class Float8Tensor(Quantized):
    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(self.dtype)  # type: ignore[attr-defined]


class BlockTensor(Quantized):
    """Block-scaled, by rows and by columns, as MXFP8 and its like."""

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self._rowwise_data.view(torch.float8_e4m3fn).float() * self._rowwise_scale_inv).to(self.dtype)  # type: ignore[attr-defined]


class Delayed:
    """A quantizer."""


VALUES = torch.tensor([[0.5, -0.25], [0.125, 0.0]])
CODES = (VALUES * 512).to(torch.float8_e4m3fn).view(torch.uint8)
SCALE = torch.tensor([1 / 512])
CASES = {
    "codes": lambda: Float8Tensor(
        (2, 2), _data=CODES, _scale_inv=SCALE, _transpose=None, _fp8_dtype="DType.kFloat8E4M3", _quantizer=Delayed()
    ),
    "codes and their transpose": lambda: Float8Tensor((2, 2), _data=CODES, _scale_inv=SCALE, _transpose=CODES.t().contiguous()),
    "rows": lambda: BlockTensor((2, 2), _rowwise_data=CODES, _rowwise_scale_inv=SCALE.expand(2, 1), _columnwise_data=None),
    "rows and columns": lambda: BlockTensor((2, 2), _rowwise_data=CODES, _rowwise_scale_inv=SCALE.expand(2, 1), _columnwise_data=CODES),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_of_the_values(case: str) -> None:
    """Extremes and sum are those of the dequantized values, whatever members there are; the description is that of the wrapper."""
    backend = TorchBackend(digest=True)
    ref, plain = backend.reduce(CASES[case]()), backend.reduce(VALUES.to(torch.bfloat16))
    rows = backend.finish_step().rows()
    assert rows[ref.row].tobytes() == rows[plain.row].tobytes()
    assert (ref.description.dtype, ref.description.shape) == ("torch.bfloat16", (2, 2))
    if case == "codes":
        assert ref.description.extra == (("fp8_dtype", "Float8E4M3"), ("quantizer", "Delayed"))


def test_saved_are_the_values() -> None:
    """The tensor that is copied to a file is the dequantized one."""
    data, _, why = describe.resolve(CASES["codes"]())
    assert why == ""
    assert data is not None
    assert torch.equal(data, VALUES.to(torch.bfloat16))


def test_codes_without_a_way_back_have_no_numbers() -> None:
    """A wrapper that cannot be dequantized, with one member of its shape and another type: no row, and that is counted."""
    backend = TorchBackend()
    assert backend.reduce(Quantized((2, 2), _rowwise_data=CODES)).row == -1
    assert [why for why in backend.unsupported if "Quantized" in why]
