"""Every operator that torch has samples of for its own tests, forward and backward in three types, dumped at level L1 with its tensors
(arguments: directory of the dump)."""

from __future__ import annotations

import contextlib
import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from msprobe.pytorch import PrecisionDebugger

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LOOKED_AT, LARGEST = 6, 4000
WITHOUT_VALUES = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


def samples() -> Iterator[tuple[Any, Any]]:
    """An operator and a call of it, with the most numbers among the first ones."""
    if "expecttest" not in sys.modules:  # torch's samples import it, and do not use it
        stub = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, print  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name in WITHOUT_VALUES or op.name.startswith("jiterator"):
            continue
        for dtype in TYPES:
            if dtype not in op.dtypes:
                continue
            with_gradients = op.supports_autograd and dtype in op.backward_dtypes
            try:
                found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=with_gradients), LOOKED_AT))
            except Exception:  # a sample that this build of torch has not
                continue
            sizes = [sum(t.numel() for t in tensors(s)) for s in found]
            fit = [(size, n) for n, size in enumerate(sizes) if size <= LARGEST]
            if fit:
                yield op, found[max(fit)[1]]


def tensors(sample: Any) -> list[torch.Tensor]:
    """Those among the arguments."""
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def roots_of(results: Any) -> list[torch.Tensor]:
    """Results that a backward begins at."""
    found = (t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad)
    return [t for t in found if t.numel() and t.layout is torch.strided]


def incoming(op: Any, sample: Any) -> list[torch.Tensor] | None:
    """Gradients for the results of a call; None where it does not run."""
    try:
        roots = roots_of(op(sample.input, *sample.args, **sample.kwargs))
        gradients = [torch.randn(t.shape, dtype=torch.complex64 if t.is_complex() else torch.float32).to(t.dtype) for t in roots]
        if roots:
            torch.autograd.backward(roots, gradients)
    except Exception:
        return None
    return gradients


def main(out: Path) -> None:
    """Dump one step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = out.with_suffix(".json")
    settings.write_text(json.dumps({"task": "tensor", "dump_path": str(out), "level": "L1", "tensor": {"data_mode": ["all"]}}))
    calls = [(op, sample, gradients) for op, sample in samples() if (gradients := incoming(op, sample)) is not None]
    debugger = PrecisionDebugger(config_path=str(settings))
    debugger.start()
    for op, sample, gradients in calls:
        with contextlib.suppress(Exception):  # kernels for sparse gradients, the second time
            if roots := roots_of(op(sample.input, *sample.args, **sample.kwargs)):
                torch.autograd.backward(roots, gradients)
    debugger.stop()
    debugger.step()
    print(json.dumps({"calls": len(calls), "operators": len({op.name for op, *_ in calls})}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
