"""Tensors may lie at any address (torch.frombuffer, fields of numpy records): the C modules give the same numbers there, and read no
element from an address that its type may not have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from misaligned_sweep import sweep

from msprobe_engine.formats.dump.writing import text
from msprobe_integrations.torch.backend import TorchBackend

ROOT = Path(__file__).parents[2]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1", "-fno-omit-frame-pointer"]


@pytest.mark.usefixtures("isa")
def test_numbers_do_not_depend_on_the_address() -> None:
    """Every call of every type gives bit for bit what it gives for an aligned copy."""
    rowstats = pytest.importorskip("msprobe_engine.native._rowstats")
    assert sweep(rowstats, pytest.importorskip("msprobe_engine.native._tensordiff"), 12, 7) == []


def test_a_misaligned_tensor_has_the_row_of_its_copy() -> None:
    """Through the backend, as a hook meets it."""
    data = bytearray(np.random.default_rng(3).integers(0, 100, 8001, dtype=np.uint8).tobytes())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        tensor = torch.frombuffer(data, dtype=dtype, offset=1, count=8000 // dtype.itemsize)
        assert tensor.data_ptr() % dtype.itemsize == 1
        backend = TorchBackend(digest=True)
        here, copied = backend.reduce(tensor), backend.reduce(tensor.clone())
        rows = backend.finish_step().rows()
        assert rows[here.row].tobytes() == rows[copied.row].tobytes(), dtype


def test_text_is_made_of_numbers_at_any_address() -> None:
    """A log of a killed process is read in pieces that begin anywhere."""
    template = text.Template(b'{"a": }', np.array([[6, text.SCALAR, 0, 0]], np.int32))

    def shifted(array: np.ndarray) -> np.ndarray:
        room = np.zeros(array.nbytes + 1, np.uint8)
        room[1:] = array.reshape(-1).view(np.uint8)
        return room[1:].view(array.dtype).reshape(array.shape)

    odd = text.Template(template.text, shifted(template.ops))
    made = text.render(odd, shifted(np.zeros(1, np.int32)), shifted(np.zeros((1, 16))), shifted(np.array([0.5])))
    assert made == b'{"a": 0.5}'


def _build(directory: Path, compiler: str) -> str:
    """All C modules with sanitizers; the error of the compiler, empty when there is none."""
    for source in [*(ROOT / "msprobe_engine" / "native").glob("_*.c"), *(ROOT / "msprobe_integrations" / "common").glob("_*.c")]:
        target = directory / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-shared", "-fPIC", "-std=gnu11", *SANITIZERS, include, str(source), "-o", str(target), "-lm"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            return made.stderr
    return ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over random types, sizes, offsets and strides."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    if problem := _build(tmp_path, compiler):
        pytest.skip(f"gcc builds nothing with sanitizers here: {problem[:200]}")
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(library).is_file():
        pytest.skip("gcc has no libasan here")
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    sweep_file = str(Path(__file__).with_name("misaligned_sweep.py"))
    run = subprocess.run(
        [sys.executable, sweep_file, str(tmp_path), "300", "11"], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "clean"), run.stderr[-4000:]
