"""Does a word look as if a generator of keys had made it? The second look at values whose names say nothing.

Words of people change between lower case, upper case and digits rarely; a random one does at most characters. Digests of files and commits
look random and are no secrets: they are told by what stands before them, or by the name they have. Letters alone are judged by how well
they follow each other, measured against the words of our own tables of settings.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

SHORTEST = 20
"""Characters; what is shorter cannot be told from names and numbers of versions."""
_HEX = re.compile(r"(?:[0-9a-f]{32,}|[0-9A-F]{32,})")
UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_UUID = re.compile(UUID)
_WORD = re.compile(r"[A-Za-z0-9+/_=.~-]{20,}")
_DIGEST_BEFORE = re.compile(
    r"(?:sha\d{0,3}|md5|blake\w{0,3}|crc\w{0,3}|digest|checksum|etag|commit|revision|rev|git|tree|blob|blobs|resolve|raw|archive|snapshots|"
    r"objects|hash|fingerprint|uuid|build|overlay2|store|cache)\W{0,3}(?:\w{1,20}[/])?$|[@+]g?$",
    re.IGNORECASE,
)
_DIGEST_NAME = re.compile(
    r"(?:^|[^a-z])(?:sha\d{0,3}(?:sum)?|md5(?:sum)?|hash|hashes|digest|digests|checksum|commit|revision|rev|git|etag|fingerprint|uuid|guid|"
    r"run_?id|job_?id|build_?id)(?:$|[^a-z])",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?:~|\.{1,2})?/|[A-Za-z0-9_.-]{1,60}/[A-Za-z0-9_./-]*\.[A-Za-z]{1,12}$")
_FILE = re.compile(
    r".*\.(?:py|sh|json|jsonl|ya?ml|toml|txt|bin|idx|pt|pth|ckpt|safetensors|distcp|csv|so|zip|tar|gz|npy|npz|whl|html|log|parquet|arrow)$",
    re.I,
)


_SPLIT = re.compile(r"([/=]+|(?<=[^A-Za-z0-9])-+|^-+|\.(?=[a-z]))")


def is_digest_name(name: str) -> bool:
    """Does a setting of this name hold the digest of something, or the name of a run?"""
    return bool(_DIGEST_NAME.search(re.sub(r"([a-z])([A-Z])", r"\1_\2", name[-200:])))


def is_random(word: str) -> bool:
    """Is this word, without spaces, most likely a generated key?"""
    word = _UUID.sub("", word)  # names of devices and of runs; those of keys cannot be told from them
    if len(word) < SHORTEST or _FILE.fullmatch(word):
        return False
    if _HEX.fullmatch(word):
        return len(set(word.lower())) >= 8
    if _PATH.match(word) and "=" not in word:
        return False
    dense = re.sub(r"[^A-Za-z0-9]", "", word[:4096])
    pieces = [piece for piece in re.split(r"[^A-Za-z0-9]+", word[:4096]) if len(piece) >= SHORTEST]
    if any(_is_mixed(piece) for piece in pieces):
        return True
    # a key in base64 has / and +, one that is safe in URLs - and _; names of people and models have more of them, and words between
    return len(dense) >= 32 and len(dense) >= 0.85 * min(len(word), 4096) and _is_mixed(dense, 0.45)


def looks_generated(word: str) -> bool:
    """A lower bar, for values under a name that may be that of a secret (``token``, ``key``): letters and digits mixed, without spaces."""
    return (
        8 <= len(word) <= 4096
        and not re.search(r"\s", word)
        and bool(re.search(r"[A-Za-z]", word))
        and bool(re.search(r"[0-9]", word))
        and not _FILE.fullmatch(word)
        and not _PATH.match(word)
    )


_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_FEWEST_LETTERS = 8
_MOST_BITS = 4.9
"""Of 2,069 words of eight letters and more in our documentation 0.5 percent need more; of as many letters drawn by chance 95 percent."""
_CAPITALISED = re.compile(r"[A-Z][a-z]{2,}")
_IN_WORDS = 0.75
"""Part of the characters of a class's name that is in such words. Of keys of 20 letters and digits 5 in 1,000 have as many in them, and of
those 1 in 25 read as words."""
_RARE = 0.2
"""How often a pair of letters that was never seen counts as seen."""


@lru_cache(maxsize=1024)
def reads_as_words(text: str) -> bool:
    """Are the letters of `text` those of words, as far as so few can tell? Short pieces always are."""
    return all(len(piece) < _FEWEST_LETTERS or _bits_of_word(piece.lower()) < _MOST_BITS for piece in _LETTERS.findall(text[:4096]))


def _bits_of_word(word: str) -> float:
    """Bits a letter, were each drawn as it follows the one before in `words_of_settings`."""
    pairs, firsts = _letter_pairs()
    counted = [(pairs[pair] + _RARE) / (firsts[pair[0]] + _RARE * 27) for pair in zip("^" + word, word + "$")]
    return -sum(map(math.log2, counted)) / len(counted)


@lru_cache(maxsize=1)
def _letter_pairs() -> tuple[Counter[tuple[str, str]], Counter[str]]:
    pairs = Counter(pair for word in words_of_settings() for pair in zip("^" + word, word + "$"))
    firsts: Counter[str] = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    return pairs, firsts


@lru_cache(maxsize=1)
def words_of_settings() -> frozenset[str]:
    """Words of three letters and more in the tables of settings and variables, in lower case."""
    tables = (("msprobe_engine.config.settings", "aliases.yaml"), ("msprobe_engine.config.environment", "rules.yaml"))
    text = "".join((files(package) / name).read_text("utf-8") for package, name in tables)
    return frozenset(re.findall("[a-z]{3,}", text.lower()))


def masked_random(text: str, hidden: str) -> str:
    """`text` with each generated key replaced by `hidden`; digests of commits and files, and parts of paths, stay."""
    if len(text) < SHORTEST:
        return text

    def mask_word(match: re.Match[str]) -> str:
        word, start = match[0], match.start()
        in_url = _is_url(text, start)
        if word.startswith(("/", "./", "../", "~/")) and not in_url:
            return word
        if not in_url and "=" not in word.rstrip("=") and word[0] not in "-.":
            return hidden if _is_key(word, text[max(0, start - 40) : start]) else word
        parts, position = [], start
        for part in _SPLIT.split(word):
            parts.append(hidden if len(part) >= SHORTEST and _is_key(part, text[max(0, position - 40) : position]) else part)
            position += len(part)
        return "".join(parts)

    return _WORD.sub(mask_word, text)


def _is_key(word: str, before: str) -> bool:
    if not is_random(word):
        return False
    return not (_DIGEST_BEFORE.search(before[-40:]) and _HEX.fullmatch(word.strip("=")))


def _is_url(text: str, at: int) -> bool:
    """Does the word at `at` belong to a URL?"""
    start = max(text.rfind(c, max(0, at - 2000), at) for c in " \t\n\"'<>")
    return "://" in text[max(start, at - 2000, 0) : at + 3]


def _is_mixed(word: str, share: float = 0.4) -> bool:
    """Changes between lower case, upper case and digits; of lower case and digits alone a longer word and fewer changes."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in word]
    counts = Counter(kinds)
    changes = sum(previous != following for previous, following in pairwise(kinds)) / max(1, len(kinds) - 1)
    if len(counts) == 3:
        return changes >= share and _bits(word) >= 3.2 and not _is_class_name(word)
    if set(counts) == {"l", "u"}:  # CamelCase has one capital a word
        return len(word) >= 24 and changes >= 0.42 and min(counts.values()) >= 0.25 * len(word)
    if len(counts) == 2:
        return len(word) >= 24 and changes >= 0.3 and 0.12 <= counts["d"] / len(word) <= 0.6 and _bits(word) >= 3.3
    return False


def _is_class_name(word: str) -> bool:
    """A few digits among words that begin with a capital each, as ``DeepseekV3ForCausalLM``."""
    words = _CAPITALISED.findall(word)
    letters = sum(map(len, words))
    if letters < _IN_WORDS * len(word):
        return False
    return sum(len(one) * _bits_of_word(one.lower()) for one in words) < _MOST_BITS * letters


def _bits(word: str) -> float:
    """Shannon's entropy of the characters, in bits each."""
    size = len(word)
    return -sum(count / size * math.log2(count / size) for count in Counter(word).values())
