"""Which names say that what stands under them is a secret: variables, settings, options, keys of files.

Models are full of keys, tokens and passes (``num_key_value_heads``, ``eos_token``, ``forward_pass``), so a name has one of three grades:
it says it whatever the value is, it says it when the value looks like one, or it says nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from msprobe_engine.config_check.random_tokens import is_random, looks_generated

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_INNER = ("PASSKEY", "PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "SECRET", "CREDENTIAL", "APIKEY", "COOKIE", "BEARER", "AUTHORIZATION")
"""Anywhere in a name, its separators left out."""
_WORDS = frozenset(
    ("JWT", "SK", "TOTP", "OTP", "MFA", "SALT", "DSN", "NETRC", "WEBHOOK", "CREDS", "CRED", "VAULT", "SASL", "PASSKEY", "AK")
)
"""A whole part of a name, wherever it stands."""
_LAST = frozenset(("PAT", "PIN", "PWD", "PW", "PASS", "SAS", "PEM", "OAUTH", "AUTH", "SIGNATURE", "SIG", "PSK"))
"""The last part of a name, or all of it."""
_LAST_OF_VARIABLE = frozenset(("KEY", "KEYS", "TOKEN", "TOKENS", "PRIVATE", "CERT", "XAUTHORITY", "AUTHENTICATION", "IDENTITY", "SOCK"))
_ANYWHERE_IN_VARIABLE = frozenset(("KEY", "KEYS", "TOKEN", "AUTH", "OAUTH", "PRIVATE", "SIGNATURE", "PASS", "PWD", "PW", "SAS", "CERT"))
_GLUED = ("PASS", "PWD", "TOKEN", "APIKEY", "APIKEYS", "SECRET")
"""The end of a last part without a separator (``DBPASS``, ``hubtoken``)."""
_NOT_GLUED = frozenset(("COMPASS", "BYPASS", "OLDPWD", "SUBTOKEN", "PERTOKEN"))
_NOT = frozenset(("PWD", "OLDPWD"))
"""The directory of a shell."""
_OF_COMPUTING = frozenset(
    (
        *("FORWARD", "BACKWARD", "FWD", "BWD", "SINGLE", "MULTI", "ONE", "TWO", "FIRST", "SECOND", "NUM", "FUSION", "COMPILE", "COMPILER"),
        *("GRAPH", "LOW", "HIGH", "BAND", "EACH", "PER", "CPU", "MEMORY", "THREAD", "CORE", "IR", "OPT", "LAST", "EXTRA", "MAX", "MIN"),
    )
)
"""Before PASS and PIN: a pass over data or code, pinned memory or threads."""
_SERVICES = (
    "api|access|auth|hub|hf|hugging(?:_?face)?|wandb|git|github|gitlab|gitee|aws|azure|gcp|s3|oss|obs|cos|minio|private|secret|account|ssh|gpg|"
    "session|swan(?:_?lab)?|comet|mlflow|neptune|clearml|openai|anthropic|dashscope|registry|docker|pypi|npm|bot|login|modelscope|refresh|"
    "csrf|xsrf|slack|telegram|feishu|lark|dingtalk|wechat|discord|datadog|dd|sentry|grafana|kaggle|bearer|app|client|service|deploy|runner|"
    "encryption|signing|master|license|subscription|shared|personal|admin|root|db|redis|mongo|mysql|postgres|proxy|identity"
)
_OF_SERVICE = re.compile(
    rf"(?:^|[._-])(?:{_SERVICES})[._-]?(?:key(?:[._-]?id)?|token|pat|pwd|pass|pin)s?$|(?:^|[._-])(?:id|user|web|job)[._-]?token$",
    re.IGNORECASE,
)
_ROLE = re.compile(r"(?:vault|approle|aws|azure|oidc)[._-]?role[._-]?id$|(?:^|[._-])secret[._-]?id$|identity[._-]?header$", re.IGNORECASE)
_SWITCHES = frozenset(("", "true", "false", "none", "null", "yes", "no", "on", "off", "auto", "default"))
_TOKENS_OF_MODELS = re.compile(r"[<\[|].{0,60}[>\]|]|</?\w{1,20}>")
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w{0,80}|\{[A-Za-z_]\w{0,80}\})|%\w{1,80}%")

SURE, PERHAPS, NOTHING = 2, 1, 0


def secret_variable(name: str) -> bool:
    """Does the name of a variable of the environment say that its value is a secret?"""
    return _variable(name[:300])


@lru_cache(maxsize=4096)
def _variable(name: str) -> bool:
    if name in _NOT:
        return False
    parts = _parts(name)
    if _grade(name) == SURE or not parts:
        return bool(parts)
    if parts[-1] in _LAST_OF_VARIABLE or name.upper() == "XAUTHORITY":
        return True
    return (bool(_ANYWHERE_IN_VARIABLE & set(parts)) and not _is_of_computing(parts)) or parts[-1].endswith(("TOKEN", "KEY", "KEYS"))


def secret_setting(name: str, value: Any) -> bool:
    """Is the value of a setting, option or key a secret by its name?"""
    if value is None or isinstance(value, (bool, float)) or not isinstance(value, (str, bytes, int)):
        return False
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    if text.strip().lower() in _SWITCHES or _REFERENCE.fullmatch(text.strip()):
        return False
    grade = _grade(name[-300:])
    if isinstance(value, int):
        return grade == SURE and value not in (0, 1)
    if grade == NOTHING or _TOKENS_OF_MODELS.fullmatch(text.strip()):
        return False
    if name.lower().rpartition(".")[2] == "token":
        return names_token(text)
    return grade == SURE or looks_generated(text.strip()) or is_random(text.strip())


def names_secret(name: str) -> bool:
    """Is everything under this name a secret?"""
    return _grade(name[-300:]) == SURE


def may_name_secret(name: str) -> bool:
    """Is it worth while to look at the value?"""
    return _grade(name[-300:]) != NOTHING or (name.isupper() and secret_variable(name))


def names_token(value: str) -> bool:
    """Can a value under ``token`` be that of a service, and not a word of a tokenizer (``<unk>``) or a switch?"""
    return len(value) > 3 and not value.startswith(("<", "[")) and secret_setting("password", value)


@lru_cache(maxsize=8192)
def _grade(name: str) -> int:
    parts = _parts(name)
    if not parts:
        return NOTHING
    joined = re.sub(r"[^A-Z]", "", name.upper())
    if any(word in joined for word in _INNER) or _OF_SERVICE.search(name) or _ROLE.search(name):
        return SURE
    if _WORDS & set(parts) or (parts[-1] in _LAST and not _is_of_computing(parts)):
        return SURE
    last = parts[-1]
    if len(last) > 4 and last not in _NOT_GLUED and last.endswith(_GLUED) and last not in _GLUED:
        return SURE
    return PERHAPS if last in ("KEY", "TOKEN", "CODE", "AUTH") else NOTHING


def _is_of_computing(parts: tuple[str, ...]) -> bool:
    """``forward_pass``, ``cpu_pin``: words that are secrets of nobody."""
    return parts[-1] in ("PASS", "PIN") and len(parts) > 1 and parts[-2] in _OF_COMPUTING


@lru_cache(maxsize=8192)
def _parts(name: str) -> tuple[str, ...]:
    """``hubToken``, ``HUB_TOKEN`` and ``hub-token`` are HUB, TOKEN; ``S3_SK`` is S, 3, SK."""
    return tuple(part.upper() for part in _PART.findall(name))
