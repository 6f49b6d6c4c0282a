"""What differences look like: planted changes, compared for real, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_arrays import Array, checkpoint_of

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.align.parameters.mapping_file import mapping_of
from msprobe_engine.find.checkpoint.compare import compare
from msprobe_engine.find.checkpoint.hints import explain
from msprobe_engine.measure.stored.threads import plan

FACTS = {"heads": 4, "kv_heads": 2, "head_dim": 8}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
Change = Callable[[dict[str, Array]], None]


def _weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (64, 32),
        QKV: (64, 32),
        "decoder.layers.0.self_attention.linear_proj.weight": (32, 32),
        FC1: (96, 32),
        FC2: (32, 48),
        "decoder.final_layernorm.weight": (32,),
    }
    for layer in (1, 2):
        for e in range(3):
            shapes[f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_fc1.weight"] = (48, 32)
            shapes[f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_fc2.weight"] = (32, 24)
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {f"exp_avg|{name}": value * np.float32(0.01) for name, value in found.items()}


def _hints(tmp_path: Path, change: Change) -> tuple[dict[str, str], list[str]]:
    """Hints of the tensors that differ, and those of all."""
    a, b = _weights(), _weights()
    change(b)
    alignment = align_checkpoints(checkpoint_of(a, tmp_path / "a", FACTS), checkpoint_of(b, tmp_path / "b", FACTS))
    results, _ = compare(alignment.pairs, plan(256, 1))
    notes = explain(alignment, results)
    return {r.name: r.hint for r in results if not r.equal}, notes


def _flip(values: Array, at: tuple[int, ...], bit: int) -> None:
    values.view(np.uint32)[at] ^= np.uint32(1 << bit)


def _grouped(q: Array, k: Array, v: Array) -> Array:
    return np.concatenate([np.concatenate([q[g * 16 : g * 16 + 16], k[g * 8 : g * 8 + 8], v[g * 8 : g * 8 + 8]]) for g in range(2)])


def _parts(qkv: Array) -> tuple[Array, Array, Array]:
    groups = [qkv[:32], qkv[32:]]
    return tuple(np.concatenate([g[s] for g in groups]) for s in (slice(0, 16), slice(16, 24), slice(24, 32)))  # type: ignore[return-value]


def _transpose_q(b: dict[str, Array]) -> None:
    q, k, v = _parts(b[QKV])
    b[QKV] = _grouped(np.ascontiguousarray(q.T), k, v)


def _exchange_kv(b: dict[str, Array]) -> None:
    q, k, v = _parts(b[QKV])
    b[QKV] = _grouped(q, v, k)


def _blocks(b: dict[str, Array]) -> None:
    b[QKV] = np.concatenate(_parts(b[QKV]))


def _rotary_q(b: dict[str, Array]) -> None:
    q, k, v = _parts(b[QKV])
    b[QKV] = _grouped(q.reshape(4, 2, 4, 32).transpose(0, 2, 1, 3).reshape(32, 32), k, v)


def _set(name: str, make: Callable[[Array], Array]) -> Change:
    def change(b: dict[str, Array]) -> None:
        b[name] = np.ascontiguousarray(make(b[name]))

    return change


def _to_bf16(x: Array) -> Array:
    return ((x.view(np.uint32) + 0x7FFF + ((x.view(np.uint32) >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


NORM = "decoder.final_layernorm.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
CASES: list[tuple[str, Change, str, str]] = [
    ("one bit", lambda b: _flip(b[FC2], (3, 7), 30), FC2, "one flipped bit: bit 30 (exponent) of the element at [3, 7]"),
    ("sign", lambda b: _flip(b[FC2], (0, 0), 31), FC2, "one flipped bit: bit 31 (sign)"),
    ("transposed", _set(PROJ, lambda x: x.T), PROJ, "equal when transposed"),
    ("transposed q", _transpose_q, QKV, "only q differs: equal when transposed"),
    ("k and v", _exchange_kv, QKV, "q, v, k"),
    ("blocks", _blocks, QKV, "equal when the golden run is read as blocks q, k, v and the run by key/value head"),
    ("rotary", _rotary_q, QKV, "only q differs: equal when rotary pairs of rows become halves of each head"),
    ("gate and up", _set(FC1, lambda x: np.concatenate([x[48:], x[:48]])), FC1, "equal with gate and up exchanged"),
    ("in turns", _set(FC1, lambda x: x.reshape(2, 48, 32).transpose(1, 0, 2).reshape(96, 32)), FC1, "its halves take turns row by row"),
    ("rows", _set(FC2, lambda x: np.roll(x, 5, 0)), FC2, "equal with its rows in another order: shifted by 5"),
    ("columns", _set(FC2, lambda x: x[:, ::-1]), FC2, "equal with its columns in another order"),
    ("scaled", _set(FC2, lambda x: x * np.float32(0.5)), FC2, "the golden run is the run times 0.5"),
    ("sign turned", _set(FC2, lambda x: -x), FC2, "the golden run is the run with the sign turned"),
    ("one added", _set(NORM, lambda x: x + 1), NORM, "the golden run is the run plus 1 (a norm that is stored as what is added to 1?)"),
    ("zeros", _set(FC2, np.zeros_like), FC2, "the golden run is all zeros"),
    ("rounded", _set(FC2, _to_bf16), FC2, "the golden run holds what the other side holds rounded to bfloat16"),
    ("half", _set(FC2, lambda x: x.astype(np.float16)), FC2, "the same, rounded to float16"),
    ("not a number", _set(FC2, lambda x: np.where(x > 2, np.float32("nan"), x)), FC2, "NaN in 0 elements of the run and"),
    ("noise", _set(FC2, lambda x: x * np.float32(1.001) + np.float32(0.01)), FC2, ""),
]


@pytest.mark.parametrize(("change", "name", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_planted_change_is_named(tmp_path: Path, change: Change, name: str, words: str) -> None:
    """Exactly the changed tensor differs, and the hint says how; of what is not understood nothing is said."""
    hints, _ = _hints(tmp_path, change)
    assert list(hints) == [name]
    assert words in hints[name] if words else not hints[name]


def test_exchanged_experts_and_layers_are_named_once_for_all_their_tensors(tmp_path: Path) -> None:
    """Two experts that changed places are one sentence, with the layer; so are layers."""

    def experts(b: dict[str, Array]) -> None:
        for leaf in ("linear_fc1.weight", "linear_fc2.weight"):
            one, two = (f"decoder.layers.1.mlp.experts.local_experts.{e}.{leaf}" for e in (0, 2))
            for state in ("", "exp_avg|"):
                b[state + one], b[state + two] = b[state + two], b[state + one]

    hints, notes = _hints(tmp_path, experts)
    assert len(hints) == 8
    assert all(hint.startswith("exchanged with") for hint in hints.values())
    assert notes == ["layer 1: experts 0 and 2 are exchanged (8 tensors)"]

    def layers(b: dict[str, Array]) -> None:
        for key in [k for k in b if "layers.1." in k]:
            other = key.replace("layers.1.", "layers.2.")
            b[key], b[other] = b[other], b[key]

    (tmp_path / "layers").mkdir()
    _, notes = _hints(tmp_path / "layers", layers)
    assert notes == ["layers 1 and 2 are exchanged (24 tensors)"]


def test_layers_that_moved_on_are_one_sentence(tmp_path: Path) -> None:
    """A layer that is missing at the beginning shifts all others: a range, not a line for each."""
    rng = np.random.default_rng(2)
    layers = [rng.standard_normal((4, 4)).astype(np.float32) for _ in range(7)]
    a = {f"decoder.layers.{n}.mlp.linear_fc2.weight": layers[n] for n in range(6)}
    b = {f"decoder.layers.{n}.mlp.linear_fc2.weight": layers[n + 1] for n in range(6)}
    alignment = align_checkpoints(checkpoint_of(a, tmp_path / "a"), checkpoint_of(b, tmp_path / "b"))
    results, _ = compare(alignment.pairs, plan(256, 1))
    assert explain(alignment, results) == ["layers 1 to 5 of the run are layers 0 to 4 of the golden run (5 tensors)"]


def test_one_file_that_holds_all_differences_is_named(tmp_path: Path) -> None:
    """A shard of another save: each tensor it holds differs, no other does."""
    from dataclasses import replace

    from msprobe_engine.formats.checkpoint.model import concatenate_tensors

    def sharded(directory: Path, second: float) -> Any:
        directory.mkdir()
        rows = {name: value for name, value in _weights().items() if value.ndim == 2}
        first = checkpoint_of({n: v[: len(v) // 2] for n, v in rows.items()}, directory / "rank0")
        last = checkpoint_of({n: v[len(v) // 2 :] + np.float32(second) * ("exp_avg" in n) for n, v in rows.items()}, directory / "rank1")
        first.tensors = {key: replace(concatenate_tensors([t, last.tensors[key]])) for key, t in first.tensors.items()}
        return first

    alignment = align_checkpoints(sharded(tmp_path / "a", 0.0), sharded(tmp_path / "b", 0.25))
    results, _ = compare(alignment.pairs, plan(256, 1))
    notes = explain(alignment, results)
    words = "rank1 (17 tensors; every state of the optimizer there differs: of another save?)"
    assert f"all differences lie in one file of both sides: {words}" in notes
    assert any("the weights are equal; only states of the optimizer differ (exp_avg)" in note for note in notes)


def test_tensors_under_other_names_become_rules_of_a_mapping_file(tmp_path: Path) -> None:
    """What only A has and what only B has hold the same: the rules for it, which a mapping file then takes."""
    rng = np.random.default_rng(5)
    weights = {n: rng.standard_normal((3, 4)).astype(np.float32) for n in range(3)}
    a = {f"blk.{n}.w": value for n, value in weights.items()} | {"zeros": np.zeros(3, np.float32), "own": np.ones(2, np.float32)}
    b = {f"stage.{n}.unit.kernel": value for n, value in weights.items()} | {"other": np.zeros(3, np.float32)}
    sides = checkpoint_of(a, tmp_path / "a"), checkpoint_of(b, tmp_path / "b")
    (note,) = explain(align_checkpoints(*sides), [])
    words = '{a: "blk.{n}.w", b: "stage.{n}.unit.kernel"} (3 tensors), {a: "zeros", b: "other"}'
    assert note == f"4 tensors only in the run are tensors only in the golden run under other names; rules for --map: {words}"
    rule = {"a": "blk.{n}.w", "b": "stage.{n}.unit.kernel"}
    assert len(align_checkpoints(*sides, mapping=mapping_of({"names": [rule]})).pairs) == 3
