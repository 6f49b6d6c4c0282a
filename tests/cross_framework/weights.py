"""Weights, tokens and sizes of the small transformer that both frameworks train; numpy only, so that either environment can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, HEADS, LAYERS, BATCH, TOKENS = 32, 16, 2, 2, 2, 8
EPSILON, RATE = 1e-5, 1e-3
Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def make(seed: int = 0) -> Arrays:
    """Every weight by the name it has in the plain model (``blocks.0.attn.q.weight``), float32; linear weights are (out, in)."""
    random = np.random.RandomState(seed)
    found: Arrays = {"emb.weight": _normal(random, VOCAB, HIDDEN, scale=1.0)}
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        _norm(found, random, f"{at}.ln1")
        for part in "qkvo":
            _linear(found, random, f"{at}.attn.{part}", HIDDEN, HIDDEN)
        _norm(found, random, f"{at}.ln2")
        _linear(found, random, f"{at}.mlp.up", HIDDEN, 4 * HIDDEN)
        _linear(found, random, f"{at}.mlp.down", 4 * HIDDEN, HIDDEN)
    _norm(found, random, "norm")
    _linear(found, random, "head", HIDDEN, VOCAB)
    return found


def tokens(step: int) -> tuple[Any, Any]:
    """int32 (BATCH, TOKENS): what goes in, and what should come out."""
    random = np.random.RandomState(1000 + step)
    text = random.randint(0, VOCAB, (BATCH, TOKENS + 1)).astype(np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def fused(weights: Arrays) -> Arrays:
    """The same with one linear layer ``attn.qkv`` (queries, keys, values) in place of three."""
    found = dict(weights)
    for layer in range(LAYERS):
        for kind in ("weight", "bias"):
            parts = [found.pop(f"blocks.{layer}.attn.{part}.{kind}") for part in "qkv"]
            found[f"blocks.{layer}.attn.qkv.{kind}"] = np.concatenate(parts)
    return found


def _linear(found: Arrays, random: np.random.RandomState, name: str, size: int, out: int) -> None:
    found[f"{name}.weight"] = _normal(random, out, size, scale=0.3)
    found[f"{name}.bias"] = _normal(random, out, scale=0.1)


def _norm(found: Arrays, random: np.random.RandomState, name: str) -> None:
    found[f"{name}.weight"] = 1 + _normal(random, HIDDEN, scale=0.1)
    found[f"{name}.bias"] = _normal(random, HIDDEN, scale=0.1)


def _normal(random: np.random.RandomState, *shape: int, scale: float) -> Any:
    return (random.randn(*shape) * scale).astype(np.float32)


def out_of(directory: Path | str) -> Path:
    """The directory, made."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    return path
