"""What looks like a password, key or token is never written: packs are mailed around.

By name (`HF_TOKEN`, `db_password`), and by the shape of a value whatever its name: user and password in a URL, tokens of services,
private keys, `Authorization` headers, `password=...` inside connection strings. It is a net, not a proof: a secret under an ordinary
name in an ordinary shape is not seen.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "<left out: looks like a secret>"

_WORDS = frozenset(
    (
        *("KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASS"),
        *("PWD", "PW", "CREDENTIAL", "CREDENTIALS", "CRED", "CREDS", "AUTH", "OAUTH", "XAUTHORITY", "AUTHORIZATION", "AUTHENTICATION"),
        *("BEARER", "COOKIE", "COOKIES", "PRIVATE", "JWT", "SAS", "CERT", "PEM", "NETRC", "SIGNATURE", "WEBHOOK", "DSN"),
    )
)
_ENDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "COOKIE", "APIKEYS")
_INNER = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "APIKEY", "COOKIE")
_NOT = frozenset(("PWD", "OLDPWD"))
"""The directory of a shell."""
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_HARD = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "APIKEY", "COOKIE", "BEARER", "AUTHORIZATION", "JWT")
_OF_SERVICES = re.compile(
    r"(?:^|[._-])(?:api|access|auth|hub|hf|huggingface|wandb|github|gitlab|aws|azure|s3|oss|obs|private|secret|account|ssh|session|swanlab|comet|"
    r"mlflow|neptune|clearml|openai|registry|bot|login|user)[._-]?(?:key|token|pat)s?$",
    re.IGNORECASE,
)
_URL = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)[^\s/@'\"<>]{1,1000}@")
_SHAPES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hf_", "api_org_"), r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    (("github_pat_",), r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    (("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glsoat-"), r"\bgl(?:pat|dt|rt|cbt|ptt|soat)-[A-Za-z0-9_-]{16,}"),
    (("sk-", "sk_", "pk_", "rk_"), r"\b(?:sk-(?:proj-|ant-|or-)?|[spr]k_(?:live|test)_)[A-Za-z0-9_-]{20,}"),
    (("akia", "asia", "aroa", "aida", "abia", "acca"), r"\b(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    (("aiza", "ya29."), r"\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,})"),
    (("xox", "hooks.slack"), r"\bxox[abeprs]-[A-Za-z0-9-]{10,}|https://hooks\.slack\.com/services/[A-Za-z0-9/_-]+"),
    (("npm_", "pypi-", "dop_v1_"), r"\b(?:npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dop_v1_[a-f0-9]{40,})"),
    (("eyj",), r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"),
    (("private key",), r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----[\s\S]{0,20000}"),
    (("authorization",), r"(?i:\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:(?:bearer|basic|token|digest)\s+)?[^\s\"'\\,;}]{4,})"),
    (
        ("bearer", "basic"),
        r"(?i:\b(?:bearer|basic)\s+[A-Za-z0-9+/_.=-]{16,}|\bbearer\s+(?=[A-Za-z+/_.=-]{0,40}[0-9])[A-Za-z0-9+/_.=-]{8,})",
    ),
    (
        ("pass", "secret", "credential", "key", "token", "cookie"),
        r"(?i:[\"'](?:[\w-]{0,40}(?:password|passwd|passphrase|secret|credential|cookie|(?:api|access|account|secret|private)[_-]?key)[\w-]{0,20}|"
        r"(?:[\w-]{0,40}(?:access|auth|refresh|api|hub|session|hf|bearer|user|bot|login|registry)[_-]?)?token)\\?[\"']\s*:\s*"
        r"\\?[\"'](?!(?:true|false|none|null)\\?[\"'])(?![<\[])[^\"'\\]{4,}\\?[\"'])",
    ),
    (
        ("pass", "pwd", "secret", "key", "token", "sig"),
        r"(?i:\b(?:password|passwd|pwd|passphrase|secret|api_?key|access_?key(?:_?id)?|account_?key|secret_?key|shared_?access_?key|"
        r"(?:access|auth|refresh|api|hub|session|hf)_?token|sig(?:nature)?)\s*[=:]\s*['\"]?[^\s'\",;&)}\]]{4,})",
    ),
)
"""Lower-case marks, one of which is in every text with the shape, and the shape."""
_COMPILED = tuple((marks, re.compile(shape)) for marks, shape in _SHAPES)


def secret_variable(name: str) -> bool:
    """Does the name of a variable of the environment say that its value is a secret?"""
    if name in _NOT:
        return False
    upper = name.upper()
    words = {part.upper() for part in _PART.findall(name)} | set(re.split(r"[^A-Z0-9]+", upper))
    if words & _WORDS:
        return True
    return any(word.endswith(_ENDS) for word in words) or any(inner in upper.replace("_", "") for inner in _INNER)


def secret_setting(name: str, value: Any) -> bool:
    """Does a setting of a training hold a secret? Names of models are full of keys and tokens (``num_key_value_heads``, ``eos_token``),
    so only words that say nothing else count, and names of credentials of services (``hub_token``, ``wandb_api_key``)."""
    if not isinstance(value, (str, bytes)) or not value:
        return False
    plain = re.sub(r"[^A-Z]", "", name.upper())
    return any(word in plain for word in _HARD) or _OF_SERVICES.search(name) is not None


def masked(text: str) -> str:
    """`text` without what has the shape of a secret."""
    if "://" in text and "@" in text:
        text = _URL.sub(lambda m: f"{m['scheme']}***@", text)
    lower = text.lower()
    for marks, shape in _COMPILED:
        if any(mark in lower for mark in marks):
            text = shape.sub(_masked, text)
    return text


def _masked(found: re.Match[str]) -> str:
    name, sign, _ = found[0].partition("=") if "=" in found[0] else found[0].partition(":")
    plain = name.strip("\"'\\ ")
    return f"{name}{sign}{HIDDEN}" if sign and len(name) < 24 and plain.replace("_", "").isalpha() else HIDDEN


def masked_tree(value: Any) -> Any:
    """`masked` for all texts in nested dicts and lists, keys too."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked_tree(key): masked_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_tree(item) for item in value]
    return value


def cleaned(name: str, value: Any) -> Any:
    """A setting as it may be written: `HIDDEN` where it is a secret, texts masked, containers inside out."""
    if secret_setting(name, value):
        return HIDDEN
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: cleaned(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(name, item) for item in value]
    return value
