"""What programs and documents of the existing tool import from ``msprobe.mindspore`` is there."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("msprobe.mindspore", "PrecisionDebugger TrainerMon save save_grad step seed_all MsprobeStep MsprobeInitStep"),
        ("msprobe.mindspore.common.utils", "MsprobeStep MsprobeInitStep seed_all"),
        ("msprobe.mindspore.compare.ms_compare", "ms_compare"),
        ("msprobe.mindspore.compare.distributed_compare", "ms_compare_distributed"),
    ],
)
def test_names(module: str, names: str) -> None:
    """Both versions' names, and none of them needs torch."""
    found = importlib.import_module(module)
    assert all(callable(getattr(found, name)) for name in names.split())
    assert set(getattr(found, "__all__", ())) <= vars(found).keys()
    assert "torch" not in sys.modules


def test_signatures() -> None:
    """Arguments have the order that the existing tool has; those of our own come behind."""
    from msprobe.mindspore import PrecisionDebugger, save, save_grad, seed_all

    def first(function: object, count: int) -> list[str]:
        return list(inspect.signature(function).parameters)[:count]  # type: ignore[arg-type]

    assert first(PrecisionDebugger.__init__, 6) == ["self", "config_path", "task", "dump_path", "level", "step"]
    assert first(PrecisionDebugger.start, 2) == ["model", "token_range"]
    assert first(PrecisionDebugger.save, 3) == ["variable", "name", "save_backward"]
    assert first(PrecisionDebugger.register_custom_api, 3) == ["module", "api", "api_prefix"]
    assert first(seed_all, 3) == ["seed", "mode", "rm_dropout"]
    assert first(save, 3) == first(save_grad, 3) == ["save_dir", "name", "data"]
