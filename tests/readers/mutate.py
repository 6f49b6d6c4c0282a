"""Damage to files as it happens, and as somebody would make it: every kind of file is changed in its own terms, or as plain bytes."""

from __future__ import annotations

import csv
import io
import json
import pickle
import pickletools
import random
import re
import sqlite3
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**250, 10**400, 0.5, -0.0, 1e308, float("inf"), float("-inf"),
    float("nan"), "", "x", "1", "inf", "NaN", "\ud800", "a\0b", "../../x", "/etc/passwd", "a\nb", "=1+1", "x" * 5000, [], {}, [[]], [None],
    ["x"], [1, "x"], [{}], [-1], [2**62, 2**62], {"a": 1}, {"type": 1}, {"type": "torch.Tensor"}, {"": {}}, [["x"], 1], [[1], [1]],
)  # fmt: skip
SCALARS = (
    "!!int ''", "!!float ''", "!!bool 'x'", "!!timestamp 'x'", "2026-99-99", "9" * 5000, "9" * 350, "1:" * 400 + "1", "!!binary x", "*a",
    "&a [*a]", "!!python/object:os.system x", "!include x", "<<: x", "? [a]", "[" * 400, "{}", "[]", "~", ".inf", ".nan", "0x", "0b2", "-",
    "!!set {1}", "!!omap x", "!!str", "'", '"', "|", "%", "@", "yes", "1e400", "\t", "\x00", "{a: 1, a: 2}", "- - - -", "!!map x",
)  # fmt: skip
CELLS = ("", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 20, "-1", "0.5", "x", '"', "\0", "\ud7ff", "=1+1", "[1", "N/A", "x" * 9000)


def mutate(name: str, data: bytes, rng: random.Random) -> bytes:
    """Other bytes for the file of this name, mostly still of its kind."""
    if rng.random() < 0.03:
        return _whole(data, rng)
    kind = next((make for ending, make in _KINDS.items() if name.endswith(ending)), None)
    if kind is not None and rng.random() < 0.85:
        with suppress(ValueError, LookupError, sqlite3.Error, zipfile.BadZipFile, RecursionError, struct.error, OverflowError):
            return kind(data, rng)
    return _bytes(data, rng)


def _whole(data: bytes, rng: random.Random) -> bytes:
    """The file is empty, of another encoding, or has other ends of lines."""
    text = data.decode("utf-8", "surrogateescape")
    return rng.choice(
        (
            lambda: b"",
            lambda: b"\xef\xbb\xbf" + data,
            lambda: text.encode("utf-16", "surrogatepass"),
            lambda: text.encode("utf-32", "surrogatepass"),
            lambda: data.replace(b"\n", b"\r\n"),
            lambda: data.replace(b"\n", b"\r"),
            lambda: data.replace(b"e", b"\xe9"),
            lambda: data + data,
            lambda: b"\0" * len(data),
            lambda: b"[" * 100_000,
            lambda: b"\n" * 100_000,
        )
    )()


def _bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        way = rng.randrange(5)
        if way == 0:
            del out[at:]
        elif way == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif way == 2:
            del out[at : at + rng.randrange(1, 64)]
        elif way == 3:
            out[at:at] = rng.choice(
                (b"\0", b"\xff\xfe", b"[" * 300, b"{", b'"', b"\n", b",", b"9" * 400, bytes(rng.randrange(256) for _ in range(8)))
            )
        else:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + rng.randrange(1, 200)]
    return bytes(out)


def _json(data: bytes, rng: random.Random) -> bytes:
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        document = _changed(document, rng)
    text = json.dumps(document, indent=rng.choice((1, 1, None)))
    if rng.random() < 0.05:  # a key twice
        text = re.sub(r'("[^"]{1,40}": )', r"\1 0, \1", text, count=1)
    return text.encode("utf-8", "surrogatepass")


def _changed(node: Any, rng: random.Random) -> Any:
    """One place of a document is another: on the way down any child is as likely, so that small parts of the head are hit, too."""
    if not isinstance(node, (dict, list)) or not node or rng.random() < 0.08:
        return rng.choice(VALUES)
    keys: Any = list(node) if isinstance(node, dict) else range(len(node))
    key = rng.choice(keys)
    out: Any = dict(node) if isinstance(node, dict) else list(node)
    way = rng.random()
    if way < 0.08:
        del out[key]
    elif way < 0.12 and isinstance(node, dict):
        out[rng.choice(("", "x", "a.b.c.0", "\ud800", "9" * 400, "Module.a.B.forward.-1"))] = out.pop(key)
    elif way < 0.16:
        out[key] = node[rng.choice(keys)]
    else:
        out[key] = _changed(node[key], rng)
    return out


def _json_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(_changed(json.loads(lines[at]), rng)).encode("utf-8", "surrogatepass") + b"\n"
    return b"".join(lines)


def _csv(data: bytes, rng: random.Random) -> bytes:
    rows = list(csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline="")))
    for _ in range(rng.choice((1, 2, 5))):
        row = rng.choice(rows if rng.random() < 0.7 else rows[:1])
        if row:
            row[rng.randrange(len(row))] = rng.choice(CELLS)
        if rng.random() < 0.1:
            row.append(rng.choice(CELLS))
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def _yaml(data: bytes, rng: random.Random) -> bytes:
    words = re.split(r"(\s+|[:,\[\]{}])", data.decode())
    for _ in range(rng.choice((1, 1, 2))):
        words[rng.randrange(len(words))] = rng.choice(SCALARS)
    return "".join(words).encode("utf-8", "surrogatepass")


def _zip(data: bytes, rng: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(entries))
    name, content = entries[at]
    if rng.random() < 0.3:
        name = rng.choice(("", "/", "../x", "a\\b", "env/", "msprobe/env/rank" + "9" * 30 + ".json", "x" * 300, name + "\0x", "C:x"))
    else:
        content = mutate(name if "." in name else name + ".txt", content, rng)
    entries[at] = name, content
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo("a")
            info.filename = name
            archive.writestr(info, content)
    return made.getvalue() if rng.random() < 0.9 else _bytes(made.getvalue(), rng)


def _sqlite(data: bytes, rng: random.Random) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "a.db"
        file.write_bytes(data)
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")]
            for _ in range(rng.choice((1, 1, 3))):
                table = rng.choice(tables)
                if rng.random() < 0.05:
                    db.execute(f'DROP TABLE "{table}"')
                    tables.remove(table)
                    continue
                column = rng.choice([row[1] for row in db.execute(f'PRAGMA table_info("{table}")')])
                value = rng.choice(
                    [v for v in (*VALUES, b"\xff", b"") if isinstance(v, (str, bytes, float)) and v != "\ud800"] + [None, -1, 2**62]
                )
                rows = db.execute(f'SELECT * FROM "{table}"').fetchall()
                columns = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
                if not rows or rng.random() < 0.2:
                    db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (value,))
                    continue
                where = " AND ".join(f'"{name}" IS ?' for name in columns)  # not all tables have a rowid
                db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {where}', (value, *rng.choice(rows)))
        return file.read_bytes()


def _pickle(data: bytes, rng: random.Random) -> bytes:
    """Some operations have other arguments, or are others."""
    found = list(pickletools.genops(data))
    ends = [*(at for _, _, at in found[1:]), len(data)]
    pieces = [data[at:end] for (_, _, at), end in zip(found, ends)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        i, way = rng.randrange(len(pieces)), rng.random()
        operation = found[i][0].name if i < len(found) else ""
        if way < 0.6:
            value = rng.choice(VALUES)
            if "UNICODE" in operation or "GLOBAL" in operation:
                value = rng.choice(("", "x", "w", "torch\nfloat64", "builtins\neval", "a.b", "../../x", "x" * 5000, value))
            pieces[i] = pickle.dumps(value, 2)[2:-1]
        elif way < 0.8:
            pieces[i] = rng.choice(pieces)
        elif way < 0.9:
            pieces[i] = b""
        else:
            pieces[i] = bytes([rng.randrange(256)]) + pieces[i][1:]
    return b"".join(pieces)


def _torch(data: bytes, rng: random.Random) -> bytes:
    """An archive of `torch.save`, whose checksums are right; one part of it is another."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = next(i for i, (name, _) in enumerate(entries) if name.endswith(".pkl")) if rng.random() < 0.8 else rng.randrange(len(entries))
    name, content = entries[at]
    entries[at] = name, _pickle(content, rng) if name.endswith(".pkl") else _bytes(content, rng)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return made.getvalue()


def _pickled_or_bytes(data: bytes, rng: random.Random) -> bytes:
    return _torch(data, rng) if data.startswith(b"PK") else _pickle(data, rng)


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = _json(data[8 : 8 + length], rng)
    told = rng.choice((len(header),) * 9 + (len(header) - 1, 2**63, 10**9))
    return struct.pack("<Q", told) + header + (data[8 + length :] if rng.random() < 0.9 else _bytes(data[8 + length :], rng))


def _npy(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<H", data, 8)
    header = data[10 : 10 + length].decode("latin-1")
    words = re.split(r"(\W)", header.rstrip())
    for _ in range(rng.choice((1, 1, 2))):
        words[rng.randrange(len(words))] = rng.choice(
            ("", "-1", "9" * 30, "1e9", "(", "True", "|O", "<M8[x]", "V9" * 9, "None", "f" * 99, "<f8", "<c16", "[]")
        )
    text = "".join(words).encode("latin-1", "replace") + b"\n"
    return data[:8] + struct.pack("<H", len(text) & 65535) + text + data[10 + length :]


def _frame_log(data: bytes, rng: random.Random) -> bytes:
    """Other numbers, with checksums that are right."""
    form = struct.Struct("<8sIi9QIII")
    magic, step, rank, *numbers, _, _, _ = form.unpack_from(data)
    layout = bytearray(zlib.decompress(data[form.size : form.size + numbers[4]]))
    rest = bytearray(data[form.size + numbers[4] :])
    for _ in range(rng.choice((1, 1, 2, 5))):
        part, unit = rng.choice(((layout, 4), (rest, 4), (rest, 8)))
        first = numbers[1] if part is layout else numbers[0]  # behind the text
        at = first + unit * rng.randrange(max(1, (len(part) - first) // unit))
        odd = (0, 1, 2, -1, 2**31 - 1, -(2**31), 7, 64, 65) if unit == 4 else (0, -1, 2**63 - 1, -(2**63), 0x7FF8 << 48, 0x7FF0 << 48, 1)
        part[at : at + unit] = rng.choice(odd).to_bytes(unit, "little", signed=True)
    if rng.random() < 0.3:
        at = rng.randrange(9)
        numbers[at] = rng.choice((0, 1, numbers[at] + 1, 2**31, 2**40, 2**63))
    packed = zlib.compress(bytes(layout))
    numbers[4] = len(packed)
    head = form.pack(magic, step, rank, *numbers, zlib.crc32(packed), zlib.crc32(bytes(rest)), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + packed + bytes(rest)


_KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".yaml": _yaml, ".zip": _zip, ".xlsx": _zip, ".db": _sqlite,
    ".pt": _torch, ".pth": _torch, ".metadata": _pickle, ".distcp": _pickled_or_bytes, ".safetensors": _safetensors, ".npy": _npy,
    ".frame.bin": _frame_log, ".toml": _yaml, ".log": _yaml, ".sh": _yaml, ".ir": _yaml, ".sbatch": _yaml,
}  # fmt: skip
