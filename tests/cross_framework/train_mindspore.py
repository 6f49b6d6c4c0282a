"""The small transformer in MindSpore, dumped by PrecisionDebugger: ``train_mindspore.py OUT LEVEL TASK STYLE STEPS [FAULT]``.

Styles: ``plain`` (nn.Dense, ops), ``mint`` (mint.nn.Linear, mint), ``primitive`` (operators as members of Cells), ``named`` (other names
for everything), ``fused`` (one layer for queries, keys and values), ``functions`` (activation as a function, normalization out of its
parts). A fault is one of `FAULTS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import mindspore as ms
import numpy as np
import weights as w
from mindspore import Parameter, Tensor, mint, nn, ops

from msprobe.mindspore import PrecisionDebugger

HEAD = w.HIDDEN // w.HEADS

FAULTS = {
    "": {},
    "default_epsilon": {"epsilon": 1e-7, "final_epsilon": 1e-7},
    "epsilon": {"last_epsilon": 1e-3},
    "final_epsilon": {"final_epsilon": 1e-2},
    "mask": {"diagonal": 2},
    "small_mask": {"mask": -5.0},
    "scale": {"scale": float(HEAD)},
    "transposed": {"transposed": "blocks.1.attn.q.weight"},
    "exchanged": {"exchanged": ("blocks.1.attn.k.weight", "blocks.1.attn.v.weight")},
    "gelu": {"gelu": True},
    "relu": {"activation": "relu"},
    "dropout": {"dropout": 0.2},
    "rate": {"rate": 2 * w.RATE},
    "betas": {"beta1": 0.8},
    "decay": {"decay": 0.1},
    "order": {"order": (1, 0)},
    "residual": {"residual": False},
    "bias": {"bias": False},
    "embedding_scale": {"embedding_scale": w.HIDDEN**0.5},
    "after": {"norm_after": True},
    "axis": {"axis": -2},
    "half": {"half": True},
    "heads": {"heads_first": True},
    "no_final_norm": {"final_norm": False},
    "smoothing": {"smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "frozen": {"frozen": "blocks.0.mlp.up.weight"},
    "cut": {"cut": True},
    "clipped": {"clip": 0.05},
    "tokens": {"shift": True},
}
"""What a fault changes of `GOOD`."""

GOOD: dict[str, Any] = {
    "epsilon": w.EPSILON, "last_epsilon": w.EPSILON, "final_epsilon": w.EPSILON, "mask": -1e9, "diagonal": 1, "scale": HEAD**0.5,
    "transposed": "", "exchanged": (), "gelu": False, "activation": "gelu", "dropout": 0.0, "rate": w.RATE, "beta1": 0.9, "decay": 0.0,
    "order": None, "residual": True, "bias": True, "embedding_scale": 1.0, "norm_after": False, "axis": -1, "half": False,
    "heads_first": False, "final_norm": True, "smoothing": 0.0, "reduction": "mean", "frozen": "", "cut": False, "clip": 0.0,
    "shift": False,
}  # fmt: skip

OTHER_NAMES = {
    "emb": "wte", "blocks": "layers", "ln1": "input_norm", "attn": "self_attention", "q": "query", "k": "key", "v": "value", "o": "dense",
    "ln2": "post_norm", "mlp": "ffn", "up": "fc_in", "act": "activation", "down": "fc_out", "norm": "final_ln", "head": "lm_head",
}  # fmt: skip


class Named(nn.Cell):
    """A Cell whose members have the names of the style."""

    def __init__(self, style: str, c: SimpleNamespace) -> None:
        super().__init__()
        self.style, self.c = style, c

    def put(self, **members: Any) -> None:
        for name, member in members.items():
            setattr(self, OTHER_NAMES.get(name, name) if self.style == "named" else name, member)

    def get(self, name: str) -> Any:
        return getattr(self, OTHER_NAMES.get(name, name) if self.style == "named" else name)

    def linear(self, size: int, out: int, bias: bool = True) -> Any:
        return mint.nn.Linear(size, out, bias=bias) if self.style == "mint" else nn.Dense(size, out, has_bias=bias)


class Norm(nn.Cell):
    """Layer normalization out of its parts."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.gamma, self.beta = Parameter(Tensor(np.ones(w.HIDDEN, np.float32))), Parameter(Tensor(np.zeros(w.HIDDEN, np.float32)))
        self.epsilon = epsilon

    def construct(self, x: Any) -> Any:
        mean = ops.mean(x, -1, keep_dims=True)
        variance = ops.mean(ops.square(x - mean), -1, keep_dims=True)
        return (x - mean) / ops.sqrt(variance + self.epsilon) * self.gamma + self.beta


class Attention(Named):
    def __init__(self, style: str, c: SimpleNamespace) -> None:
        super().__init__(style, c)
        if style == "fused":
            self.put(qkv=self.linear(w.HIDDEN, 3 * w.HIDDEN))
        else:
            self.put(**{part: self.linear(w.HIDDEN, w.HIDDEN) for part in "qkv"})
        self.put(o=self.linear(w.HIDDEN, w.HIDDEN, c.bias))
        self.drop = nn.Dropout(p=c.dropout) if c.dropout else None
        if style == "primitive":
            self.batch_matmul, self.batch_matmul_t = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
            self.softmax, self.transpose, self.reshape = ops.Softmax(c.axis), ops.Transpose(), ops.Reshape()
            self.add, self.div = ops.Add(), ops.Div()

    def heads(self, x: Any) -> Any:
        b, t, _ = x.shape
        if self.c.heads_first:
            return x.reshape(b, w.HEADS, t, HEAD)
        if self.style == "mint":
            return mint.transpose(mint.reshape(x, (b, t, w.HEADS, HEAD)), 1, 2)
        if self.style == "primitive":
            return self.transpose(self.reshape(x, (b, t, w.HEADS, HEAD)), (0, 2, 1, 3))
        return x.reshape(b, t, w.HEADS, HEAD).transpose(0, 2, 1, 3)

    def parts(self, x: Any) -> Any:
        if self.style == "fused":
            return ops.split(self.qkv(x), w.HIDDEN, axis=-1)
        return self.get("q")(x), self.get("k")(x), self.get("v")(x)

    def construct(self, x: Any, mask: Any) -> Any:
        q, k, v = [self.heads(part) for part in self.parts(x)]
        if self.style == "mint":
            scores = mint.div(mint.matmul(q, mint.transpose(k, -2, -1)), self.c.scale)
            attention = mint.nn.functional.softmax(mint.add(scores, mask), dim=self.c.axis)
        elif self.style == "primitive":
            scores = self.div(self.batch_matmul_t(q, k), self.c.scale)
            attention = self.softmax(self.add(scores, mask))
        else:
            scores = ops.matmul(q, k.swapaxes(-2, -1)) / self.c.scale
            attention = ops.softmax(scores + mask, axis=self.c.axis)
        if self.drop is not None:
            attention = self.drop(attention)
        if self.c.cut:
            attention = ops.stop_gradient(attention)
        if self.style == "mint":
            context = mint.reshape(mint.transpose(mint.matmul(attention, v), 1, 2), x.shape)
        elif self.style == "primitive":
            context = self.reshape(self.transpose(self.batch_matmul(attention, v), (0, 2, 1, 3)), x.shape)
        else:
            context = ops.matmul(attention, v).transpose(0, 2, 1, 3).reshape(x.shape)
        return self.get("o")(context)


class Mlp(Named):
    def __init__(self, style: str, c: SimpleNamespace) -> None:
        super().__init__(style, c)
        self.put(up=self.linear(w.HIDDEN, 4 * w.HIDDEN), down=self.linear(4 * w.HIDDEN, w.HIDDEN))
        if style != "functions":
            self.put(act=nn.ReLU() if c.activation == "relu" else nn.GELU(c.gelu))
        if c.half:
            self.get("down").to_float(ms.float16)

    def construct(self, x: Any) -> Any:
        x = self.get("up")(x)
        x = ops.gelu(x) if self.style == "functions" else self.get("act")(x)
        return self.get("down")(x)


class Block(Named):
    def __init__(self, style: str, c: SimpleNamespace, last: bool) -> None:
        super().__init__(style, c)
        attention, mlp = (SelfAttention, FeedForward) if style == "named" else (Attention, Mlp)
        self.put(ln1=norm(style, c.epsilon), attn=attention(style, c), ln2=norm(style, c.last_epsilon if last else c.epsilon))
        self.put(mlp=mlp(style, c))

    def construct(self, x: Any, mask: Any) -> Any:
        ln1, attn, ln2, mlp = (self.get(name) for name in ("ln1", "attn", "ln2", "mlp"))
        if self.c.norm_after:
            x = ln1(x + attn(x, mask))
        else:
            x = x + attn(ln1(x), mask)
        return x + mlp(ln2(x)) if self.c.residual else mlp(ln2(x))


class SelfAttention(Attention):
    """Another name for it."""


class FeedForward(Mlp):
    """Another name for it."""


class Layer(Block):
    """Another name for it."""


def norm(style: str, epsilon: float) -> Any:
    return Norm(epsilon) if style == "functions" else nn.LayerNorm((w.HIDDEN,), epsilon=epsilon)


class Net(Named):
    def __init__(self, style: str, c: SimpleNamespace) -> None:
        super().__init__(style, c)
        block = Layer if style == "named" else Block
        self.put(emb=nn.Embedding(w.VOCAB, w.HIDDEN))
        self.put(blocks=nn.CellList([block(style, c, layer == w.LAYERS - 1) for layer in range(w.LAYERS)]))
        self.put(norm=norm(style, c.final_epsilon), head=self.linear(w.HIDDEN, w.VOCAB))

    def construct(self, ids: Any, mask: Any) -> Any:
        x = self.get("emb")(ids)
        if self.c.embedding_scale != 1.0:
            x = x * self.c.embedding_scale
        blocks = self.get("blocks")
        for block in [blocks[at] for at in self.c.order] if self.c.order else blocks:
            x = block(x, mask)
        return self.get("head")(self.get("norm")(x) if self.c.final_norm else x)


def fill(net: Any, style: str, c: SimpleNamespace) -> None:
    """Give the net its weights."""
    values = w.make()
    if c.transposed:
        values[c.transposed] = np.ascontiguousarray(values[c.transposed].T)
    if c.exchanged:
        one, two = c.exchanged
        values[one], values[two] = values[two], values[one]
    values = w.fused(values) if style == "fused" else values
    back = {other: name for name, other in OTHER_NAMES.items()} if style == "named" else {}
    for parameter in net.trainable_params():
        parts = [back.get(part, part) for part in parameter.name.split(".")]
        name = ".".join(parts).replace("gamma", "weight").replace("beta", "bias").replace("embedding_table", "weight")
        parameter.set_data(Tensor(values[name]))
        if name == c.frozen:
            parameter.requires_grad = False


def main(out: str, level: str, task: str, style: str, steps: int, fault: str = "") -> None:
    c = SimpleNamespace(**(GOOD | FAULTS[fault]))
    ms.set_seed(1)
    net = Net(style, c)
    net.set_train()
    fill(net, style, c)
    trained = net.trainable_params()
    optimizer = nn.Adam(trained, learning_rate=c.rate, beta1=c.beta1, weight_decay=c.decay)
    mask = Tensor(np.triu(np.full((w.TOKENS, w.TOKENS), c.mask, np.float32), c.diagonal))

    def forward(ids: Any, labels: Any) -> Any:
        logits = net(ids, mask)
        return ops.cross_entropy(logits.reshape(-1, w.VOCAB), labels.reshape(-1), reduction=c.reduction, label_smoothing=c.smoothing)

    step_of = ms.value_and_grad(forward, None, trained)
    config = w.out_of(out) / "config.json"
    settings = {
        "task": task,
        "dump_path": out,
        "rank": [],
        "step": [],
        "level": level,
        task: {"scope": [], "list": [], "data_mode": ["all"]},
    }
    config.write_text(json.dumps(settings))
    debugger = PrecisionDebugger(config_path=str(config))
    for step in range(steps):
        ids, labels = w.tokens(step)
        if c.shift:
            ids = np.roll(ids, 1, axis=1)
        debugger.start(model=net)
        loss, gradients = step_of(Tensor(ids), Tensor(labels))
        debugger.stop()
        if c.clip:
            gradients = ops.clip_by_global_norm(gradients, c.clip)
        optimizer(gradients)
        debugger.step()
        print(step, float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), *sys.argv[6:])
