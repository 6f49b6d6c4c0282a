"""Text that stands in another one in base64 or in hex digits, packed or not (``echo aGZfdG9rZW4 | base64 -d``): whoever has the pack can
read it."""

from __future__ import annotations

import base64
import binascii
import bz2
import lzma
import re
import zlib
from collections.abc import Callable

_LINE, _LETTERS = 16, r"[A-Za-z0-9+/_-]"
_WORD = re.compile(rf"(?<!{_LETTERS}){_LETTERS}{{{_LINE},}}(?:\r?\n{_LETTERS}{{4,}}(?!{_LETTERS}))*={{0,2}}")
"""One word, and lines that may be more of it."""
_MOST = 65536
"""Characters of a packed text that are looked into."""
_PACKED: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", lambda data: zlib.decompressobj(31).decompress(data, _MOST)),
    (b"x\x01", lambda data: zlib.decompressobj().decompress(data, _MOST)),
    (b"x\x5e", lambda data: zlib.decompressobj().decompress(data, _MOST)),
    (b"x\x9c", lambda data: zlib.decompressobj().decompress(data, _MOST)),
    (b"x\xda", lambda data: zlib.decompressobj().decompress(data, _MOST)),
    (b"BZh", lambda data: bz2.BZ2Decompressor().decompress(data, _MOST)),
    (b"\xfd7zXZ", lambda data: lzma.LZMADecompressor(memlimit=1 << 26).decompress(data, _MOST)),
)


def masked_encoded(text: str, judge: Callable[[str], str], hidden: str) -> str:
    """`text` with each encoded text in it replaced by `hidden` that `judge` would not leave as it is, or that nobody can look into."""
    if len(text) < _LINE:
        return text

    def mask_word(found: re.Match[str]) -> str:
        lines = found[0].split("\n")
        if len(lines) > 1 and not _hides(re.sub(r"\s", "", found[0]), judge):
            return "\n".join(hidden if _hides(line.strip("\r"), judge) else line for line in lines)
        return hidden if _hides(re.sub(r"\s", "", found[0]), judge) else found[0]

    return _WORD.sub(mask_word, text)


def _hides(word: str, judge: Callable[[str], str]) -> bool:
    if len(word) < _LINE:
        return False
    return any(_tells(data, judge) for data in (_decode_base64(word), _from_hex(word)) if data is not None)


def _tells(data: bytes, judge: Callable[[str], str]) -> bool:
    for mark, unpack in _PACKED:
        if data.startswith(mark):
            try:
                data = unpack(data)
            except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError):
                continue  # bytes that only begin so
            if not _is_text(data) or len(data) == _MOST:
                return True
            break
    else:
        if not _is_text(data):
            return False
    text = data.decode("utf-8", "replace")
    return judge(text) != text


def _decode_base64(word: str) -> bytes | None:
    plain = word.rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _from_hex(word: str) -> bytes | None:
    try:
        return bytes.fromhex(word)
    except ValueError:
        return None


def _is_text(data: bytes) -> bool:
    """In UTF-8, but for the last character, which may be cut off; without characters that no text has."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(data) - 3:
            return False
        text = data[: error.start].decode("utf-8")
    return bool(text) and all(c.isprintable() or c in "\n\r\t" for c in text)
