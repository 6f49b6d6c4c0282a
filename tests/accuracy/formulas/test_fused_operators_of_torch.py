"""Formulas of fused operators agree with what torch has of the same, forward and backward; recorded results of them are judged."""

from __future__ import annotations

import math

import pytest
import torch
from call_records import Memory, wide
from torch.nn import functional

from msprobe_engine.accuracy.results import ERROR, PASS
from msprobe_integrations.torch.op_tools.accuracy.checker import Checker
from msprobe_integrations.torch.op_tools.accuracy.references import FORMULAS, activations, matmul, moe, moves, norms


def test_norms_and_activations() -> None:
    """RMS norm, layer norm, group norm with SiLU, SwiGLU, Mish, the fast GELU."""
    x, w, b = wide(2, 5, 8), wide(8), wide(8)
    y, rstd = norms.rms_norm(x, w, 1e-6)
    torch.testing.assert_close(y, functional.rms_norm(x, (8,), w, 1e-6))
    torch.testing.assert_close(rstd, (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5)
    torch.testing.assert_close(norms.layer_norm_eval(x, (8,), w, b), functional.layer_norm(x, (8,), w, b))
    torch.testing.assert_close(activations.swiglu(x), functional.silu(x[..., :4]) * x[..., 4:])
    torch.testing.assert_close(activations.mish(x), functional.mish(x))
    torch.testing.assert_close(activations.fast_gelu(x), x / (1 + torch.exp(-1.702 * x)))
    torch.testing.assert_close(matmul.linear(x, wide(3, 8)).shape, torch.Size((2, 5, 3)))
    image, scale, shift = wide(2, 4, 3, 3), wide(4), wide(4)
    torch.testing.assert_close(
        norms.group_norm_silu(image, scale, shift, 2)[0], functional.silu(functional.group_norm(image, 2, scale, shift))
    )


def test_rotary_and_softmax() -> None:
    """Both halves are turned, or pairs; a masked score weighs nothing."""
    x, angle = wide(2, 3, 4, 6), wide(2, 3, 4, 3)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.complex(angle.cos(), angle.sin())
    torch.testing.assert_close(activations.rotary_mul(x, cos, sin), torch.cat((turned.real, turned.imag), -1))
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.complex(angle.cos(), angle.sin())
    cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)
    torch.testing.assert_close(activations.rotary_mul(x, cos, sin, "interleave"), torch.view_as_real(pairs).flatten(-2))
    scores, mask = wide(2, 2, 5, 5).requires_grad_(), torch.ones(5, 5).triu(1).bool()
    y = activations.scaled_masked_softmax(scores, mask[None, None], 0.5)
    torch.testing.assert_close(y, torch.softmax((scores * 0.5).masked_fill(mask, -math.inf), -1))
    assert torch.equal(y, activations.scaled_masked_softmax(scores, torch.zeros(1, 1, 5, 5), 0.5, True))
    g = wide(2, 2, 5, 5)
    back = activations.scaled_masked_softmax_backward(g, y, mask[None, None], 0.5)
    torch.testing.assert_close(back, torch.autograd.grad(y, scores, g)[0])


def test_backward_operators() -> None:
    """What is recorded as a backward of its own is the gradient of the forward."""
    g, x, w = wide(2, 5, 8), wide(2, 5, 8).requires_grad_(), wide(8).requires_grad_()
    y, rstd = norms.rms_norm(x, w)
    torch.testing.assert_close(norms.rms_norm_backward(g, x, w, rstd), torch.autograd.grad(y, (x, w), g))
    half = wide(2, 5, 4)
    torch.testing.assert_close(FORMULAS["npu_swiglu_backward"](half, x, -1), torch.autograd.grad(activations.swiglu(x), x, half)[0])
    torch.testing.assert_close(FORMULAS["npu_fast_gelu_backward"](g, x), torch.autograd.grad(activations.fast_gelu(x), x, g)[0])
    cos, sin = wide(1, 5, 8), wide(1, 5, 8)
    dx, dcos, _ = FORMULAS["npu_rotary_mul_backward"](g, x, cos, sin)
    torch.testing.assert_close(dx, torch.autograd.grad(activations.rotary_mul(x, cos, sin), x, g)[0])
    assert dcos.shape == cos.shape
    weight = wide(3, 8).requires_grad_()
    out = functional.linear(x, weight)
    torch.testing.assert_close(matmul.linear_backward(out.detach(), x, weight), torch.autograd.grad(out, (x, weight), out.detach()))
    for first in (True, False):
        shape = (2, 20) if first else (10, 4)
        perm = (1, 0, 2) if first else (1, 0)
        source = (2, 5, 4) if first else (10, 4)
        flat = wide(2, 5, 4) if first else wide(40)
        moved = moves.confusion_transpose(flat, perm, (20, 2) if first else shape, first)
        back = moves.confusion_transpose_backward(moved, perm, source if first else shape, first)
        assert torch.equal(back.flatten(), flat.flatten())


def test_optimizers() -> None:
    """One step is that of torch's Adam and AdamW."""
    p, g, m, v = wide(5), wide(5), wide(5), wide(5).square()
    for kind, formula, extra in ((torch.optim.Adam, "npu_apply_adam", ()), (torch.optim.AdamW, "npu_apply_adam_w", (0.1,))):
        weight = torch.nn.Parameter(p.clone())
        weight.grad = g.clone()
        optimizer = kind([weight], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=extra[0] if extra else 0.0)
        optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        optimizer.step()
        # the optimizer divides the second moment before the root, the kernel of Adam after it, with eps that is not: almost the same
        power = 4 if kind is torch.optim.Adam else 3
        got = FORMULAS[formula](
            0.9**power, 0.99**power, 0.01, *extra, 0.9, 0.99, 1e-8, g, *((None, False, False) if extra else ()), out=(p, m, v)
        )
        torch.testing.assert_close(got[0], weight.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got[1], optimizer.state[weight]["exp_avg"])


def test_experts() -> None:
    """The best experts by the softmax, their numbers, and the numbers of the rows column by column."""
    x = wide(4, 6)
    weights, experts, rows = moe.moe_gating_top_k_softmax(x, None, 2)
    values, indices = torch.softmax(x, -1).topk(2)
    torch.testing.assert_close(weights, values)
    assert torch.equal(experts.long(), indices)
    assert rows.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    finished = torch.tensor([False, True, False, False])
    assert moe.moe_gating_top_k_softmax(x, finished, 2)[1][1].tolist() == [6, 6]
    assert torch.equal(moves.sort_v2(x, 1, True), torch.sort(x, dim=1, descending=True).values)


def test_results_of_an_npu_are_judged_elsewhere() -> None:
    """A dump with the tensors of an NPU's fused operator is checked on a machine without one: its results against the formula."""
    memory = Memory()
    x, g = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4, 4).bfloat16()
    y = activations.swiglu(x.float()).bfloat16()
    dx = torch.autograd.grad(activations.swiglu(x.float()), x, g.float())[0]
    for result, status in ((y, PASS), (y * 1.1, ERROR)):
        record, backward = memory.record((x,), {"dim": -1}, result), memory.backward(g, output=[dx])
        found = Checker(memory).check("NPU.npu_swiglu.0", record, backward).result
        assert (found.forward, found.backward) == (status, PASS)


@pytest.mark.slow
def test_recorded_attention_with_later_arguments() -> None:
    """A call of an NPU with the arguments of later releases is judged by attention, statistics of the softmax and gradients; one
    with an argument that no formula knows is not, and says so."""
    memory = Memory()
    q, k, v = (torch.randn(6, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    sink, g = torch.randn(2).requires_grad_(), torch.randn(6, 2, 16).bfloat16()
    kwargs = {"head_num": 2, "input_layout": "TND", "scale": 0.25, "actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6], "sink": sink}
    kwargs |= {"softmax_layout": "TND", "seed": 0, "offset": 0}
    formula = FORMULAS["npu_fusion_attention"]
    out, maximum, total = formula(*(t.float() for t in (q, k, v)), **kwargs)
    gradients = torch.autograd.grad(out, (q, k, v, sink), g.float())
    for factor, wrong in ((1.0, ""), (1.1, "output.0"), (1.1, "output.2"), (1.1, "backward")):
        sums, result = total * (factor if wrong == "output.2" else 1), out * (factor if wrong == "output.0" else 1)
        back = [t * (factor if wrong == "backward" else 1) for t in gradients]
        record = memory.record((q, k, v), kwargs, [result.bfloat16(), maximum.contiguous(), sums.contiguous(), torch.empty(0), 0, 0, 144])
        found = Checker(memory).check("NPU.npu_fusion_attention.0", record, memory.backward(g, output=back)).result
        assert (found.forward, found.backward) == (ERROR if "output" in wrong else PASS, ERROR if wrong == "backward" else PASS)
        bad = [t.name for t in found.tensors if t.status == ERROR]
        assert all(wrong in name for name in bad), found.message
        assert len(found.tensors) == 3 + 4
    record = memory.record((q, k, v), kwargs | {"of_the_future": 1}, [out])
    found = Checker(memory).check("NPU.npu_fusion_attention.0", record, None).result
    assert found.skipped
    assert found.message == "not checked: argument of_the_future is not known to the formula of npu_fusion_attention"
