"""Mapping files of checkpoints: names and facts that the tool cannot know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stored_arrays import array_of, checkpoint_of

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.align.parameters.mapping_file import mapping_of, read_mapping
from msprobe_engine.core.errors import DumpFormatError, ProbeError

RNG = np.random.default_rng(1)
Q, K, V, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (2, 4), (2, 4), (4, 5)))


def test_rules_rename_cut_and_transpose_parameters_and_their_states(tmp_path: Path) -> None:
    """A fused tensor of one side is the other's, one behind the other; states go along; numbers of layers stay."""
    file = tmp_path / "map.yaml"
    file.write_text(
        """
names:
  - {a: "net.{n}.mix.weight", b: ["body.{n}.one.w", "body.{n}.two.w", "body.{n}.three.w"]}
  - {a: "net.{n}.last", b: "body.{n}.final", transposed: true}
  - {a: "never.{n}", b: "matched.{n}"}
ignore: ["*.counter"]
"""
    )
    fused = np.concatenate([Q, K, V])
    a = {
        "net.3.mix.weight": fused,
        "exp_avg|net.3.mix.weight": fused * 2,
        "step|net.3.mix.weight": np.float32(7),
        "net.3.last": W,
        "x.counter": V,
    }
    b = {"body.3.final": W.T.copy()}
    for name, value in (("one", Q), ("two", K), ("three", V)):
        b |= {f"body.3.{name}.w": value, f"exp_avg|body.3.{name}.w": value * 2, f"step|body.3.{name}.w": np.float32(7)}
    found = align_checkpoints(checkpoint_of(a, tmp_path / "a"), checkpoint_of(b, tmp_path / "b"), mapping=read_mapping(file))
    assert (found.only_a, found.only_b) == ([], [])
    assert len(found.pairs) == 10
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)
    assert "net.3.mix.weight[body.3.two.w]" in [pair.name for pair in found.pairs]
    assert [left.names for left in found.left_out] == [("x.counter",)]
    assert any("never.{n} -> matched.{n}" in note for note in found.notes)


def test_facts_of_a_mapping_file_say_what_no_checkpoint_says(tmp_path: Path) -> None:
    """Without heads a fused projection stays whole, with the reason; with them it is cut."""
    fused = np.concatenate([Q[:3], K[:1], V[:1], Q[3:], K[1:], V[1:]])
    a = checkpoint_of({"decoder.layers.0.self_attention.linear_qkv.weight": fused}, tmp_path / "a")
    b = checkpoint_of({f"model.layers.0.self_attn.{n}_proj.weight": v for n, v in (("q", Q), ("k", K), ("v", V))}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert (found.pairs, found.only_a, found.only_b) == ([], [], [])
    assert "facts: {heads" in found.left_out[0].reason
    assert [(left.side, len(left.names), left.open) for left in found.left_out] == [("a", 1, True), ("b", 3, True)]
    found = align_checkpoints(a, b, mapping=mapping_of({"facts": {"heads": 5, "kv_heads": 3, "head_dim": 1}}))
    assert not found.pairs
    assert "cannot be taken apart" in found.left_out[0].reason
    found = align_checkpoints(a, b, mapping=mapping_of({"facts": {"heads": 6, "kv_heads": 2, "head_dim": 1}}))
    assert [pair.name.rpartition("[")[2] for pair in found.pairs] == ["q]", "k]", "v]"]
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "this one is a list"),
        ("nmaes: []", "unknown key 'nmaes'"),
        ("facts: {heads: many}", "facts.heads must be a whole number"),
        ("facts: {gated: 1}", "true or false"),
        ("facts: {depth: 1}", "unknown key 'depth'"),
        ("names: [{a: x}]", "needs `a` and `b`"),
        ("names: [{a: x, b: y, c: z}]", "unknown key 'c'"),
        ("names: [{a: [x, y], b: [u, v]}]", "one side must be a single name"),
        ('names: [{a: "x.{n}", b: "y.{m}"}]', "does not stand in"),
        ('names: [{a: "x.{n}{m}", b: "y.{n}"}]', "two places in one part"),
        ('names: [{a: "x.*", b: y}]', "allowed under ignore only"),
        ("names: [{a: x, b: 3}]", "a int stands where a name is needed"),
        ("names: [{a: x, b: y, dim: -1}]", "from 0 on"),
        ("ignore: x", "a list of at most"),
        ("names: [", "not valid YAML"),
    ],
)
def test_a_wrong_mapping_file_is_named_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    """The message has the file, what is wrong and what is allowed."""
    file = tmp_path / "map.yaml"
    file.write_text(text)
    with pytest.raises(ProbeError, match=str(file)) as caught:
        read_mapping(file)
    assert words in str(caught.value)


def test_patterns_of_names_to_ignore(tmp_path: Path) -> None:
    """``*`` is anything, also nothing; everything else is itself. A pattern made to be slow is not."""
    del tmp_path
    mapping = mapping_of({"ignore": ["*.counter", "probe.*", "a*b*c", "whole", "*" + "a*" * 400 + "b"]})
    for name in ("x.y.counter", "probe.x", "abc", "a.b.b.c", "whole"):
        assert mapping.ignores(name), name
    for name in ("counter", "a.probe.x", "acb", "wholes", "x.whole", "xcounter", "a" * 2000):
        assert not mapping.ignores(name), name
    assert mapping_of({"ignore": ["ab*ba"]}).ignores("abba")
    assert not mapping_of({"ignore": ["ab*ba"]}).ignores("aba")


def test_a_rule_that_does_not_fit_the_shapes_is_an_error(tmp_path: Path) -> None:
    """Pieces that are not the whole together, and a missing piece, are named with the rule."""
    a = checkpoint_of({"fused": Q}, tmp_path / "a")
    b = checkpoint_of({"one": K, "two": V}, tmp_path / "b")
    with pytest.raises(DumpFormatError, match=r"fused -> one, two: fused has shape \[6, 4\]; the others together have 4"):
        align_checkpoints(a, b, mapping=mapping_of({"names": [{"a": "fused", "b": ["one", "two"]}]}))
    with pytest.raises(DumpFormatError, match="the golden run has no tensor 'three'"):
        align_checkpoints(a, b, mapping=mapping_of({"names": [{"a": "fused", "b": ["one", "three"]}]}))


def test_an_alias_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    """References to references: neither built as text nor walked."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines) + "\nnames: *a11\n")
    with pytest.raises(ProbeError, match="its aliases stand for 2,345,679,012,358 values"):
        read_mapping(file)
    file.write_text("names:\n" + "\n".join(f"  - {line.partition(': ')[2]}" for line in lines))
    with pytest.raises(ProbeError, match="its aliases stand for"):
        read_mapping(file)
