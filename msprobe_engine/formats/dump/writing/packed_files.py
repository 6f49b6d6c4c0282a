"""Tensor format ``packed``: safetensors files of many tensors, and an index.

``dump_tensor_data/pack-00000.safetensors``, about 64 MiB each, are complete safetensors files
(https://huggingface.co/docs/safetensors, format): 8 bytes little endian, length of the header; the header in JSON; the bytes of all
tensors without gaps. Keys are tensor file names as the format ``files`` has them. Types that safetensors does not have are stored as
U8, and ``__metadata__["dtypes"]`` (JSON text, key to [dtype, shape]) says what they are.

``dump_tensor_data/index.json`` is written when the step is over::

    {"format": "msprobe packed tensors", "version": 1,
     "tensors": {data_name: {"file": shard, "key": name in the shard, when it is another one, "dtype": "torch.float32"}},
     "aliases": {data_name: a name of "tensors" with the same content}}
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable

from msprobe_engine.core.dtypes import TYPES
from msprobe_engine.formats.dump.writing.disk_quota import DiskQuota
from msprobe_engine.formats.dump.writing.step_files import NOT_WRITTEN, OVER_QUOTA, WRITTEN, Payload, StepFiles

INDEX = "index.json"
FORMAT, VERSION = "msprobe packed tensors", 1
SHARD_BYTES = 64 << 20
DTYPES: dict[str, tuple[str, int]] = {
    name: (kind.safetensors, kind.size)
    for kind in TYPES.values()
    if kind.safetensors and kind.common
    for name in (f"torch.{kind.name}", kind.mindspore)
}
"""dtype of dump files (PyTorch, MindSpore) to the name safetensors has for it since version 0.4.5, and bytes per element."""
TORCH, MINDSPORE = "pt", "ms"
"""``__metadata__["format"]``, as the frameworks' own files have it: whose dtypes the tensors are."""


def family(dtype: str) -> str:
    """Which framework's dtype it is."""
    return TORCH if dtype.startswith("torch.") else MINDSPORE


_quoted = json.encoder.encode_basestring  # json.dumps of a text with ensure_ascii=False, without the way through the encoder
_LINES = ",\n"
_PAD = 64
_SHARD_OVERHEAD = 512


def overhead(dtype: str, shape: tuple[int, ...]) -> int:
    """Most bytes that one tensor adds to a shard besides its own."""
    return _SHARD_OVERHEAD + 640 + 22 * len(shape) + (0 if dtype in DTYPES else 1400 + 22 * len(shape))


def shard_name(number: int) -> str:
    return f"pack-{number:05d}.safetensors"


def header(payloads: list[Payload], step: int) -> bytes:
    """What stands in a shard before the bytes of `payloads`, which follow in this order.

    The bytes begin at a multiple of 64, and with payloads ordered by `alignment` each one at a multiple of its element size.
    """
    metadata = {"format": family(payloads[0].dtype) if payloads else TORCH, "step": str(step)}
    odd = {p.key: [p.dtype, list(p.shape)] for p in payloads if p.dtype not in DTYPES}
    if odd:
        metadata["dtypes"] = json.dumps(odd, ensure_ascii=False, separators=(",", ":"))
    # a shard may have tens of thousands of tensors, and the training waits for what is done here: text, not objects
    fields = [f'"__metadata__":{json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))}']
    offset = 0
    for payload in payloads:
        known = DTYPES.get(payload.dtype)
        shape = ",".join(map(str, payload.shape)) if known else payload.nbytes
        end = offset + payload.nbytes
        safe = known[0] if known else "U8"
        fields.append(f'{_quoted(payload.key)}:{{"dtype":"{safe}","shape":[{shape}],"data_offsets":[{offset},{end}]}}')
        offset = end
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-(8 + len(text)) % _PAD)
    return len(text).to_bytes(8, "little") + text


def pieces(payloads: list[Payload]) -> list[memoryview]:
    """The bytes of `payloads` in this order; what is side by side in memory is one piece."""
    found: list[memoryview] = []
    slab, first, end = None, 0, 0
    for payload in payloads:
        if payload.slab is not slab or payload.offset != end:
            if slab is not None:
                found.append(slab.view[first:end])
            slab, first = payload.slab, payload.offset
        end = payload.offset + payload.nbytes
    if slab is not None:
        found.append(slab.view[first:end])
    return found


def index_text(tensors: Iterable[tuple[str, str, str, str]], aliases: Iterable[tuple[str, str]]) -> bytes:
    """Content of the index.

    Args:
        tensors: data name, shard, key in the shard, dtype.
        aliases: data name, and a name of `tensors` with the same content.
    """
    own: list[str] = []
    for name, shard, key, dtype in tensors:
        other_key = "" if key == name else f',"key":{_quoted(key)}'
        own.append(f'{_quoted(name)}:{{"file":"{shard}"{other_key},"dtype":{_quoted(dtype)}}}')
    same = _LINES.join(f"{_quoted(other)}:{_quoted(first)}" for other, first in aliases)
    head = f'"format":"{FORMAT}","version":{VERSION}'
    return f'{{{head},\n"tensors":{{\n{_LINES.join(own)}}},\n"aliases":{{\n{same}}}}}\n'.encode()


def alignment(payload: Payload) -> int:
    """What the offset of a payload has to be a multiple of."""
    known = DTYPES.get(payload.dtype)
    if known is not None:
        return known[1]
    numel = math.prod(payload.shape)
    return min(16, payload.nbytes // numel) if numel else 1


class PackedFiles:
    """The shards and the index of one step. All methods run on writer threads.

    Args:
        release: called when the bytes of a payload are not needed in memory any more.
        fail: called with a payload that could not be written, and the error.
        shard_bytes: a shard is written when it has so many.
    """

    def __init__(
        self,
        files: StepFiles,
        quota: DiskQuota,
        release: Callable[[Payload], None],
        fail: Callable[[Payload, Exception], None],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._files = files
        self._quota = quota
        self._release = release
        self._fail = fail
        self._shard_bytes = shard_bytes
        self._open: list[Payload] = []
        self._open_bytes = 0
        self._shards = 0
        self._index_reserved = 0

    def contents(self, payloads: list[Payload]) -> None:
        """Take the bytes of payloads into the next shard, which is written when it is full."""
        with self._files.lock:
            self._open += payloads
            self._open_bytes += sum(payload.nbytes for payload in payloads)
            if self._open_bytes < self._shard_bytes:
                return
            # what has no name yet gets a shard with names later, unless it is most of what is here
            ready = [p for p in self._open if p.names]
            named = sum(p.nbytes for p in ready)
            ready = ready if 2 * named >= self._open_bytes else self._open
            full, number = self._start_shard(ready)
        self._write(full, number)

    def _start_shard(self, payloads: list[Payload]) -> tuple[list[Payload], int]:
        chosen = set(map(id, payloads))
        self._open = [p for p in self._open if id(p) not in chosen]
        self._open_bytes = sum(p.nbytes for p in self._open)
        used: set[str] = set()
        for payload in payloads:
            key = payload.names[0] if payload.names else f"unnamed.{payload.row}"
            payload.key = key if key not in used else f"{key}.{payload.row}"
            used.add(payload.key)
        self._shards += 1
        return sorted(payloads, key=alignment, reverse=True), self._shards - 1

    def _write(self, payloads: list[Payload], number: int) -> None:
        name, temporary = shard_name(number), f".{shard_name(number)}.tmp"
        try:
            first = header(payloads, self._files.step)
            reserved, actual = sum(p.reserved for p in payloads), len(first) + sum(p.nbytes for p in payloads)
            if actual > reserved and not self._quota.reserve(actual - reserved):
                raise OSError(f"{OVER_QUOTA}: file headers are larger than expected")
            self._files.write(temporary, [first, *pieces(payloads)])
            self._files.rename(temporary, name)
        except Exception as error:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            for payload in payloads:
                self._fail(payload, error)
            return
        self._quota.release(max(0, reserved - actual))
        with self._files.lock:
            for payload in payloads:
                payload.where, payload.state, payload.reserved = name, WRITTEN, payload.nbytes
            payloads[0].reserved += len(first)
        for payload in payloads:
            self._release(payload)

    def add_name(self, payload: Payload, name: str) -> None:
        if self._quota.limit:
            size = self._entry_bytes(payload, name)
            if not self._quota.reserve(size):
                self._files.lose(name, payload.nbytes, "max_disk_gb is used up", OVER_QUOTA)
                return
            self._index_reserved += size
        payload.names.append(name)

    def withdraw(self, payload: Payload, name: str) -> None:
        """`name` belongs to another payload now; the caller holds the lock."""
        if name in payload.names:
            payload.names.remove(name)

    def flush(self) -> None:
        """Memory is short: write what is here, with and without names."""
        with self._files.lock:
            if not self._open:
                return
            full, number = self._start_shard(self._open)
        self._write(full, number)

    def finish(self) -> None:
        """All bytes and names are here: write the rest, and the index.

        Raises:
            OSError: the index cannot be written.
        """
        with self._files.lock:
            for payload in self._open:
                if not payload.names:
                    self._quota.release(payload.reserved)
            unnamed = [p for p in self._open if not p.names]
            self._open = [p for p in self._open if p.names]
        for payload in unnamed:
            self._release(payload)
        self.flush()
        self._remove_unnamed()
        tensors: list[tuple[str, str, str, str]] = []
        aliases: list[tuple[str, str]] = []
        for payload in self._files.kept.values():
            if payload.state == WRITTEN and payload.names and payload.where is not None:
                first, *others = payload.names
                tensors.append((first, payload.where, payload.key, payload.dtype))
                aliases.extend((other, first) for other in others)
        if not tensors:
            self._quota.release(self._index_reserved)
            return
        text = index_text(tensors, aliases)
        temporary = f".{INDEX}.tmp"
        try:
            if len(text) > self._index_reserved and not self._quota.reserve(len(text) - self._index_reserved):
                raise OSError("max_disk_gb is used up")
            self._files.write(temporary, [text])
            self._files.rename(temporary, INDEX)
        except OSError as error:
            self._quota.release(self._index_reserved)
            why = error.strerror or str(error)
            for name, _ in aliases:
                self._files.lose(name, 0, f"the index that has this name could not be written: {why}", NOT_WRITTEN)
            raise
        self._quota.release(max(0, self._index_reserved - len(text)))

    def _remove_unnamed(self) -> None:
        """Shards of which no tensor has a name (any more) go."""
        written = [p for p in self._files.kept.values() if p.state == WRITTEN and p.where is not None]
        used = {p.where for p in written if p.names}
        for payload in written:
            if payload.where not in used and payload.where is not None:
                self._files.unlink(payload.where)
                self._quota.release(payload.reserved)
                payload.where = None

    def _entry_bytes(self, payload: Payload, name: str) -> int:
        """Most bytes that a name adds to the index."""
        fixed = 160 if self._index_reserved else 160 + 256
        other = payload.names[0] if payload.names else payload.key
        return fixed + 2 * len(name.encode()) + 2 * len(other.encode()) + len(payload.dtype)
