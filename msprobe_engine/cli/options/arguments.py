"""The parser of all commands: an option that no command has is answered with the one that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_LATEST, _LAST_LAUNCH = "latest", "msprobe_output/latest"
_OUTPUTS = ("--output", "--output-path", "--output_path", "--output-dir", "--output_dir")


class Parser(argparse.ArgumentParser):
    """As argparse has it, but for what it says of unknown options, and positional arguments may stand on both sides of options."""

    _given: tuple[str, ...] = ()

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As there.

        Raises:
            SystemExit: wrong usage (2), or ``--help`` (0).
        """
        self._given = tuple(args or ())
        known, unknown = self.parse_known_args(args, namespace)
        if unknown and not any(_is_option(word) for word in unknown):
            # argparse takes optional positional arguments at the first place that has any; what stands behind an option is left over
            known, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return known

    def error(self, message: str) -> NoReturn:
        """A required option that is missing may be there under another spelling.

        Raises:
            SystemExit: always, 2.
        """
        super().error(message + (self._meant(self._given) if "are required" in message else ""))

    def accept_all_spellings(self) -> None:
        """Show every option with hyphens, and take it with underscores as well, as the existing tool writes them; what ``-o`` names may be
        called by any of the words that commands have had for it. To be asked when all options are defined."""
        for action in self._actions:
            shown = list(dict.fromkeys(_hyphens(option) for option in action.option_strings))
            outputs = _OUTPUTS if "-o" in shown else ()
            for option in (*shown, *(_underscores(option) for option in shown), *outputs):
                self._option_string_actions.setdefault(option, action)
            action.option_strings = shown

    def _meant(self, words: Iterable[str]) -> str:
        """``; did you mean '--calibration' in place of '--calibraton'?`` for every option among `words` that is near a known one."""
        known = [option for action in self._actions for option in action.option_strings]
        hints = []
        for word in words:
            if word == "--":
                break
            option = word.partition("=")[0]
            near = difflib.get_close_matches(_plain(option), {_plain(name): name for name in known}, n=1) if _is_option(word) else []
            if near and option not in self._option_string_actions:
                meant = next(name for name in known if _plain(name) == near[0])
                hints.append(f"'{meant}' in place of '{option}'")
        return f"; did you mean {' and '.join(hints)}?" if hints else ""


def replace_latest(args: argparse.Namespace) -> None:
    """The word ``latest`` among the paths that were given stands for the last launch of `msprobe run` below this directory, unless there
    is a file of that name. The link ``latest`` is replaced by the launch that it leads to: what a command prints is still true after the
    next launch."""
    for name, value in vars(args).items():
        if isinstance(value, list):
            setattr(args, name, [_name_launch(one) for one in value])
        else:
            setattr(args, name, _name_launch(value))


def _name_launch(value: Any) -> Any:
    """A path through ``latest`` with the name of the launch; anything else as it is."""
    if not isinstance(value, (str, Path)) or _LATEST not in (parts := Path(value).parts):
        return value
    from msprobe_engine.cli.options.outputs import is_run  # which commands without paths do without

    if str(value) == _LATEST and not os.path.lexists(_LATEST):
        parts = Path(_LAST_LAUNCH).parts
    link = Path(*parts[: parts.index(_LATEST) + 1])
    launch = link.parent / os.readlink(link) if link.is_symlink() else link
    known = launch.parent == link.parent and is_run(launch)
    return type(value)(launch.joinpath(*parts[len(link.parts) :])) if known else value


def _hyphens(option: str) -> str:
    return f"--{option[2:].replace('_', '-')}" if option.startswith("--") else option


def _underscores(option: str) -> str:
    return f"--{option[2:].replace('-', '_')}" if option.startswith("--") else option


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _plain(option: str) -> str:
    """Options are near each other by their letters, whatever stands between and before these."""
    return option.lstrip("-").replace("-", "_").lower()
