"""The digest of a step's batch: what changes it, and what does not."""

from __future__ import annotations

import pytest
import torch

from msprobe_engine.core.records import BATCH_DIGEST
from msprobe_integrations.torch.training.batch_digest import BatchDigest

TOKENS = torch.arange(48).reshape(6, 8) % 37
LABELS = TOKENS.roll(1, 1)


def digest(*calls: list[torch.Tensor]) -> float | None:
    """Of a step in which the model was called with these."""
    batch = BatchDigest()
    for tensors in calls:
        batch.add(tensors)
    found = batch.finish()
    return float(found[BATCH_DIGEST]) if found else None


def test_the_same_samples() -> None:
    """In another order, in other micro batches, as narrower integers, not contiguous: it is the same batch."""
    whole = digest([TOKENS, LABELS])
    assert whole is not None
    assert 0 <= whole < 1
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert digest([TOKENS[order], LABELS[order]]) == whole
    assert digest([TOKENS[:2], LABELS[:2]], [TOKENS[2:], LABELS[2:]]) == whole
    assert digest([TOKENS.int(), LABELS.int()]) == whole
    assert digest([TOKENS.T.contiguous().T, LABELS]) == whole


@pytest.mark.parametrize("places", [(0, 0), (5, 7), (2, 3)])
def test_one_other_token(places: tuple[int, int]) -> None:
    """Wherever it stands."""
    other = TOKENS.clone()
    other[places] += 1
    assert digest([other, LABELS]) != digest([TOKENS, LABELS])


def test_other_batches() -> None:
    """Tokens that have changed places in a sample, another form, labels for tokens, a sample twice: each is another batch."""
    known = [
        digest([TOKENS, LABELS]),
        digest([TOKENS.flip(1), LABELS]),
        digest([TOKENS.reshape(8, 6), LABELS]),
        digest([LABELS, TOKENS]),
        digest([torch.cat([TOKENS, TOKENS[:1]]), torch.cat([LABELS, LABELS[:1]])]),
    ]
    assert len(set(known)) == len(known)


def test_what_is_not_read_is_not_claimed() -> None:
    """A step with more integers than are read has no digest, nor has one without integers; the next step has one again."""
    batch = BatchDigest()
    batch.add([TOKENS])
    batch.add([torch.zeros(1 << 22, dtype=torch.int64).expand(2, -1)])
    assert batch.finish() == {}
    batch.add([torch.randn(3), torch.ones(3, dtype=torch.bool)])
    assert batch.finish() == {}
    batch.add([TOKENS])
    assert float(batch.finish()[BATCH_DIGEST]) == digest([TOKENS])
