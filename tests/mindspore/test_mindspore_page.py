"""docs/mindspore.md: what it says of tensors and of MSAdapter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mindspore
import numpy as np
import warm

from msprobe_integrations.mindspore import npy
from msprobe_integrations.mindspore.dtypes import KERNEL, WITHOUT_KERNEL

ROOT = Path(__file__).parents[2]
PAGE = "docs/mindspore.md"


def section(title: str) -> str:
    """The text of one section."""
    return (ROOT / PAGE).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_program_of_msadapter(tmp_path: Path) -> None:
    """Run with torch's names over MindSpore, the program writes what the page says."""
    (program,) = re.findall(r"^```python\n(.*?)^```", section("MSAdapter"), re.DOTALL | re.MULTILINE)
    stand_in = str(Path(__file__).with_name("stand_in"))
    code = f"import sys\nsys.path.insert(0, {stand_in!r})\n{program}"
    assert warm.run(code, cwd=tmp_path).returncode == 0
    (dump,) = (tmp_path / "msadapter_dump" / "step0").iterdir()
    document = json.loads((dump / "dump.json").read_text())
    assert document["framework"] == "mindtorch"
    assert {name.partition(".")[0] for name in document["data"]} == {"Functional", "Tensor", "Torch"}
    (tensor, *_) = document["data"]["Functional.linear.0.forward"]["input_args"]
    assert (tensor["type"], tensor["dtype"]) == ("mindspore.Tensor", "Float32")


def test_the_table_of_types_is_complete() -> None:
    """Every type is in the table, with the type that its file has."""
    table = section("Tensors and their statistics")
    for name in ("Float64", "Float16", "Int64", "UInt8", "Bool", "Complex64", "BFloat16", "Float8E4M3FN", "Float8E5M2", "Int4", "HiFloat8"):
        assert f"`{name}`" in table
        assert name in KERNEL or name in WITHOUT_KERNEL
    files = {"BFloat16": "float32", "Float8E5M2": "float32", "Int4": "int8", "HiFloat8": "uint8", "Complex64": "complex64"}
    for name, kind in files.items():
        size = 8 if name == "Complex64" else 2 if name == "BFloat16" else 1
        assert npy.array_of(npy.from_bytes(bytes(2 * size), name, (2,))).dtype == kind


def test_only_copies_count_a_version() -> None:
    """The page tells why every look reads the tensor."""
    tensor = mindspore.Tensor(np.zeros(2, np.float32))
    tensor[0] = 1.0
    mindspore.ops.assign(tensor, mindspore.Tensor(np.ones(2, np.float32)))
    assert tensor._version == 0
    tensor.copy_(mindspore.Tensor(np.ones(2, np.float32)))
    tensor.asnumpy()
    assert tensor._version == 1
