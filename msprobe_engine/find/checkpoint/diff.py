"""Compare two checkpoints: open both, align their names, read every byte once, and say what differs.

Numbers of an optimizer that one checkpoint holds as tensors and the other as plain values: Adam's ``step``, learning rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msprobe_engine.align.parameters.align_names import Pair, align_checkpoints, label
from msprobe_engine.align.parameters.mapping_file import read_mapping
from msprobe_engine.align.parameters.prefixes import bare
from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError, SinkError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.find.checkpoint.compare import compare, start_result
from msprobe_engine.find.checkpoint.digests import Digest, digests_of, is_manifest, read_manifest
from msprobe_engine.find.checkpoint.hints import explain
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN, LeftOut, Result, SideFacts, strict
from msprobe_engine.find.checkpoint.resume import Journal, Stamp, fingerprint, stamps
from msprobe_engine.find.checkpoint.tensor_result import CRC, DIFFERENT, DIGEST, EQUAL, ROUNDED, SHAPE, UNREADABLE, TensorResult
from msprobe_engine.find.checkpoint.values import compare_values
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, Checkpoint, StoredTensor
from msprobe_engine.formats.checkpoint.open import open_checkpoint
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.contents import Contents
from msprobe_engine.measure.stored.crc import same_crc
from msprobe_engine.measure.stored.threads import DEFAULT_MEMORY_MB, Plan, plan


@dataclass(frozen=True, slots=True)
class Options:
    """How two checkpoints are compared.

    Attributes:
        atol, rtol: a tensor is no difference while every element is within ``|a - b| <= atol + rtol |a|``. Both 0: the same bits.
        memory_mb: MiB that the process may take, whatever the size of the checkpoints.
        workers: threads that read and compare; None: by the number of cores.
        trust: classes that pickles may hold besides the known ones; nothing is executed either way.
        facts: of the model, where the checkpoints do not say them.
        mapping: file of names that the tool cannot know.
        quick: where both sides have a CRC-32 of a tensor, do not read it.
        model_only: leave states of the optimizer, random states and values out.
        output: directory of the reports and of the journal of a run that is not finished; None: no journal.
        resume: go on with such a journal.
    """

    atol: float = 0.0
    rtol: float = 0.0
    memory_mb: int = DEFAULT_MEMORY_MB
    workers: int | None = None
    trust: Collection[str] = ()
    facts: dict[str, Any] | None = None
    mapping: Path | None = None
    quick: bool = False
    model_only: bool = False
    output: Path | None = None
    resume: bool = True


class OpenedCheckpoint:
    """One of the two: a checkpoint, or the manifest of one."""

    def __init__(self, path: Path, options: Options) -> None:
        self.digests: dict[str, Digest] | None = None
        if path.is_file() and is_manifest(path):
            self.checkpoint, self.digests = read_manifest(path)
        else:
            self.checkpoint = open_checkpoint(path, options.trust)
        if options.model_only:
            kept = {key: tensor for key, tensor in self.checkpoint.tensors.items() if tensor.group == MODEL}
            self.checkpoint = replace(self.checkpoint, tensors=kept, values={})

    def digest(self, tensor: StoredTensor) -> Digest | None:
        """What the manifest says of a tensor, None when it was cut out of one of its tensors."""
        key = label(tensor)
        if self.digests is None or self.checkpoint.tensors.get(key) is not tensor:
            return None
        return self.digests[key]

    def facts(self) -> SideFacts:
        """For the report."""
        c = self.checkpoint
        nbytes = sum(t.numel * (item_size(t.dtype) or 0) for t in c.tensors.values())
        return SideFacts(str(c.path), c.format, len(c.tensors), nbytes, len(c.files), list(c.notes), list(c.problems))


def diff(target_path: Path | str, golden_path: Path | str, options: Options | None = None) -> Result:
    """Compare two checkpoints, or manifests of checkpoints (`digests`).

    Raises:
        DumpFormatError: one of them is no checkpoint of a known format, or refused.
        UsageError: settings that cannot work.
        SinkError: the journal cannot be written.
    """
    options = options or Options()
    begin = time.monotonic()
    how = plan(options.memory_mb, options.workers, options.atol, options.rtol)
    target, golden = OpenedCheckpoint(Path(target_path), options), OpenedCheckpoint(Path(golden_path), options)
    if target.digests is None and golden.digests is None:
        target.checkpoint, golden.checkpoint = (
            as_the_other(target.checkpoint, golden.checkpoint),
            as_the_other(golden.checkpoint, target.checkpoint),
        )
    mapping = read_mapping(options.mapping) if options.mapping is not None else None
    alignment = align_checkpoints(target.checkpoint, golden.checkpoint, options.facts, mapping)
    out = Result(
        target.facts(), golden.facts(), only_in_a=[label(t) for t in alignment.only_a], only_in_b=[label(t) for t in alignment.only_b],
        not_compared=[LeftOut(part.side, part.names, part.reason, part.open) for part in alignment.left_out], notes=list(alignment.notes),
        atol=options.atol, rtol=options.rtol, quick=options.quick,
    )  # fmt: skip
    if target.digests is not None or golden.digests is not None:  # a manifest has values as JSON can hold them
        values = compare_values(*(replace(side.checkpoint, values=strict(side.checkpoint.values)) for side in (target, golden)))
    else:
        values = compare_values(target.checkpoint, golden.checkpoint)
    out.values, out.values_equal = values.different, values.equal
    out.notes += values.notes
    for facts, which in ((out.a, RUN), (out.b, GOLDEN)):
        if names := values.lacking.get(which):
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            facts.problems.append(f"{facts.path}: has no {', '.join(names[:8])}{more}, which the other one has; not compared")
    target_files, golden_files = (
        _files(target.checkpoint, [p.a for p in alignment.pairs]),
        _files(golden.checkpoint, [p.b for p in alignment.pairs]),
    )
    before = stamps(target_files | golden_files)
    _tensors(out, target, golden, alignment.pairs, how, options, before)
    _take_rounded(out.tensors, target.checkpoint, golden.checkpoint)
    if target.digests is None and golden.digests is None:
        out.hints = explain(alignment, out.tensors)
    for side, files in ((out.a, target_files), (out.b, golden_files)):
        changed = [name for name, stamp in stamps(files).items() if stamp != before[name]]
        side.problems += [f"{name} was changed while it was read" for name in changed]
    out.seconds = time.monotonic() - begin
    return out


def _take_rounded(results: Sequence[TensorResult], target: Checkpoint, golden: Checkpoint) -> None:
    """Where a checkpoint saved only the float32 copies of weights that it trains in 16 bits, these rounded are its weights."""
    for result in results:
        sides = ((target, result.dtype_a, result.dtype_b), (golden, result.dtype_b, result.dtype_a))
        meant = any(own == "float32" and side.facts.get("stored_for") == other for side, own, other in sides)
        if meant and result.rounded and result.group == MODEL and not result.state and result.status == DIFFERENT:
            result.status, result.by = EQUAL, ROUNDED


def _files(checkpoint: Checkpoint, tensors: Iterable[StoredTensor]) -> set[Path]:
    return {*checkpoint.files, *(box.file for tensor in tensors for box in (*tensor.boxes, *tensor.copies))}


def _tensors(
    out: Result,
    target: OpenedCheckpoint,
    golden: OpenedCheckpoint,
    pairs: Sequence[Pair],
    how: Plan,
    options: Options,
    files: dict[str, Stamp],
) -> None:
    """Fill in the results of all pairs."""
    known: dict[int, TensorResult] = {}
    if options.quick:
        known.update(_by_crc(pairs))
    journal = None
    if options.output is not None:
        settings = {"atol": options.atol, "rtol": options.rtol, "a": str(target.checkpoint.path), "b": str(golden.checkpoint.path)}
        try:
            make_directories(str(options.output))
        except OSError as error:
            raise SinkError(f"cannot make the directory {options.output}: {error.strerror or error}; name another one with -o") from error
        journal = Journal(options.output, fingerprint(files, pairs, settings), options.resume)
        out.resumed = len(journal.known)
        known.update(journal.known)
    with journal or nullcontext(), bar("comparing", len(pairs)) as advance:

        def report_result(number: int, result: TensorResult) -> None:
            if journal is not None:
                journal.add(number, result)
            advance(result.name)

        for result in known.values():
            advance(result.name)
        if target.digests is not None or golden.digests is not None:
            out.tensors, out.nbytes = _by_digest(target, golden, pairs, how, report_result, known)
        else:
            out.tensors, out.nbytes = compare(pairs, how, report_result, known)


def _by_crc(pairs: Sequence[Pair]) -> dict[int, TensorResult]:
    """Pairs that are the same by CRC-32. Those that differ are read: by how much has to be said."""
    equal = {}
    reads = FileReads()
    for number, pair in enumerate(pairs):
        if same_crc(pair.a, pair.b, reads):
            result = start_result(pair)
            result.by, result.changed = CRC, 0
            equal[number] = result
    reads.close()
    return equal


def _by_digest(
    target: OpenedCheckpoint,
    golden: OpenedCheckpoint,
    pairs: Sequence[Pair],
    how: Plan,
    report_result: Callable[[int, TensorResult], None],
    known: dict[int, TensorResult],
) -> tuple[list[TensorResult], int]:
    """Compare where one side or both are manifests: every tensor of the other side is read once."""
    results: dict[int, TensorResult] = dict(known)
    wanted: dict[str, tuple[int, OpenedCheckpoint, StoredTensor]] = {}
    for number, pair in enumerate(pairs):
        if number in results:
            continue
        result = start_result(pair)
        trouble = _no_digest(target, golden, pair)
        if pair.a.shape != pair.b.shape:
            result.status = SHAPE
        elif trouble:
            result.status, result.note = UNREADABLE, trouble
        else:
            for letter, side, tensor in (("a", target, pair.a), ("b", golden, pair.b)):
                if side.digests is None:
                    wanted[f"{letter}{number}"] = (number, side, tensor)
        results[number] = result
    made, nbytes = digests_of(((name, tensor) for name, (_, _, tensor) in wanted.items()), how)
    by_name = {digest.name: digest for digest in made}
    for number, pair in enumerate(pairs):
        result = results[number]
        if number not in known and result.status not in (SHAPE, UNREADABLE):
            of_target = target.digest(pair.a) if target.digests is not None else by_name[f"a{number}"]
            of_golden = golden.digest(pair.b) if golden.digests is not None else by_name[f"b{number}"]
            assert of_target is not None  # `_no_digest` has asked
            assert of_golden is not None
            _judge(result, of_target, of_golden)
        if number not in known:
            report_result(number, result)
    return [results[number] for number in range(len(pairs))], nbytes


def _no_digest(target: OpenedCheckpoint, golden: OpenedCheckpoint, pair: Pair) -> str:
    """Why the digests of a pair say nothing, "" when they do."""
    for which, side, tensor in ((RUN, target, pair.a), (GOLDEN, golden, pair.b)):
        if side.digests is not None and side.digest(tensor) is None:
            return f"{which} has one digest of the whole of {tensor.origin or tensor.key}; its parts cannot be compared with it"
    if pair.a.dtype != pair.b.dtype:
        return f"digests of {pair.a.dtype} and {pair.b.dtype} cannot be compared"
    return ""


def _judge(result: TensorResult, target: Digest, golden: Digest) -> None:
    result.by = DIGEST
    result.nan_a, result.nan_b, result.inf_a, result.inf_b = target.nan, golden.nan, target.inf, golden.inf
    result.norm_a, result.norm_b = target.norm, golden.norm
    result.missing_a, result.missing_b = target.missing, golden.missing
    trouble = target.trouble or golden.trouble
    if trouble or target.missing or golden.missing:
        result.status, result.note = UNREADABLE, trouble or "elements are in no file, so the digests say nothing"
    elif target.digest != golden.digest:
        result.status = DIFFERENT


def digest_checkpoint(path: Path | str, options: Options | None = None) -> tuple[Checkpoint, list[Digest], int]:
    """The digests of all tensors of a checkpoint, for a manifest: read once.

    Returns:
        the checkpoint, the digests in the order of its tensors, and how many bytes were read.
    """
    options = options or Options()
    side = OpenedCheckpoint(Path(path), options)
    how = plan(options.memory_mb, options.workers)
    tensors: Iterable[tuple[str, StoredTensor]] = side.checkpoint.tensors.items()
    with bar("reading", len(side.checkpoint.tensors)) as advance:
        digests, nbytes = digests_of(tensors, how, lambda digest: advance(digest.name))
    return side.checkpoint, digests, nbytes


_STATE = ".state."


def as_the_other(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """A checkpoint with those tensors of one element as values that the other has as values, so that they are compared.

    States are ``optimizer.state.<parameter>.<state>`` among the values (`optimizer_names`), settings of groups have the same path. The
    elements are read; what cannot be read stays a tensor.
    """
    plain = {_common(key): key for key, value in other.values.items() if key.startswith("optimizer") and type(value) in (int, float)}
    other_names = {bare(key) for key in other.tensors}
    moved: dict[str, Any] = {}
    contents = Contents()
    for key, tensor in checkpoint.tensors.items() if plain else ():
        path = f"optimizer.state.{tensor.name}.{tensor.state}" if tensor.state else tensor.name
        name = plain.get(_common(path))
        if name is None or tensor.group != OPTIMIZER or tensor.numel != 1 or bare(key) in other_names:
            continue
        number = _number(tensor, contents)
        if number is not None:
            moved[key] = (name, number)
    if not moved:
        return checkpoint
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in moved}
    return replace(checkpoint, tensors=tensors, values=checkpoint.values | dict(moved.values()))


def _common(path: str) -> str:
    """A path without what wrappers put before the name of the parameter."""
    head, state, rest = path.partition(_STATE)
    return f"{head}{state}{bare(rest)}" if state else path


def _number(tensor: StoredTensor, contents: Contents) -> int | float | None:
    try:
        elements = contents.sample(tensor, 1).reshape(-1)
    except DumpFormatError:
        return None
    return elements[0].item() if elements.size == 1 and elements.dtype.kind in "iuf" else None
