"""Settings for who has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.presets import PRESETS, describe, preset_file
from msprobe_engine.core.window import Window, of_monitor
from msprobe_engine.probe.rules.build import build_rules

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_settings_file(name: str) -> None:
    """Checked with its rules; what it watches is bounded on disk."""
    settings = load_settings(preset_file(name))
    build_rules(settings)
    assert settings.output_dir == "msprobe_output"
    assert settings.dump.max_disk_gb if settings.dump else settings.sinks.max_gb == 1


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "watch",
            (),
            "loss every step, gradients in each of the first 100 steps and then every 10 steps; "
            "copies of parameters on several ranks compared every 10 steps; rules recommended; "
            "operators captured after a critical alert; at most 1 GB of monitor files per rank",
        ),
        (
            "watch",
            ("monitor.interval=1", "monitor.parameters=true", "incident=false"),
            "loss every step, gradients, parameters every step;",
        ),
        ("nan", (), "the last 3 steps at level mix kept for an alert"),
        ("dump", (), "a dump of step 0 at level mix (task statistics)"),
        ("dump", ("dump.step=5",), "a dump of step 5 at"),
        ("dump", ("dump=false",), "nothing"),
    ],
)
def test_what_is_watched_in_one_line(name: str, changes: tuple[str, ...], said: str) -> None:
    """With what the command line has changed."""
    text = describe(load_settings(preset_file(name), changes=changes))
    assert said in text
    assert "\n" not in text


def test_the_first_steps_are_all_watched() -> None:
    """A run of some dozen steps is seen whole; a long one pays a tenth. They are those of this process: one that goes on from a checkpoint
    learns anew what is usual."""
    monitor = load_settings(preset_file("watch")).monitor
    assert monitor is not None
    window, resumed = of_monitor(monitor), of_monitor(monitor)
    assert [step for step in range(125) if window.is_wanted(step, 0)] == [*range(100), 100, 110, 120]
    assert [step for step in range(5003, 5125) if resumed.is_wanted(step, 0)] == [*range(5003, 5103), 5110, 5120]
    later = Window(start=7, interval=5, first=2)
    assert [step for step in range(20) if later.is_wanted(step, None)] == [7, 8, 12, 17]


def test_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The file of a preset, with comments; what is there stays as it is."""
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert load_settings("probe.yaml") == load_settings(preset_file("watch"))
    assert "msprobe run --config probe.yaml -- torchrun train.py" in capsys.readouterr().out
    assert main(["init", "--preset", "dump"]) == 2
    assert "is there already and was left as it is" in capsys.readouterr().err
    assert load_settings("probe.yaml") == load_settings(preset_file("watch"))
    assert main(["init", "--preset", "dump", "--force"]) == 0
    assert load_settings("probe.yaml") == load_settings(preset_file("dump"))
    assert main(["init", "--preset", "nan", "other.yaml"]) == 0
    assert "--config other.yaml" in Path("other.yaml").read_text()
    capsys.readouterr()
    assert main(["init", "-"]) == 0
    assert capsys.readouterr().out == preset_file("watch").read_text()


@pytest.mark.parametrize(("name", "said"), [("probe.txt", "ends in .yaml"), ("no/such/probe.yaml", "cannot be written")])
def test_init_where_it_cannot(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 2
    assert said in capsys.readouterr().err
