"""The programs that tests run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

_PACKAGES = {"promtool": "prometheus"}


@pytest.fixture(scope="session")
def binary() -> Callable[[str], str]:
    """Path of a program. Without it the test fails with the Debian package to install, or is skipped with MSPROBE_ALLOW_SKIP=1."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            text = f"{name} is not installed: apt-get install {_PACKAGES.get(name, name)}"
            if os.environ.get("MSPROBE_ALLOW_SKIP") == "1":
                pytest.skip(text)
            pytest.fail(text)
        return path

    return find
