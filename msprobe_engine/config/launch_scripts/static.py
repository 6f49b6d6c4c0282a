"""Settings of a training from its launch scripts and settings files; nothing of them is ever run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.config.environment.variables import BY_NAME, BY_VALUE
from msprobe_engine.config.launch_scripts import tree_files
from msprobe_engine.config.launch_scripts.launchers import DISTRIBUTED, STARTING_RANKS, Parsed, parse
from msprobe_engine.config.launch_scripts.named_files import NamedFiles, directories, tree_settings
from msprobe_engine.config.launch_scripts.python_arguments import read_python
from msprobe_engine.config.launch_scripts.sbatch import read_sbatch
from msprobe_engine.config.launch_scripts.shell.context import Context, Started, short
from msprobe_engine.config.launch_scripts.shell.evaluate import read_script
from msprobe_engine.config.launch_scripts.shell.values import Place, State, Text, show_text, unknown_of
from msprobe_engine.config.launch_scripts.static_values import Found, Launch, StaticSettings
from msprobe_engine.config.secrets.masking import HIDDEN, mask_setting, mask_text, masked_arguments, masked_value, values_of_secrets
from msprobe_engine.config.secrets.names import is_betrayed_by_use, judged_name, secret_setting, secret_variable
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.text.words import some

__all__ = ["Found", "Launch", "StaticSettings", "collect_static"]

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".job")
_NOT_SOURCED = frozenset({"activate", "conda.sh", ".bashrc", ".bash_profile", ".profile", "profile", "modules.sh", "init.sh", "bash"})
"""Files that set up an interactive shell or a package manager: long, and without settings of a training."""
_MAX_LAUNCHES = 200
_MAX_ITEMS = 10_000
_MAX_CONFLICTS = 20
"""Settings with several values that are noted one by one."""


def collect_static(
    paths: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    *,
    inherited: Mapping[str, str] | None = None,
) -> StaticSettings:
    """Read launch scripts (``.sh``), Python argument files (``.py``, read as text), YAML, JSON and TOML files.

    Args:
        paths: the files; those that they name (sourced scripts, ``--deepspeed x.json``, ``--config_file``) are read too.
        environment: the variables the script would start with; None: not known, so a variable without a default in the script is not known.
        arguments: what would stand behind the script on its command line; None: not known.
        inherited: some of the variables the script would start with, such as those of this process without secrets; of a variable that is
            not among them nothing is known, as without `environment`.

    Raises:
        UsageError: `paths` is one text, not a list, or a path is no file of these kinds.
        DumpFormatError: a given file cannot be read.
    """
    if isinstance(paths, (str, Path)) or not all(isinstance(path, (str, Path)) for path in paths):
        raise UsageError(f"a list of files is expected, not {paths!r}")
    kinds = [_kind(Path(path)) for path in paths]
    collector = _Collector(environment, arguments, inherited)
    for path, kind in zip(paths, kinds):
        collector.add(Path(path), kind)
    return collector.result()


def _kind(path: Path) -> str:
    """``script``, ``python`` or a kind of `tree_files`; by the suffix, else by the first line."""
    suffix = path.suffix.lower()
    if suffix in SCRIPTS:
        return "script"
    if suffix == ".py":
        return "python"
    if suffix in tree_files.SUFFIXES:
        return tree_files.SUFFIXES[suffix]
    if not path.exists():
        raise DumpFormatError(f"{path}: cannot be read: no such file")
    first = "" if suffix in (".zip", ".pt", ".bin", ".safetensors") else tree_files.read_text(path).partition("\n")[0]
    if first.startswith("#!") and "sh" in first.rpartition("/")[2]:
        return "script"
    allowed = ", ".join((*SCRIPTS, ".py", *tree_files.SUFFIXES))
    raise UsageError(f"{path}: settings are read from {allowed} and from scripts whose first line names a shell; this is neither")


class _Collector:
    def __init__(self, environment: Mapping[str, str] | None, arguments: Sequence[str] | None, inherited: Mapping[str, str] | None) -> None:
        self._environment, self._arguments, self._inherited = environment, arguments, inherited
        self._out = StaticSettings()
        self._secrets: dict[str, set[str]] = {BY_NAME: set(), BY_VALUE: set()}
        self._known_secrets: set[str] = set()
        self._edited: list[tuple[str, str]] = []
        self._variables_seen: dict[str, list[str]] = {}

    def add(self, path: Path, kind: str) -> None:
        """One given file."""
        file = str(path)
        text = tree_files.read_text(path, kind if kind in tree_files.MAX_BYTES else "text")
        self._add_file(file)
        if kind == "script":
            self._script(text, file)
            return
        if kind == "python":
            settings, notes = read_python(text, file)
        else:
            settings, notes = tree_settings(text, kind, file), []
        named = NamedFiles(directories(None, file), {}, self._add_file)
        self._settings(settings)
        self._settings(named.of(settings, []))
        self._out.notes += [*notes, *named.notes]

    def result(self) -> StaticSettings:
        """All that was found, without secrets and with each note once. What one place shows to be a secret is masked where it stands again:
        ``SK=x; torchrun train.py --other $SK``, or the other way round, ``P=x; torchrun train.py --login $P``."""
        out = self._out
        self._know_edited()
        self._mask_known()
        for why, names in self._secrets.items():
            if names:
                left_out = "1 value is left out or masked" if len(names) == 1 else f"{len(names)} values are left out or masked; of each"
                out.notes.append(f"{left_out}: {why} ({', '.join(sorted(names))})")
        for key, places in list(out.conflicts.items())[:_MAX_CONFLICTS]:
            seen = [
                f"{'not given' if setting.value is None else repr(setting.value)} ({setting.file}, line {setting.line})"
                for setting in places
            ]
            out.notes.append(f"'{key}' has several values: {some(seen, 5)}; it is equal to no single one of them")
        if len(out.conflicts) > _MAX_CONFLICTS:
            out.notes.append(f"{len(out.conflicts) - _MAX_CONFLICTS} more settings have several values")
        for name, values in self._variables_seen.items():
            if len(values) > 1:
                shown_values = ", ".join(repr(value) for value in values[:5])
                out.notes.append(f"commands get several values of {name}: {shown_values}; it is equal to no single one of them")
        out.notes = [self._without_known(mask_text(note)) for note in dict.fromkeys(out.notes)]
        return out

    def _mask_known(self) -> None:
        out, hide = self._out, self._without_known
        for key, setting in out.values.items():
            if hide(setting.value) != setting.value:
                self._secrets[BY_VALUE].add(hide(key))
        out.values = {hide(key): self._hide_in(setting) for key, setting in out.values.items()}
        out.conflicts = {hide(key): [self._hide_in(setting) for setting in places] for key, places in out.conflicts.items()}
        self._secrets[BY_VALUE] |= {name for name, value in out.env.items() if hide(value) != value}
        out.env = {name: hide(value) for name, value in out.env.items()}
        out.env_found = {name: self._hide_in(setting) for name, setting in out.env_found.items()}
        out.launches = [
            replace(
                setting,
                argv=tuple(map(hide, setting.argv)),
                env={name: hide(value) for name, value in setting.env.items()},
                condition=hide(setting.condition),
            )
            for setting in out.launches
        ]

    def _hide_in(self, one: Found) -> Found:
        return _replace_value(one, self._without_known(one.value), self._without_known(one.why))

    def _add_file(self, file: str) -> None:
        if file not in self._out.files:
            self._out.files.append(file)

    def _add_secrets(self, text: str) -> None:
        self._known_secrets |= {secret for secret in values_of_secrets(text) if is_betrayed_by_use(secret)}

    def _know_variables(self, state: State) -> None:
        """Values of variables whose names say that they are secrets, as the script has computed them (``PASS=$(cat <<< x)``)."""
        for name in filter(secret_variable, state.names()):
            variable = state.lookup(name)
            value = variable.value() if variable is not None else None
            if value is not None and unknown_of(value) is None and is_betrayed_by_use(show_text(value)):
                self._known_secrets.add(show_text(value))

    def _know_edited(self) -> None:
        """What expansions and filters made of secrets (``--login ${PASS^^}``), and of what letters in another case show to be one."""
        for before, after in reversed(self._edited):
            if after in self._known_secrets and before.casefold() == after.casefold():
                self._known_secrets.add(before)
        for before, after in self._edited:
            if not is_betrayed_by_use(after) or self._mask_text(after) != after:
                continue
            rest = self._mask_text(before)
            if rest != before and after.casefold() not in rest.casefold():  # else it is made of what is no secret
                self._known_secrets.add(after)

    def _mask_text(self, text: str) -> str:
        return str(self._without_known(masked_value("", text)))

    def _settings(self, settings: Mapping[str, Found]) -> None:
        """Take values over; a key that is there with another value becomes a conflict, and the first counts."""
        out = self._out
        values = {key: setting.value for key, setting in settings.items()}
        for key, setting in settings.items():
            name = judged_name(key, values)
            key = self._shown_key(key)
            shown_value = mask_setting(name, setting.value)
            if shown_value != setting.value:
                self._secrets[BY_NAME if shown_value == HIDDEN and secret_setting(name, setting.value) else BY_VALUE].add(key)
                self._known_secrets |= {text for text in _hidden_texts(setting.value, shown_value) if is_betrayed_by_use(text)}
            setting = _replace_value(setting, _limit_size(shown_value), mask_text(setting.why))
            before = out.values.setdefault(key, setting)
            if before is not setting and (before.value, type(before.value)) != (setting.value, type(setting.value)):
                self._conflict(key, setting)

    def _shown_key(self, key: str) -> str:
        """A key as it may be written: a quoted text that begins with dashes is taken for an option."""
        return mask_text(f"--{key}").removeprefix("--") if " " in key else key

    def _without_known(self, value: Any) -> Any:
        if isinstance(value, str):
            if value in self._known_secrets:
                return HIDDEN
            return _without(value, self._known_secrets)
        return [self._without_known(item) for item in value] if isinstance(value, list) else value

    def _conflict(self, key: str, one: Found) -> None:
        places = self._out.conflicts.setdefault(key, [self._out.values[key]])
        if all((one.value, type(one.value)) != (other.value, type(other.value)) for other in places):
            places.append(one)

    def _script(self, text: str, file: str) -> None:
        if "\r\n" in text:
            self._out.notes.append(
                f"{file}: lines end with CR LF; bash would take the CR as part of the last word of each line. Read without it"
            )
            text = text.replace("\r\n", "\n")
        if "\0" in text:
            self._out.notes.append(f"{file}: has zero bytes; bash leaves them out, and so does this")
            text = text.replace("\0", "")
        slurm, given = read_sbatch(text, file)
        self._settings(slurm)
        context = Context(self._environment, {**(self._inherited or {}), **given}, inherits=self._inherited is not None)
        self._add_secrets(text)
        finder = _Finder(context, self._add_file, self._add_secrets)
        arguments = None if self._arguments is None else tuple(self._arguments)
        state = read_script(text, file, context, finder, arguments)
        self._know_variables(state)
        self._edited += context.edited
        parsed = [
            one for one in (parse(started, context.add_note) for started in context.started if not started.captured) if one is not None
        ]
        launches = self._select_training_commands(parsed, context.started, file)
        programs: dict[str, list[tuple[Place, set[str]]]] = {}
        for one in launches[:_MAX_LAUNCHES]:
            programs.setdefault(mask_text(one.program), []).append((one.started.at, self._launch(one, file)))
        for of_program in programs.values():
            for key in dict.fromkeys(key for _, keys in of_program for key in keys):
                for at in [at for at, keys in of_program if key not in keys][:1]:
                    self._conflict(key, Found(None, "flag", at.file, at.line))
        if not launches:
            self._variables(state.exported_variables())
        if len(launches) > _MAX_LAUNCHES:
            self._out.notes.append(f"{file}: {len(launches)} commands start a training; the first {_MAX_LAUNCHES} are taken")
        context.finish()
        self._out.notes += context.notes

    def _select_training_commands(self, parsed: list[Parsed], started: list[Started], file: str) -> list[Parsed]:
        """The commands that start the training: those that start ranks, where there are any."""
        ranks = [command for command in parsed if command.launcher in DISTRIBUTED or command.launcher in STARTING_RANKS]
        others = [command for command in parsed if command not in ranks]
        if ranks and others:
            lines = ", ".join(f"line {command.started.at.line} ({command.program})" for command in others[:10])
            self._out.notes.append(f"{file}: taken as preparation, because another command starts ranks: {lines}")
        if not parsed and started:
            seen = ", ".join(dict.fromkeys(show_text(command.argv[0]).rpartition("/")[2] for command in started))[:200]
            known = "torchrun, deepspeed, accelerate launch, msrun, srun, mpirun, python"
            self._out.notes.append(f"{file}: no command starts a training (known are {known}); commands in it: {seen}")
        for command in started:
            if show_text(command.argv[0]).startswith("--"):
                said = "stands as a command of its own; is a backslash missing at the end of the line before?"
                self._out.notes.append(f"{command.at.file}, line {command.at.line}: {show_text(command.argv[0])} {said}")
        return ranks or others

    def _launch(self, command: Parsed, script: str) -> set[str]:
        """Take one command over; the keys that it gives."""
        started = command.started
        argv = tuple(show_text(word) for word in started.argv)
        env = {name: masked_value(name, show_text(text)) for name, text in started.env.items() if not secret_variable(name)}
        hidden = tuple(masked_arguments(argv))
        condition = mask_text(started.condition)
        self._out.launches.append(
            Launch(command.launcher, mask_text(command.program), hidden, env, started.at.file, started.at.line, condition)
        )
        if started.condition:
            self._out.notes.append(f"{started.at.file}, line {started.at.line}: this training is started only if {started.condition}")
        self._variables(started.env)
        options = {**command.of_launcher, **command.options.found}
        written = {path: show_text(text) for path, text in started.written.items()}
        named = NamedFiles(directories(started.directory, script, command.program), written, self._add_file)
        from_files = named.of(options, [show_text(word) for word in command.options.positionals])
        for key in from_files.keys() & options.keys():
            if options[key].value != from_files[key].value:
                place = f"{from_files[key].file}, line {from_files[key].line}"
                self._out.notes.append(f"{place}: '{key}' is given on the command line too, and that counts")
        together = {self._shown_key(key): setting for key, setting in {**options, **from_files, **options}.items()}
        self._settings(together)
        self._out.notes += named.notes
        return set(together)

    def _variables(self, env: Mapping[str, Text]) -> None:
        """Variables that the script sets for a command; where several commands get other values, all of them."""
        for name, text in env.items():
            if secret_variable(name):
                self._secrets[BY_NAME].add(name)
                continue
            place = text[0].at if text else Place("", 0)
            unknown = unknown_of(text)
            value = str(_limit_size(masked_value(name, show_text(text))))
            if value != str(_limit_size(show_text(text))):
                self._secrets[BY_VALUE].add(name)
            values = self._variables_seen.setdefault(name, [])
            if value not in values:
                values.append(value)
            self._out.env[name] = " or ".join(values)  # of several commands: equal to no single one of them
            setting = Found(
                value,
                "shell",
                place.file,
                place.line,
                unknown is None,
                mask_text(f"{unknown.source} {unknown.why}") if unknown else "",
            )
            self._out.env_found.setdefault(name, setting)


def _limit_size(value: object) -> object:
    """A value of a size that belongs into a pack."""
    if isinstance(value, str) and len(value) > tree_files.MAX_TEXT:
        return f"{value[: tree_files.MAX_TEXT]}... ({len(value)} characters)"
    if isinstance(value, list) and len(value) > _MAX_ITEMS:
        return [*(_limit_size(item) for item in value[:_MAX_ITEMS]), f"... ({len(value)} values)"]
    return [_limit_size(item) for item in value] if isinstance(value, list) else value


def _without(text: str, secrets: Iterable[str]) -> str:
    """A text without these secrets. One may be a part of another, or overlap it: what any of them covers goes."""
    spans = sorted(
        (at.start(), at.start() + len(one)) for one in secrets if one in text for at in re.finditer(f"(?={re.escape(one)})", text)
    )
    out, done = "", 0
    for begin, end in spans:
        if end <= done:
            continue
        out += (text[done:begin] + HIDDEN) if begin >= done else ""
        done = end
    return out + text[done:]


def _hidden_texts(value: Any, shown_value: Any) -> list[str]:
    """Texts of a setting that are masked as a whole."""
    if isinstance(value, list) and isinstance(shown_value, list) and len(value) == len(shown_value):
        return [text for pair in zip(value, shown_value) for text in _hidden_texts(*pair)]
    return [value] if isinstance(value, str) and shown_value == HIDDEN else []


def _replace_value(one: Found, value: object, why: str) -> Found:
    """The same place with a value as it may be written, its reason too."""
    return one if value == one.value and why == one.why else Found(value, one.where, one.file, one.line, one.known, why)


class _Finder:
    """Gives the text of a script that another one sources or starts; says where there is none."""

    def __init__(self, context: Context, read: Callable[[str], None], know: Callable[[str], None]) -> None:
        self._context, self._read, self._know = context, read, know

    def __call__(self, path: str, state: State, place: Place) -> tuple[str, str] | None:
        name = path.rpartition("/")[2]
        if name in _NOT_SOURCED:
            self._context.add_note(place, f"{short(path)} sets up the shell; it is not read")
            return None
        if path in state.written:
            return self._context.paste(state.written[path]), path
        candidate = tree_files.first_file(path, directories(state.directory, place.file))
        if candidate is not None:
            try:
                text = tree_files.read_text(candidate).replace("\r\n", "\n").replace("\0", "")
            except DumpFormatError as error:
                self._context.add_note(place, str(error))
                return None
            self._read(str(candidate))
            self._know(text)
            return text, str(candidate)
        self._context.add_note(place, f"{short(path)} is not here; what it sets or starts is not known")
        return None
