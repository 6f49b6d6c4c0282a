"""Megatron's files with entries of any kind in any place: read, or refused by an error of this project, never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_pickles import load

from msprobe_engine.core.errors import ProbeError
from msprobe_engine.formats.checkpoint.megatron import reader as read_megatron
from msprobe_engine.formats.checkpoint.torch_dist import reader as read_torch_dist

STRANGE: list[Any] = [
    None, 3, -1, 1.5, "text", [], {}, [1], {"a": 1}, (1, 2), {1: 2}, True, b"x", {0: {}}, [None], float("nan"), 10**30, "\x1b[31m",
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries but the tree itself."""
    inside = vars(tree) if isinstance(tree, argparse.Namespace) else dict(enumerate(tree)) if isinstance(tree, list) else tree
    if path:
        yield path
    if isinstance(inside, dict):
        for key, value in inside.items():
            yield from places(value, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    *above, last = path
    for key in above:
        tree = vars(tree)[key] if isinstance(tree, argparse.Namespace) else tree[key]
    (vars(tree) if isinstance(tree, argparse.Namespace) else tree)[last] = value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("moe-ep2", "mp_rank_00_001/model_optim_rng.pt"),
        ("fp32", "mp_rank_00/model_optim_rng.pt"),
        ("sharded-buckets", "mp_rank_00/distrib_optim.pt"),
        ("dist-moe-ep2", "common.pt"),
    ],
)
def test_entries_of_any_kind_in_any_place(megatron_checkpoints: Path, tmp_path: Path, case: str, file: str) -> None:
    """An entry that another kind of value stands for is a problem, a note or an error that says what is wrong."""
    shutil.copytree(megatron_checkpoints / case, tmp_path / case)
    directory = tmp_path / case / "iter_0000005"
    whole = load(directory / file)
    everywhere = list(places(whole))
    outer = [path for path in everywhere if len(path) <= 4]
    chosen = random.Random(case)
    read = (read_torch_dist if file == "common.pt" else read_megatron).read_checkpoint
    for number in range(24):
        tree = copy.deepcopy(whole)
        put(tree, chosen.choice(outer if number % 3 else everywhere), chosen.choice([*STRANGE, torch.ones(2), torch.ones(())]))
        torch.save(tree, directory / file)
        with contextlib.suppress(ProbeError):
            assert read(directory).tensors
