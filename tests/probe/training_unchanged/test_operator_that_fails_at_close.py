"""An operator of the training that fails unnoticed until the probe is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.guard import of_training, raised_at
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


def test_the_place_of_an_error_is_in_the_training() -> None:
    """A Ctrl-C that comes while the probe is at work is said with the program's line, not with one of the probe's."""
    probe: dict[str, Any] = {"__name__": "msprobe_engine.somewhere"}
    exec(compile("def look():\n    raise KeyboardInterrupt", "probe.py", "exec"), probe)
    with pytest.raises(KeyboardInterrupt) as caught:
        probe["look"]()
    assert f"{Path(__file__).name}:" in raised_at(caught.value)
    assert raised_at(caught.value).endswith(" test_the_place_of_an_error_is_in_the_training")
    assert raised_at(ValueError()) == ""
