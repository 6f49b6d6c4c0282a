"""The environment that `make test-mindspore` makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def test_versions_live_together() -> None:
    """MindSpore's compiled part is built for NumPy 1; arithmetic with Python and NumPy numbers works here."""
    import mindspore

    assert np.__version__.startswith("1.")
    tensor = mindspore.Tensor(np.ones(2, np.float32))
    assert ((tensor * 2.0) * np.float32(2)).asnumpy().tolist() == [4.0, 4.0]


def test_every_test_has_its_own_directory(tmp_path: Path) -> None:
    """What MindSpore drops into the working directory stays out of the work tree."""
    assert Path.cwd() == tmp_path
