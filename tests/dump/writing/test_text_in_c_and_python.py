"""Numbers and templates: the C and the Python implementation, and json itself, give one text."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import dump_frames as frames
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.core.records import Entry, Opaque, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.writing import text
from msprobe_engine.formats.dump.writing.template import LayoutCache, Options

compiled = text._load_native()
needs_c = pytest.mark.skipif(compiled is None, reason="the C implementation was not built")
DTYPES = [("torch.float32", True), ("torch.int64", False), ("torch.bool", False), ("torch.complex64", None)]
words = st.integers(-(2**63), 2**63 - 1)
doubles = st.floats(allow_nan=True, allow_infinity=True, width=64)


@needs_c
@given(st.one_of(doubles, st.integers(0, 2**64 - 1).map(lambda b: struct.unpack("d", struct.pack("Q", b))[0]), st.floats(width=32)))
@settings(max_examples=4 * settings().max_examples)
def test_doubles_are_the_shortest_text_that_reads_back(value: float) -> None:
    """Every double gets the text that Python's repr gives it, NaN and infinities as json writes them."""
    assert compiled is not None
    assert compiled.format_double(value) == text.number(value) == json.dumps(value)


@needs_c
def test_doubles_at_every_power_of_two() -> None:
    """Where the gap between neighbours changes, the text is still the shortest."""
    assert compiled is not None
    for exponent in range(2047):
        for fraction in (0, 1, 2**52 - 1):
            value = struct.unpack("d", struct.pack("Q", exponent << 52 | fraction))[0]
            assert compiled.format_double(value) == float.__repr__(value)


@st.composite
def row(draw: st.DrawFn) -> R.Rows:
    """A row of floats, integers, truth values or nothing, with and without checksums."""
    made: R.Rows = draw(plain_row())
    for word, flag, value in (
        (R.CRC, R.HAS_CRC, draw(st.none() | st.integers(0, 2**32 - 1))),
        (R.XOR, R.HAS_XOR, draw(st.none() | st.integers(0, 2**64 - 1))),
    ):
        if value is not None:
            made.view(np.uint64)[0, word] = value
            R.as_int64(made)[0, R.FLAGS] |= flag
    return made


@st.composite
def plain_row(draw: st.DrawFn) -> R.Rows:
    kind = draw(st.sampled_from(["f", "i", "b", "empty"]))
    if kind == "f":
        return frames.row_of(
            np.array(draw(st.lists(st.floats(width=32), max_size=6)), np.float32), draw(st.none() | st.integers(0, 2**64 - 1))
        )
    if kind == "i":
        return frames.row_of(np.array(draw(st.lists(words, min_size=1, max_size=4)), np.int64))
    return frames.row_of(np.array(draw(st.lists(st.booleans(), min_size=kind == "b", max_size=3)), bool))


structures = st.recursive(
    st.one_of(
        st.none(),
        st.builds(
            lambda kind, row, dtype, shape: TensorRef(row, TensorDescription(kind, dtype[0], tuple(shape), dtype[1])),
            st.sampled_from(["torch.Tensor", "numpy.ndarray"]),
            st.integers(-1, 7),
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        st.builds(lambda v: Opaque({"type": "float", "value": v}), doubles),
        st.builds(lambda v: Opaque({"value": v, "type": "float"}), doubles),
        st.builds(
            Opaque,
            st.sampled_from(
                [{}, {"type": "int", "value": 2**70}, {"type": "str", "value": 'q"\n\u00e9{}'}, {"type": "slice", "value": [0, None]}]
            ),
        ),
    ),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=4), child, max_size=3),
    max_leaves=8,
)
entries = st.lists(
    st.builds(
        lambda n, sections, tags: Entry(f"Torch.f.{n}.forward", sections, None, -1, -1, tags),
        st.integers(0, 30),
        st.dictionaries(st.sampled_from(["input_args", "input_kwargs", "output", "parameters"]), structures, max_size=4),
        st.sampled_from([{}, {"is_recompute": True}, {"ranks": [0, 1]}]),
    ),
    max_size=5,
    unique_by=lambda e: e.name,
)


def further(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a record: texts and bools stand alone, other values in ``tags``."""
    inner = {k: v for k, v in tags.items() if not isinstance(v, (bool, str))}
    return {k: v for k, v in tags.items() if k not in inner} | ({"tags": inner} if inner else {})


def sections(entry: Entry) -> dict[str, Any]:
    """Sections as they are written: a call without a result has the output ``[null]``, as in the existing format."""
    return {name: [None] if name == "output" and value is None else value for name, value in entry.sections.items()}


def plain(node: Any, rows: R.Rows, mode: str) -> Any:
    """The document that the writer must produce, built the obvious way."""
    if isinstance(node, Opaque):
        return node.json
    if isinstance(node, TensorRef):
        d = node.description
        s = R.read_row(rows[node.row]) if node.row >= 0 else None
        values = (
            dict.fromkeys(("Max", "Min", "Mean", "Norm")) if s is None else {"Max": s.max, "Min": s.min, "Mean": s.mean, "Norm": s.norm}
        )
        if d.dtype == "torch.bool":
            values = (
                {"Max": None, "Min": None, "Mean": None, "Norm": None}
                if s is None or s.max is None
                else {"Max": bool(s.max), "Min": bool(s.min), "Mean": None, "Norm": None}
            )
        mode = "statistics" if d.type == "numpy.ndarray" else mode
        if mode == "xor":
            values = {"md5": f"0x{s.xor:016x}" if s is not None and s.xor is not None and s.count else None}
        out: dict[str, Any] = {"type": d.type, "dtype": d.dtype, "shape": list(d.shape), **values}
        if d.requires_grad is not None:
            out["requires_grad"] = d.requires_grad
        if mode == "md5":
            out["md5"] = f"{s.crc32:08x}" if s is not None and s.crc32 is not None else None
        if d.dtype == "torch.bool" and mode != "xor" and s is not None and s.count:
            out["true_count"] = s.count - s.zeros
        if s is not None and s.nans:
            out["nan_count"] = s.nans
        if s is not None and s.infs:
            out["inf_count"] = s.infs
        if s is not None and s.digest is not None:
            out["digest"] = f"{s.digest:016x}"
        return out
    if isinstance(node, list):
        return [plain(c, rows, mode) for c in node]
    if isinstance(node, dict):
        return {k: plain(c, rows, mode) for k, c in node.items()}
    return node


@given(entries, st.lists(row(), min_size=8, max_size=8), st.sampled_from(["statistics", "md5", "xor", "digest"]))
def test_the_text_is_that_of_json(made: list[Entry], rows: list[R.Rows], mode: str) -> None:
    """Whatever the structures, values and summary mode, C and Python render the text that json.dumps with indent 1 gives."""
    matrix = np.concatenate(rows)
    layout, slots, floats = LayoutCache(Options(summary_mode=mode)).find(made, "mix")
    expected = json.dumps({"data": {e.name: {**plain(sections(e), matrix, mode), **further(e.tags)} for e in made}}, indent=1)
    python = b'{\n "data": ' + text.render_python(layout.data, slots, matrix, floats) + b"\n}"
    assert python.decode() == expected
    assert b'{\n "data": ' + text.render(layout.data, slots, matrix, floats) + b"\n}" == python


@given(entries, entries)
def test_same_layout_agrees_with_the_text(a: list[Entry], b: list[Entry]) -> None:
    """Two lists of entries have one layout exactly when C and Python say so, and then their templates are equal."""
    one, slots, floats = LayoutCache(Options()).find(a, "mix")
    two, other_slots, other_floats = LayoutCache(Options()).find(b, "mix")
    found = np.empty_like(slots), np.empty_like(floats)
    same = text.same_layout_python(b, a, *found)
    also = np.empty_like(slots), np.empty_like(floats)
    assert text.same_layout(b, a, *also) == same
    if same:
        assert one.data.text == two.data.text
        for got in (found, also):
            np.testing.assert_array_equal(got[0], other_slots)
            np.testing.assert_array_equal(got[1], other_floats)


@pytest.mark.parametrize("same_layout", [text.same_layout, text.same_layout_python])
def test_only_rows_and_float_scalars_may_differ(same_layout: Any) -> None:
    """New row indices and float scalars keep the layout; another int, bool, description, name or sign of zero in other values ends it."""
    d = TensorDescription("torch.Tensor", "torch.float32", (2,), False)

    def entry(
        row: int = 0, scalar: float = 0.5, other: Any = 1, description: TensorDescription = d, name: str = "Torch.f.0.forward"
    ) -> list[Entry]:
        sections = {
            "input_args": [TensorRef(row, description), Opaque({"type": "float", "value": scalar}), Opaque({"type": "int", "value": other})]
        }
        return [Entry(name, sections)]

    def same(new: list[Entry]) -> bool:
        slots, floats = np.empty(1, np.int32), np.empty(1, np.float64)
        answer: bool = same_layout(new, entry(), slots, floats)
        if answer:
            ref, scalar, _ = new[0].sections["input_args"]
            assert slots[0] == max(ref.row, -1)
            assert struct.pack("d", floats[0]) == struct.pack("d", scalar.json["value"])
        return answer

    assert same(entry(7))
    assert same(entry(-1, math.nan))
    assert same(entry(3, -0.0))
    assert same(entry(description=d._replace()))
    assert not same(entry(other=2))
    assert not same(entry(other=True))
    assert not same(entry(other=1.0))
    assert not same(entry(description=d._replace(shape=(3,))))
    assert not same(entry(name="Torch.f.1.forward"))
    assert not same(entry() + entry())


@pytest.mark.parametrize("render", [text.render, text.render_python])
@pytest.mark.parametrize(
    ("op", "slots"),
    [
        ((99, 0, 1, 0), [0]),
        ((0, 9, 1, 0), [0]),
        ((0, 0, 1000, 0), [0]),
        ((0, 0, 1, 5), [0]),
        ((0, 3, 1, 0), [0]),
        ((0, 0, 1, 0), [4]),
        ((-1, 0, 1, 0), [0]),
    ],
)
def test_a_damaged_template_is_refused(render: Any, op: tuple[int, int, int, int], slots: list[int]) -> None:
    """Offsets, kinds, depths, slots and rows outside their range raise ValueError instead of reading foreign memory."""
    template = text.Template(b"{}", np.array([op], np.int32))
    with pytest.raises(ValueError, match=r"must grow|out of range|does not exist"):
        render(template, np.array(slots, np.int32), R.empty(1), np.zeros(0))
