"""Packs with entries of any content: an error in words or a comparison, never anything else."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.config.between_ranks import between_ranks
from msprobe_engine.find.config.pack_settings import PackSide
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.report.config import page, tables, text
from msprobe_engine.report.config.files import json_text

NAMES = (
    *("env", "pip", "hyperparameters/hyperparameters_static.json", "hyperparameters/hyperparameters_dynamic.json", "random/rank0.json"),
    *("weights/step0/rank0/weight.json", "dataset/step0/rank0/dataset.json", "msprobe/meta.json", "msprobe/static.json"),
    *("msprobe/ranks/rank0.json", "msprobe/env/rank0.json", "msprobe/env/rank1.json", "msprobe/system/rank0.json"),
    *("msprobe/system/rank1.json", "msprobe/hyperparameters/rank0.json", "msprobe/hyperparameters/rank1.json", "msprobe/random/rank0.json"),
    *("msprobe/weights/step0/rank0.json", "msprobe/weights/step0/rank1.json", "msprobe/dataset/step0/rank0.json"),
)
WORDS = st.sampled_from(
    (
        *(
            "lr",
            "optimizer.params.betas",
            "bf16",
            "train_iters",
            "micro_batch_size",
            "global_batch_size",
            "w",
            "args",
            "kwargs",
            "max",
            "min",
        ),
        *(
            "mean",
            "norm",
            "digest",
            "shape",
            "dtype",
            "samples",
            "value",
            "class",
            "origin",
            "framework",
            "count",
            "stack",
            "calls",
            "states",
        ),
        *(
            "where",
            "seeds",
            "name",
            "arguments",
            "values",
            "env",
            "host",
            "world_size",
            "torch.rand",
            "torch.manual_seed",
            "flags",
            "program",
        ),
        *(
            "tensor_parallel_size",
            "lr_decay_style",
            "fp16.initial_scale_power",
            "warmup_ratio",
            "vocab_size",
            "hidden_size",
            "known",
            "file",
        ),
    )
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(("1e-4", "auto", "transformers")),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=6)), inner, max_size=6)),
    max_leaves=25,
)
NAMED = st.dictionaries(WORDS, st.dictionaries(WORDS, VALUES, max_size=6), max_size=5)
"""Nearly what entries look like: name -> facts."""
CALLS = st.dictionaries(WORDS, st.lists(st.dictionaries(WORDS, VALUES, max_size=4), max_size=3), max_size=4)
PACKS = st.dictionaries(st.sampled_from(NAMES), st.one_of(VALUES, NAMED, CALLS), min_size=1, max_size=12)


def _write(path: Path, entries: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in entries.items():
            archive.writestr(name, json.dumps(value).encode("utf-8", "surrogatepass"))
    return path


def _look_at(a: Path, b: Path) -> None:
    try:
        found = compare_packs(a, b)
        between_ranks(a)
    except DumpFormatError:
        return
    json.loads(json_text(found))
    assert text.text(found)
    assert page.page(found)
    for table in tables.tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)


@given(PACKS, PACKS)
@pytest.mark.slow
def test_any_entries(tmp_path_factory: pytest.TempPathFactory, a: dict[str, Any], b: dict[str, Any]) -> None:
    """Whatever JSON an entry holds, both packs are compared and all forms of the result can be made."""
    place = tmp_path_factory.mktemp("packs")
    _look_at(_write(place / "a.zip", a), _write(place / "b.zip", {**a, **b}))


@pytest.mark.parametrize("name", NAMES)
def test_deep_entries(tmp_path: Path, name: str) -> None:
    """Values nested hundreds of levels deep are no endless recursion."""
    deep: Any = 1
    for level in range(900):
        deep = {"lr": deep} if level % 2 else [deep]
    _look_at(_write(tmp_path / "a.zip", {name: {"lr": deep, "w": deep}}), _write(tmp_path / "b.zip", {name: {"lr": [deep], "w": 1}}))


@pytest.mark.parametrize("name", ["msprobe/static.json", "msprobe/ranks/rank0.json", "msprobe/system/rank0.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"a": ' + "[" * 200 + "]" * 200 + "}"], ids=["cut off", "a list", "deep"])
def test_a_damaged_entry_is_empty_and_said(tmp_path: Path, name: str, content: str) -> None:
    """What cannot be read of a pack is left out, not made up."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, content)
    side = PackSide(read_pack(tmp_path / "a.zip"))
    assert side.read_mapping(name) == {}
    assert [name in problem for problem in side.problems].count(True) >= 1, side.problems


@pytest.mark.parametrize(
    ("digests", "ranks", "severity"),
    [("aab", (2,), CHANGES), ("ab", (1,), CHANGES), ("abc", (0, 1, 2), MAY), ("aaa", None, "")],
)
def test_ranks_with_other_weights(tmp_path: Path, digests: str, ranks: tuple[int, ...] | None, severity: str) -> None:
    """The ranks that are not as most, or as rank 0 of two, are named and change the result; where all differ none is known to be wrong."""
    shape = {"shape": [2], "dtype": "float32"}
    weights = {f"msprobe/weights/step0/rank{rank}.json": {"w": {**shape, "digest": digest}} for rank, digest in enumerate(digests)}
    found = between_ranks(_write(tmp_path / "a.zip", weights)).deviations
    assert [(one.sheet, one.name, one.ranks, one.severity) for one in found] == (
        [] if ranks is None else [("weights", "w", ranks, severity)]
    )
