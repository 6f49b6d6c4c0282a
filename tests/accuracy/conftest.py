"""What all tests of this folder share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Tests draw the same numbers in whatever order they run."""
    torch.manual_seed(0)
