"""What looks like a password, key or token is never written: packs are mailed around.

One masker for values of variables, settings, command lines, launch scripts, and the texts inside of them. It looks

1. at names (`secret_names`): of a setting, and of ``name=value``, ``--name value``, ``"name": value`` and ``?name=value`` inside a text;
2. at shapes: user and password in a URL, tokens of services, private keys, headers;
3. at words that look generated, whatever their name (`random_tokens`);
4. into texts that are encoded or packed (`encoded`, `masked_percent_encoded`).

It is a net, not a proof: a short secret under an ordinary name is not seen. Therefore variables of the environment whose names are not
known to matter are not written at all (`environment`).

Text that stands in another one as URLs have it: ``?next=https%3A%2F%2Fme%3Apassword%40host``, ``q=--password+x``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from msprobe_engine.config.secrets.encoded import masked_encoded
from msprobe_engine.config.secrets.licenses import is_license_number
from msprobe_engine.config.secrets.names import below_secrets, judged_name, may_name_secret, names_secret, secret_setting
from msprobe_engine.config.secrets.random_tokens import UUID, is_digest_name, masked_random
from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.yaml_text import parse_foreign_yaml

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
    (("/bot",), r"/bot[0-9]{6,}:[A-Za-z0-9_-]{16,}"),
    (("npm_", "pypi-", "dop_v1_"), r"(?<![A-Za-z0-9])(?:npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dop_v1_[a-f0-9]{40,})"),
    (("dapi",), r"(?<![A-Za-z0-9])dapi[a-f0-9]{32}(?:-[0-9])?(?![A-Za-z0-9])"),
    (("密", "口令", "令牌"), r"(?:密码|密碼|密钥|密鑰|口令|令牌)\s{0,4}[:=：]\s{0,4}[^\s\"',;]+"),  # noqa: RUF001 - a Chinese colon
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
    (("-u", "--user"), r"(?<!\S)(?:-[uU]|--user(?:name)?)[\s=]{1,8}[\"']?[\w.@+-]{1,100}[:%][^\s\"'/:][^\s\"']*"),
    (("hook",), r"https?://[^\s\"'<>]{0,200}?hook[^\s\"'<>]{0,200}?/(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{8,}[^\s\"'<>,;]*"),
    (("http",), rf"https?://[^\s\"'<>]{{1,200}}?[/=@:]{UUID}[^\s\"'<>,;]*"),  # who knows such an address may use it
    (
        ("echo", "printf"),
        r"\b(?:echo|printf)\s[^|\n]{1,200}\|(?!\s{0,8}(?:grep|tee|sed|awk)\b)[^|;&\n]{0,200}?(?:stdin\b|\bsudo\s{1,8}-S\b|\blogin\b|passwd\b)",
    ),
)
"""Lower-case marks, one of which is in every text with the shape, and the shape."""
_COMPILED = tuple((marks, re.compile(shape)) for marks, shape in _SHAPES)
_COMMANDS = (
    ("sshpass", r"sshpass", "p"),
    ("mysql", r"mysql\w*", "p"),
    ("mariadb", r"mariadb\w*", "p"),
    ("login", r"login", "pk"),
    ("redis-cli", r"redis-cli", "a"),
    ("ldap", r"ldap\w+", "w"),
    ("zip", r"(?:un)?zip", "P"),
    ("ssh-keygen", r"ssh-keygen", "N"),
    ("config", r"(?:obs|oss|cos)\w{2,6}\s{1,8}config", "ikas"),
)
"""A mark in lower case, a command line, and the letters of its options that take a secret. Of others these are ports and switches."""
_OPTIONS_OF_COMMANDS = tuple(
    (
        mark,
        re.compile(rf"(?<![\w-]){command}(?=\s)[^\n|;&]{{0,500}}"),
        re.compile(rf"(?<=\s)(-[{letters}](?:\s{{1,8}}|=)?)(?!\s|-|{re.escape(HIDDEN)})\S+"),
    )
    for mark, command, letters in _COMMANDS
)
_ANY_MARK = re.compile("|".join(map(re.escape, sorted({*(m for marks, _ in _SHAPES for m in marks), *(m for m, _, _ in _COMMANDS)}))))
_SHORT = 256
"""Characters of a text in which all marks are looked for at once: the names and values of a configuration, of which there are thousands."""
_URL = re.compile(r"(://)[^\s/'\"<>]{1,1000}@")
_URL_WITH_SLASH = re.compile(r"(://[^\s/@:'\"<>]{1,200}):(?![0-9]{1,5}(?:[/?#,;\s]|$))[^\s@'\"<>]{1,400}@(?=[\w.-]+)")
_USER_AT = re.compile(r"(?<![\w/.@:+-])([\w.+-]{1,64}):([^\s/@:'\"<>,;]{3,200})@(?!sha\d|md5)(?=[\w(\[])")

_NETWORK_SHARE = re.compile(r"(?<![:\w/])//[^\s/:@'\"<>]{1,64}:[^\s/@'\"<>]{3,200}@(?=[\w.-]+)")

_NAME = r"(?=(?P<name>[A-Za-z0-9_.-]+))(?P=name)"  # read once: a long word without a sign behind it costs its length
_ASSIGNED = re.compile(
    rf"(?<![A-Za-z0-9_.-]){_NAME}(?P<sep>\\{{0,4}}[\"'`]?[\])]{{0,2}}\s{{0,8}}(?:=>|:=|==|=|<<<|:[-+?](?=\S)|:(?!//))\s{{0,8}})"
)
_OPTION = re.compile(rf"(?<![\w-])--?(?=[A-Za-z_]){_NAME}(?P<sep>(?:\\{{0,4}}[\"'`])?,?\s{{1,8}})(?!-)")
_VALUE = re.compile(
    r"(?P<list>\[[^\[\]\n]{0,2000}\])"
    r"|(?P<quote>\\{0,4}[\"'`])(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*)"
    r"|(?P<bare>(?:[^\s\"'`,;&]|[,;&](?!\s|$|[,;&]|[\w.-]{1,40}[=:])|(?<=\w)[\"'](?=[A-Za-z0-9]))+)",
    re.DOTALL,
)
_HOLDERS = ("value", "several")
"""Keys of entries of ours that hold the value of the setting around them."""
_LONGEST_STRUCTURE = 10_000
"""Characters of a text that is read as data; a longer one is only looked through."""
_LONGEST_JUDGED = 200
"""Characters of a value that are looked at where its name alone does not decide."""


def mask_text(text: str) -> str:
    """`text` without what has the shape of a secret, or stands in it under the name of one, encoded or not."""
    text = masked_encoded(_by_names(masked_shapes(text)), _masked_inside, HIDDEN)
    return masked_percent_encoded(text, _masked_inside_url, HIDDEN)


def _masked_inside_url(text: str) -> str:
    return masked_encoded(_masked_inside(text), _masked_inside, HIDDEN)


def _masked_inside(text: str) -> str:
    """An encoded text, which is not looked into again."""
    plain = _masked_structure("", text)
    return masked_random(_by_names(masked_shapes(plain)), HIDDEN)


def masked_shapes(text: str) -> str:
    """`text` without what has the shape of a secret; for lists of packages, whose names may be anything."""
    if "@" in text and ":" in text:
        if "://" in text:
            text = _URL_WITH_SLASH.sub(r"://***@", _URL.sub(r"\1***@", text))
        text = _USER_AT.sub(r"***@", _NETWORK_SHARE.sub("//***@", text))
    lower = text.lower()
    if len(lower) < _SHORT and _ANY_MARK.search(lower) is None:
        return text
    for marks, shape in _COMPILED:
        if any(mark in lower for mark in marks):
            text = shape.sub(_hide_shape, text)
    for mark, command, options in _OPTIONS_OF_COMMANDS:
        if mark in lower:
            text = command.sub(partial(_hide_options, options), text)
    return text


def _hide_options(options: re.Pattern[str], command: re.Match[str]) -> str:
    return options.sub(rf"\1{HIDDEN}", command[0])


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
        copied = position = 0
        while (match := pattern.search(text, position)) is not None:
            position = match.end()  # a value may have pairs of its own
            name = match["name"].lstrip("-.0123456789")
            if not may_name_secret(name) or text.startswith(HIDDEN, position + len(_quotes(text, position))):
                continue
            value = _VALUE.match(text, position) if names_secret(name) else _VALUE.match(text, position, position + _LONGEST_JUDGED)
            if value is None or not _is_secret(text, match, name, value):
                continue
            start, end = value.span(_kind(value))
            if value["bare"] is not None:
                end = start + len(value["bare"].rstrip(")]}"))
            if end > start:
                parts += [text[copied:start], HIDDEN]
                if collected is not None:
                    collected.add(text[start:end])
                copied = position = end
        text = "".join([*parts, text[copied:]])
    return text


def _quotes(text: str, at: int) -> str:
    end = at
    while end < at + 5 and text[end : end + 1] in ("\\", '"', "'", "`"):
        end += 1
    return text[at:end]


def _kind(value: re.Match[str]) -> str:
    return next(kind for kind in ("list", "bare", "quoted") if value[kind] is not None)


def _is_secret(text: str, found: re.Match[str], name: str, value: re.Match[str]) -> bool:
    given = value[_kind(value)]
    word, before = name.lower(), text[: found.start()][-1:]
    if word in ("token", "key", "auth", "sig") and before in ("?", "&"):
        return len(given) > 3 and secret_setting("password", given)
    in_sentence = word in ("token", "tokens") and value["quote"] is None and ":" in found["sep"]
    if in_sentence and not found["sep"].startswith(("'", '"', "\\")) and not _is_in_mapping(text, found.start(), value):
        return False
    if value["list"] is not None:
        return any(secret_setting(name, item) for item in re.split(r"[\[\]\s,\"'\\]+", given))
    return secret_setting(name, given)


def _is_in_mapping(text: str, start: int, value: re.Match[str]) -> bool:
    """``{token: x}``, ``{a: 1, token: x}``, ``tokens: [x]``: data, and no sentence about tokens."""
    return value["list"] is not None or text[max(0, start - 8) : start].rstrip().endswith(("{", ","))


def masked_tree(value: Any) -> Any:
    """`mask_text` for all texts in nested dicts and lists, keys too; names of the dicts say nothing of their values."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return {masked_tree(key): masked_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_tree(item) for item in value]
    return value


def mask_setting(name: str, value: Any) -> Any:
    """A setting as it may be written: `HIDDEN` where it is a secret, texts masked, words that look generated too, containers inside out."""
    if secret_setting(name, value):
        return value if value == HIDDEN else HIDDEN
    if isinstance(value, str):
        return masked_value(name, value)
    if isinstance(value, dict):
        return {masked_tree(key): mask_setting(_name_inside(name, str(key), value), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, str) and item.startswith("-") for item in value) and all(isinstance(item, str) for item in value):
            return masked_arguments(value, name)
        return [mask_setting(name, item) for item in value]
    return value


def _name_inside(name: str, key: str, values: Mapping[Any, Any]) -> str:
    """The name by which the value of `key` in a dict called `name` is judged."""
    judged = judged_name(key, values)
    if judged != key:
        return judged
    if key in _HOLDERS:
        return name
    is_entry = any(holder in values for holder in _HOLDERS)  # what else is in it says where the value is from
    return below_secrets(name, key) if not is_entry else key


def masked_value(name: str, text: str) -> str:
    """A text under a name that says nothing, but that it is a licence."""
    if is_license_number(name, text):
        return HIDDEN
    text = mask_text(_masked_structure(name, text))
    return text if is_digest_name(name) else masked_random(text, HIDDEN)


def _masked_structure(name: str, text: str) -> str:
    """A list or mapping in a text (``{token: x}``, ``[{"name": "HF_TOKEN", "value": "x"}]``) as JSON; unchanged where nothing is secret."""
    stripped = text.strip()
    ends = (stripped[:1], stripped[-1:])
    if not 2 < len(stripped) <= _LONGEST_STRUCTURE or stripped[1:-1].isalnum() or ends not in (("{", "}"), ("[", "]")):
        return text
    try:
        documents = parse_foreign_yaml(stripped)
        before = json.dumps(documents, default=str)
        after = json.dumps([mask_setting(name, document) for document in documents], default=str)
    except (TextError, TypeError, ValueError, RecursionError):
        return text
    return text if before == after else after[1:-1]


def masked_arguments(arguments: Sequence[str], name: str = "") -> list[str]:
    """A command line without secrets: ``--hub_token X`` and ``--hub_token=X`` lose their X.

    Args:
        name: of what holds the words.
    """
    masked: list[str] = []
    option = ""
    for argument in arguments:
        first, equals, value = argument.partition("=")
        if argument.startswith("-") and not (option and secret_setting(option, argument) and " " in argument):
            option = "" if equals else argument.lstrip("-")
            masked.append(f"{first}={mask_setting(first.lstrip('-'), value)}" if equals else masked_value(name, argument))
            continue
        masked.append(str(mask_setting(option or name, argument)))
        option = ""
    return masked


_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")
_WORDS = re.compile(r"[A-Za-z0-9_.~+%-]+"), re.compile(r"[^\s\"'<>]+")
"""What is encoded as a whole, and what has encoded signs within it, as a name of which one letter is encoded."""
_MOST_TIMES = 3
"""A text may have been encoded again."""


def masked_percent_encoded(text: str, judge: Callable[[str], str], hidden: str) -> str:
    """`text` with each word in it replaced by `hidden` of which `judge` would not leave as it is what it stands for."""
    if "%" not in text and "+" not in text:
        return text
    for words in _WORDS:
        text = words.sub(lambda found: hidden if any(judge(plain) != plain for plain in _meanings(found[0])) else found[0], text)
    return text


def _meanings(word: str) -> Iterator[str]:
    if "+" not in word and not _ESCAPED.search(word):
        return
    for _ in range(_MOST_TIMES):
        if "+" in word:
            yield unquote(word.replace("+", " "))
        before, word = word, unquote(word)
        if word == before:
            return
        yield word
