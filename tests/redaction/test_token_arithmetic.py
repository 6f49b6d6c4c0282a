"""Sums of tensors that differ by one element tell it: labels that are shifted by one, a context that grows. What is written of redacted
tensors must not; each attack is made on open ones too, where it must succeed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import warm
from test_redaction import KEY, row_of

from msprobe_engine.core.process.user_key import KEY as VARIABLE
from msprobe_engine.core.redaction import FEWEST, Redaction
from msprobe_engine.core.statistics import rows

VOCABULARY = 50_000
RNG = np.random.default_rng(5)
LENGTHS = (FEWEST, 4096, 16_384, 50_000)


def told_sums(values: np.ndarray, redacted: bool) -> tuple[float, float] | None:
    """Sum and sum of squares as mean, norm and count tell them; None where they are not told."""
    row = row_of(values)
    seen = rows.read_row((Redaction(KEY).rows(row) if redacted else row)[0])
    return None if seen.mean is None or seen.norm is None else (seen.mean * seen.count, seen.norm**2)


@pytest.mark.parametrize("kind", ["uniform", "small ids", "mostly ignored", "rare words"])
@pytest.mark.parametrize("length", LENGTHS)
def test_no_element_moves_what_is_written(length: int, kind: str) -> None:
    """The smallest or the largest token of the batch in place of the first is seen in few of many batches, where a sum is at the edge of
    its cell."""
    told, tried = 0, 100
    for _ in range(tried):
        values = {
            "uniform": lambda: RNG.integers(0, VOCABULARY, length),
            "small ids": lambda: RNG.integers(0, 50, length),
            "mostly ignored": lambda: np.where(RNG.random(length) < 0.9, -100, RNG.integers(0, VOCABULARY, length)),
            "rare words": lambda: np.where(RNG.random(length) < 0.99, 7, RNG.integers(0, VOCABULARY, length)),
        }[kind]()
        other = values.copy()
        other[0] = values.max() + 1 if values[0] < values.max() / 2 else values.min() - 1
        told += told_sums(values, True) != told_sums(other, True)
        assert told_sums(values, False) != told_sums(other, False)
    assert told <= tried * 0.3


@pytest.mark.parametrize("steps", [200])
@pytest.mark.parametrize("start", [64, FEWEST, 4000])
def test_a_context_that_grows_tells_no_token(start: int, steps: int) -> None:
    """`generate` sees one token more at each step: differences of sums, and of sums of squares, are tokens no more often than by chance."""
    ids = RNG.integers(1, VOCABULARY, start + steps)
    found = {}
    for redacted in (True, False):
        sums = [told_sums(ids[: start + n], redacted) for n in range(steps + 1)]
        guesses = [
            (after[0] - before[0], np.sqrt(max(after[1] - before[1], 0))) if before and after else (np.nan, np.nan)
            for before, after in pairwise(sums)
        ]
        found[redacted] = int((np.abs(np.array(guesses) - ids[start:, None]) < 0.5).any(1).sum())
    assert found[False] == steps
    assert found[True] <= steps / 100


@pytest.mark.slow
def test_windows_of_all_places_tell_no_token() -> None:
    """Every window of a text with and without its last token, averaged: rounding hides a token from one look, and from hundreds."""
    ids = RNG.integers(0, VOCABULARY, 3000)
    errors = []
    for token in range(2000, 2020):
        differences = [
            after[0] - before[0]
            for start in range(0, 1000, 5)
            if (before := told_sums(ids[start:token], True)) and (after := told_sums(ids[start : token + 1], True))
        ]
        errors.append(abs(np.mean(differences) - ids[token]))
    assert np.median(errors) > VOCABULARY / 100


PROGRAM = """
import json, sys, torch
from torch import nn
from msprobe.pytorch import PrecisionDebugger, TorchProbe

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(60_000, 2), nn.Linear(2, 2)
    def forward(self, ids, labels):
        return self.head(self.words(ids)).sum() + 0 * labels.sum()

way, out, redact = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ids = torch.tensor(json.loads(sys.argv[4]))
torch.manual_seed(0)
model = Model()
if way == "dump":
    settings = {"task": "statistics", "level": "mix", "dump_path": out, "statistics": {"summary_mode": "statistics"}, **redact}
    with open(out + ".json", "w") as file:
        json.dump(settings, file)
    probe = PrecisionDebugger(out + ".json")
else:
    sinks = {"csv": {"enabled": True}, "jsonl": {"enabled": True}}
    settings = {"output_dir": out, "sinks": sinks, "monitor": {"activations": True, "ops": ["norm", "mean"]}, **redact}
    with open(out + ".json", "w") as file:
        json.dump(settings, file)
    probe = TorchProbe.from_config(out + ".json")
    probe.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
for length in range(2000, 2006):
    if way == "dump":
        probe.start(model)
    else:
        probe.begin_step(length - 2000)
    model(ids[:length], ids[1 : length + 1]).backward()
    if way == "dump":
        probe.stop()
        probe.step()
    else:
        probe.end_step()
if way != "dump":
    probe.close()
"""


def written_sums(out: Path, way: str) -> Iterator[float]:
    """Sums of integer tensors as files tell them, each with every length that it could have."""
    if way == "dump":
        for path in sorted(out.rglob("dump.json")):
            for record in json.loads(path.read_text())["data"].values():
                for one in (*record.get("input_args", ()), *(record.get("output") or ())):
                    if isinstance(one, dict) and "int" in str(one.get("dtype")) and one["Mean"] is not None:
                        yield one["Mean"] * int(np.prod(one["shape"]))
    else:
        for path in sorted(out.rglob("*.jsonl")):
            for line in path.read_text().splitlines():
                for mean in values_of(json.loads(line), "mean"):
                    if mean > 1000:
                        yield from (mean * length for length in range(2000, 2006))


def values_of(tree: object, name: str) -> Iterator[float]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name and isinstance(value, (int, float)):
                yield value
            yield from values_of(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from values_of(value, name)


@pytest.mark.framework
@pytest.mark.parametrize("way", ["dump", pytest.param("monitor", marks=pytest.mark.slow)])
def test_files_of_shifted_labels_and_of_a_growing_context(way: str, tmp_path: Path) -> None:
    """No difference of two sums in the files is a token, nor the difference of two tokens that a shift by one makes."""
    ids = RNG.integers(1, 60_000, 2007)
    tokens = {int(one) for one in ids[2000:2006]} | {int(abs(ids[n] - ids[0])) for n in range(2000, 2006)}
    found = {}
    for name, redact in (("redacted", {"redact": ["tokens"]}), ("open", {})):
        words = [way, tmp_path / name, json.dumps(redact), json.dumps(ids.tolist())]
        made = warm.run(PROGRAM, *words, env={**os.environ, VARIABLE: "k" * 32})
        assert made.returncode == 0, made.stderr[-3000:]
        sums = sorted(set(written_sums(tmp_path / name, way)))
        assert sums or name == "redacted"
        differences = {abs(a - b) for a, b in combinations(sums, 2)}
        found[name] = sum(any(abs(one - token) < 0.5 for one in differences) for token in tokens)
    assert found["open"] >= 6
    assert found["redacted"] == 0
