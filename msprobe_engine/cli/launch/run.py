"""Run a launch line (torchrun, deepspeed, accelerate, a shell script, python) with the probe in every training process it starts.

The launch line stays as it is, and so do its exit code, its signals, its input and its output: this command becomes the launcher.
Processes that import none of the supported frameworks are left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from msprobe_engine.core.errors import SettingsError, UnreadableSettingsError, UsageError
from msprobe_engine.core.process.processes import OWNER
from msprobe_engine.workflow.launch_watch import LAUNCH, cancel

EXAMPLES = """\
examples:
  msprobe run -- torchrun --nproc_per_node 8 train.py                    no settings file: preset watch
  msprobe run --preset dump --set dump.step=5 -- python train.py
  msprobe run --config probe.yaml -- torchrun --nproc_per_node 8 train.py --lr 1e-4
  msprobe run --config probe.yaml -- bash pretrain_llama.sh
  msprobe run --config probe.yaml --set monitor.activations=true --output-dir runs/today -- python train.py
  msprobe run --config probe.yaml --dry-run -- deepspeed train.py        print the environment, start nothing

exit code: that of the launch line; 2 when the settings are wrong or there is no such file or program, and nothing was started. A settings
file that is there and cannot be read (rights, a disk that does not answer) keeps no node of a job from training: the launch line runs
without a probe, unless --set strict=true is given"""
VARIABLES = ("MSPROBE_CONFIG", "MSPROBE_SET", OWNER, "MONITOR_OUTPUT_DIR", "PYTHONPATH")
"""What of the environment may differ for the launch line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "msprobe run [--config FILE | --preset NAME] [--set KEY=VALUE ...] [--output-dir DIR] [--perturb HOW] [--dry-run] -- COMMAND ..."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="settings file; without it the one that MSPROBE_CONFIG names, else the preset"
    )
    parser.add_argument(
        "--preset",
        choices=("watch", "nan", "dump"),
        help="settings in place of a file: watch (default), nan, dump",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the file; the value is YAML; may be repeated"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="write here, relative to where this command is typed")
    parser.add_argument(
        "--perturb",
        choices=("ulp", "bf16"),
        help="calibration run: move the weights by a rounding unit, or round them, before the first step; changes the training",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started and its environment")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the launch line, after --")


def run(args: argparse.Namespace) -> int:
    """Become the launch line; returns (0) only after ``--dry-run``.

    Raises:
        UsageError: there is no launch line, or its program cannot be started.
        SettingsError: the settings are wrong; said before anything starts.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no launch line: msprobe run -- torchrun --nproc_per_node 8 train.py")
    preset = _preset(args)
    try:
        if preset is None:
            environment = prepare_environment(args.config, args.set, args.output_dir, args.perturb)
        else:
            environment = _with_preset(preset, args, command)
    except UnreadableSettingsError as error:
        environment = _without_probe(args, error)
    program, command = _program(command)
    if args.dry_run:
        for name in VARIABLES:
            if environment.get(name) != os.environ.get(name):
                print(f"{name}={shlex.quote(environment[name])}" if name in environment else f"unset {name}")
        print(shlex.join(command))
        return 0
    if environment.get("MSPROBE_AUTOLOAD") == "0":
        print("msprobe run: MSPROBE_AUTOLOAD=0: the launch line runs without a probe", file=sys.stderr)
    elif environment.get("MSPROBE_CONFIG"):
        _watch(environment, latest=preset is not None and args.output_dir is None)
        _keep_launch_line(environment, command)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in ("SIGPIPE", "SIGXFSZ"):  # ignored by Python, and a program inherits what is ignored
        if hasattr(signal, number):
            signal.signal(getattr(signal, number), signal.SIG_DFL)
    try:
        os.execve(program, command, environment)
    except OSError as error:
        cancel(environment.get(LAUNCH, ""))
        raise UsageError(f"{program} cannot be started: {error.strerror}; is it a script without a first line #!? name its shell") from None


def _preset(args: argparse.Namespace) -> str | None:
    """The preset that stands in for a settings file; None: there is a file.

    Raises:
        UsageError: both are named.
    """
    from msprobe_engine.core.settings.presets import DEFAULT

    if args.preset and args.config is not None:
        raise UsageError(f"--preset {args.preset} and --config {args.config} are both settings; leave one of them out")
    return args.preset or (None if args.config is not None or os.environ.get("MSPROBE_CONFIG") else DEFAULT)


def _with_preset(preset: str, args: argparse.Namespace, command: list[str]) -> dict[str, str]:
    """The environment of a launch line without a settings file; says in one line what is watched, and where that goes."""
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.process.variables import warn_unknown_variables
    from msprobe_engine.core.settings.load import read_settings
    from msprobe_engine.core.settings.presets import describe, preset_file
    from msprobe_engine.workflow.launch_directory import name_launch

    warn_unknown_variables()
    file = str(preset_file(preset))
    unchanged, changed = read_settings(file)[0], read_settings(file, changes=[*_inherit_changes(file), *args.set])[0]
    directory = args.output_dir
    if directory is None and changed.output_dir == unchanged.output_dir:
        directory = os.path.join(changed.output_dir, name_launch(command))
    environment = prepare_environment(file, args.set, directory, args.perturb)
    place = os.path.relpath(directory or changed.output_dir)
    unused = not args.preset and os.path.exists("probe.yaml")
    hint = "; probe.yaml in this directory is not used, name it with --config" if unused else ""
    print(printable(f"msprobe run: preset {preset}: {describe(changed)}; writing to {place}{hint}"), file=sys.stderr, flush=True)
    return environment


def _watch(environment: dict[str, str], *, latest: bool) -> None:
    """Let somebody listen to what the launch line's processes do, who says at the end when no training was found. A launch line inside of
    a launch line reports to the outer one."""
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.settings.load import read_settings
    from msprobe_engine.workflow.greeting import find_foreign
    from msprobe_engine.workflow.launch_watch import watch_launch

    if LAUNCH in environment:
        return
    for conflict in find_foreign():
        print(printable(f"msprobe run: {conflict}"), file=sys.stderr, flush=True)
    changes = environment.get("MSPROBE_SET", "").split("\n")
    settings = read_settings(environment["MSPROBE_CONFIG"], changes=[each for each in changes if each])[0]
    dump, sinks = settings.dump, settings.sinks
    places = [settings.output_dir, dump.dump_path if dump else "", sinks.csv.path, environment.get("MONITOR_OUTPUT_DIR", "")]
    root = os.path.dirname(settings.output_dir) if latest else ""
    if key := watch_launch([place for place in places if place], root):
        environment[LAUNCH] = key


def _keep_launch_line(environment: dict[str, str], command: list[str]) -> None:
    """Let the configuration pack of the run have the launch line, and its last words; of one inside of another the outer."""
    from msprobe_engine.config.secrets.masking import masked_arguments
    from msprobe_engine.core.process.variables import LAUNCH_LINE

    if LAUNCH not in os.environ:
        environment[LAUNCH_LINE] = shlex.join(masked_arguments(command))


def prepare_environment(
    config: str | None, changes: list[str], output_dir: str | None = None, perturb: str | None = None
) -> dict[str, str]:
    """The environment in which interpreters load the probe.

    Args:
        config: settings file, None: that of ``MSPROBE_CONFIG``.
        changes: ``key=value`` each; those of ``MSPROBE_SET`` (a launch line inside of a launch line, a job script that exports it) hold
            before them.
        output_dir: where to write, None: as the file says.
        perturb: as the key ``perturb`` of the dump section; None: as the file says.

    Raises:
        SettingsError, UsageError: the settings are wrong, or there are none.
    """
    from msprobe_engine.core.settings.load import read_settings, recognise
    from msprobe_engine.core.settings.text import read_file
    from msprobe_engine.probe.rules.build import build_rules

    config = config or os.environ.get("MSPROBE_CONFIG", "")
    if not config:
        raise UsageError("no settings file: add --config FILE, or set MSPROBE_CONFIG")
    environment = dict(os.environ)
    if output_dir is not None:
        directory = os.path.abspath(output_dir)
        kind = recognise(read_file(Path(config)))
        if kind == "monitor":
            environment["MONITOR_OUTPUT_DIR"] = directory
        else:
            changes = [*changes, f"{'dump_path' if kind == 'dump' else 'output_dir'}={json.dumps(directory, ensure_ascii=False)}"]
    if perturb is not None:
        if recognise(read_file(Path(config))) in ("dump", "monitor"):
            raise UsageError(
                f"--perturb: {config} is a file of the existing tool, which has no such key; write a probe.yaml with dump: {{}}"
            )
        changes = [*changes, f"dump.perturb={perturb}"]
    for change in changes:
        if "\n" in change:
            raise SettingsError(f"--set {change!r}: a change is one line; write lists and mappings as [...] and {{...}}")
    inherited = _inherit_changes(config)
    changes, own = [*inherited, *changes], changes
    build_rules(read_settings(config, changes=changes)[0])
    _say_inherited(inherited, own)
    bootstrap = _bootstrap()
    before = os.environ.get("PYTHONPATH")
    entries = [entry for entry in before.split(os.pathsep) if entry != bootstrap] if before else []
    environment["MSPROBE_CONFIG"] = os.path.abspath(config)
    environment["PYTHONPATH"] = os.pathsep.join([bootstrap, *entries])
    environment.pop("MSPROBE_SET", None)
    environment.pop(OWNER, None)  # who types this wants the probe, also inside of a program that has one
    if changes:
        environment["MSPROBE_SET"] = "\n".join(changes)
    return environment


def _inherit_changes(config: str) -> list[str]:
    """The changes of ``MSPROBE_SET``. None of them where they were made to a file of another kind, whose keys this one does not have."""
    from msprobe_engine.core.settings.load import recognise
    from msprobe_engine.core.settings.text import read_file

    if (changes := _changes_of_environment()) and (outer := os.environ.get("MSPROBE_CONFIG")):
        kind = recognise(read_file(Path(config)))
        with contextlib.suppress(SettingsError):  # a file that is not used, and that may be gone
            if recognise(read_file(Path(outer))) != kind:
                return []
    return changes


def _changes_of_environment() -> list[str]:
    return [line for line in os.environ.get("MSPROBE_SET", "").split("\n") if line.strip()]


def _say_inherited(inherited: list[str], own: list[str]) -> None:
    """What of the environment holds in this launch: nobody who types this line sees it there. Names only, a value may be a secret."""
    from msprobe_engine.core.log import printable

    def keys(changes: list[str]) -> list[str]:
        return list(dict.fromkeys(change.partition("=")[0].strip() for change in changes))

    if not inherited:
        if _changes_of_environment():
            file = os.environ["MSPROBE_CONFIG"]
            print(
                printable(f"msprobe run: MSPROBE_SET is not used: it changes {file}, a file of another kind"), file=sys.stderr, flush=True
            )
        return
    replaced = [key for key in keys(inherited) if any(f"{key}.".startswith(f"{name}.") for name in keys(own))]
    held = [key for key in keys(inherited) if key not in replaced]
    parts = [f"MSPROBE_SET holds in this launch too: {', '.join(held)}"] if held else []
    parts += [f"MSPROBE_SET does not count for what this launch sets: {', '.join(replaced)}"] if replaced else []
    print(printable(f"msprobe run: {'; '.join(parts)}"), file=sys.stderr, flush=True)


def _without_probe(args: argparse.Namespace, error: UnreadableSettingsError) -> dict[str, str]:
    """The environment of a launch line that gets no probe, because this machine cannot read the settings: other nodes of the job may, and
    would wait for this one.

    Raises:
        UnreadableSettingsError: the user wants to know, or only to look.
        SettingsError: a change is none.
    """
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.settings.changes import apply_changes

    if args.dry_run or (apply_changes({}, [*_changes_of_environment(), *args.set], "the settings file") or {}).get("strict"):
        raise error
    print(printable(f"msprobe run: {error}; the launch line runs without a probe"), file=sys.stderr)
    return {name: value for name, value in os.environ.items() if name not in ("MSPROBE_CONFIG", "MSPROBE_SET")}


def _bootstrap() -> str:
    spec = importlib.util.find_spec("msprobe_integrations.autoload")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("the package msprobe_integrations is not installed beside this command; install msprobe anew")
    return str(Path(next(iter(spec.submodule_search_locations))).resolve() / "bootstrap")


def _program(command: list[str]) -> tuple[str, list[str]]:
    """The file of the program, and its arguments as a shell would give them; a Python script that cannot be executed runs in this
    interpreter."""
    program = shutil.which(command[0])
    if program is not None:
        return program, command
    if not Path(command[0]).is_file():
        raise UsageError(f"program '{command[0]}' was not found; give the launch line as you would type it, after --")
    if command[0].endswith(".py"):
        return sys.executable, [sys.executable, *command]
    raise UsageError(f"'{command[0]}' is a file that cannot be executed; name what runs it: bash {command[0]}")
