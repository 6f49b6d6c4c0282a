"""Formulas of fused attention against attention written out, query by query, in float64; gradients against autograd of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_records import run_formula as run
from call_records import wide

from msprobe_integrations.torch.op_tools.accuracy.references.formula import NotChecked

HEADS, KEY_HEADS, SIZE, VALUE_SIZE, ROWS, COLUMNS = 4, 2, 6, 4, 5, 7
Counts = Callable[[int, int, int], bool]
"""Does a key count: (batch, query, key)."""


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, counts: Counts | None = None, bias: Any = None,
    sink: torch.Tensor | None = None, kept: torch.Tensor | None = None, first_scaled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[batch, heads, queries, size]: a sum over the keys that count, for each query."""
    batches = []
    for b in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            shared = h * k.shape[1] // q.shape[1]
            rows = []
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if counts is None or counts(b, i, j)]
                scores = [(q[b, h, i] * k[b, shared, j]).sum() for j in keys]
                added = [0.0 if bias is None else bias[b, h, i, j] for j in keys]
                scores = [s * scale + a if first_scaled else (s + a) * scale for s, a in zip(scores, added)]
                every = torch.stack([*scores, *([] if sink is None else [sink[h]])]) if keys else None
                out = torch.zeros(v.shape[-1], dtype=v.dtype)
                for j, score in zip(keys, scores):
                    assert every is not None
                    weight = (score - every.logsumexp(0)).exp()
                    out = out + weight * v[b, shared, j] * (1.0 if kept is None else kept[b, h, i, j])
                rows.append(out)
            heads.append(torch.stack(rows))
        batches.append(torch.stack(heads))
    return torch.stack(batches)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    return x if layout == "BSND" else x.flatten(2) if layout == "BSH" else x.flatten(2).transpose(0, 1)


def inputs(batch: int = 2, rows: int = ROWS, columns: int = COLUMNS) -> list[torch.Tensor]:
    shapes = ((HEADS, rows, SIZE), (KEY_HEADS, columns, SIZE), (KEY_HEADS, columns, VALUE_SIZE))
    return [wide(batch, *shape).requires_grad_() for shape in shapes]


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_MASK = torch.cat((TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, 2048)))
SHIFT = COLUMNS - ROWS
RANDOM = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) < 0.3
RANDOM[:, 2] = False
MASKS: dict[str, tuple[dict[str, Any], Counts | None]] = {
    "none": ({}, None),
    "a mode without a mask": ({"sparse_mode": 3, "pre_tokens": 1, "next_tokens": 0}, None),
    "mask": ({"atten_mask": RANDOM, "sparse_mode": 1}, lambda _b, i, j: not RANDOM[i, j]),
    "mask of integers": ({"atten_mask": RANDOM.byte()[None, None]}, lambda _b, i, j: not RANDOM[i, j]),
    "causal": ({"atten_mask": TRIANGLE, "sparse_mode": 2}, lambda _b, i, j: j <= i),
    "bottom right": ({"atten_mask": TRIANGLE, "sparse_mode": 3}, lambda _b, i, j: j <= i + SHIFT),
    "band": (
        {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0},
        lambda _b, i, j: i + SHIFT - 3 <= j <= i + SHIFT,
    ),
    "prefix": ({"atten_mask": PREFIX_MASK, "sparse_mode": 6, "prefix": [3, 5]}, lambda b, i, j: j <= i + SHIFT or j < (3, 5)[b]),
}


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("case", MASKS)
def test_layouts_and_masks(layout: str, case: str) -> None:
    """In every layout and every mode of masks, with shared heads and shorter values, it is the sum over the keys that count."""
    if layout in ("BSH", "BSND") and case not in ("none", "band"):
        return  # layouts and masks have nothing to do with each other
    kwargs, counts = MASKS[case]
    q, k, v = inputs()
    got = run("NPU.npu_fusion_attention_v2", *(laid_out(t, layout) for t in (q, k, v)), HEADS, layout, scale=0.3, **kwargs)
    torch.testing.assert_close(got[0], laid_out(by_hand(q, k, v, 0.3, counts), layout))
    assert got[1].shape == got[2].shape == (2, HEADS, ROWS, 8)
    assert not got[1].requires_grad
    assert not got[2].requires_grad


def test_statistics_of_the_softmax() -> None:
    """Maximum and sum of the exponentials, eight times each, the sink among them."""
    q, k, v = inputs()
    sink = wide(HEADS)
    scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    _, maximum, total = run("NPU.npu_fusion_attention", q, k, v, HEADS, "BNSD", scale=0.3, sink=sink)
    every = torch.cat((scores, sink[None, :, None, None].expand(2, HEADS, ROWS, 1)), -1)
    torch.testing.assert_close(maximum, every.amax(-1, keepdim=True).expand(-1, -1, -1, 8))
    torch.testing.assert_close(total.log() + maximum, every.logsumexp(-1, keepdim=True).expand(-1, -1, -1, 8))


@pytest.mark.parametrize("name", ["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"])
@pytest.mark.parametrize("what", ["bias", "row of bias", "bias after the scale", "sink", "dropout"])
def test_what_changes_the_scores(name: str, what: str) -> None:
    """Bias, sink and a dropout mask of bits mean what the documentation says, in all versions that have them."""
    q, k, v = inputs()
    expected: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}
    if "bias" in what:
        pse = wide(2, HEADS, 1 if what == "row of bias" else ROWS, COLUMNS)
        kwargs, expected = {"pse": pse}, {"bias": pse.expand(2, HEADS, ROWS, COLUMNS)}
        if what == "bias after the scale":
            kwargs["pse_type"], expected["first_scaled"] = 0, True
    elif what == "sink":
        kwargs = expected = {"sink": wide(HEADS)}
    else:
        kept = torch.rand(2, HEADS, ROWS, COLUMNS) < 0.8
        bits = torch.cat((kept.flatten(), torch.zeros(-kept.numel() % 128, dtype=torch.bool))).view(-1, 8).int()
        mask = (bits << torch.arange(8)).sum(1).to(torch.uint8)
        kwargs, expected = {"keep_prob": 0.8, "dropout_mask": mask, "seed": 1, "offset": 2}, {"kept": kept / 0.8}
    if (what == "dropout" and name.endswith("v3")) or ("pse_type" in kwargs and not name.endswith("v2")):
        with pytest.raises(NotChecked, match="is not known to the formula"):
            run(f"NPU.{name}", q, k, v, HEADS, "BNSD", **kwargs)
        return
    got = run(f"NPU.{name}", q, k, v, HEADS, "BNSD", scale=0.3, **kwargs)
    torch.testing.assert_close(got[0], by_hand(q, k, v, 0.3, **expected))


ENDS: dict[str, Any] = {"actual_seq_qlen": [2, 2, 5, 9], "actual_seq_kvlen": [3, 4, 8, 10]}
"""Of packed sequences: with 2, 0, 3 and 4 queries and 3, 1, 4 and 2 keys."""


WINDOWS = {4: (5, 0), 7: (6, -1), 8: (4, 1)}
"""By mode: how far queries see before them and behind."""


def packed_counts(mode: int, number: int, rows: int, columns: int) -> Counts | None:
    """Which keys of a packed sequence count, with the window of `WINDOWS`."""
    corner = columns - rows
    before, behind = WINDOWS.get(mode, (0, 0))
    band: Counts = lambda _b, i, j: i + corner - before <= j <= i + corner + behind  # noqa: E731
    left: Counts = lambda _b, i, j: j <= i  # noqa: E731
    right: Counts = lambda _b, i, j: j <= i + corner  # noqa: E731
    return {0: None, 2: left, 3: right, 4: band, 7: band if number == 3 else right, 8: band if number == 0 else left}[mode]


@pytest.mark.parametrize("mode", [0, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["npu_fusion_attention_v2", "npu_fusion_attention_v3"])
def test_packed_sequences(mode: int, name: str) -> None:
    """Layout TND: every sequence sees itself alone; statistics stand head by head in each, or by `softmax_layout` token by token.
    Where nothing counts for a query (more queries than keys) its result is 0."""
    q, k, v = wide(9, HEADS, SIZE), wide(10, KEY_HEADS, SIZE), wide(10, KEY_HEADS, VALUE_SIZE)
    ends = {key: torch.tensor(value) for key, value in ENDS.items()} if name.endswith("v3") else ENDS
    names = ("pre_tockens", "next_tockens") if name.endswith("v3") else ("pre_tokens", "next_tokens")
    window = dict(zip(names, WINDOWS.get(mode, ())))
    mask = {} if mode == 0 else {"atten_mask": TRIANGLE, "sparse_mode": mode}
    got = run(f"NPU.{name}", q, k, v, HEADS, "TND", scale=0.3, **ends, **mask, **window)
    by_token = run(f"NPU.{name}", q, k, v, HEADS, "TND", scale=0.3, softmax_layout="TND", **ends, **mask, **window)
    starts = zip([0, *ENDS["actual_seq_qlen"]], ENDS["actual_seq_qlen"], [0, *ENDS["actual_seq_kvlen"]], ENDS["actual_seq_kvlen"])
    for number, (q0, q1, k0, k1) in enumerate(starts):
        if q0 == q1:
            continue
        parts = (t[None].transpose(1, 2) for t in (q[q0:q1], k[k0:k1], v[k0:k1]))
        expected = by_hand(*parts, 0.3, packed_counts(mode, number, q1 - q0, k1 - k0))
        torch.testing.assert_close(got[0][q0:q1], expected[0].transpose(0, 1))
    if mode == 0:
        assert got[1].shape == by_token[1].shape == (9, HEADS, 8)
        for q0, q1 in ((0, 2), (2, 5), (5, 9)):
            torch.testing.assert_close(got[1][q0:q1].reshape(HEADS, q1 - q0, 8), by_token[1][q0:q1].transpose(0, 1))


def test_positions_apart() -> None:
    """`query_rope` and `key_rope` add their products, in packed sequences."""
    q, k, v = wide(5, HEADS, SIZE), wide(5, KEY_HEADS, SIZE), wide(5, KEY_HEADS, SIZE)
    rope_q, rope_k = wide(5, HEADS, 3), wide(5, KEY_HEADS, 3)
    ends = {"actual_seq_qlen": [5], "actual_seq_kvlen": [5]}
    got = run("NPU.npu_fusion_attention_v2", q, k, v, HEADS, "tnd", scale=0.3, query_rope=rope_q, key_rope=rope_k, **ends)
    both = torch.cat((q, rope_q), -1), torch.cat((k, rope_k), -1), v
    expected = by_hand(*(t[None].transpose(1, 2) for t in both), 0.3)
    torch.testing.assert_close(got[0], expected[0].transpose(0, 1))


@pytest.mark.parametrize("kept", ["kept", "computed again"])
@pytest.mark.parametrize("layout", ["BSH", "TND", "TND by token"])
def test_backward_operators(layout: str, kept: str) -> None:
    """Gradients from kept statistics are those of autograd through the sums written out: with shared heads, bias, mask and sink."""
    pack = layout.startswith("TND")
    q, k, v = inputs(1)
    sink, pse = wide(HEADS).requires_grad_(), wide(1, HEADS, ROWS, COLUMNS).requires_grad_()
    expected = by_hand(q, k, v, 0.3, lambda _b, i, j: j <= i + SHIFT, pse, sink)
    grad = wide(*expected.shape)
    found = torch.autograd.grad(expected, (q, k, v, pse, sink), grad)
    kwargs: dict[str, Any] = {"atten_mask": TRIANGLE, "sparse_mode": 3, "sink": sink, "pse": pse.flatten() if pack else pse}
    if pack:
        kwargs |= {"actual_seq_qlen": [ROWS], "actual_seq_kvlen": [COLUMNS], "softmax_layout": "TND" if "by" in layout else ""}

    def put(x: torch.Tensor) -> torch.Tensor:
        return x[0].transpose(0, 1) if pack else laid_out(x, "BSH")

    heads = (HEADS, "TND" if pack else "BSH")
    out, maximum, total = run("NPU.npu_fusion_attention", put(q), put(k), put(v), *heads, scale=0.3, **kwargs)
    torch.testing.assert_close(out, put(expected))
    statistics = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out} if kept == "kept" else {}
    args = (put(q), put(k), put(v), put(grad), *heads)
    of_v1 = run("NPU.npu_fusion_attention_grad", *args, scale_value=0.3, **statistics, **kwargs)
    of_v2 = run("NPU.npu_fusion_attention_grad_v2", *args, scale_value=0.3, **statistics, **kwargs)
    for got in (of_v1, (*of_v2[:4], of_v2[6])):
        for mine, right in zip(got[:3], found[:3]):
            torch.testing.assert_close(mine, put(right))
        torch.testing.assert_close(got[3].view(pse.shape), found[3])
        torch.testing.assert_close(got[4], found[4])
    assert of_v2[4] is of_v2[5] is None


def test_autograd_of_the_forward() -> None:
    """The gradients of a recorded forward are those of the sums written out, that of the sink too."""
    q, k, v = inputs(1)
    sink = wide(HEADS).requires_grad_()
    expected = by_hand(q, k, v, 0.3, None, None, sink)
    out = run("NPU.npu_fusion_attention", q, k, v, HEADS, "BNSD", scale=0.3, sink=sink)[0]
    grad = wide(*out.shape)
    for mine, right in zip(*(torch.autograd.grad(t, (q, k, v, sink), grad) for t in (out, expected))):
        torch.testing.assert_close(mine, right)


def test_queries_for_which_nothing_counts() -> None:
    """Where the operator makes the mask, or looks for such queries, their result is 0; else all keys count alike, and statistics are not
    compared."""
    q, k, v = inputs(1, 5, 3)
    got = run("NPU.npu_fusion_attention", q, k, v, HEADS, "BNSD", atten_mask=TRIANGLE, sparse_mode=3)
    torch.testing.assert_close(got[0], by_hand(q, k, v, 1.0, lambda _b, i, j: j <= i - 2))
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[1] = True
    looked_for = run("NPU.npu_fusion_attention", q, k, v, HEADS, "BNSD", atten_mask=mask, inner_precise=2)
    assert len(got) == len(looked_for) == 1
    torch.testing.assert_close(looked_for[0], by_hand(q, k, v, 1.0, lambda _b, i, _j: i != 1))
    alike = run("NPU.npu_fusion_attention", q, k, v, HEADS, "BNSD", atten_mask=mask)[0]
    torch.testing.assert_close(alike[0, 0, 1], v[0, 0].mean(0))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "argument of a later release": ({"new_one": 1}, "argument new_one is not known to the formula of npu_fusion_attention_v2"),
    "random dropout": ({"keep_prob": 0.9}, "draws random numbers"),
    "layout": ({"input_layout": "XYZ"}, "input_layout 'XYZ'"),
    "layout of statistics": ({"softmax_layout": "SBH"}, "softmax_layout 'SBH'"),
    "bias that the operator makes": ({"pse": torch.ones(HEADS), "pse_type": 2}, "pse_type 2"),
    "compressed bias": ({"pse": torch.ones(1, HEADS, 3, COLUMNS)}, "compressed form"),
    "mode": ({"atten_mask": TRIANGLE, "sparse_mode": 9}, "sparse_mode 9"),
    "mode of packed sequences": ({"atten_mask": TRIANGLE, "sparse_mode": 7}, "layout TND alone"),
    "no triangle": ({"atten_mask": RANDOM, "sparse_mode": 2}, "not the compressed one"),
    "mask of another shape": ({"atten_mask": RANDOM[:2]}, "atten_mask of shape"),
    "mask against window": ({"atten_mask": RANDOM, "next_tokens": 0}, "outside of pre_tokens and next_tokens"),
    "mask against prefix": ({"atten_mask": RANDOM, "sparse_mode": 5, "prefix": [1, 1]}, "not that of its prefix"),
    "short dropout mask": ({"keep_prob": 0.5, "dropout_mask": torch.ones(2, dtype=torch.uint8)}, "too short"),
    "half a rope": ({"query_rope": torch.ones(1)}, "query_rope without key_rope"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_formula_says_so(case: str) -> None:
    """Nothing is passed over: an unknown argument, or a value without a formula, is named."""
    wrong, text = REFUSED[case]
    q, k, v = inputs()
    with pytest.raises(NotChecked, match=f"not checked: .*{text}"):
        run("NPU.npu_fusion_attention_v2", q, k, v, **({"head_num": HEADS, "input_layout": "BNSD"} | wrong))


def test_parts_of_a_ring() -> None:
    """Two parts of the keys, updated, are the attention of all keys: in both layouts, by the names of torch_npu and of MindSpeed."""
    q, k, v = wide(2, HEADS, ROWS, SIZE), wide(2, HEADS, COLUMNS, SIZE), wide(2, HEADS, COLUMNS, SIZE)
    halves = [(k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:])]
    parts = [run("NPU.npu_fusion_attention", *(laid_out(t, "SBH") for t in (q, *half)), HEADS, "SBH", scale=0.3) for half in halves]
    whole = run("NPU.npu_fusion_attention", *(laid_out(t, "SBH") for t in (q, k, v)), HEADS, "SBH", scale=0.3)
    for kind in ("NPU", "MindSpeed"):
        torch.testing.assert_close(run(f"{kind}.npu_ring_attention_update", *parts[0], *parts[1]), whole)
    tokens, ends = [t[0].transpose(0, 1) for t in (q, k, v)], {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [3, 7]}
    for layout in ("", "TND"):
        kwargs: dict[str, Any] = {"softmax_layout": layout, "scale": 0.3, **ends}
        whole = run("NPU.npu_fusion_attention", *tokens, HEADS, "TND", **kwargs)
        again = run(
            "NPU.npu_ring_attention_update",
            *whole,
            *whole,
            actual_seq_qlen=torch.tensor([2, 5]),
            input_layout="TND",
            input_softmax_layout=layout,
        )
        torch.testing.assert_close(again[0], whole[0])  # each key twice: the same attention, twice the sum
        torch.testing.assert_close(again[2], 2 * whole[2])
        if not layout:
            begun = run("MindSpeed.npu_ring_attention_update", *whole, *whole, torch.tensor([0, 2, 5]), "TND")
            torch.testing.assert_close(begun, again)
    other = run("NPU.npu_fusion_attention", tokens[0], tokens[1].flip(0), tokens[2].flip(0), HEADS, "TND", scale=0.3, **ends)
    first = run("NPU.npu_fusion_attention", *tokens, HEADS, "TND", scale=0.3, **ends)
    got = run("NPU.npu_ring_attention_update", *first, *other, actual_seq_qlen=torch.tensor([2, 5]), input_layout="TND")
    for q0, q1, k0, k1 in ((0, 2, 0, 3), (2, 5, 3, 7)):
        keys = [torch.cat((t[k0:k1], t.flip(0)[k0:k1])) for t in tokens[1:]]
        expected = by_hand(*(t[None].transpose(1, 2) for t in (tokens[0][q0:q1], *keys)), 0.3)
        torch.testing.assert_close(got[0][q0:q1], expected[0].transpose(0, 1))
    assert math.isfinite(float(got[1].sum()))
