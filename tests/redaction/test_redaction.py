"""What is left of a row and of an argument, case by case; settings and keys."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.records import Opaque, TensorDescription, TensorRef
from msprobe_engine.core.redaction import Redaction
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.statistics import columns, host_kernel, rows
from msprobe_engine.formats.dump.writing import text

KEY = b"sixteen bytes or more"
IDS = np.random.default_rng(0).integers(0, 50_000, 4000)
LABELS = np.where(np.arange(4000) % 1000 == 7, 48_231, -100)


def row_of(values: np.ndarray, kind: str = "int64") -> np.ndarray:
    values = np.ascontiguousarray(values, kind)
    out = np.zeros((1, rows.WORDS))
    flags = host_kernel.CODES[kind]
    host_kernel.reduce(values.ctypes.data, values.size, flags, out.ctypes.data, 1 | 4 | 8, 0)
    return out


SUMS = {
    "ids of a batch": (IDS, True),
    "a mask": (IDS % 4 > 0, True),
    "few": (IDS[:1023], False),
    "one": (IDS[:1], False),
    "all the same": (np.full(4000, 7), False),
    "nearly all the same": (np.where(np.arange(4000) % 50 == 3, 8, 7), False),
    "few labels among ignored ones": (LABELS, False),
    "one that is not zero": (np.where(np.arange(4000) == 3, 48_231, 0), False),
    "none": (IDS[:0], False),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("key", [b"", KEY], ids=["no key", "key"])
def test_a_row_of_integers_tells_of_no_element(name: str, key: bytes) -> None:
    """Extremes never; mean and norm only where no element shows in them, and coarse; digests keyed or not at all. C and Python write the
    same text."""
    values, has_sums = SUMS[name]
    before = row_of(values)
    after = Redaction(key).rows(before)
    seen, was = rows.read_row(after[0]), rows.read_row(before[0])
    assert (seen.max, seen.min, seen.finite_max, seen.zeros) == (None, None, None, 0)
    assert (seen.mean is not None, seen.norm is not None) == (has_sums, has_sums)
    if has_sums:
        assert (seen.mean, seen.norm) != (was.mean, was.norm)
        assert (seen.mean, seen.norm) == pytest.approx((was.mean, was.norm), rel=0.1)
    assert [one is None for one in (seen.digest, seen.crc32, seen.xor)] == [not key] * 3
    assert seen.digest != was.digest
    assert seen.crc32 != was.crc32
    for op in ("max", "min", "absmax", "zeros"):
        assert math.isnan(columns.column(after, op)[0])
    template = text.Template(b"{}", np.array([[1, text.NUMERIC, 1, 0], [1, text.CRC, 1, 0], [1, text.TAIL, 1, 0]], np.int32))
    arguments = template, np.zeros(1, np.int32), after, np.zeros(0)
    assert text.render(*arguments) == text.render_python(*arguments)
    words = np.concatenate((after.view(np.int64)[0], after[0]))
    assert values.dtype == bool or not np.isin(words[words != len(values)], values[values != 0]).any()


def test_floats_stay() -> None:
    """A row of a float tensor is not touched; the array is the same object."""
    row = row_of(np.linspace(-1, 1, 7), "float64")
    assert Redaction(KEY).rows(row) is row


def test_digests_tell_the_same_from_others_with_one_key_only() -> None:
    """Same key and ids: same digest. Other ids, other key: another one."""
    first, again, other = (rows.read_row(Redaction(KEY).rows(row_of(ids))[0]) for ids in (IDS, IDS.copy(), IDS[::-1]))
    foreign = rows.read_row(Redaction(KEY[::-1]).rows(row_of(IDS))[0])
    assert (first.digest, first.redacted) == (again.digest, again.redacted)
    assert first.digest != other.digest
    assert first.digest != foreign.digest
    assert first.redacted != foreign.redacted


REF = TensorRef(0, TensorDescription("torch.Tensor", "torch.int64", (2,), False))
HIDDEN = {"value": None, "redacted": "no key"}
ARGUMENTS = {
    "text": (Opaque({"type": "str", "value": "a prompt"}), Opaque({"type": "str", **HIDDEN})),
    "large integer": (Opaque({"type": "int", "value": 48_231}), Opaque({"type": "int", **HIDDEN})),
    "a dimension": (Opaque({"type": "int", "value": -1}), None),
    "integers in a list": ([Opaque({"type": "int", "value": 3}), REF], [Opaque({"type": "int", **HIDDEN}), REF]),
    "float": (Opaque({"type": "float", "value": 0.5}), None),
    "bool": (Opaque({"type": "bool", "value": True}), None),
    "dtype": (Opaque({"type": "torch.dtype", "value": "torch.float32"}), None),
    "shape": (Opaque({"type": "torch.Size", "value": [2, 512]}), None),
    "slice": (Opaque({"type": "slice", "value": [48_231, None, None]}), Opaque({"type": "slice", **HIDDEN})),
    "small slice": (Opaque({"type": "slice", "value": [1, None, 2]}), None),
    "nothing": (None, None),
    "keys": ({"48231": REF, "input_ids": REF, "a prompt!": REF}, {"key0": REF, "input_ids": REF, "key2": REF}),
    "keys of no Latin letters": ({"\u4eca\u5929\u5929\u6c14": REF}, {"key0": REF}),
}


def test_arguments() -> None:
    """Texts, integers that could be tokens, and keys that are no names are left out; None: unchanged."""
    for name, (given, expected) in ARGUMENTS.items():
        assert Redaction().values(given) == (given if expected is None else expected), name


FILES = {
    "probe": {"output_dir": "x", "redact": ["tokens"]},
    "dump": {"task": "statistics", "level": "L1", "redact": ["tokens"]},
    "monitor": {"targets": {}, "wg_distribution": True, "redact": ["tokens"]},
    "grad_probe": {"task": "grad_probe", "redact": ["tokens"]},
}


def test_every_settings_file_has_the_key() -> None:
    for kind, settings in FILES.items():
        assert load_settings(settings).redact == ("tokens",), kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_dir": "x", "redact": ["names"]}, "redact"),
        ({"task": "statistics", "redact": "tokens"}, "redact"),
        ({"task": "statistics", "level": "L2", "redact": ["tokens"]}, "L2"),
    ],
)
def test_what_cannot_be_is_an_error(settings: dict[str, object], message: str) -> None:
    """Unknown words, no list, and a level whose files the device writes itself."""
    with pytest.raises(SettingsError, match=message):
        load_settings(settings)


@pytest.mark.parametrize(
    ("environment", "key_id", "said"),
    [
        ({"MSPROBE_REDACT": "tokens"}, False, "no key"),
        ({"MSPROBE_REDACT": "tokens", "MSPROBE_KEY": "short"}, False, "16 to 4096"),
        ({"MSPROBE_REDACT": "tokens", "MSPROBE_KEY_FILE": "missing"}, False, "missing"),
        ({"MSPROBE_REDACT": "tokens", "MSPROBE_KEY_FILE": "key"}, True, "keyed"),
        ({"MSPROBE_REDACT": "names", "MSPROBE_KEY": "sixteen bytes or more"}, True, "allowed: tokens"),
    ],
)
def test_keys(environment: dict[str, str], key_id: bool, said: str, tmp_path: Path) -> None:
    """Whatever is wrong with a key or a word, more is left out, never less; the log says so and has no key."""
    (tmp_path / "key").write_text("a key that was made by chance\n")
    program = "from msprobe_engine.core import redaction as r; print(bool(r.active().key_id))"
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == str(key_id)
    assert said in run.stdout + run.stderr
    assert "sixteen bytes or more" not in run.stdout + run.stderr
