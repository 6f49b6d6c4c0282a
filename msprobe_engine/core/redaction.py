"""What is left out of everything that is written when ``redact: [tokens]`` is set: values of integer tensors (token ids, labels,
positions, masks), texts and integers among the arguments of calls.

It holds for the process, not for one probe: what a second face writes (`SingleSave`, a configuration pack) would give away what the first
one keeps. Once on it stays on, also when a settings file that is followed no longer asks for it.

A row of an integer tensor keeps its number of elements, and mean and norm on a grid (`coarse_sums`): mean times count would be the exact
sum, and the difference of two such sums, of ids and labels shifted by one or of a context that grows, is a token. The grid is so wide that
one element moves a sum by a quarter of a cell at most, and that elements lie in several cells. Where two digits do not leave room for
that, and below `FEWEST` elements, both go. Smallest and largest value are elements, so they always go. A digest without a key could be
guessed, as there are few sequences of a few tokens, so digest, CRC-32 and XOR become a keyed hash of themselves (HMAC-SHA-256, cut to
their width), or go when there is no key.
"""

from __future__ import annotations

import hashlib
import hmac
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.process.user_key import KEY, KEY_FILE, read_key
from msprobe_engine.core.records import Entry, Frame, Opaque, Sample, TensorRef, leaves
from msprobe_engine.core.settings.schema import REDACTABLE
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows

WANTED = "MSPROBE_REDACT"
FEWEST = 1024
"""Elements of a tensor whose mean and norm are written."""
_MANY = 16384
"""Elements from which on they have three digits, not two."""
_CELL = 4.0
"""A cell of a sum is at least as wide as this many times the largest element."""
_LARGEST_PLAIN = 16
"""Single integers below this size are dimensions, axes and counts; they stay."""
_DEEPEST = 32
_MARK, NO_KEY = "redacted", "no key"
NOT_SAVED = "integer values are redacted (redact: [tokens])"
_log = get_logger()


def is_integer(dtype: str) -> bool:
    """Is this the name of an integer or bool type, as dumps have it (``torch.int64``, ``Int32``, ``bool``)?"""
    return dtype.rpartition(".")[2].lower().startswith(("int", "uint", "bool"))


class Redaction:
    """What is done to values before they are written.

    Args:
        key: of the digests, at least `user_key.SHORTEST` bytes; empty: there are no digests of integer tensors.

    Attributes:
        key_id: tells which key it was, 0 without one. Two dumps can be compared when they have the same.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self.key_id = (self._hash_with_key(b"key", b"") | 1) if key else 0

    def _hash_with_key(self, kind: bytes, content: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, b"msprobe " + kind + b"\0" + content, hashlib.sha256)[:8], "big")

    def digest(self, word: int) -> int | None:
        """A keyed digest of a digest, 64 bits; None without a key."""
        return self._hash_with_key(b"digest", (word & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")) if self._key else None

    @property
    def mark(self) -> str:
        """What a record says whose values were left out: the key of its digests."""
        return f"{self.key_id:016x}" if self.key_id else NO_KEY

    def facts(self, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
        """`found`, what a pack says of an input (``digest``, ``samples``: hexadecimal texts or None), as it may be written."""
        if not is_integer(dtype):
            return found

        def redact_digest(text: str | None) -> str | None:
            word = None if text is None else self.digest(int(text, 16))
            return None if word is None else f"{word:016x}"

        samples = {"samples": [redact_digest(sample) for sample in found["samples"]]} if "samples" in found else {}
        return {**found, "digest": redact_digest(found["digest"]), **samples, _MARK: self.mark}

    def values(self, node: Any, *, inside: bool = False) -> Any:
        """An argument as a structure of records, without texts and without integers that could be tokens: `_LARGEST_PLAIN` or more, or in
        a list. Types, keys that are names, and what is no text or number of the user (dtypes, devices, shapes) stay.

        Args:
            inside: `node` is a member of a list.
        """
        if isinstance(node, TensorRef):
            return node
        if isinstance(node, Opaque):
            return self._plain(node, inside)
        if isinstance(node, list):
            return [self.values(child, inside=True) for child in node]
        if isinstance(node, dict):
            return {_name(key, n): self.values(child) for n, (key, child) in enumerate(node.items())}
        return node

    def _plain(self, node: Opaque, inside: bool) -> Opaque:
        json = node.json
        if not isinstance(json, dict) or "value" not in json or "." in str(json.get("type", "")):
            return node
        value, kind = json["value"], json.get("type")
        if kind == "slice":
            if not any(isinstance(bound, int) and abs(bound) >= _LARGEST_PLAIN for bound in value):
                return node
        elif (
            isinstance(value, bool)
            or not isinstance(value, (int, str))
            or kind == "ellipsis"
            or (isinstance(value, int) and not inside and abs(value) < _LARGEST_PLAIN)
        ):
            return node
        return Opaque({"type": kind, "value": None, **self.of_argument(value)})

    def of_argument(self, value: Any) -> dict[str, str]:
        """What is written in place of a value: its keyed digest, where there is a key, and which key that is."""
        digest = {"digest": f"{self._hash_with_key(b'argument', repr(value).encode()):016x}"} if self._key else {}
        return {**digest, _MARK: self.mark}

    def rows(self, rows: Rows, entries: Sequence[Entry] = (), samples: Iterable[Sample] = ()) -> Rows:
        """`rows` ([n, 16]) without values of integer tensors; the same object when there are none. Which rows these are says their flag,
        and the dtype of what `entries` and `samples` refer to."""
        hidden = (_rows.as_int64(rows)[:, _rows.FLAGS] & _rows.HAS_INTEGERS) != 0
        refs = [ref for entry in entries for _, ref in leaves(entry)]
        for ref in (*refs, *(sample.ref for sample in samples)):
            if 0 <= ref.row < len(rows) and is_integer(ref.description.dtype):
                hidden[ref.row] = True
        places = np.flatnonzero(hidden)
        if not len(places):
            return rows
        out: Rows = rows.copy()
        out[places] = self._hide(rows[places])
        return out

    def _hide(self, rows: Rows) -> Rows:
        out: Rows = rows.copy()
        ints = _rows.as_int64(out)
        flags = ints[:, _rows.FLAGS].copy()
        many, out[:, _rows.SUM], out[:, _rows.SUMSQ] = coarse_sums(rows)
        neutral = _rows.empty(len(out))
        out[:, (_rows.MIN, _rows.MAX)] = neutral[:, (_rows.MIN, _rows.MAX)]
        ints[:, (_rows.IMIN, _rows.IMAX)] = _rows.as_int64(neutral)[:, (_rows.IMIN, _rows.IMAX)]
        few = ~many
        out[few, _rows.SUM] = out[few, _rows.SUMSQ] = 0.0
        ints[:, _rows.ZEROS] = 0
        kept = flags & _rows.WRITTEN | _rows.REDACTED | np.where(few, _rows.NO_SUMS, 0)
        digests = ((_rows.DIGEST, _rows.HAS_DIGEST, 64), (_rows.CRC, _rows.HAS_CRC, 32), (_rows.XOR, _rows.HAS_XOR, 64))
        taken = {word: ((flags & bit) != 0) & (self.key_id != 0) for word, bit, _ in digests}
        for word, bit, width in digests:
            before = ints[:, word].copy()
            ints[:, word] = 0
            for i in np.flatnonzero(taken[word]):
                content = ints[i, _rows.COUNT].tobytes() + before[i].tobytes()
                ints[i, word] = np.uint64(self._hash_with_key(str(word).encode(), content) >> (64 - width)).astype(np.int64)
            kept |= np.where(taken[word], bit, 0)
        ints[:, _rows.FLAGS] = kept
        ints[:, _rows.KEY_ID] = np.uint64(self.key_id).astype(np.int64)
        return out


def coarse_sums(rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of which rows mean and norm may be written, and their sums and sums of squares on a grid that hides each element.

    Mean and root mean square are rounded to a power of ten: to two digits of the root mean square, three from `_MANY` elements on. Not to
    digits of the mean: one near zero would have a finer grid.
    """
    ints = _rows.as_int64(rows)
    count = ints[:, _rows.COUNT].astype(np.float64)
    with np.errstate(all="ignore"):
        rms = np.sqrt(rows[:, _rows.SUMSQ] / count)
        cell = 10.0 ** (np.floor(np.log10(rms)) - np.where(count >= _MANY, 2, 1))
        largest = np.maximum(np.abs(rows[:, _rows.MAX]), np.abs(rows[:, _rows.MIN]))
        seen = (count >= FEWEST) & (largest > 0)
        seen &= (count * cell >= _CELL * largest) & (2 * count * cell * rms >= _CELL * largest * largest)
        mean = rows[:, _rows.SUM] / count
        seen &= rms * rms - mean * mean >= (_CELL * cell) ** 2 / 4  # elements that are nearly the same would be told by their mean
        mean, rms = np.round(mean / cell) * cell, np.round(rms / cell) * cell
    return seen, mean * count, rms * rms * count


def hide_names(value: Any, depth: int = 0) -> Any:
    """Arguments with other keys in place of those of dicts that may be tokens or texts, where something is to be written by its key."""
    if active() is None or depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {_name(key, n): hide_names(child, depth + 1) for n, (key, child) in enumerate(value.items())}
    if type(value) in (list, tuple):
        return type(value)(hide_names(child, depth + 1) for child in value)
    return value


def shown_key(key: Any, number: int) -> Any:
    """A key of a container as it may be part of a name that is written; `number` is its place there."""
    return key if active() is None or isinstance(key, int) else _name(key, number)


def _name(key: Any, number: int) -> str:
    """A key of a dict, or `number` in its place where it is no name of a program."""
    text = str(key)
    plain = (
        len(text) <= 64 and text.isascii() and all(part.isidentifier() or (part.isdecimal() and len(part) < 3) for part in text.split("."))
    )
    return text if plain else f"key{number}"


def source_line(file: str, number: int) -> str:
    """A line of the program as it is shown behind the place of a call; empty where texts are not written: it may hold a prompt or ids."""
    return linecache.getline(file, number).strip() if active() is None else ""


def argument_fact(value: Any) -> dict[str, Any] | None:
    """What a configuration pack says of a text or number that a model is called with; None when its value may be written."""
    hides = active()
    if hides is None or value is None or isinstance(value, (bool, float)):
        return None
    return {"type": type(value).__name__, **hides.of_argument(value)}


_active: Redaction | None = None
_environment_read = False


def active() -> Redaction | None:
    """What this process leaves out; None: nothing."""
    if not _environment_read:
        _read_environment()
    return _active


def hide_frame(frame: Frame) -> Frame:
    """What of a frame may be written and told to rules."""
    hides = active()
    return frame if hides is None else replace(frame, rows=hides.rows(frame.rows, frame.entries, frame.samples))


def demand(words: Sequence[str]) -> None:
    """Leave out what settings name, from now until the process ends."""
    global _active
    if words and active() is None:
        _active = Redaction(_read_key())
        keyed = "digests of them are keyed" if _active.key_id else f"there are no digests of them: no key in {KEY} or {KEY_FILE}"
        _log.info("values of integer tensors and texts of arguments are not written (redact: [tokens]); %s", keyed)


def _read_environment() -> None:
    global _environment_read
    _environment_read = True
    words = [word.strip() for word in os.environ.get(WANTED, "").split(",") if word.strip()]
    if unknown := [word for word in words if word not in REDACTABLE]:
        _log.warning("%s is %r; allowed: %s. All that can be redacted is", WANTED, ",".join(unknown), ", ".join(REDACTABLE))
    demand(words)


def _read_key() -> bytes:
    """The user's key; empty when there is none that can be used, which is said: without a key nothing is given away."""
    try:
        return read_key()
    except UsageError as error:
        _log.warning("%s. Integer tensors get no digests", error)
        return b""
