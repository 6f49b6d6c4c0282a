"""What a dump will cost over a whole run, whether it fits on the disk, and what to change when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.settings.selection import selection
from msprobe_engine.core.settings.tree import to_tree
from msprobe_engine.core.text.words import size
from msprobe_engine.probe.estimate import disk
from msprobe_engine.probe.estimate.cost import ZERO, Range, StepCost, price
from msprobe_engine.probe.estimate.recorded_step import CHECKSUMS, ROWS, STATISTICS, Source, load_source

READ_SPEED, CHECKSUM_SPEED, SECONDS_PER_TENSOR = 30e9, 19e9, 1.6e-6
"""Bytes per second without and with a checksum, and seconds per tensor, of the statistics kernel alone (docs/evidence/benchmarks.md): the
least by which a step gets longer."""
COLD_SPEED, SECONDS_PER_RECORD = 12e9, 50e-6
"""Bytes per second of tensors that have left the cache, and what hooks, names and stacks of a record take (docs/guide/how-big.md): about
the most."""
GB = 1e9
_SETTINGS = ("task", "level", "summary_mode", "tensor_format")
_WHEN_SET = ("list", "scope", "tensor_list", "data_mode", "risk_level", "slice", "extra_info", "max_disk_gb")
_DEFAULTS = {"data_mode": ["all"], "risk_level": "ALL", "extra_info": True}


@dataclass(frozen=True)
class Change:
    """Settings under which the dump would fit, as text, and the bytes it would take."""

    settings: str
    nbytes: Range


@dataclass(frozen=True)
class Estimate:
    """What a configuration will cost. Sizes are bytes, times seconds; `str` of it is a table.

    Attributes:
        source, source_step, source_ranks: what it was made from: a dump, a step of it, and how many ranks that has.
        dump: the settings that were priced.
        steps, ranks: how many steps are dumped, and by how many ranks.
        per_rank: cost of one step of each rank that was read.
        speed, space: of the disk.
        total_bytes: all files of all steps and ranks, in whole blocks of the disk.
        tensor_bytes: the tensor files of them, as `max_disk_gb` counts.
        total_files: every name counted.
        step_seconds: by how much a dumped step gets longer, on the rank where it is most.
        write_seconds: how long writing the files of one step of all ranks takes, in the background.
        wait_seconds: how much of that the training waits for because a step is larger than `memory_budget_mb`.
        problems: why it does not fit; () when it does.
        changes: what would fit.
        notes: what was assumed.
    """

    source: Path
    source_step: int
    source_ranks: int
    dump: DumpSettings
    steps: int
    ranks: int
    per_rank: Mapping[int | str, StepCost]
    speed: disk.Speed
    space: disk.Space
    total_bytes: Range = ZERO
    tensor_bytes: Range = ZERO
    total_files: float = 0.0
    step_seconds: Range = ZERO
    write_seconds: Range = ZERO
    wait_seconds: Range = ZERO
    problems: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """The upper bound is within free space and `max_disk_gb`."""
        return not self.problems

    def mean(self, value: Callable[[StepCost], float]) -> float:
        """Mean of something over the ranks that were read."""
        return sum(map(value, self.per_rank.values())) / len(self.per_rank)

    def mean_range(self, value: Callable[[StepCost], Range]) -> Range:
        """Mean of a range over the ranks that were read."""
        return Range(self.mean(lambda c: value(c).low), self.mean(lambda c: value(c).high))

    def __str__(self) -> str:
        return _as_text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts; ranges are ``[low, high]``."""
        return _as_json(self)


def estimate(
    source: Path | str,
    settings: Path | str | Mapping[str, Any] | None,
    steps: int | None,
    ranks: int | None,
    from_step: int | None,
    disk_speed: float | None,
    measure_disk: bool,
    changed: Mapping[str, Any],
) -> Estimate:
    """See `msprobe.dump.estimate`."""
    for option, number in (("steps", steps), ("ranks", ranks)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise UsageError(f"estimate: {option} is {number!r}; allowed: an integer >= 1")
    if disk_speed is not None and not disk_speed > 0:
        raise UsageError(f"estimate: disk_speed is {disk_speed!r}; allowed: a number > 0, in bytes per second")
    recorded = load_source(source, from_step)
    dump = _settings(recorded, settings, changed)
    target = Path(dump.dump_path or ".")
    speed = disk.measure(target) if measure_disk else disk.Speed() if disk_speed is None else disk.Speed(disk_speed, measured=True)
    maker = _Maker(
        Path(source), recorded, steps or len(dump.step) or 1, ranks or len(dump.rank) or len(recorded.all_ranks), speed, disk.space(target)
    )
    made = maker.estimate(dump)
    notes = tuple(_notes(recorded, made, counted=steps is not None or bool(dump.step)))
    return replace(made, notes=notes, changes=() if made.fits else tuple(maker.changes(made)))


def _settings(recorded: Source, settings: Path | str | Mapping[str, Any] | None, changed: Mapping[str, Any]) -> DumpSettings:
    if settings is None:
        tree: dict[str, Any] = {"level": recorded.ranks[0].dump.level or "mix"}
    else:
        read, _ = read_settings(settings)
        if read.dump is None:
            raise UsageError(f"{settings}: has no 'dump' section; there is nothing to estimate")
        tree = to_tree(read.dump)
    again, _ = read_settings({"dump": tree | {key: value for key, value in changed.items() if value is not None}}, kind="probe")
    assert again.dump is not None
    return again.dump


@dataclass(frozen=True)
class _Maker:
    """Everything but the settings."""

    path: Path
    source: Source
    steps: int
    ranks: int
    speed: disk.Speed
    space: disk.Space

    def estimate(self, dump: DumpSettings, like: Estimate | None = None) -> Estimate:
        """The estimate for these settings; `like`: of other ones, whose JSON files tell the size of these."""
        chosen = [one for one in self.source.ranks if one.rank in dump.rank] or self.source.ranks
        known: Mapping[int | str, StepCost] = like.per_rank if like is not None else {}
        costs = {one.rank: price(one, dump, self.space.block, known.get(one.rank)) for one in chosen}
        path, step, n_ranks = self.path, self.source.step, len(self.source.all_ranks)
        return _add_totals(Estimate(path, step, n_ranks, dump, self.steps, self.ranks, costs, self.speed, self.space))

    def changes(self, made: Estimate) -> Iterator[Change]:
        """What would fit, largest first."""
        fitting = [Change(words, other.total_bytes) for words, other in self._alternatives(made) if other.fits]
        yield from sorted(fitting, key=lambda change: -change.nbytes.high)

    def _alternatives(self, made: Estimate) -> Iterator[tuple[str, Estimate]]:
        dump = made.dump
        fewer = [n for n in _fewer(made.steps) if _add_totals(replace(made, steps=n)).fits]
        if fewer:
            yield f"dump {fewer[0]} of the {made.steps} steps", _add_totals(replace(made, steps=fewer[0]))
        if made.ranks > 1 and not dump.rank:
            yield "rank: [0]", _add_totals(replace(made, ranks=1))
        if made.tensor_bytes.high:
            if dump.tensor_format == "files":
                yield "tensor_format: packed", self.estimate(replace(dump, tensor_format="packed"), made)
            if tuple(dump.data_mode) == ("all",):
                yield "data_mode: [output]", self.estimate(replace(dump, data_mode=("output",)), made)
            yield "task: statistics", self.estimate(replace(dump, task="statistics", tensor_list=()), made)
        if self.source.ranks[0].dump.level == "mix" and dump.level != "L0":
            modules = replace(dump, level="L0", risk_level="ALL", scope=())
            yield "level: L0", self.estimate(modules, made)
            if made.tensor_bytes.high:
                yield "task: statistics, level: L0", self.estimate(replace(modules, task="statistics", tensor_list=()), made)


def _fewer(steps: int) -> Iterator[int]:
    """Numbers below `steps`, largest first: every one up to 100, then ten to a power of ten."""
    n = steps - 1
    while n > 0:
        yield n
        n -= max(1, 10 ** (len(str(n)) - 2))


def _add_totals(made: Estimate) -> Estimate:
    """`made` with its totals, for its numbers of steps and ranks."""
    dump, speed, costs, runs = made.dump, made.speed, list(made.per_rank.values()), made.steps * made.ranks
    disk_bytes, tensors = made.mean_range(lambda c: c.disk_bytes), made.mean_range(lambda c: c.tensor_bytes)
    files = made.mean(lambda c: c.files)
    total, problems = disk_bytes * runs, []
    quota, largest = dump.max_disk_gb * GB, max(c.tensor_bytes.high for c in costs) * made.steps
    if quota and largest > quota:
        problems.append(
            f"tensor files of a rank take up to {size(largest)}, max_disk_gb allows {size(quota)}: what is over it would not be saved"
        )
        saved = quota / largest  # the part of the upper bound that is written
        most = (made.mean(lambda c: c.json_disk) + made.mean(lambda c: c.tensor_disk.high) * saved) * runs
        total = Range(min(total.low, most), most)
    if total.high > made.space.free:
        problems.append(f"the dump takes {size_range(total)}, and {size(made.space.free)} are free on {made.space.path}")
    read = READ_SPEED if dump.summary_mode == "statistics" else CHECKSUM_SPEED
    least = max(c.read_bytes.low / read + c.read_tensors.low * SECONDS_PER_TENSOR for c in costs)
    most_time = max(c.read_bytes.high / COLD_SPEED + c.records * SECONDS_PER_RECORD for c in costs)
    over = (max(0.0, n - dump.memory_budget_mb * (1 << 20)) * made.ranks for n in tensors)
    return replace(
        made,
        total_bytes=total,
        tensor_bytes=tensors * runs,
        total_files=files * runs,
        step_seconds=Range(least, most_time),
        write_seconds=Range(*(speed.seconds(n * made.ranks, files * made.ranks) for n in disk_bytes)),
        wait_seconds=Range(*(n / speed.bytes_per_second for n in over)),
        problems=tuple(problems),
    )


def _notes(recorded: Source, made: Estimate, counted: bool) -> Iterator[str]:
    """What was assumed, most important first."""
    first, costs = recorded.ranks[0], list(made.per_rank.values())
    if not counted:
        yield "one step is counted, because the settings dump every step; --steps N counts N of them"
    if not first.ours and made.dump.level in ("L1", "mix"):
        yield "the dump was written by the existing tool, which records fewer functions at levels L1 and mix: expect more"
    if not all(rank.dump.complete for rank in recorded.ranks):
        yield f"step {recorded.step} was cut off, a whole one takes more"
    left_out = first.dump.header.get("selection")
    if isinstance(left_out, dict) and left_out and left_out != selection(made.dump):
        words = ", ".join(f"{key} {value}" for key, value in left_out.items())
        yield f"the dump holds only what its own settings asked for ({words[:200]}): what they left out is missing here too"
    if len(made.per_rank) < made.ranks:
        yield f"ranks that were not read are taken to be like the mean of rank {', '.join(map(str, made.per_rank))}"
    told_by = {rank.told_by for rank in recorded.ranks}
    saved = any(c.saved for c in costs)
    if saved and told_by == {ROWS}:
        yield "the run itself noted which tensors are the same one; they are counted once"
    elif saved and told_by <= {ROWS, CHECKSUMS, STATISTICS}:
        how = "checksum" if told_by <= {ROWS, CHECKSUMS} else "statistics"
        yield f"tensor files: one tensor is saved once; the smaller number holds if those with equal {how} are one, else the larger"
    elif saved:
        yield "tensor files: a tensor is saved once, but the dump does not tell which tensors are the same one; none is taken to be"
    if not any(t.max is not None for e in first.dump.entries.values() for _, t in e.tensors()):
        yield "the dump has no statistics: their text is taken to be of usual length"
    if any(c.unknown for c in costs):
        yield "some element types are unknown here and counted with 4 bytes per element"
    if not made.speed.measured:
        speed = f"{size(made.speed.bytes_per_second)}/s and {made.speed.seconds_per_file * 1e6:.0f} us per file"
        yield f"disk speed assumed: {speed}; --measure-disk measures it"
    yield "time added to a step: measured on CPU cores; where statistics run on a device, its kernels read faster than assumed here"


def size_range(value: Range) -> str:
    """``1.5 to 2.5 GB``, or one size where both ends look the same."""
    return _from_to(size(value.low), size(value.high))


def _from_to(low: str, high: str) -> str:
    """Two numbers with their units, which is told once where it is the same."""
    if low == high:
        return high
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"


def _as_text(e: Estimate) -> str:
    """The table that ``msprobe estimate`` prints."""
    counted = f"{e.steps} step{'s' * (e.steps != 1)}, {e.ranks} rank{'s' * (e.ranks != 1)}"
    costs = list(e.per_rank.values())
    rows = [
        ("records", f"{e.mean(lambda c: c.records):,.0f}"),
        ("tensors", f"{e.mean(lambda c: c.tensors):,.0f}"),
        *((name, size(_mean_json(e, name))) for name in costs[0].json_bytes),
    ]
    if any(c.saved for c in costs):
        rows.append(("tensor files", f"{size_range(e.mean_range(lambda c: c.tensor_bytes))} for {e.mean(lambda c: c.saved):,.0f} tensors"))
    rows.append(("a step gets longer by", seconds_range(e.step_seconds)))
    total = [
        ("on disk", f"{size_range(e.total_bytes)} in {e.total_files:,.0f} files"),
        ("free", f"{size(e.space.free)} on {e.space.path}"),
        ("writing a step", f"{seconds_range(e.write_seconds)} in the background"),
    ]
    if e.wait_seconds.high:
        total.append(("waiting for the disk", f"{seconds_range(e.wait_seconds)} per step: a step is larger than memory_budget_mb"))
    lines = [
        f"{e.source}: step {e.source_step}, {e.source_ranks} rank{'s' * (e.source_ranks != 1)}",
        f"settings: {_shown_settings(e)}",
        "",
        f"one step of one rank{f' (mean of {len(costs)})' if len(costs) > 1 else ''}",
        *(f"  {name:<24}{value}" for name, value in rows),
        f"{counted}, all files",
        *(f"  {name:<24}{value}" for name, value in total),
        "",
        "fits" if e.fits else "DOES NOT FIT",
        *(f"  {problem}" for problem in e.problems),
    ]
    if e.changes:
        lines += ["this would fit", *(f"  {change.settings:<34}{size_range(change.nbytes)}" for change in e.changes)]
    lines += ["assumptions", *(f"  {note}" for note in e.notes)]
    return "\n".join(one_line(line) for line in lines)


def _mean_json(e: Estimate, name: str) -> float:
    return e.mean(lambda cost: cost.json_bytes.get(name, 0))


def _shown_settings(e: Estimate) -> str:
    tree = to_tree(e.dump)
    shown = [*_SETTINGS, *(key for key in _WHEN_SET if tree[key] != _DEFAULTS.get(key, type(tree[key])()))]
    if not any(c.saved for c in e.per_rank.values()):
        shown.remove("tensor_format")
    return ", ".join(f"{key} {tree[key]}" for key in shown)


def seconds_range(value: Range) -> str:
    """``12 to 40 ms``, or one time where both ends look the same."""
    return _from_to(_seconds(value.low), _seconds(value.high))


def _seconds(value: float) -> str:
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            number = value / scale
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
    return f"{value * 1e6:.0f} us" if value else "0 s"


def _as_json(e: Estimate) -> dict[str, Any]:
    """Plain data: sizes in bytes, times in seconds, ranges as ``[low, high]``."""
    tree = to_tree(e.dump)
    return {
        "source": {"path": str(e.source), "step": e.source_step, "ranks": e.source_ranks},
        "settings": {key: tree[key] for key in (*_SETTINGS, *_WHEN_SET)},
        "steps": e.steps,
        "ranks": e.ranks,
        "one_step_of_one_rank": {
            "records": e.mean(lambda c: c.records),
            "tensors": e.mean(lambda c: c.tensors),
            "saved_tensors": e.mean(lambda c: c.saved),
            "files": e.mean(lambda c: c.files),
            "json_bytes": {name: _mean_json(e, name) for name in next(iter(e.per_rank.values())).json_bytes},
            "tensor_bytes": list(e.mean_range(lambda c: c.tensor_bytes)),
            "disk_bytes": list(e.mean_range(lambda c: c.disk_bytes)),
        },
        "added_seconds_per_step": list(e.step_seconds),
        "write_seconds_per_step": list(e.write_seconds),
        "wait_seconds_per_step": list(e.wait_seconds),
        "total": {"disk_bytes": list(e.total_bytes), "tensor_bytes": list(e.tensor_bytes), "files": e.total_files},
        "disk": {"path": str(e.space.path), "free_bytes": e.space.free, **e.speed._asdict()},
        "fits": e.fits,
        "problems": list(e.problems),
        "changes": [{"settings": change.settings, "disk_bytes": list(change.nbytes)} for change in e.changes],
        "notes": list(e.notes),
    }
