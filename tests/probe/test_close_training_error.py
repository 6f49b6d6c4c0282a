"""An operator of the training that fails unnoticed until the probe is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.core.guard import of_training
from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.torch.monitor.probe import TorchProbe


def test_close_ends_everything_before_it_gives_the_error_on(tmp_path: Path) -> None:
    """The error of the training comes out of `close`, unchanged, when all other ends are done."""
    probe = TorchProbe(load_settings({"output_dir": str(tmp_path), "monitor": {"enabled": True}}))
    error = of_training(RuntimeError("an operator failed"))

    def fails() -> None:
        raise error

    ended: list[str] = []
    probe.parameters.remove = fails  # type: ignore[method-assign]
    close = probe.session.close
    probe.session.close = lambda **told: (ended.append("session"), close(**told))  # type: ignore[method-assign,func-returns-value,assignment]
    with pytest.raises(RuntimeError) as caught:
        probe.close()
    assert caught.value is error
    assert ended == ["session"]
    assert probe.closed
