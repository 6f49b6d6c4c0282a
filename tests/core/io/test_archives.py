"""Zip archives that nobody should believe: what is refused, and that a refusal comes before memory is taken."""

from __future__ import annotations

import io
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable

import pytest

from msprobe_engine.core.errors import ArchiveError
from msprobe_engine.core.io import archives
from msprobe_engine.core.io.archives import Limits, check_members, open_member, read_directory, read_member, read_members, stored_begin

LIMITS = Limits(member=1 << 20, total=1 << 21)


def made(*entries: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive; names are written as they are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in entries:
            info = zipfile.ZipInfo("a")
            info.filename, info.compress_type = name, method
            archive.writestr(info, content)
    return file.getvalue()


def changed(data: bytes, offset: int, value: bytes) -> bytes:
    """The first directory entry, with other bytes at an offset of it."""
    at = data.index(b"PK\x01\x02") + offset
    return data[:at] + value + data[at + len(value) :]


PLAIN = made(("a", b"content"))
REFUSED: dict[str, tuple[bytes, str]] = {
    "no archive": (b"hello", "is no zip archive"),
    "nothing": (b"", "is no zip archive"),
    "cut off": (PLAIN[:-30], "is no zip archive"),
    "no name": (made(("", b"x")), "1 entries without a name"),
    "absolute": (made(("/etc/passwd", b"x")), "leads out of it"),
    "parent": (made(("a/../../b", b"x")), "leads out of it"),
    "zero byte": (made(("a\0b", b"x")), "leads out of it"),
    "one name twice": (made(("a", b"1"), ("a", b"2")), "more than one entry 'a'"),
    "encrypted": (changed(PLAIN, 8, b"\x01\x00"), "encrypted"),
    "method": (changed(PLAIN, 10, struct.pack("<H", 14)), "packed by method 14"),
    "large": (made(("a", bytes((1 << 20) + 1))), "unpacks from"),
    "large together": (made(*((str(i), bytes(1 << 20)) for i in range(3))), "unpacks to 3145728 bytes"),
    "says it is huge": (changed(PLAIN, 24, struct.pack("<L", 1 << 31)), "unpacks from 9 to 2147483648 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_tool_writes(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(ArchiveError, match=message):
        read_members(io.BytesIO(data), LIMITS)


def test_limits_of_a_kind() -> None:
    """What only some readers refuse."""
    for name in ("a\\b", "C:a"):
        assert list(read_members(io.BytesIO(made((name, b""))), LIMITS)) == [name]
        with pytest.raises(ArchiveError, match="leads out of it"):
            read_members(io.BytesIO(made((name, b""))), LIMITS._replace(portable=True))
    with pytest.raises(ArchiveError, match="compressed"):
        stored_begin(io.BytesIO(PLAIN), read_members(io.BytesIO(PLAIN), LIMITS)["a"])
    members = check_members(
        read_directory(io.BytesIO(made(("", b""), ("d/", b""), ("a", b"1"), ("a", b"22"))))[0], LIMITS._replace(tolerant=True)
    )
    assert (list(members.by_name), members.nameless, members.repeated) == (["a"], 1, ["a"])
    assert members.by_name["a"].file_size == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_is_what_was_put_in(method: int) -> None:
    file = io.BytesIO(made(("a", b"content" * 100), ("b", b""), method=method))
    members = read_members(file, LIMITS)
    assert read_member(file, members["a"], 700) == b"content" * 100
    assert read_member(file, members["b"], 700) == b""
    with open_member(file, members["a"]) as opened:
        assert opened.read() == b"content" * 100
    with pytest.raises(ArchiveError, match="of 700 bytes; 699 are the most"):
        read_member(file, members["a"], 699)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: changed(data, 16, b"\0\0\0\0"),  # checksum
        lambda data: changed(data, 20, struct.pack("<L", 3)),  # packed size
        lambda data: changed(data, 24, struct.pack("<L", 3)),  # size
        lambda data: changed(data, 42, struct.pack("<L", 5)),  # where its header is
        lambda data: data[:31] + b"\xff" * 5 + data[36:],  # the data
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member(damage: Callable[[bytes], bytes], method: int) -> None:
    file = io.BytesIO(damage(made(("a", b"content" * 100), method=method)))
    with pytest.raises(ArchiveError, match=r"damaged|leads|unpacks"):
        read_member(file, read_members(file, LIMITS)["a"], 1 << 20)


def test_very_many_entries_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes 15 times the bytes of a directory in memory."""
    monkeypatch.setattr(archives, "MOST_ENTRIES", 1000)
    for count, end in ((1000, "read"), (1001, "refused")):
        data = made(*((str(i), b"") for i in range(count)), method=zipfile.ZIP_STORED)
        if end == "read":
            assert len(read_members(io.BytesIO(data), LIMITS)) == count
        else:
            with pytest.raises(ArchiveError, match="1001 entries; 1000 are the most"):
                read_members(io.BytesIO(data), LIMITS)


def test_a_directory_of_60_mb_takes_no_memory() -> None:
    """1.3 million entries, as somebody would write them who does not need the entries to be there; zip64, as so many need it."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    count = 1_300_000
    directory = entry * count
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(directory), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    file = io.BytesIO(directory + end64 + locator + end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArchiveError, match="1300000 entries; 1000000 are the most"):
        read_members(file, LIMITS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
