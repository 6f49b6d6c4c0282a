"""The probe's arguments in Megatron's parser, and who asks for a probe when several ways are used at once."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_integrations.autoload import request
from msprobe_integrations.megatron import flags, patches
from msprobe_integrations.patching import MARK


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MSPROBE_SET", raising=False)
    request.forget()
    yield
    request.forget()
    patches.observe(None)


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    file = tmp_path / "probe.yaml"
    file.write_text("monitor: {gradients: true}\n")
    return file


def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
    """As Megatron's, since 0.8."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--yaml-cfg", default=None)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    return argparse.Namespace(lr=args.lr) if args.yaml_cfg else args


def parser_module() -> Any:
    module = types.ModuleType("arguments")
    module.parse_args = parse_args  # type: ignore[attr-defined]
    patches._WHOLE_LOOP["megatron.training.arguments"](module)
    return module


def command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])


def test_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request the parser is called with what it was given, and its result has no name of ours."""
    command_line(monkeypatch, "--lr", "1")
    assert vars(parser_module().parse_args(None)) == {"lr": 1.0, "yaml_cfg": None}
    assert request.current() is None


@pytest.mark.parametrize("how", ["keyword", "position"])
def test_all_arguments(monkeypatch: pytest.MonkeyPatch, probe: Path, how: str) -> None:
    """The arguments come through the parser's own way for more of them, beside the script's; the changes reach the settings."""
    monkeypatch.chdir(probe.parent)
    ours = ("--msprobe-config", "probe.yaml", "--msprobe-output-dir", "o", "--msprobe-set", "monitor.parameters=true", "--msprobe-strict")
    command_line(monkeypatch, "--lr", "1", *ours, "--theirs", "x")

    def theirs(parser: Any) -> Any:
        parser.add_argument("--theirs")
        return parser

    module = parser_module()
    args = module.parse_args(theirs) if how == "position" else module.parse_args(extra_args_provider=theirs)
    assert (args.lr, args.theirs, args.msprobe_config) == (1.0, "x", "probe.yaml")
    asked = request.current()
    assert asked is not None
    settings = asked.settings()
    assert (settings.strict, settings.output_dir) == (True, "o")
    assert settings.monitor is not None
    assert settings.monitor.parameters
    assert Path(asked.config) == probe
    assert all(isinstance(value, (str, float, bool, list, type(None))) for value in vars(args).values())  # goes into checkpoints


def test_a_configuration_file_in_place_of_arguments(monkeypatch: pytest.MonkeyPatch, probe: Path) -> None:
    """With ``--yaml-cfg`` Megatron gives other arguments than those it parsed; the probe is asked for all the same."""
    command_line(monkeypatch, "--yaml-cfg", "x.yaml", "--msprobe-config", str(probe))
    assert vars(parser_module().parse_args()) == {"lr": 0.1}
    assert request.current() == request.Request(str(probe))


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "wrong", [["--msprobe-set", "monitor.gradient=true"], ["--msprobe-set", "nonsense"], ["--msprobe-output-dir", "o"]]
)
def test_a_mistake_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch, probe: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], rank: str
) -> None:
    """Exit code 2 on every rank, the reason on one of the machine."""
    asks = [] if "--msprobe-output-dir" in wrong else ["--msprobe-config", str(probe)]
    command_line(monkeypatch, *asks, *wrong)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as ended:
        parser_module().parse_args()
    assert ended.value.code == 2
    assert ("msprobe: " in capsys.readouterr().err) == (rank == "0")


def test_arguments_on_top_of_the_environment(monkeypatch: pytest.MonkeyPatch, probe: Path) -> None:
    """The settings file of the environment, with the changes of the environment and then those of the command line."""
    monkeypatch.setenv("MSPROBE_CONFIG", str(probe))
    monkeypatch.setenv("MSPROBE_SET", "output_dir=a\nmonitor.parameters=true")
    command_line(monkeypatch, "--msprobe-output-dir", "b")
    args = parser_module().parse_args()
    assert args.msprobe_config == str(probe)
    asked = request.current()
    assert asked is not None
    assert asked.settings().output_dir == "b"


def test_mistakes_have_names(probe: Path) -> None:
    """A missing value and a missing file say what to add."""
    with pytest.raises(UsageError, match="expected one argument"):
        flags.parse_flags(["--msprobe-config"])
    with pytest.raises(UsageError, match="--msprobe-config FILE"):
        flags.request_probe(flags.Flags("", ("strict=true",)))
    with pytest.raises(SettingsError, match=r"none\.yaml"):
        flags.request_probe(flags.Flags(str(probe.parent / "none.yaml")))


def test_names_are_put_back() -> None:
    """`observe(None)` puts back every wrapped function by identity: in its module, where it was imported before, and where it was since."""
    home, early, late = (types.ModuleType(f"c_{name}") for name in ("home", "early", "late"))

    def step() -> int:
        return 1

    class Machine:
        def turn(self) -> int:
            return 2

    turn = Machine.turn
    home.step = early.own_name = step  # type: ignore[attr-defined]
    for module in (home, early, late):
        sys.modules[module.__name__] = module
    try:
        patches.wrap(home, {"step": lambda original, args, kwargs: original(*args, **kwargs) + 10, "no_such_name": print})
        patches.wrap(Machine, {"turn": lambda original, args, kwargs: original(*args, **kwargs) + 10})
        late.step = home.step  # type: ignore[attr-defined]
        assert (home.step(), early.own_name(), late.step(), Machine().turn()) == (11, 11, 11, 12)
        patches.wrap(home, {"step": lambda *_: 0})
        assert home.step() == 11
        patches.observe(None)
        assert home.step is early.own_name is late.step is step
        assert Machine.turn is turn
    finally:
        for module in (home, early, late):
            del sys.modules[module.__name__]


def test_megatron_is_put_back() -> None:
    """Every function of Megatron that is wrapped is itself again afterwards, also where the examples have imported it by name."""
    import train_gpt
    from megatron.core import optimizer, rerun_state_machine
    from megatron.core.pipeline_parallel import schedules

    def names() -> list[Any]:
        machine = rerun_state_machine.RerunStateMachine
        return [
            train_gpt.get_forward_backward_func,
            train_gpt.get_megatron_optimizer,
            schedules.get_forward_backward_func,
            schedules.forward_step,
            optimizer.get_megatron_optimizer,
            machine.should_run_forward_backward,
        ]

    patches.observe(None)
    before = names()
    patches.observe(lambda: None)
    assert all(hasattr(name, MARK) for name in names())
    patches.observe(None)
    assert all(a is b for a, b in zip(before, names(), strict=True))
