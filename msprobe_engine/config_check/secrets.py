"""What looks like a password, key or token is never written: packs are mailed around.

One masker for values of variables, settings, command lines, launch scripts, and the texts inside of them. It looks

1. at names (`secret_names`): of a setting, and of ``name=value``, ``--name value``, ``"name": value`` and ``?name=value`` inside a text;
2. at shapes: user and password in a URL, tokens of services, private keys, headers;
3. at words that look generated, whatever their name (`random_tokens`).

It is a net, not a proof: a short secret under an ordinary name is not seen. Therefore variables of the environment whose names are not
known to matter are not written at all (`environment`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msprobe_engine.config_check.random_tokens import is_digest_name, masked_random
from msprobe_engine.config_check.secret_names import may_name_secret, names_secret, names_token, secret_setting, secret_variable

HIDDEN = "<left out: looks like a secret>"

_SHAPES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hf_", "api_org_"), r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{20,}"),
    (("github_pat_",), r"github_pat_[A-Za-z0-9_]{20,}"),
    (("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glsoat-"), r"(?<![A-Za-z0-9])gl(?:pat|dt|rt|cbt|ptt|soat)-[A-Za-z0-9_-]{16,}"),
    (
        ("sk-", "sk_", "pk_", "rk_"),
        r"(?<![A-Za-z0-9])(?:sk-(?:proj-|ant-|or-)?|[spr]k_(?:live|test)_)(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,}",
    ),
    (("akia", "asia", "aroa", "aida", "abia", "acca"), r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    (("aiza", "ya29."), r"(?<![A-Za-z0-9])(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,})"),
    (("xox", "hooks.slack"), r"(?<![A-Za-z0-9])xox[abeprs]-[A-Za-z0-9-]{10,}|https://hooks\.slack\.com/services/[A-Za-z0-9/_-]+"),
    (("npm_", "pypi-", "dop_v1_"), r"(?<![A-Za-z0-9])(?:npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dop_v1_[a-f0-9]{40,})"),
    (("eyj",), r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"),
    (("private key",), r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----[\s\S]{0,20000}"),
    (
        ("authorization",),
        r"(?i:\bauthorization\\?[\"']?\s{0,8}[:=]\s{0,8}\\?[\"']?(?:(?:bearer|basic|token|digest)\s{1,8})?[^\s\"'\\,;}<]{4,})",
    ),
    (
        ("bearer", "basic"),
        r"(?i:\b(?:bearer|basic)\s{1,8}[A-Za-z0-9+/_.=-]{16,}|\bbearer\s{1,8}(?=[A-Za-z+/_.=-]{0,40}[0-9])[A-Za-z0-9+/_.=-]{8,})",
    ),
    (("password",), r"(?i:\blogin\s{1,8}\S{1,100}\s{1,8}password\s{1,8}\S+)"),
    (("sshpass",), r"\bsshpass\s{1,8}-p\s{0,8}\S+"),
    (("-u", "--user"), r"(?<!\S)(?:-u|--user(?:name)?)[\s=]{1,8}[\"']?[\w.@+-]{1,100}:[^\s\"'/:][^\s\"']*"),
)
"""Lower-case marks, one of which is in every text with the shape, and the shape."""
_COMPILED = tuple((marks, re.compile(shape)) for marks, shape in _SHAPES)
_URL = re.compile(r"(://)[^\s/'\"<>]{1,1000}@")
_URL_WITH_SLASH = re.compile(r"(://[^\s/@:'\"<>]{1,200}):(?![0-9]{1,5}(?:[/?#,;\s]|$))[^\s@'\"<>]{1,400}@(?=[\w.-]+)")
_USER_AT = re.compile(r"(?<![\w/.@:+-])([\w.+-]{1,64}):([^\s/@:'\"<>,;]{3,200})@(?!sha\d|md5)(?=[\w(\[])")

_NAME = r"(?=(?P<name>[A-Za-z0-9_.-]+))(?P=name)"  # read once: a long word without a sign behind it costs its length
_ASSIGNED = re.compile(
    rf"(?<![A-Za-z0-9_.-]){_NAME}(?P<sep>\\{{0,4}}[\"'`]?[\])]{{0,2}}\s{{0,8}}(?:=>|:=|==|=|:[-+?](?=\S)|:(?!//))\s{{0,8}})"
)
_OPTION = re.compile(rf"(?<![\w-])--?(?=[A-Za-z_]){_NAME}(?P<sep>(?:\\{{0,4}}[\"'`])?,?\s{{1,8}})(?!-)")
_VALUE = re.compile(
    r"(?P<quote>\\{0,4}[\"'`])(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*)"
    r"|(?P<bare>(?:[^\s\"'`,;&]|[,;&](?!\s|$|[,;&]|[\w.-]{1,40}[=:])|(?<=\w)[\"'](?=[A-Za-z0-9]))+)",
    re.DOTALL,
)
_HOLDERS = ("value", "several")
"""Keys of entries of ours that hold the value of the setting around them."""
_LONGEST_JUDGED = 200
"""Characters of a value that are looked at where its name alone does not decide."""


def masked(text: str) -> str:
    """`text` without what has the shape of a secret, or stands in it under the name of one."""
    return _by_names(masked_shapes(text))


def masked_shapes(text: str) -> str:
    """`text` without what has the shape of a secret; for lists of packages, whose names may be anything."""
    if "@" in text and ":" in text:
        if "://" in text:
            text = _URL_WITH_SLASH.sub(r"://***@", _URL.sub(r"\1***@", text))
        text = _USER_AT.sub(r"***@", text)
    lower = text.lower()
    for marks, shape in _COMPILED:
        if any(mark in lower for mark in marks):
            text = shape.sub(_hide_shape, text)
    return text


def _hide_shape(found: re.Match[str]) -> str:
    name, sign, _ = found[0].partition("=") if "=" in found[0] else found[0].partition(":")
    plain = name.strip("\"'\\ ")
    return f"{name}{sign}{HIDDEN}" if sign and len(name) < 24 and plain.replace("_", "").isalpha() else HIDDEN


def values_of_secrets(text: str) -> set[str]:
    """What stands in a text under names of secrets: a script may use it again under another name."""
    found: set[str] = set()
    _by_names(text, found)
    return found


def _by_names(text: str, collected: set[str] | None = None) -> str:
    for pattern in (_ASSIGNED, _OPTION):
        parts: list[str] = []
        done = at = 0
        while (found := pattern.search(text, at)) is not None:
            at = found.end()  # a value may have pairs of its own
            name = found["name"].lstrip("-.0123456789")
            if not may_name_secret(name) or text.startswith(HIDDEN, at + len(_quotes(text, at))):
                continue
            value = _VALUE.match(text, at) if names_secret(name) else _VALUE.match(text, at, at + _LONGEST_JUDGED)
            if value is None or not _is_secret(text, found, name, value):
                continue
            start, end = value.span("bare" if value["bare"] is not None else "quoted")
            if value["bare"] is not None:
                end = start + len(value["bare"].rstrip(")]}"))
            if end > start:
                parts += [text[done:start], HIDDEN]
                if collected is not None:
                    collected.add(text[start:end])
                done = at = end
        text = "".join([*parts, text[done:]])
    return text


def _quotes(text: str, at: int) -> str:
    end = at
    while end < at + 5 and text[end : end + 1] in ("\\", '"', "'", "`"):
        end += 1
    return text[at:end]


def _is_secret(text: str, found: re.Match[str], name: str, value: re.Match[str]) -> bool:
    given = value["bare"] if value["bare"] is not None else value["quoted"]
    word = name.lower()
    if word in ("token", "key", "auth", "sig") and text[found.start() - 1 : found.start()] in ("?", "&"):
        return len(given) > 3 and secret_setting("password", given)
    if word == "token" and value["quote"] is None and ":" in found["sep"] and not found["sep"].startswith(("'", '"', "\\")):
        return False  # a sentence about tokens
    if secret_setting(name, given):
        return True
    return name.isupper() and secret_variable(name) and names_token(given)


def masked_tree(value: Any) -> Any:
    """`masked` for all texts in nested dicts and lists, keys too; names of the dicts say nothing of their values."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked_tree(key): masked_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_tree(item) for item in value]
    return value


def cleaned(name: str, value: Any) -> Any:
    """A setting as it may be written: `HIDDEN` where it is a secret, texts masked, words that look generated too, containers inside out."""
    if secret_setting(name, value):
        return value if value == HIDDEN else HIDDEN
    if isinstance(value, str):
        return masked_value(name, value)
    if isinstance(value, dict):
        return {masked_tree(key): cleaned(name if key in _HOLDERS else str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, str) and item.startswith("-") for item in value) and all(isinstance(item, str) for item in value):
            return masked_arguments(value, name)
        return [cleaned(name, item) for item in value]
    return value


def masked_value(name: str, text: str) -> str:
    """A text under a name that says nothing."""
    text = masked(text)
    return text if is_digest_name(name) else masked_random(text, HIDDEN)


def masked_arguments(arguments: Sequence[str], name: str = "") -> list[str]:
    """A command line without secrets: ``--hub_token X`` and ``--hub_token=X`` lose their X.

    Args:
        name: of what holds the words.
    """
    found: list[str] = []
    option = ""
    for argument in arguments:
        first, equals, value = argument.partition("=")
        if argument.startswith("-") and not (option and secret_setting(option, argument) and " " in argument):
            option = "" if equals else argument.lstrip("-")
            found.append(f"{first}={cleaned(first.lstrip('-'), value)}" if equals else masked_value(name, argument))
            continue
        found.append(str(cleaned(option or name, argument)))
        option = ""
    return found
