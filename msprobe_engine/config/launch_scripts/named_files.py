"""Files that a command line or a settings file names: ``--deepspeed ds.json``, ``--job.config_file x.toml``, ``--hostfile hosts``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msprobe_engine.config.launch_scripts import tree_files
from msprobe_engine.config.launch_scripts.python_arguments import read_python
from msprobe_engine.config.launch_scripts.static_values import Found
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.log import one_line

MAX_FILES = 50
MAX_DEEP = 4
MAX_PARENTS = 5
_NAMES_SETTINGS = re.compile(r"config|cfg|deepspeed|yaml|json|toml|hparam|recipe|args[_-]?file", re.IGNORECASE)
_NAMES_HOSTS = re.compile(r"(?:^|[._-])host[_-]?file$", re.IGNORECASE)
_NAMES_MODEL = re.compile(r"(?:^|[._-])(?:model_name_or_path|model_path|config_name|hf_assets_path|hf_path|base_model)$")


def directories(known: str | None, script: str, program: str = "") -> list[Path]:
    """Where a relative path may lead: the working directory if the script says it, that of this process, those above the script.

    Launch scripts are mostly run in the root of their repository, a few levels above.
    """
    out = [Path(known)] if known is not None else []
    out.append(Path.cwd())
    above = Path(os.path.abspath(script)).parent
    out.extend([above, *list(above.parents)[: MAX_PARENTS - 1]])
    if program.endswith(".py"):
        out.append(Path(os.path.abspath(os.path.join(above, program))).parent)
    return list(dict.fromkeys(out))


class NamedFiles:
    """Reads the files that settings name, and those that these name.

    Args:
        places: directories that relative paths are tried in, in this order.
        written: files that the script writes itself -> content.
        read: is told each file that was read.
    """

    def __init__(self, places: Iterable[Path], written: Mapping[str, str], read: Callable[[str], None]) -> None:
        self._places, self._written, self._read = list(places), written, read
        self._seen: set[str] = set()
        self.notes: list[str] = []

    def of(self, settings: Mapping[str, Found], positionals: Iterable[str], deep: int = 0) -> dict[str, Found]:
        out: dict[str, Found] = {}
        self._of_hydra(settings, deep, out)
        for path in positionals:
            if Path(path).suffix.lower() in tree_files.SUFFIXES:
                self._add(path, Found(path, "flag", "", 0), deep, out)
        for key, setting in list(settings.items()):
            if not isinstance(setting.value, str) or not setting.known or not setting.value or "\0" in setting.value:
                continue
            if "msprobe" in key:
                continue  # settings of the probe, not of the training
            suffix = Path(setting.value).suffix.lower()
            last = key.rpartition(".")[2]
            if _NAMES_HOSTS.search(key):
                self._add(setting.value, setting, deep, out, hosts=True)
            elif (suffix in tree_files.SUFFIXES or suffix == ".py") and _NAMES_SETTINGS.search(key) and "://" not in setting.value:
                self._add(setting.value, setting, deep, out)
            elif _NAMES_MODEL.search(last):
                self._add(os.path.join(setting.value, "config.json"), setting, deep, out, quiet=True)
        return out

    def _of_hydra(self, settings: Mapping[str, Found], deep: int, out: dict[str, Found]) -> None:
        """``--config-path`` and ``--config-name`` name one file together; lists of defaults in it are not put together."""
        flags = {
            key.replace("_", "-"): setting
            for key, setting in settings.items()
            if setting.where == "flag" and isinstance(setting.value, str) and setting.known
        }
        name = flags.get("config-name") or flags.get("cn")
        folder = flags.get("config-path") or flags.get("config-dir") or flags.get("cp")
        if name is None or folder is None or Path(str(name.value)).is_absolute():
            return
        file = str(name.value) if Path(str(name.value)).suffix.lower() in tree_files.SUFFIXES else f"{name.value}.yaml"
        self._seen.add(str(name.value))
        self._add(os.path.join(str(folder.value), file), name, deep, out)
        if "defaults" in out or any(key.startswith("defaults.") for key in out):
            self.notes.append(
                f"{name.file}, line {name.line}: the list 'defaults' of {one_line(file)} names more files, which are not put together"
            )

    def _add(self, path: str, named: Found, deep: int, out: dict[str, Found], hosts: bool = False, quiet: bool = False) -> None:
        """Read one file into `out`; what is there stays."""
        if path in self._seen:
            return
        self._seen.add(path)
        by = one_line(f"{named.file}, line {named.line}: " if named.line else f"{named.file}: " if named.file else "")
        if deep >= MAX_DEEP or len(self._seen) > MAX_FILES:
            self.notes.append(
                f"{by}{one_line(path[:200])} is not read: files that name files more than {MAX_DEEP} deep, or more than {MAX_FILES}"
            )
            return
        try:
            content = self._content(path)
            if content is None:
                if not quiet:
                    self.notes.append(f"{by}{one_line(path[:200])} is not here; what stands in it is not read")
                return
            text, file = content
            settings = self._settings(text, path, file, hosts)
        except DumpFormatError as error:
            self.notes.append(f"{by}{error}")
            return
        for key, setting in {**settings, **self.of(settings, [], deep + 1)}.items():
            out.setdefault(key, setting)

    def _settings(self, text: str, path: str, file: str, hosts: bool) -> dict[str, Found]:
        if hosts:
            return {key: Found(value, "hostfile", file, 0) for key, value in tree_files.hosts(text).items()}
        suffix = Path(path).suffix.lower()
        if suffix == ".py":
            found, notes = read_python(text, file)
            self.notes += notes
            return found
        return tree_settings(text, tree_files.SUFFIXES[suffix], file)

    def _content(self, path: str) -> tuple[str, str] | None:
        """Text and path of a file; None where it is not here."""
        for name in (path, path.removeprefix("./")):
            if name in self._written:
                return self._written[name], f"{name} (written by the script)"
        candidate = tree_files.first_file(path, self._places)
        if candidate is None:
            return None
        self._read(str(candidate))
        return tree_files.read_text(candidate, tree_files.SUFFIXES.get(candidate.suffix.lower(), "text")), str(candidate)


def tree_settings(text: str, kind: str, file: str) -> dict[str, Found]:
    """Settings of a YAML, JSON or TOML file.

    Raises:
        DumpFormatError: it is not valid, or too large.
    """
    lines = tree_files.lines_of(text, kind)
    values = tree_files.flat(tree_files.parse(text, kind, file), file)
    return {key: Found(value, kind, file, lines.get(key.rpartition(".")[2], 0)) for key, value in values.items()}
