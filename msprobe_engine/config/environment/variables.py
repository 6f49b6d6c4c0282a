"""Variables of the environment as they may be written.

Values are collected of families that libraries of a training read (the rows of ``config/environment/rules.yaml`` without ``by_name``), and
of names that the user adds. Of everything else the name is recorded, and where the user has set a key, a keyed digest, so that two packs
made with the same key can be compared: without the key nobody can tell a value by trying, with it two values are the same or they are not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from msprobe_engine.config.environment.rules import environment_rules
from msprobe_engine.config.secrets.masking import HIDDEN, masked_value
from msprobe_engine.config.secrets.names import is_free_text, secret_variable
from msprobe_engine.core.process.user_key import KEY
from msprobe_engine.core.text.words import some

LONGEST = 32768
"""Characters of one value; longer ones are cut, with a note of their length."""
_MOST_NAMES = 10
_NOISE = frozenset(("_", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "PS1", "PS2", "PROMPT_COMMAND", "TERMCAP", KEY))

NOT_KNOWN = "no library of the training is known to read it"
BY_NAME = "its name says that it is a secret"
BY_VALUE = "its value looks like a secret"
REASONS = (NOT_KNOWN, BY_NAME, BY_VALUE)


@dataclass(frozen=True)
class Withheld:
    """A variable whose value is not written, or not all of it.

    Attributes:
        why: one of `REASONS`.
        digest: of the value, by the key; empty: there is no key.
    """

    why: str
    digest: str = ""


@dataclass(frozen=True)
class Environment:
    """Variables of one process.

    Attributes:
        values: what may be written.
        withheld: by name, what may not; of a name in `values` a part of the value is masked.
        key: which key the digests are by, one way; empty: there is none.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    withheld: Mapping[str, Withheld] = field(default_factory=dict)
    key: str = ""

    def names(self, why: str) -> list[str]:
        """Names that are withheld for a reason."""
        return [name for name, one in self.withheld.items() if one.why == why]

    def entry(self) -> dict[str, Any]:
        """`withheld` as a pack has it, with how many values and names there are, so that a pack of which some were taken away says so."""
        variables = {name: {"why": one.why, "digest": one.digest} for name, one in self.withheld.items()}
        return {"key_id": self.key, "values": len(self.values), "names": len(variables), "variables": variables}

    def notes(self) -> list[str]:
        """What is not written, by name and with the reason, for people; `_MOST_NAMES` each."""
        said = []
        for why in REASONS:
            names = self.names(why)
            if names:
                shown = some(names, _MOST_NAMES)
                reason = "masked" if why == BY_VALUE else "recorded by name only"
                kept = f", with a digest by your key ({self.key})" if self.key else ""
                plural = "s" if len(names) > 1 else ""
                said.append(
                    f"{len(names)} variable{plural} of the environment {reason}{kept}, because {_of_several(why, len(names))} ({shown})"
                )
        if self.names(NOT_KNOWN):
            said.append("--env NAME (config_check.environment in a probe's settings) collects the value of a variable of your own")
        return said


def _of_several(why: str, count: int) -> str:
    if count == 1:
        return why
    several = {NOT_KNOWN: "no library of the training is known to read them", BY_NAME: "their names say that they are secrets"}
    return several.get(why, "their values look like secrets")


def collect(environ: Mapping[str, str] | None = None, *, added: Sequence[str] = (), key: bytes = b"") -> Environment:
    """The environment of this process (or `environ`), sorted by name.

    Args:
        added: names and patterns (``MY_*``) whose values are collected, too.
        key: see `core.user_key`; empty: values that are not collected cannot be compared.
    """
    rules = environment_rules()
    values: dict[str, str] = {}
    withheld: dict[str, Withheld] = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name in _NOISE or name.startswith("BASH_FUNC_"):  # functions of a shell, not settings
            continue
        if secret_variable(name):
            withheld[name] = Withheld(BY_NAME, digest(key, name, value))
        elif (is_free_text(name) or rules.of(name).by_name) and not any(fnmatchcase(name, pattern) for pattern in added):
            withheld[name] = Withheld(NOT_KNOWN, digest(key, name, value))
        else:
            shown = masked_value(name, value)
            if shown != value:
                withheld[name] = Withheld(BY_VALUE, digest(key, name, value))
            values[name] = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}... ({len(shown)} characters)"
    return Environment(values, withheld, key_id(key))


def of_entries(values: Mapping[str, Any], withheld: Mapping[str, Any], session_key: bytes) -> Environment:
    """The environment as a pack has it. A pack that does not say what it withheld (the existing tool's, those of earlier versions) may hold
    anything: its values are treated as this process' are, by `session_key`, so that two such packs can be compared and nothing is shown."""
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    variables = withheld.get("variables")
    if not isinstance(variables, Mapping):
        return collect({name: value for name, value in texts.items() if value != HIDDEN}, key=session_key)
    entries = {
        str(name): Withheld(str(one.get("why", "")), str(one.get("digest", "")))
        for name, one in variables.items()
        if isinstance(one, Mapping)
    }
    shown = {name: masked_value(name, value) for name, value in texts.items() if not secret_variable(name)}
    return Environment(shown, entries, str(withheld.get("key_id", "")))


def digest(key: bytes, name: str, value: str) -> str:
    """HMAC-SHA256 of name and value, 128 bits of it; empty without a key."""
    if not key:
        return ""
    return _hmac(key, "msprobe variable", name, value)[:32]


def key_id(key: bytes) -> str:
    """Tells keys apart, and nothing of a key itself; empty without one."""
    return _hmac(key, "msprobe key")[:16] if key else ""


def _hmac(key: bytes, *texts: str) -> str:
    text = "\0".join(texts)
    try:
        data = text.encode("utf-8", "surrogateescape")  # the bytes that the system has
    except UnicodeEncodeError:  # a pack may hold anything
        data = text.encode("utf-8", "surrogatepass")
    return hmac.new(key, data, hashlib.sha256).hexdigest()
