"""Shared by all tests: hypothesis without deadlines (machines differ), and an environment free of this project's variables."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MSPROBE_CONFIG", "MSPROBE_LOG_LEVEL", "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR"):
        monkeypatch.delenv(name, raising=False)
    yield
    logging.getLogger("msprobe").setLevel(logging.INFO)  # settings loaded in a test may have made it silent
