"""The launch arguments of the probe, for Megatron's parser (its extra arguments) and for scripts that have a parser of their own.

=========================  =================================================================
``--msprobe-config FILE``  the settings
``--msprobe-output-dir``   the same as ``--msprobe-set output_dir=DIR``
``--msprobe-set K=V``      one key of the file is another one; may be repeated
``--msprobe-strict``       a fault of the probe ends the training: ``strict=true``
=========================  =================================================================
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_integrations.autoload import request

CONFIG = "--msprobe-config"


class Flags(NamedTuple):
    """What stood on the command line.

    Attributes:
        config: settings file, ``""`` when there is no such argument.
        changes: ``key=value`` each, in order.
    """

    config: str = ""
    changes: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; for example: {CONFIG} probe.yaml --msprobe-set dump.step=[5]")


def parse_flags(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """The probe's arguments, wherever they stand, and all the others in their order.

    Raises:
        UsageError: an argument of the probe lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add(parser, default=None)
    own: list[str] = []
    rest: list[str] = []
    items = list(arguments)
    while items:  # argparse would take an argument that follows `--` or is like one of a group for its own
        name, equals, _ = items[0].partition("=")
        if name not in parser._option_string_actions:
            rest.append(items.pop(0))
            continue
        takes = 1 if equals or parser._option_string_actions[name].nargs == 0 else 2
        own += items[:takes]
        del items[:takes]
    parsed = parser.parse_args(own)
    changes = list(parsed.msprobe_set)
    if parsed.msprobe_output_dir:
        changes.append(f"output_dir={parsed.msprobe_output_dir}")
    if parsed.msprobe_strict:
        changes.append("strict=true")
    return Flags(parsed.msprobe_config or "", tuple(changes)), rest


def add(parser: Any, default: str | None = None) -> Any:
    """Make a parser know the arguments; it is returned. One that knows them already stays as it is.

    Args:
        parser: an `argparse.ArgumentParser`.
        default: settings file when ``--msprobe-config`` is not given.
    """
    if CONFIG in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("msprobe")
    group.add_argument(CONFIG, metavar="FILE", default=default, help="settings file of the probe")
    group.add_argument("--msprobe-output-dir", metavar="DIR", default=None, help="where the probe writes (output_dir of its settings)")
    group.add_argument(
        "--msprobe-set", action="append", metavar="KEY=VALUE", default=[], help="change one key of the probe's settings; may be repeated"
    )
    group.add_argument("--msprobe-strict", action="store_true", help="a fault of the probe ends the training (default: the probe goes off)")
    return parser


def request_probe(flags: Flags) -> request.Request | None:
    """Ask for the probe of these arguments; what they leave open holds as the environment says it. None: nobody asks for one.

    Raises:
        UsageError: there are arguments, but no settings file.
        SettingsError: the settings are wrong.
    """
    asked = request.current()
    if flags != Flags():
        config = flags.config or (asked.config if asked is not None else "")
        if not config:
            raise UsageError(f"no settings file: add {CONFIG} FILE, or set MSPROBE_CONFIG")
        asked = request.request_probe(
            config, (*(asked.changes if asked is not None else request.environment_changes()), *flags.changes), by=CONFIG
        )
        asked.settings()
    return asked


def asked_or_exit() -> request.Request | None:
    """`request_probe` for the arguments of this process, which has not begun to train: a mistake ends it.

    Raises:
        SystemExit: with code 2 on every rank; one rank of a machine says why.
    """
    try:
        return request_probe(parse_flags(sys.argv[1:])[0])
    except ProbeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"msprobe: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
