"""Formulas of norms, activations, losses, products in groups, experts and quantization against loops or torch, in float64; gradients
against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_records import run_formula as run
from call_records import wide
from torch.nn import functional

from msprobe_integrations.torch.op_tools.accuracy.references import FORMULAS, find
from msprobe_integrations.torch.op_tools.accuracy.references.formula import NotChecked, with_known_arguments

close = torch.testing.assert_close


def test_norms_of_sums() -> None:
    """The norm of a sum is that of torch; results stand in the documented order."""
    a, b, w, shift = wide(2, 3, 8), wide(2, 3, 8), wide(8), wide(8)
    total = functional.rms_norm(a + b, (8,), w, 1e-6)
    rstd = ((a + b).square().mean(-1, keepdim=True) + 1e-6) ** -0.5
    close(run("NPU.npu_add_rms_norm", a, b, w), (total, rstd, a + b))
    close(run("NPU.npu_add_rms_norm_cast", a, b, w), (total, total, rstd, a + b))
    close(run("NPU.npu_gemma_rms_norm", a, w)[0], functional.rms_norm(a, (8,), w + 1, 1e-6))
    first, second = a.clone(), b.clone()
    close(run("NPU.npu_add_rms_norm_v2", first, second, w), rstd)
    close((first, second), (total, a + b))
    normed = functional.layer_norm(a + b, (8,), w, shift, 1e-5)
    y, mean, deviation, x = run("NPU.npu_add_layer_norm", a, b, w, shift, additional_output=True)
    close((y, mean, x), (normed, (a + b).mean(-1, keepdim=True), a + b))
    close(deviation, ((a + b).var(-1, correction=0, keepdim=True) + 1e-5) ** -0.5)
    assert run("NPU.npu_add_layer_norm", a, b, w, shift)[3] is None
    image, scale, bias = wide(2, 4, 3, 3), wide(4), wide(4)
    group = functional.group_norm(image, 2, scale, bias)
    close(run("NPU.npu_group_norm_swish", image, 2, scale, bias, swish_scale=0.5)[0], group * torch.sigmoid(0.5 * group))


def test_deep_norm_and_its_backward() -> None:
    """Layer norm of ``alpha * x + gx``; the backward from kept statistics is autograd's."""
    x, gx, beta, gamma, grad = (t.requires_grad_() for t in (wide(3, 4, 8), wide(3, 4, 8), wide(8), wide(8), wide(3, 4, 8)))
    right = functional.layer_norm(0.3 * x + gx, (8,), gamma, beta, 1e-6)
    mean, rstd, y = run("NPU.npu_deep_norm", x, gx, beta, gamma)
    close(y, right)
    found = torch.autograd.grad(right, (x, gx, beta, gamma), grad)
    close(run("Aten.npu_deep_norm_backward", grad, x, gx, gamma, mean, rstd), found)
    close(torch.autograd.grad(y, (x, gx, beta, gamma), grad), found)


def test_dropout_add_norms_of_mindspeed() -> None:
    """Without dropout: scales of rows and columns, residual, norm; `prenorm` gives the sum too. Dropout is not checked."""
    x, residual, w, b, rows, columns = wide(2, 3, 8), wide(2, 3, 8), wide(8), wide(8), wide(2, 3), wide(8)
    total = x * rows[..., None] * columns + residual
    layer, summed = run("MindSpeed.npu_dropout_add_layer_norm", x, residual, w, b, 0.0, 1e-5, rows, columns, True)
    close((layer, summed), (functional.layer_norm(total, (8,), w, b), total))
    close(run("MindSpeed.npu_dropout_add_rms_norm", x, None, w, None, 0.0, 1e-5), functional.rms_norm(x, (8,), w, 1e-5))
    with pytest.raises(NotChecked, match="draws random numbers"):
        run("MindSpeed.npu_dropout_add_layer_norm", x, None, w, None, 0.1, 1e-5)


@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dim", [-1, 1])
def test_gelu_gates(approximate: int, left: bool, dim: int) -> None:
    """GELU of one half times the other; its backward from the kept GELU is autograd's."""
    kind = ("none", "tanh")[approximate]
    x = wide(2, 4, 6).requires_grad_()
    first, second = torch.chunk(x, 2, dim)
    right = functional.gelu(first, approximate=kind) * second if left else first * functional.gelu(second, approximate=kind)
    y, activated = run("NPU.npu_geglu", x, dim, approximate, left)
    close(y, right)
    close(activated, functional.gelu(first if left else second, approximate=kind))
    grad = wide(*y.shape)
    close(run("Aten.npu_geglu_grad", grad, x, activated, dim, approximate, left), torch.autograd.grad(right, x, grad)[0])
    plain = functional.gelu(x, approximate=kind)
    close(run("NPU.npu_gelu", x, approximate=kind), plain)
    grad = wide(*x.shape)
    close(run("Aten.npu_gelu_backward", grad_output=grad, self=x, approximate=kind), torch.autograd.grad(plain, x, grad)[0])
    halves = torch.chunk(x, 2, -1)
    close(run("NPU.npu_gelu_mul", x, approximate=kind), functional.gelu(halves[0], approximate=kind) * halves[1])


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu(interleaved: bool) -> None:
    """Element by element, along an axis that is not the last: even and odd are those of the axis and all behind it."""
    x = 4 * wide(3, 4, 2)
    got = run("NPU.npu_clipped_swiglu", x, dim=1, alpha=0.7, limit=2.0, bias=1.2, interleaved=interleaved)
    assert got.shape == (3, 2, 2)
    flat = x.reshape(3, 8)
    for row in range(3):
        for n in range(4):
            a, b = (flat[row, 2 * n], flat[row, 2 * n + 1]) if interleaved else (flat[row, n], flat[row, n + 4])
            a, b = min(float(a), 2.0), max(-2.0, min(float(b), 2.0))
            assert float(got.reshape(3, 4)[row, n]) == pytest.approx(a / (1 + 2.718281828459045 ** (-0.7 * a)) * (b + 1.2))
    close(run("NPU.npu_clipped_swiglu", x, dim=1, group_index=torch.tensor([1, 2])), run("NPU.npu_clipped_swiglu", x, dim=1))
    with pytest.raises(NotChecked, match="in no group"):
        run("NPU.npu_clipped_swiglu", x, dim=1, group_index=torch.tensor([1, 1]))


def test_rotations() -> None:
    """A matrix in place of a mode turns alike; MindSpeed's modes are numbers; modes of newer devices are not checked."""
    x, cos, sin = wide(2, 3, 4, 6), wide(1, 3, 1, 6), wide(1, 3, 1, 6)
    for mode, name in enumerate(("half", "interleave")):
        right = run("NPU.npu_rotary_mul", x, cos, sin, name)
        unit = torch.eye(6, dtype=torch.float64)
        matrix = run("NPU.npu_rotary_mul", unit, torch.zeros(6), torch.ones(6), name)  # what it makes of each unit vector
        close(run("NPU.npu_rotary_mul", x, cos, sin, rotate=matrix), right)
        close(run("MindSpeed.npu_rotary_position_embedding", x, cos, sin, mode), right)
    for wrong in ({"rotary_mode": "quarter"}, {"rotation": 1}):
        with pytest.raises(NotChecked, match="is not known to the formula"):
            run("NPU.npu_rotary_mul", x, cos, sin, **wrong)


@pytest.mark.parametrize(
    "shapes", [((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4)), ((2, 3, 5), (5, 4)), ((3, 5), (2, 5, 4)), ((2, 1, 3, 5), (6, 5, 4))]
)
def test_matmul_backward(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Gradients of every combination of dimensions are those of ``torch.matmul``; what the mask leaves out is None."""
    a, b = (wide(*shape).requires_grad_() for shape in shapes)
    out = torch.matmul(a, b)
    grad = wide(*out.shape)
    right = torch.autograd.grad(out, (a, b), grad)
    close(run("Aten.matmul_backward", grad, a, b, [True, True]), right)
    assert run("Aten.matmul_backward", grad, a, b, [False, True])[0] is None


def groups(lengths: list[int]) -> list[tuple[int, int]]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return list(zip([0, *ends], ends))


LENGTHS = [2, 0, 3]
ENDS = torch.tensor([2, 2, 5])


@pytest.mark.parametrize("act", [0, 1, 2, 4, 5])
def test_grouped_matmul_of_rows(act: int) -> None:
    """Rows in groups (by ends, counts, or a list), each by its weight, with bias and activation."""
    x, weight, bias = wide(5, 4), wide(3, 4, 6), wide(3, 6)
    through = {
        0: lambda t: t,
        1: torch.relu,
        2: lambda t: functional.gelu(t, approximate="tanh"),
        4: lambda t: t * torch.sigmoid(1.702 * t),
        5: functional.silu,
    }[act]
    right = [through(x[a:b] @ weight[n] + bias[n]) for n, (a, b) in enumerate(groups(LENGTHS))]
    for kwargs in ({"group_list": ENDS}, {"group_list": torch.tensor(LENGTHS), "group_list_type": 1}):
        got = run("NPU.npu_grouped_matmul", [x], [weight], bias=[bias], split_item=3, group_type=0, act_type=act, **kwargs)
        close(got, [torch.cat(right)])
    many = run("NPU.npu_grouped_matmul", [x], list(weight), bias=list(bias), group_list=[2, 2, 5], group_type=None, act_type=act)
    close(many, right)
    close(run("NPU.npu_grouped_matmul", [x[a:b] for a, b in groups(LENGTHS)], list(weight), bias=list(bias), act_type=act), right)


def test_grouped_matmul_of_the_inner_axis_and_what_it_refuses() -> None:
    """The gradient of weights: columns of x with rows of the other. Quantized products and rows in no group are not checked."""
    x, other = wide(4, 5), wide(5, 6)
    right = torch.stack([x[:, a:b] @ other[a:b] for a, b in groups(LENGTHS)])
    close(run("NPU.npu_grouped_matmul", [x], [other], group_list=ENDS, split_item=3, group_type=2), [right])
    weight = wide(3, 5, 6)
    for kwargs, text in (
        ({"scale": [wide(6)]}, "argument scale .a quantized product. is not known"),
        ({"group_list": torch.tensor([1, 2, 3])}, "in no group"),
        ({"act_type": 3}, "act_type 3"),
        ({"group_list_type": 2}, "group_list_type 2"),
        ({"fused": 1}, "argument fused is not known"),
    ):
        with pytest.raises(NotChecked, match=text):
            run("NPU.npu_grouped_matmul", [x], [weight], **({"group_list": ENDS, "group_type": 0, "scale": []} | kwargs))


def test_products_of_mindspeed() -> None:
    """Groups by ends or counts, with the gradient of the weight; sums that go into a tensor there is."""
    x, weight, grad = wide(5, 4).requires_grad_(), wide(3, 4, 6).requires_grad_(), wide(5, 6)
    right = torch.cat([x[a:b] @ weight[n] for n, (a, b) in enumerate(groups(LENGTHS))])
    of_right = torch.autograd.grad(right, (x, weight), grad)
    for got in (
        run("MindSpeed.npu_gmm", x, weight, bias=None, group_list=[2, 2, 5], gemm_fusion=False),
        run("mindspeed.npu_gmm", None, x, weight, group_list=ENDS),
        run("MindSpeed.npu_gmm_v2", x=x, weight=weight, group_list=torch.tensor(LENGTHS)),
    ):
        close(got, right)
        close(torch.autograd.grad(got, (x, weight), grad), of_right)
    begin = wide(3, 4, 6)
    total = begin.clone().view(12, 6)
    assert run("MindSpeed.npu_groupmatmul_add_fp32", x.detach(), grad, ENDS, total) is None
    close(total.view(3, 4, 6), begin + of_right[1])
    close(run("NPU.npu_grouped_matmul_add_", begin.clone(), x.detach(), grad, ENDS), begin + of_right[1])
    into = wide(6, 4)
    right = into + grad.t() @ x.detach()
    run("MindSpeed.npu_matmul_add_fp32", x.detach(), grad, into)
    close(into, right)


def test_tokens_go_to_their_experts_and_back() -> None:
    """In the order of the experts, cut off at the end; places lead back. Backward operators are autograd's."""
    tokens, indices, probs = wide(4, 3).requires_grad_(), torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]]), wide(4, 2).requires_grad_()
    slots = sorted(range(8), key=lambda n: (int(indices.flatten()[n]), n))
    for kept in (None, 0, 6, -2):
        permuted, places = run("NPU.npu_moe_token_permute", tokens, indices, kept)
        used = slots[: kept or None]
        close(permuted, torch.stack([tokens[n // 2] for n in used]))
        assert places.tolist() == [slots.index(n) for n in range(8)]
        back = run("NPU.npu_moe_token_unpermute", permuted, places, probs)
        right = torch.stack([sum((probs[t, c] * tokens[t] * (2 * t + c in used) for c in range(2)), torch.zeros(3)) for t in range(4)])
        close(back, right)
        grad = wide(*permuted.shape)
        right = torch.autograd.grad(permuted, tokens, grad, retain_graph=True)[0]
        close(run("Aten.npu_moe_token_permute_grad", tokens, grad, indices, places), right)
        rows = permuted.detach().requires_grad_()
        out = run("NPU.npu_moe_token_unpermute", rows, places, probs)
        grad = wide(*out.shape)
        close(run("Aten.npu_moe_token_unpermute_grad", rows, grad, places, probs), torch.autograd.grad(out, (rows, probs), grad))
    single = run("NPU.npu_moe_token_permute", tokens, indices[:, 0])
    close(run("NPU.npu_moe_token_unpermute", *single), tokens)
    with pytest.raises(NotChecked, match="padded_mode"):
        run("NPU.npu_moe_token_permute", tokens, indices, padded_mode=True)


def test_tokens_by_a_map() -> None:
    """Expert by expert, or each expert with the same number of tokens; weighted on the way back."""
    tokens, probs = wide(4, 3), wide(4, 3)
    route = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
    pairs = [(t, e) for e in range(3) for t in range(4) if route[t, e]]
    permuted, weights, places = run("NPU.npu_moe_token_permute_with_routing_map", tokens, route, probs=probs, num_out_tokens=8)
    close(permuted, torch.stack([tokens[t] for t, _ in pairs]))
    close(weights, torch.stack([probs[t, e] for t, e in pairs]))
    right = torch.stack([sum((probs[t, e] * tokens[t] for e in range(3) if route[t, e]), torch.zeros(3)) for t in range(4)])
    back = "NPU.npu_moe_token_unpermute_with_routing_map"
    close(run(back, permuted, places, [4, 3], probs=probs, routing_map=route), right)
    close(run(back, permuted, places, [4, 3], routing_map=route), 2 * tokens)
    first = [(t, e) for e in range(3) for t in [t for t in range(4) if route[t, e]][:2]]
    permuted, weights, places = run(
        "NPU.npu_moe_token_permute_with_routing_map", tokens, route, probs=probs, num_out_tokens=6, drop_and_pad=True
    )
    assert places.tolist() == [t for t, _ in first]
    close(weights, torch.stack([probs[t, e] for t, e in first]))
    right = torch.stack([sum((probs[t, e] * tokens[t] for s, e in first if s == t), torch.zeros(3)) for t in range(4)])
    close(run(back, permuted, places, [4, 3], probs=probs, drop_and_pad=True), right)
    with pytest.raises(NotChecked, match="different numbers of experts"):
        run(back, permuted, places, [4, 3], routing_map=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]]))


@pytest.mark.parametrize("select", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
def test_gates(select: int, norm: int) -> None:
    """The best experts of the best groups, row by row; the bias counts for the choice alone."""
    x, bias = wide(6, 12), wide(12)
    kwargs = {"bias": bias, "k_group": 2, "group_count": 4, "group_select_mode": select, "norm_type": norm, "routed_scaling_factor": 2.5}
    best, experts, every = run("NPU.npu_moe_gating_top_k", x, 3, out_flag=True, **kwargs)
    for row in range(6):
        weights = torch.softmax(x[row], -1) if norm == 0 else torch.sigmoid(x[row])
        score = (weights + bias).tolist()
        of_group = [sum(sorted(score[g * 3 : g * 3 + 3])[-1 - select :]) for g in range(4)]
        allowed = [e for g in sorted(range(4), key=lambda g: -of_group[g])[:2] for e in range(g * 3, g * 3 + 3)]
        chosen = sorted(allowed, key=lambda e: -score[e])[:3]
        assert experts[row].tolist() == chosen
        right = weights[chosen]
        close(best[row], 2.5 * (right / right.sum() if norm else right))
        close(every[row], weights)
    with pytest.raises(NotChecked, match="tid2eid"):
        run("NPU.npu_moe_gating_top_k", x, 3, input_ids=torch.zeros(6), tid2eid=torch.zeros(2, 3))


def test_second_version_of_the_softmax_gate() -> None:
    """The softmax of all, or of the best alone; a finished row has the number of experts."""
    x, finished = wide(4, 6), torch.tensor([False, True, False, False])
    values, indices = torch.softmax(x, -1).topk(2)
    best, experts, every = run("NPU.npu_moe_gating_top_k_softmax_v2", x, k=2, finished=finished, output_softmax=True)
    close((best, every), (values, torch.softmax(x, -1)))
    assert experts.tolist() == [[6, 6] if n == 1 else indices[n].tolist() for n in range(4)]
    best, experts = run("NPU.npu_moe_gating_top_k_softmax_v2", x, k=2, renorm=1, output_softmax=True)
    close(best, torch.softmax(x.topk(2).values, -1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, smoothing: float) -> None:
    """It is torch's, with class weights, an ignored class and smoothing, except for the shape [1]; with its gradient."""
    x, target, weight = wide(7, 5).requires_grad_(), torch.tensor([0, 1, 2, 3, 4, 1, 1]), torch.rand(5, dtype=torch.float64)
    kwargs: dict[str, Any] = {"weight": weight, "reduction": reduction, "ignore_index": 1, "label_smoothing": smoothing}
    right = functional.cross_entropy(x, target, **kwargs)
    loss, logs = run("NPU.npu_cross_entropy_loss", x, target, **kwargs)
    assert loss.shape == ((7,) if reduction == "none" else (1,))
    close(loss, right.reshape(loss.shape))
    close(logs, torch.log_softmax(x, -1).detach())
    grad = wide(*loss.shape)
    close(torch.autograd.grad(loss, x, grad)[0], torch.autograd.grad(right, x, grad.reshape(right.shape))[0])
    close(run("NPU.npu_cross_entropy_loss", x, target)[0], functional.cross_entropy(x, target).reshape(1))
    with pytest.raises(NotChecked, match="z loss"):
        run("NPU.npu_cross_entropy_loss", x, target, return_zloss=True)


def test_quantization() -> None:
    """What comes back differs by half a step at most; every row uses the whole range; rows of a group have its scales."""
    x, smooth = 3 * wide(2, 3, 8), wide(2, 8).abs() + 0.1
    y, scale = run("NPU.npu_dynamic_quant", x)
    assert y.dtype == torch.int8
    assert (y.abs().amax(-1) == 127).all()
    assert ((y * scale[..., None] - x).abs() <= scale[..., None] / 2 + 1e-12).all()
    grouped = run("NPU.npu_dynamic_quant", x, smooth_scales=smooth, group_index=torch.tensor([2, 6], dtype=torch.int32))
    rows = x.view(6, 8) * torch.cat((smooth[:1].expand(2, 8), smooth[1:].expand(4, 8)))
    close(grouped, run("NPU.npu_dynamic_quant", rows.view(2, 3, 8)))
    close(run("NPU.npu_dynamic_quant", x, smooth_scales=smooth[0]), run("NPU.npu_dynamic_quant", x * smooth[0]))
    y, scale, offset = run("NPU.npu_dynamic_quant_asymmetric", x)
    assert (y.amax(-1) == 127).all()
    assert (y.amin(-1) == -128).all()
    assert (((y - offset[..., None]) * scale[..., None] - x).abs() <= scale[..., None] / 2 + 1e-12).all()
    for kwargs in ({"dst_type": 291}, {"quant_mode": "pertensor"}, {"scale_alg": 1}):
        with pytest.raises(NotChecked):
            run("NPU.npu_dynamic_quant", x, **kwargs)


def test_the_optimizer_with_a_moving_average() -> None:
    """One step of MindSpeed's AdamW is torch's; the average follows."""
    p, g, m, v, s = wide(5), wide(5), wide(5), wide(5).square(), wide(5)
    for mode, kind in ((1, torch.optim.AdamW), (0, torch.optim.Adam)):
        weight = torch.nn.Parameter(p.clone())
        weight.grad = g.clone()
        optimizer = kind([weight], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        optimizer.step()
        step = torch.tensor([4])
        got = run("MindSpeed.npu_apply_fused_ema_adamw", g, p, m, v, s, step, 0.01, 0.999, 0.9, 0.99, 1e-8, mode, True, 0.1)
        close(got[0], weight.detach(), rtol=1e-6, atol=1e-7)
        close(got[3], 0.999 * s + 0.001 * got[0])


def test_every_formula_has_a_signature_and_takes_the_operators_names() -> None:
    """What a formula takes can be told before it runs, and its first argument has the operator's name too."""
    for name in FORMULAS:
        with pytest.raises(NotChecked, match="argument of_the_future is not known to the formula of x"):
            with_known_arguments("x", FORMULAS[name])(of_the_future=1)
    x = wide(2, 4)
    for first in ("self", "input", "x"):
        close(run("NPU.npu_swiglu", **{first: x}, dim=-1), functional.silu(x[:, :2]) * x[:, 2:])
    with pytest.raises(NotChecked, match="positional argument 3 is not known to the formula of npu_swiglu"):
        run("NPU.npu_swiglu", x, -1, 5)
    assert find("NPU.npu_gmm") is None
