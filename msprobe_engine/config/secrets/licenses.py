"""Numbers of licences: under a name like ``NPU_LICENSE`` stands what somebody has paid for, or the name of terms (``apache-2.0``)."""

from __future__ import annotations

import re

from msprobe_engine.config.secrets.random_tokens import reads_as_words

_NAME = re.compile(
    r"licen[sc]es?(?:[._-]?(?:number|num|no|nr|serial|id|code|string|text|data))?$|(?:^|[._-])serial[._-]?(?:number|num|no)$", re.I
)
_FAMILIES = frozenset([
    "apache", "mit", "bsd", "gpl", "lgpl", "agpl", "mpl", "cc", "cc0", "isc", "unlicense", "zlib", "mulan", "mulanpsl",
    "mulanpubl", "artistic", "afl", "epl", "eupl", "ecl", "ofl", "odbl", "odc", "pddl", "wtfpl", "postgresql", "python", "psf",
    "bsl", "ms", "osl", "openrail", "creativeml", "bigscience", "bigcode", "llama", "llama2", "llama3", "gemma", "qwen", "tongyi",
    "deepseek", "glm", "chatglm", "yi", "baichuan", "falcon", "intel", "nvidia", "apple", "c", "etalab", "lppl", "lgpllr", "gfdl",
    "fair", "h", "ncsa", "community", "proprietary", "other", "unknown", "public", "commercial", "academic", "research", "spdx",
    "the", "license", "licence",
])  # fmt: skip
"""First words of names of terms, as SPDX and the hubs of models write them."""
_WORD = re.compile(r"[A-Za-z]+(?:[0-9]{1,2}(?:\.[0-9]{1,2})*)?\+{0,2}|v?[0-9]{1,2}(?:\.[0-9]{1,2})*\+?")
_PLACE = re.compile(
    r"[0-9]{1,5}@[\w.-]+(?:[:;][0-9]{1,5}@[\w.-]+)*|(?:~|\.{1,2}|[\w.-]+)?/\S*|[A-Za-z]+://\S*|[\w.-]+\.(?:lic|dat|txt|md|rst|json)"
)
"""Of a server of licences, or of a text."""
_GROUPS = re.compile(r"^[A-Z0-9]{4,}(?:[-_ ][A-Z0-9]{4,})+$")
_DIGIT_IN_WORD = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]{8})[A-Za-z0-9]{0,80}?[A-Za-z][0-9]{1,80}[A-Za-z]")


def is_license_name(name: str) -> bool:
    """May a licence stand under it?"""
    return _NAME.search(name[-300:]) is not None


def is_license_number(name: str, value: str) -> bool:
    """Is it a licence itself, and neither the name of its terms nor the place of its text or server?"""
    value = value.strip()
    if not is_license_name(name) or _PLACE.fullmatch(value):
        return False
    words = re.split(r"[-_\s,;/()]+", value[:200].strip())
    first = re.match(r"[a-z]+[0-9]?", words[0].lower())
    if first is not None and bool({first[0], first[0].rstrip("0123456789")} & _FAMILIES) and all(map(_WORD.fullmatch, filter(None, words))):
        return False
    return (
        len(re.findall("[0-9]", value)) >= 4 or any(shape.search(value) for shape in (_GROUPS, _DIGIT_IN_WORD)) or not reads_as_words(value)
    )
