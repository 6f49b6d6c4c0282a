"""The one entry for zip archives that somebody else wrote: configuration packs, files of ``torch.save``, xlsx.

Python's `zipfile` reads the directory; what the directory says is looked at before memory is taken for it, and nothing is ever unpacked
to a disk. Messages have no subject, for the caller puts the file before them.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from io import RawIOBase
from typing import IO, NamedTuple, TypeAlias

from msprobe_engine.core.errors import ArchiveError

File: TypeAlias = "IO[bytes] | RawIOBase"
MEMBER = b"PK\x03\x04"
"""The first bytes of a member's header, and so of most archives."""
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""Header of a member (APPNOTE.TXT 4.3.7): signature, version, flags, method, time, date, CRC, two sizes, lengths of name and extra."""
MOST_ENTRIES = 1_000_000
MOST_PACKED = 1100
"""Deflate ends at 1032 times: a member that says it unpacks to more, and to more than a few MB, was made to fill a memory."""
_FEW_BYTES = 1 << 24
_ENTRY, _END, _LONGEST_COMMENT = b"PK\x01\x02", b"PK\x05\x06", 0xFFFF
_SMALLEST_ENTRY = 46
_ENCRYPTED = 0x1
DAMAGED_ARCHIVE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)
"""What `zipfile` raises for a damaged archive, besides OSError; `open_member` does so while it is read."""


class Limits(NamedTuple):
    """What an archive of some kind may have.

    Attributes:
        member: bytes of one member, unpacked.
        total: bytes of all members, unpacked.
        portable: backslashes and colons, which lead out of a directory on some systems, are in no name.
        tolerant: members without a name and all but the last of one name are left out, and counted; otherwise they are errors.
    """

    member: int
    total: int
    portable: bool = False
    tolerant: bool = False


class Members(NamedTuple):
    """The members of an archive that may be read.

    Attributes:
        by_name: what the directory says of each; directories are not among them.
        nameless: how many have no name.
        repeated: names that are there more than once.
    """

    by_name: dict[str, zipfile.ZipInfo]
    nameless: int
    repeated: list[str]


def read_directory(file: File) -> tuple[list[zipfile.ZipInfo], int]:
    """All members as the directory lists them, unchecked, and the byte where the directory begins.

    Raises:
        ArchiveError: it is no archive, is damaged, or has more than `MOST_ENTRIES` members.
    """
    try:
        size = file.seek(0, 2)
        if size > MOST_ENTRIES * _SMALLEST_ENTRY and (count := _count_entries(file, size)) > MOST_ENTRIES:
            raise ArchiveError(f"has {count} entries; {MOST_ENTRIES} are the most")
        with zipfile.ZipFile(file) as archive:
            return archive.infolist(), archive.start_dir
    except ArchiveError:
        raise
    except DAMAGED_ARCHIVE as error:
        raise ArchiveError(f"is no zip archive or is damaged ({' '.join(str(error).split())[:120]})") from error


def read_members(file: File, limits: Limits) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive by name; raises as `read_directory` and `check_members`."""
    return check_members(read_directory(file)[0], limits).by_name


def check_members(listed: Iterable[zipfile.ZipInfo], limits: Limits) -> Members:
    """The members that may be read.

    Raises:
        ArchiveError: the archive has what no tool writes, or more than `limits` allow.
    """
    members: dict[str, zipfile.ZipInfo] = {}
    repeated: dict[str, None] = {}
    nameless = total = 0
    for member in listed:
        name = member.filename
        if not name:
            nameless += 1
            continue
        _check_member(member, limits)
        if name.endswith("/"):
            continue
        if name in members:
            repeated[name] = None
            total -= members[name].file_size
        members[name] = member
        total += member.file_size
    if total > limits.total:
        raise ArchiveError(f"unpacks to {total} bytes; {limits.total} are the most")
    if not limits.tolerant and (nameless or repeated):
        trouble = f"more than one entry {next(iter(repeated))[-80:]!r}" if repeated else f"{nameless} entries without a name"
        raise ArchiveError(f"has {trouble}, which no tool writes; it is damaged, or made to mislead")
    return Members(members, nameless, list(repeated))


def member_begin(file: File, member: zipfile.ZipInfo) -> int:
    """The byte at which a member's data begin.

    Raises:
        ArchiveError: it has no header where the directory says.
    """
    file.seek(member.header_offset)
    head = file.read(LOCAL_HEADER.size) or b""
    if len(head) < LOCAL_HEADER.size or not head.startswith(MEMBER):
        raise ArchiveError("has a member that begins where there is none; it is damaged")
    *_, name_length, extra_length = LOCAL_HEADER.unpack(head)
    return member.header_offset + LOCAL_HEADER.size + int(name_length) + int(extra_length)


def stored_begin(file: File, member: zipfile.ZipInfo) -> int:
    """As `member_begin`, of a member that has to be in the file as it is.

    Raises:
        ArchiveError: it is compressed, too.
    """
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise ArchiveError(f"has an entry {member.filename[-80:]!r} that is compressed; such files never are")
    return member_begin(file, member)


def read_member(file: File, member: zipfile.ZipInfo, most: int) -> bytes:
    """The content of a member, without a look at the directory, which takes long in an archive of very many.

    Raises:
        ArchiveError: it has more than `most` bytes or is damaged.
    """
    if member.file_size > most:
        raise ArchiveError(f"has an entry {member.filename[-80:]!r} of {member.file_size} bytes; {most} are the most")
    file.seek(member_begin(file, member))
    data = file.read(min(member.compress_size, most + _FEW_BYTES)) or b""
    try:
        if member.compress_type == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.file_size + 1)
    except zlib.error as error:
        raise ArchiveError(f"has an entry {member.filename[-80:]!r} that is damaged ({error})") from None
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        raise ArchiveError(f"has an entry {member.filename[-80:]!r} whose size or checksum is not that of the directory; it is damaged")
    return data


def open_member(file: File, member: zipfile.ZipInfo) -> IO[bytes]:
    """A member that is too large to be read at once; reading raises `DAMAGED_ARCHIVE`."""
    return zipfile.ZipFile(file).open(member)


def _check_member(member: zipfile.ZipInfo, limits: Limits) -> None:
    name = member.filename
    outside = name.startswith(("/", "\\")) or ".." in name.split("/") or "\0" in member.orig_filename
    if outside or (limits.portable and any(letter in name for letter in "\\:")):
        raise ArchiveError(f"has an entry {member.orig_filename[:200]!r} whose name leads out of it; nothing of it is read")
    if member.flag_bits & _ENCRYPTED:
        raise ArchiveError(f"has an entry {name[-80:]!r} that is encrypted; no such file is")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"has an entry {name[-80:]!r} that is packed by method {member.compress_type}; 0 and 8 (deflate) are allowed")
    lies = member.file_size > _FEW_BYTES and member.file_size > MOST_PACKED * max(1, member.compress_size)
    if lies or member.file_size > limits.member:
        raise ArchiveError(
            f"has an entry {name[-80:]!r} that unpacks from {member.compress_size} to {member.file_size} bytes; "
            f"{limits.member} and {MOST_PACKED} times are the most"
        )


def _count_entries(file: File, size: int) -> int:
    """Entries of the directory, or more: `zipfile` takes ten times the directory's bytes in memory, and trusts no count either."""
    tail_start = max(0, size - _LONGEST_COMMENT - 22)
    file.seek(tail_start)
    tail = file.read() or b""
    end = tail.rfind(_END)
    if end < 0 or end + 22 > len(tail):
        return 0
    length = int.from_bytes(tail[end + 12 : end + 16], "little")
    position = tail_start + end - length
    if length == 0xFFFFFFFF and end >= 76:  # zip64: its own end record, and a locator, stand before the old one
        length = int.from_bytes(tail[end - 76 + 40 : end - 76 + 48], "little")
        position = tail_start + end - 76 - length
    if position < 0:
        return 0
    file.seek(position)
    count, left, rest = 0, length, b""
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        left -= len(block)
        count += (rest + block).count(_ENTRY)
        rest = block[-3:]
    return count
