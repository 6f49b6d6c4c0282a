"""What a dump will cost in disk and time, from one step of an existing one.

The step is written again on paper: `price` selects its records as the settings would and makes the text of the JSON files with the
code that writes them. Sizes of tensor files follow from dtypes and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core import names
from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Entry, TensorRef, leaves
from msprobe_engine.core.settings.schema import DumpSettings, SliceSettings
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.writing import text
from msprobe_engine.formats.dump.writing.template import LayoutCache, Options
from msprobe_engine.formats.dump.writing.tensor_names import tensor_files
from msprobe_engine.probe.estimate.recorded_step import ROWS, SourceStep, elements
from msprobe_engine.probe.selection import risk
from msprobe_engine.probe.selection.patterns import NamePatterns

PT_OVERHEAD = 1577
"""Bytes of a ``.pt`` file besides the tensor's own (torch 2.13: 1513 to 1641, by dtype and shape)."""
SHARD_BYTES, SHARD_ENTRY, INDEX_ENTRY, ALIAS_ENTRY = 64 << 20, 62, 72, 8
"""Packed files: bytes of a shard, and what one tensor adds to its header and to the index, besides its names."""
HEADER_BYTES, PATH_BYTES = 130, 60
"""Keys of dump.json before ``data``; with tensor files ``dump_data_dir`` holds a path."""
_FLAG = {"md5": R.HAS_CRC, "xor": R.HAS_XOR, "digest": R.HAS_DIGEST}


class Range(NamedTuple):
    """From `low` to `high`; both are the same when it is known."""

    low: float
    high: float

    def __add__(self, other: Any) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: Any) -> Range:
        return Range(self.low * factor, self.high * factor)


ZERO = Range(0, 0)


class StepCost(NamedTuple):
    """One step of one rank.

    Attributes:
        records, tensors: in dump.json.
        json_bytes: file name to bytes.
        saved: names of saved tensors: files, or entries of the index of packed ones.
        files: of all kinds, with every name of a tensor counted.
        tensor_bytes: of tensor files, each tensor once however many names it has.
        json_disk, tensor_disk: the same in whole blocks of the disk.
        read_bytes, read_tensors: what statistics are taken of, every tensor once.
        unknown: tensors of element types whose size is not known; counted with 4 bytes per element.
    """

    records: int
    tensors: int
    json_bytes: dict[str, int]
    saved: int
    files: float
    tensor_bytes: Range
    json_disk: int
    tensor_disk: Range
    read_bytes: Range
    read_tensors: Range
    unknown: int

    @property
    def disk_bytes(self) -> Range:
        """Of all files, in whole blocks of the disk."""
        return self.tensor_disk + Range(self.json_disk, self.json_disk)


def price(source: SourceStep, dump: DumpSettings, block: int = 4096, like: StepCost | None = None) -> StepCost:
    """Cost of one step of this rank under `dump`.

    Args:
        block: smallest unit of the disk, bytes.
        like: cost of other settings; JSON files are then taken to be as large per tensor instead of being made, which is most of the
            work.

    Raises:
        UsageError: the source does not hold what `dump` would record.
    """
    suffix = ".npy" if source.dump.framework in ("mindspore", "mindtorch") else ".pt"
    saves = _saves(dump)
    options = Options(tuple(dump.data_mode), saves, suffix, dump.summary_mode)
    written = [(_cut_entry(entry, dump.slice), options.sections(entry)) for entry in select(source, dump)]
    written = [(entry, sections) for entry, sections in written if sections or not entry.sections]
    seen = [ref for entry, sections in written for ref in _tensors(entry, sections)]
    name_bytes, sizes, contents = [], [], []
    for entry, sections in written:
        for _, file, ref in tensor_files(entry, sections, suffix) if saves is not None and saves(entry.name) else ():
            if file is not None:
                name_bytes.append(len(file))
                sizes.append(_nbytes(ref))
                contents.append(int(source.contents[ref.row]))
    json_bytes = _json_bytes(source, dump, options, [entry for entry, _ in written]) if like is None else _scale_json_bytes(like, len(seen))
    exact = source.told_by == ROWS
    tensor_bytes, tensor_disk, files = _tensor_files(sizes, contents, name_bytes, dump.tensor_format, exact, block)
    read = [(_nbytes(ref), int(source.contents[ref.row])) for ref in seen if ref.row >= 0]
    once = {content: nbytes for nbytes, content in read}
    least = sum(once.values())
    return StepCost(
        len(written),
        len(seen),
        json_bytes,
        len(sizes),
        files + len(json_bytes),
        tensor_bytes,
        sum(_blocks(n, block) for n in json_bytes.values()),
        tensor_disk,
        Range(least, least if exact else sum(nbytes for nbytes, _ in read)),
        Range(len(once), len(once) if exact else len(read)),
        sum(item_size(dtype) is None for dtype in {ref.description.dtype for ref in seen}),
    )


def _tensors(entry: Entry, sections: list[str]) -> list[TensorRef]:
    return [ref for _, ref in leaves(entry._replace(sections={key: entry.sections[key] for key in sections}))]


def _scale_json_bytes(like: StepCost, tensors: int) -> dict[str, int]:
    return {name: int(nbytes * tensors / max(like.tensors, 1)) for name, nbytes in like.json_bytes.items()}


def _saves(dump: DumpSettings) -> Callable[[str], bool] | None:
    if dump.task == "tensor":
        return lambda _: True
    return NamePatterns(dump.tensor_list) if dump.task == "statistics" and dump.tensor_list else None


def _json_bytes(source: SourceStep, dump: DumpSettings, options: Options, entries: list[Entry]) -> dict[str, int]:
    """Sizes of the JSON files, by making their text."""
    kept = np.ones(len(source.rows) + 1, np.bool_)
    kept[-1] = False
    layout, slots, floats = LayoutCache(options).find(entries, dump.level, kept if options.saves is not None else None)
    rows = source.rows.copy()
    R.as_int64(rows)[:, R.FLAGS] |= _FLAG.get(dump.summary_mode, 0)
    data = len(text.render(layout.data, np.full_like(slots, -1) if dump.task == "structure" else slots, rows, floats))
    header = HEADER_BYTES + (PATH_BYTES if options.saves is not None else 0)
    if dump.level == "debug":
        return {"debug.json": header + data}
    sizes = {"dump.json": header + (2 if dump.task == "structure" else data)}
    if dump.extra_info:
        sizes["stack.json"] = len(layout.stack(source.stacks))
        sizes["construct.json"] = len(layout.construct)
    if dump.task == "structure":
        sizes["shapes.json"] = data + layout.n_slots * (len(str(layout.n_slots)) + 1)
    return sizes


def _nbytes(ref: TensorRef) -> int:
    return elements(ref.description.shape) * (item_size(ref.description.dtype) or 4)


def _blocks(nbytes: float, block: int) -> int:
    return math.ceil(nbytes / block) * block


def _tensor_files(
    sizes: list[int], contents: list[int], name_bytes: list[int], tensor_format: str, exact: bool, block: int
) -> tuple[Range, Range, float]:
    """Bytes of tensor files, the same in blocks, and number of files. Low: tensors that look the same are one; high: none are."""
    first: dict[int, int] = {}
    for i, content in enumerate(contents):
        first.setdefault(content, i)
    each, once = range(len(sizes)), list(first.values())
    if tensor_format == "packed":
        low = _estimate_packed_bytes(sizes, name_bytes, once)
        high = low if exact else _estimate_packed_bytes(sizes, name_bytes, each)
        tensor_bytes = Range(low, high)
        shards = math.ceil(high / SHARD_BYTES)
        return tensor_bytes, tensor_bytes + Range(shards * block, shards * block) if sizes else ZERO, shards + 1 if sizes else 0
    low, high = (sum(sizes[i] + PT_OVERHEAD for i in chosen) for chosen in (once, once if exact else each))
    disk = Range(*(sum(_blocks(sizes[i] + PT_OVERHEAD, block) for i in chosen) for chosen in (once, once if exact else each)))
    return Range(low, high), disk, len(sizes)


def _estimate_packed_bytes(sizes: list[int], name_bytes: list[int], chosen: Iterable[int]) -> int:
    stored = list(chosen)
    aliases = sum(2 * n + ALIAS_ENTRY for n in name_bytes) - sum(2 * name_bytes[i] + ALIAS_ENTRY for i in stored)
    return sum(sizes[i] + 2 * name_bytes[i] + SHARD_ENTRY + INDEX_ENTRY for i in stored) + aliases


def select(source: SourceStep, dump: DumpSettings) -> list[Entry]:
    """The records that would be there under `dump`.

    Raises:
        UsageError: the source does not hold them.
    """
    level = source.dump.level
    if level != dump.level and not (level == "mix" and dump.level in ("L0", "L1")):
        raise UsageError(
            f"the dump is of level {level or 'unknown'}, which does not tell what level {dump.level} would record; "
            f"give a dump of level {f'{dump.level} or mix' if dump.level in ('L0', 'L1') else dump.level}"
        )
    entries = source.entries
    if level != dump.level:
        modules = dump.level == "L0"
        entries = [e for e in entries if isinstance(names.parse(e.name), (names.ModuleName, names.ParametersGradName)) == modules]
    if dump.scope:
        entries = _within(entries, *dump.scope)
    if dump.list:
        entries = _select_listed(entries, source, dump)
    elif not dump.scope and dump.risk_level != "ALL":
        entries = [e for e in entries if _is_recorded(e.name, dump.risk_level)]
    return entries


def _is_recorded(name: str, risk_level: str) -> bool:
    parsed = names.parse(name)
    return not isinstance(parsed, names.ApiName) or risk.is_recorded(risk_level, parsed.prefix, parsed.api)


def _within(entries: list[Entry], first: str, last: str) -> list[Entry]:
    """From the start of `first` to the end of `last`. A dump is in order of completion: what ran inside `first` is before it."""
    order = {e.name: i for i, e in enumerate(entries)}
    if first not in order or last not in order:
        missing = first if first not in order else last
        raise UsageError(f"scope: the dump has no record {missing!r}; give names that are in its dump.json")
    parents = {e.name: e.parent for e in entries}
    begin = order[first]
    while begin and _inside(entries[begin - 1].name, first, parents):
        begin -= 1
    return entries[begin : order[last] + 1]


def _inside(name: str, outer: str, parents: dict[str, str | None]) -> bool:
    node: str | None = name
    for _ in range(len(parents)):
        node = parents.get(node) if node is not None else None
        if node is None or node == outer:
            break
    return node == outer


def _select_listed(entries: list[Entry], source: SourceStep, dump: DumpSettings) -> list[Entry]:
    """Records that an element of ``list`` fits; at level mix, with everything inside a module that it fits."""
    fits = NamePatterns(dump.list)
    kept: dict[str, bool] = {}

    def is_listed(name: str) -> bool:
        path, node, answer = [], name, False
        while node not in kept:
            kept[node] = False  # parents may go round in a damaged file
            path.append(node)
            parent = source.dump.construct.get(node)
            if fits(node) and (node == name or names.is_module(node)):
                answer = True
                break
            if parent is None or dump.level != "mix":
                break
            node = parent
        else:
            answer = kept[node]
        kept.update(dict.fromkeys(path, answer))
        return answer

    return [e for e in entries if is_listed(e.name)]


def _cut_entry(entry: Entry, cuts: tuple[SliceSettings, ...]) -> Entry:
    """The entry with the shapes that ``slice`` leaves."""
    if not cuts:
        return entry

    def walk(node: Any) -> Any:
        if isinstance(node, TensorRef):
            whole = node.description
            shape = _cut_shape(whole.shape, cuts)
            extra = whole.extra if shape == whole.shape else (*whole.extra, ("full_shape", list(whole.shape)))
            return TensorRef(node.row, whole._replace(shape=shape, extra=extra))
        if isinstance(node, list):
            return [walk(child) for child in node]
        return {key: walk(child) for key, child in node.items()} if isinstance(node, dict) else node

    return entry._replace(sections={key: walk(node) for key, node in entry.sections.items()})


def _cut_shape(shape: tuple[int, ...], cuts: tuple[SliceSettings, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for cut in cuts:
        if cut.dim < len(shape) and cut.size in (None, shape[cut.dim]):
            sizes[cut.dim] = len(range(*slice(cut.begin, cut.end).indices(shape[cut.dim])))
    return tuple(sizes)
