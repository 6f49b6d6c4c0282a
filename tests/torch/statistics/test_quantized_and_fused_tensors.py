"""Tensors that hold codes and scales, and weights whose gradients are accumulated elsewhere: what counts is the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from msprobe_engine.core.records import Entry
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings, SinkSettings
from msprobe_engine.core.statistics import rows
from msprobe_engine.core.statistics.rows import read_row
from msprobe_engine.formats.dump.writing import text
from msprobe_engine.formats.dump.writing.template import LayoutCache, Options
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.tensors import describe, quantized

# Tensors that hold codes and scales: what counts is the values that they stand for.


class Quantized(torch.Tensor):
    """The form of Transformer Engine's tensors: a wrapper whose members are codes (uint8) and scales, without ``__tensor_flatten__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, shape: tuple[int, ...], **members: Any) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device="cpu")  # type: ignore[attr-defined]
        vars(made).update(members)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor and "_data" in vars(args[0]):
            data = func(args[0]._data, *args[1:])
            return cls(tuple(data.shape), **{**vars(args[0]), "_data": data})
        assert func is torch.ops.aten.detach.default, func
        return cls(tuple(args[0].shape), **vars(args[0]))


class Float8Tensor(Quantized):
    made: ClassVar[list[int]] = []
    """Sizes of what was dequantized."""

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        self.made.append(self.numel())
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(self.dtype)  # type: ignore[attr-defined]


class BlockTensor(Quantized):
    """Block-scaled, by rows and by columns, as MXFP8 and its like."""

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self._rowwise_data.view(torch.float8_e4m3fn).float() * self._rowwise_scale_inv).to(self.dtype)  # type: ignore[attr-defined]


class DelayedScaling:
    """A recipe."""


class Delayed:
    """A quantizer."""

    def _get_compatible_recipe(self) -> type:
        return DelayedScaling


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
    found = backend.finish_step().rows()
    assert found[ref.row].tobytes() == found[plain.row].tobytes()
    assert (ref.description.dtype, ref.description.shape) == ("torch.bfloat16", (2, 2))
    extra = dict(ref.description.extra)
    assert extra.pop("scale_inv") == {"min": 1 / 512, "max": 1 / 512}
    assert extra == ({"fp8_dtype": "Float8E4M3", "quantizer": "Delayed", "recipe": "DelayedScaling"} if case == "codes" else {})


def test_a_large_tensor_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a slice is of the same class, no more than a block of rows is dequantized at a time; digest, counts and extremes are those of
    the whole. Where it is not, the values are made at once."""
    monkeypatch.setattr(quantized, "BLOCK_BYTES", 64)
    torch.manual_seed(0)
    codes = torch.randn(11, 10).to(torch.float8_e4m3fn).view(torch.uint8)
    codes[10, 9] = 0x7F  # NaN
    backend = TorchBackend(digest=True)
    Float8Tensor.made.clear()
    ref = backend.reduce(Float8Tensor((11, 10), _data=codes, _scale_inv=SCALE))
    assert Float8Tensor.made == [30, 30, 30, 20]
    rows_of = BlockTensor((11, 10), _rowwise_data=codes, _rowwise_scale_inv=SCALE.expand(11, 1))
    whole = backend.reduce(rows_of)
    plain = backend.reduce(rows_of.dequantize())
    found = backend.finish_step().rows()
    assert found[whole.row].tobytes() == found[plain.row].tobytes()
    have, want = rows.read_row(found[ref.row]), rows.read_row(found[plain.row])
    assert (have.count, have.nans, have.finite_min, have.finite_max) == (110, 1, want.finite_min, want.finite_max)
    assert rows.as_int64(found)[ref.row, rows.DIGEST] == rows.as_int64(found)[plain.row, rows.DIGEST]
    assert found[ref.row, rows.SUMSQ] == pytest.approx(found[plain.row, rows.SUMSQ], rel=1e-12)


E8M0 = torch.full((128, 4), 255, dtype=torch.uint8)
E8M0[:2, :2] = torch.tensor([[126, 127], [128, 127]])
BLOCKS = torch.full((4, 4), float("nan"))
BLOCKS[:1, :1] = 0.5


@pytest.mark.parametrize(
    ("scale", "members", "limits"),
    [
        (E8M0, {"_fp8_dtype": "DType.kFloat8E4M3"}, {"min": 0.5, "max": 2.0}),
        (E8M0, {"_with_gemm_swizzled_scales": True}, None),
        (torch.full((128, 4), 0x38, dtype=torch.uint8), {"_fp4_dtype": "DType.kFloat4E2M1"}, {"min": 1.0, "max": 1.0}),
        (BLOCKS, {"_is_2D_scaled": True}, {"min": 0.5, "max": 0.5}),
        (BLOCKS, {"_is_2D_scaled": False}, {"min": "nan", "max": "nan"}),
    ],
    ids=["MXFP8", "MXFP8 in the order of a product", "NVFP4", "blocks", "rows of blocks"],
)
def test_scales_are_read_as_what_they_are(scale: torch.Tensor, members: dict[str, Any], limits: dict[str, float] | None) -> None:
    """Scales of one byte are powers of two or e4m3; memory that only fills up is not read; an order that is not known has no limits."""
    width = 33 if "_is_2D_scaled" not in members else 2

    class Other(Quantized):
        def dequantize(self) -> torch.Tensor:  # type: ignore[override]
            return torch.zeros(2, width, dtype=torch.bfloat16)

    backend = TorchBackend()
    ref = backend.reduce(Other((2, width), _rowwise_data=CODES, _rowwise_scale_inv=scale, **members))
    backend.finish_step().rows()
    assert dict(ref.description.extra).get("scale_inv") == limits


def test_scales_are_in_the_dump() -> None:
    """The extremes of the scales stand beside the values in dump.json, those of this step in every step."""
    held = torch.tensor([1 / 512])
    tensor = Float8Tensor((2, 2), _data=CODES, _scale_inv=held)
    backend, cache = TorchBackend(), LayoutCache(Options())
    texts = []
    for factor in (1, 2):
        held.mul_(factor)
        ref = backend.reduce(tensor)
        arrived = backend.finish_step().rows()
        layout, slots, floats = cache.find([Entry("Torch.relu.0.forward", {"output": [ref]})], "L1")
        texts.append(json.loads(text.render(layout.data, slots, arrived, floats))["Torch.relu.0.forward"]["output"][0])
    assert [one["scale_inv"] for one in texts] == [{"min": 1 / 512, "max": 1 / 512}, {"min": 1 / 256, "max": 1 / 256}]
    assert [one["Max"] for one in texts] == [0.5, 1.0]


def test_what_cannot_be_dequantized_has_no_numbers() -> None:
    """Transformer Engine may hold the codes by columns alone, and then refuses: no row, the tensor is described all the same."""

    class Refuses(Quantized):
        def dequantize(self) -> torch.Tensor:  # type: ignore[override]
            raise NotImplementedError("no way back from the transpose")

    backend = TorchBackend()
    ref = backend.reduce(Refuses((2, 2), _data=None, _fp8_dtype="DType.kFloat8E5M2"))
    assert (ref.row, ref.description.shape, ref.description.extra) == (-1, (2, 2), (("fp8_dtype", "Float8E5M2"),))
    assert [why for why in backend.unsupported if "no way back" in why]


def test_a_description_makes_no_values() -> None:
    """`describe` tells what a tensor is without dequantizing it."""
    Float8Tensor.made.clear()
    assert describe.describe(CASES["codes"]()).dtype == "torch.bfloat16"
    assert Float8Tensor.made == []


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


@pytest.mark.parametrize("given", [None, 3, torch.zeros(1), torch.zeros(2, 2, device="meta"), "itself"], ids=str)
def test_a_dequantize_that_gives_something_else_has_no_numbers(given: Any) -> None:
    """What is no tensor of the shape, or has no data, gives a row without numbers and nothing else; nothing raises."""

    class Odd(Quantized):
        def dequantize(self) -> Any:  # type: ignore[override]
            return self if isinstance(given, str) else given

    backend = TorchBackend()
    tensor = Odd((2, 2), _data=CODES)
    assert backend.reduce(tensor).row == -1
    assert describe.resolve(tensor)[0] is None
    assert sum(backend.unsupported.values()) == 1


# Fused gradient accumulation: what autograd gets for a weight holds no values, and nothing of it is in a dump.

STAND_IN = torch.full((3, 4), float("nan"))
"""NaN for what happens to be in the memory."""


class Product(torch.autograd.Function):
    """Adds the weight's gradient into ``main_grad`` itself, as Megatron's linear layers and Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """The input's gradient, and a stand-in for the weight's."""
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, STAND_IN


class Linear(nn.Module):
    """A layer with such a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.weight.main_grad = torch.zeros(3, 4)  # type: ignore[attr-defined]
        self.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One product."""
        found: torch.Tensor = Product.apply(x, self.weight)
        return found


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_no_record_has_memory_without_values(level: str, tmp_path: Path) -> None:
    """No statistics of the stand-in at any level, also where the weight is used twice within a call; the gradient of the module's
    parameter is what was added up."""
    model = nn.Sequential(Linear(), nn.Linear(3, 4))
    settings = ProbeSettings(output_dir=str(tmp_path), strict=True, dump=DumpSettings(level=level), sinks=SinkSettings(memory=True))
    probe = TorchProbe(settings)
    probe.attach(model)
    probe.begin_step(0)
    model(model(torch.ones(2, 4))).sum().backward()
    total = float(model[0].weight.main_grad.norm())  # type: ignore[union-attr,operator]
    probe.end_step()
    probe.close()
    (frame,) = probe.frames
    assert frame.entries
    for row in frame.rows:
        assert read_row(row).nans == 0
    if level != "L1":
        found = [entry for entry in frame.entries if entry.name.startswith("Module.0.Linear.parameters_grad")]
        assert read_row(frame.rows[found[-1].sections["weight"][0].row]).norm == pytest.approx(total)
