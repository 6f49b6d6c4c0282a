"""Tensor format ``files``: one ``.pt`` or ``.npy`` file per tensor, further names of the same tensor are hard links."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from msprobe_engine.core.io.file_batches import Job, write_files
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.formats.dump.writing.disk_quota import DiskQuota
from msprobe_engine.formats.dump.writing.step_files import LOST, NOT_WRITTEN, OVER_QUOTA, WRITTEN, Payload, StepFiles


class Template(Protocol):
    """Makes files of tensors of one dtype and shape: `msprobe_engine.formats.dump.writing.pt_template`,
    `msprobe_engine.formats.dump.writing.npy_template`."""

    head: bytes
    overhead: int
    checksum: bool

    def tail(self, crc: int, /) -> bytes | bytearray:
        """File content behind the elements; `crc` is their CRC-32 where `checksum` is true, else 0."""
        ...

    def widen_elements(self, address: int, nbytes: int, /) -> npt.NDArray[Any] | None:
        """The elements as the file has them where these are not the bytes of the tensor."""
        ...


Maker = Callable[[str, tuple[int, ...]], Template]
"""The template for one dtype (as dump files have it) and shape."""

_MOST_TEMPLATES = 4096


class _Content(NamedTuple):
    """What a file is made of: `nbytes` bytes at `address` between `head` and `tail`; `owner` holds them where it is not the payload."""

    head: bytes
    address: int
    nbytes: int
    tail: bytes
    owner: object


class Templates:
    """Templates by dtype and shape, made when they are needed first.

    Args:
        make: see `Maker`.
    """

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._known: dict[tuple[str, tuple[int, ...]], Template] = {}

    def overhead(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes of a file besides the tensor's; while that is not known, more than they can be."""
        found = self._known.get((dtype, shape))
        return found.overhead if found is not None else 4096 + 64 * len(shape)

    def get(self, dtype: str, shape: tuple[int, ...]) -> Template:
        """The template. Whatever the framework raises goes through."""
        found = self._known.get((dtype, shape))
        if found is None:
            if len(self._known) >= _MOST_TEMPLATES:  # shapes that never repeat must not fill the memory
                self._known.clear()
            found = self._known[(dtype, shape)] = self._make(dtype, shape)
        return found


class LooseFiles:
    """The files of one step. All methods run on writer threads.

    Args:
        release: called when the bytes of a payload are not needed in memory any more.
        fail: called with a payload that could not be written, and the error.
    """

    def __init__(
        self,
        files: StepFiles,
        templates: Templates,
        quota: DiskQuota,
        release: Callable[[Payload], None],
        fail: Callable[[Payload, Exception], None],
    ) -> None:
        self._files = files
        self._templates = templates
        self._quota = quota
        self._release = release
        self._fail = fail

    def contents(self, payloads: list[Payload]) -> None:
        """Write the bytes of payloads, and give the files the names that are known."""
        files = self._files
        made: list[tuple[Payload, _Content]] = []
        for payload in payloads:
            try:
                made.append((payload, self._content(payload)))
            except Exception as error:
                self._fail(payload, error)
        with files.lock:
            names = [payload.names[0] if payload.names else None for payload, _ in made]
        jobs: list[Job] = []
        for i, (payload, content) in enumerate(made):
            name = _bytes(names[i])
            names[i] = names[i] if name is not None else None
            jobs.append(Job(b".%d.tmp" % payload.row, name, content.head, content.address, content.nbytes, content.tail))
        try:
            errors = write_files(files.directory(), jobs)
        except OSError as error:
            for payload, _ in made:
                self._fail(payload, error)
            return
        for (payload, _), code in zip(made, errors):
            if code:
                self._fail(payload, OSError(code, os.strerror(code)))
            else:
                self._release(payload)
        with files.lock:
            for (payload, _), first, code in zip(made, names, errors):
                if not code:
                    self._mark_written(payload, first)

    def _content(self, payload: Payload) -> _Content:
        template = self._templates.get(payload.dtype, payload.shape)
        size = template.overhead + payload.nbytes
        if size > payload.reserved and not self._quota.reserve(size - payload.reserved):
            raise OSError(f"{OVER_QUOTA}: the file is larger than expected")
        self._quota.release(max(0, payload.reserved - size))
        payload.reserved = size
        crc = host_kernel.crc32(payload.address, payload.nbytes) if template.checksum else 0
        tail = bytes(template.tail(crc))
        widened = template.widen_elements(payload.address, payload.nbytes)
        if widened is None:
            return _Content(template.head, payload.address, payload.nbytes, tail, None)
        return _Content(template.head, widened.ctypes.data, widened.nbytes, tail, widened)

    def _mark_written(self, payload: Payload, name: str | None) -> None:
        payload.where, payload.state = name or f".{payload.row}.tmp", WRITTEN
        names, payload.names = payload.names, []
        if name is not None:  # the first of them
            payload.names.append(names.pop(0))
        for other in names:
            self.add_name(payload, other)

    def add_name(self, payload: Payload, name: str) -> None:
        files = self._files
        payload.names.append(name)
        if payload.state != WRITTEN:
            return
        assert payload.where is not None
        try:
            if len(payload.names) == 1:
                files.rename(payload.where, name)
                payload.where = name
            else:
                self._another(payload, name)
        except (OSError, ValueError) as error:  # ValueError: the locale has no bytes for the name
            payload.names.remove(name)
            files.lose(name, payload.nbytes, getattr(error, "strerror", None) or str(error), NOT_WRITTEN)

    def _another(self, payload: Payload, name: str) -> None:
        assert payload.where is not None
        try:
            self._files.link(payload.where, name)
        except OSError:  # a file system without links, or too many of them
            if not self._quota.reserve(payload.reserved):
                payload.names.remove(name)
                self._files.lose(name, payload.nbytes, "max_disk_gb is used up, and this file system has no links", OVER_QUOTA)
                return
            try:
                self._files.copy(payload.where, name)
            except OSError:
                self._quota.release(payload.reserved)
                raise

    def withdraw(self, payload: Payload, name: str) -> None:
        """`name` belongs to another payload now; the caller holds the lock."""
        if name not in payload.names:
            return
        payload.names.remove(name)
        if payload.where == name and not payload.names:
            temporary = f".{payload.row}.tmp"  # another name may still come
            self._files.rename(name, temporary)
            payload.where = temporary
        elif payload.state == WRITTEN:
            self._files.unlink(name)
            if payload.where == name:
                payload.where = payload.names[0]

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self) -> None:
        """All bytes and names are here: what has no name goes.

        Raises:
            OSError: a temporary file cannot be removed.
        """
        for payload in self._files.kept.values():
            if payload.state == WRITTEN and not payload.names and payload.where is not None:
                self._files.unlink(payload.where)
                self._quota.release(payload.reserved)
                payload.state, payload.where = LOST, None


def _bytes(name: str | None) -> bytes | None:
    try:
        return None if name is None else os.fsencode(name)
    except UnicodeEncodeError:  # the locale has no bytes for it: said when it is given its name
        return None
