"""Which names say that what stands under them is a secret: variables, settings, options, keys of files.

Models are full of keys, tokens and passes (``num_key_value_heads``, ``eos_token``, ``forward_pass``), so a name has one of three grades:
it says it whatever the value is, it says it when the value looks like one, or it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msprobe_engine.config.secrets.licenses import is_license_name, is_license_number
from msprobe_engine.config.secrets.random_tokens import is_random, looks_generated, reads_as_words, words_of_settings

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_INNER = (
    *("PASSKEY", "PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "KEYPHRASE", "SECRET", "CREDENTIAL", "APIKEY", "COOKIE", "BEARER"),
    *("AUTHORIZATION", "PASSWORT", "KENNWORT", "CONTRASENA", "MOTDEPASSE"),
)
"""Anywhere in a name, its separators left out."""
_WORDS = frozenset(
    (
        *("JWT", "SK", "TOTP", "OTP", "MFA", "SALT", "DSN", "NETRC", "WEBHOOK", "CREDS", "CRED", "VAULT", "SASL", "PASSKEY", "AK", "HMAC"),
        *("MIMA", "MIYAO", "KOULING", "LINGPAI", "SENHA", "MDP"),
    )
)
"""A whole part of a name, wherever it stands."""
_LAST = frozenset(
    ("PAT", "PIN", "PWD", "PW", "PASS", "SAS", "PEM", "OAUTH", "AUTH", "SIGNATURE", "SIG", "PSK", "SIGN", "LOGIN", "UNLOCK", "TOKEN")
)
"""The last part of a name, or all of it."""
_LAST_OF_VARIABLE = frozenset(("KEY", "KEYS", "TOKEN", "TOKENS", "PRIVATE", "XAUTHORITY", "AUTHENTICATION", "IDENTITY", "SOCK"))
_ANYWHERE_IN_VARIABLE = frozenset(("KEY", "KEYS", "TOKEN", "AUTH", "OAUTH", "PRIVATE", "SIGNATURE", "PASS", "PWD", "PW", "SAS"))
_GLUED = ("PASS", "PWD", "PW", "TOKEN", "APIKEY", "APIKEYS", "SECRET")
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
_OF_TOKENIZERS = frozenset(
    (
        *("EOS", "BOS", "PAD", "PADDING", "UNK", "UNKNOWN", "SEP", "CLS", "CLASS", "MASK", "START", "BEGIN", "END", "STOP", "EOT"),
        *("EOD", "EOM", "IMAGE", "IMG", "VIDEO", "VISION", "AUDIO", "SPEECH", "FIM", "PREFIX", "SUFFIX", "MIDDLE", "NEWLINE"),
        *("SPECIAL", "ADDED", "INITIALIZER", "PLACEHOLDER", "TRIGGER", "DECODER", "ENCODER", "TYPE", "PER", "NEXT", "NUM", "MAX"),
        *("MIN", "LEVEL"),
    )
)
"""Beside TOKEN: a word of a vocabulary."""
_OF_CRYPTOGRAPHY = re.compile(r"AES|RSA|ED25519|FERNET|CIPHER|(?:EN|DE)?CRYPT.*|(?:UN)?SEAL|SIGN|SIGNING|GPG|PGP|SSH|TLS|SSL|LUKS")
"""Beside KEY."""
_PROPERTIES = frozenset(
    (
        *("LENGTH", "LEN", "SIZE", "STEP", "INTERVAL", "LAYER", "COUNT", "NUM", "RATIO", "RATE", "TIMEOUT", "TTL", "DIM", "EPOCH"),
        *("MIN", "MAX", "EVERY", "AFTER", "BEFORE", "FREE", "LEVEL", "DEPTH", "WIDTH", "PERIOD", "AGE", "PROB", "SCALE", "FACTOR"),
        *("INDEX", "OFFSET", "THRESHOLD", "LIMIT", "FRACTION", "FREQUENCY", "FREQ", "DELAY", "PORT", "ENABLED", "DISABLED"),
        *("ENABLE", "WEIGHT", "ALGORITHM", "ALG", "ALGO", "TYPE", "MODE", "METHOD", "FORMAT", "KIND", "BACKEND", "PROVIDER"),
        *("POLICY", "NAME", "FILE", "PATH", "DIR"),
    )
)
"""The last part of a name that tells how long, how many, which kind or where; not the secret itself. So does a plural before a number."""
_HOLDERS_OF_SECRETS = frozenset(("auth", "auths", "basic_auth", "basicauth", "credential", "credentials", "secret", "secrets", "passwords"))
"""Keys of settings files: what stands below is a secret, whatever it is called there."""
_OF_PEOPLE = frozenset(("USER", "USERS", "USERNAME", "ACCOUNT", "EMAIL", "HOST", "URL", "SERVER", "ENDPOINT", "REGISTRY"))
"""Below such a key, who or where."""
_FREE_TEXT = frozenset(("COMMENT", "COMMENTS", "NOTE", "NOTES", "DESCRIPTION", "MESSAGE", "REMARK", "REMARKS"))
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
_ROLE = re.compile(
    r"(?:vault|approle|aws|azure|oidc)[._-]?role[._-]?id$|(?:^|[._-])(?:secret|access)[._-]?id$|identity[._-]?header$", re.IGNORECASE
)
_SWITCHES = frozenset(("", "true", "false", "none", "null", "yes", "no", "on", "off", "auto", "default", "enabled", "disabled"))
_TOKENS_OF_MODELS = re.compile(r"[<\[|].{0,60}[>\]|]|</?\w{1,20}>")
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w{0,80}|\{[A-Za-z_]\w{0,80}\})|%\w{1,80}%")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_,.]{0,30}(?:[eE][-+]?[0-9]{1,4})?\s?[kKmMgGtTbB]?i?B?")
_USER_AND_PASSWORD = re.compile(r"[\w.+-]{1,64}[:%](?![0-9]{1,5}$)[^\s/:@]{4,}")
_INDICES = re.compile(r"(?:\.[0-9]{1,6})+$")
"""Behind the name of a list that is not flat."""
_SHORTEST_REUSED = 6
"""Characters of a secret that is looked for elsewhere; a shorter one could be any word."""

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


def is_free_text(name: str) -> bool:
    """Is a variable what people write to each other (``SLURM_JOB_COMMENT``)? It can hold anything, and no program computes with it."""
    parts = _parts(name[:300])
    return bool(parts) and parts[-1] in _FREE_TEXT


def secret_setting(name: str, value: Any) -> bool:
    """Is the value of a setting, option or key a secret by its name?"""
    if value is None or isinstance(value, (bool, float)) or not isinstance(value, (str, bytes, int)):
        return False
    text = (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).strip()
    if text.lower() in _SWITCHES or _REFERENCE.fullmatch(text):
        return False
    name = _INDICES.sub("", name[-300:])
    if is_license_number(name, text):
        return True
    grade, parts = _grade(name), _parts(name)
    if grade == NOTHING and parts and parts[-1] in _OF_PEOPLE:
        return bool(_USER_AND_PASSWORD.fullmatch(text))
    if grade != SURE and name.isupper() and _variable(name):
        grade, parts = SURE, (*parts, "TOKEN")
    if grade == NOTHING:
        return False
    is_number = bool(_NUMBER.fullmatch(text))
    if is_number and (parts[-1] in ("TOKEN", "TOKENS") or (parts[-1] not in _LAST and _is_plural(parts[-1]))):
        return False
    if isinstance(value, int):
        return grade == SURE and value not in (0, 1)
    if _TOKENS_OF_MODELS.fullmatch(text):
        return False
    if grade == SURE and parts[-1] in ("TOKEN", "TOKENS") and not _OF_SERVICE.search(name):
        return len(text) > 3 and not text.startswith(("<", "["))
    return grade == SURE or (not is_number and (looks_generated(text) or is_random(text) or not reads_as_words(text)))


def names_secret(name: str) -> bool:
    """Is everything under this name a secret?"""
    return _grade(name[-300:]) == SURE


def may_name_secret(name: str) -> bool:
    """Is it worth while to look at the value?"""
    if is_license_name(name):
        return True
    return _grade(name[-300:]) != NOTHING or (name.isupper() and secret_variable(name)) or bool(_OF_PEOPLE & set(_parts(name[-300:])[-1:]))


def below_secrets(name: str, key: str) -> str:
    """The name of what stands under `key` in a mapping called `name`: below ``auth``, ``credentials`` and ``secrets`` that counts too."""
    holder = next((part for part in name.split(".") if part in _HOLDERS_OF_SECRETS), "")
    return f"{holder}.{key}" if holder else key


def judged_name(key: str, settings: Mapping[str, Any]) -> str:
    """The name that tells what the value of `key` is: its own, but in a pair (``{"name": "HF_TOKEN", "value": ...}``, as schedulers write
    variables) the one beside it, and "secret" below ``data`` of an object whose ``kind`` is that.

    Args:
        settings: what stands beside it, by key or dotted path; a value may stand under ``value`` of an entry.
    """
    stem, dot, last = key.rpartition(".")
    if last.lower() == "value":
        for word in ("name", "key", "Name", "Key"):
            if isinstance(name := _plain_value(settings.get(f"{stem}{dot}{word}")), str):
                return name
    parts = key.split(".")
    for i, part in enumerate(parts):
        if part in ("data", "stringData") and _plain_value(settings.get(".".join((*parts[:i], "kind")))) == "Secret":
            return "secret"
    return key


def _plain_value(entry: Any) -> Any:
    return entry.get("value") if isinstance(entry, Mapping) else entry


def is_betrayed_by_use(value: str) -> bool:
    """Does a value under the name of a secret betray it where it stands again? A number, a reference to a variable, a switch, or a word of
    settings (``--password 1234``, ``--hub-token cosine``) is also that of settings that have to be compared."""
    return (
        len(value) >= _SHORTEST_REUSED
        and not value.startswith("$")
        and not _NUMBER.fullmatch(value)
        and value.lower() not in _SWITCHES
        and value.lower() not in words_of_settings()
    )


@lru_cache(maxsize=8192)
def _grade(name: str) -> int:
    name = _INDICES.sub("", name)
    parts = _parts(name)
    if not parts:
        return NOTHING
    grade = _grade_of_parts(name, parts)
    below = any(part in _HOLDERS_OF_SECRETS for part in name.split(".")[:-1])
    if below and grade != SURE:
        return NOTHING if parts[-1] in _OF_PEOPLE else PERHAPS if parts[-1] in _PROPERTIES else SURE
    return PERHAPS if grade == SURE and parts[-1] in _PROPERTIES else grade


def _grade_of_parts(name: str, parts: tuple[str, ...]) -> int:
    joined = re.sub(r"[^A-Z]", "", name.upper())
    last = parts[-1]
    if last in ("TOKEN", "TOKENS") and _OF_TOKENIZERS & set(_parts(name.rpartition(".")[2])):  # what is around it says nothing of it
        return PERHAPS
    if any(word in joined for word in _INNER) or _OF_SERVICE.search(name) or _ROLE.search(name):
        return SURE
    if _WORDS & set(parts) or (last in _LAST and not _is_of_computing(parts)):
        return SURE
    if len(last) > 4 and last not in _NOT_GLUED and last.endswith(_GLUED) and last not in _GLUED:
        return SURE
    if last == "KEY" and any(_OF_CRYPTOGRAPHY.fullmatch(part) for part in parts):
        return SURE
    if name.lower().rpartition(".")[2] == "tokens":
        return SURE
    may_be = last in ("KEY", "TOKENS", "CODE") or (last.endswith("KEY") and len(last) > 4) or joined.endswith("SESSIONID")
    return PERHAPS if may_be else NOTHING


def _is_of_computing(parts: tuple[str, ...]) -> bool:
    """``forward_pass``, ``cpu_pin``: words that are secrets of nobody."""
    return parts[-1] in ("PASS", "PIN") and len(parts) > 1 and parts[-2] in _OF_COMPUTING


def _is_plural(part: str) -> bool:
    """``steps``, ``layers``: a number under it counts them. Several secrets are none of these."""
    return part.endswith("S") and not part.endswith("SS") and _grade(part) == NOTHING and _grade(part[:-1]) == NOTHING


@lru_cache(maxsize=8192)
def _parts(name: str) -> tuple[str, ...]:
    """``hubToken``, ``HUB_TOKEN`` and ``hub-token`` are HUB, TOKEN; ``S3_SK`` is S, 3, SK."""
    return tuple(part.upper() for part in _PART.findall(name))
