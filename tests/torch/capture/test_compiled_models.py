"""torch.compile: recorded at the boundary, never compiled again because of the probe, bits as without it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # tests/monitor_modules/test_compiled.py is fast
HERE = Path(__file__).parent
SOME = ("mix-in-one_layer", "L0-out-wrapped_layer", "L0-in-whole", "L1-out-whole", "mix-in-function")
OTHERS = (
    *(f"mix-{first}-{name}" for name in ("inside_only", "in_pieces") for first in ("in", "out")),
    *("mix-out-one_layer", "mix-out-function", "L1-in-wrapped_layer", "L0-in-inside_only"),
)
"""Every kind of compiled code once with the first compilation inside a window and once outside, levels mixed."""


@functools.cache
def run(cases: tuple[str, ...]) -> dict[str, Any]:
    """What the program found, and its log."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"} | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "compiled_cases.py"), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"log": done.stderr, **dict(zip(cases, lines, strict=True))}


@pytest.mark.parametrize("cases", [SOME, OTHERS], ids=["some", "others"])
def test_the_probe_compiles_nothing_and_changes_nothing(cases: tuple[str, ...]) -> None:
    """Two steps in a window and two outside, alternating: as many frames, graphs and graph breaks after every step as without the
    probe, and the same losses. A hook or a mode that got into compiled code would show as one more."""
    for case in cases:
        plain, probed = run(cases)[case]["counted"]
        assert probed == plain, case
        assert run(cases)[case]["losses"][0] == run(cases)[case]["losses"][1], case


def test_what_is_recorded() -> None:
    """The compiled module under the name it has without compilation, nothing from its inside but parameter gradients."""
    ran = run(SOME)
    for case in ("mix-in-one_layer", "L0-out-wrapped_layer"):
        names = ran[case]["names"]
        assert "Module.layers.1.Block.forward.0" in names
        assert "Module.layers.1.Block.backward.0" in names
        assert "Module.layers.1.fc.Linear.parameters_grad.0" in names
        assert not [n for n in names if n.startswith(("Module.layers.1.fc.Linear.forward", "Aten."))]
        assert "Module.layers.0.fc.Linear.forward.0" in names
    assert [n for n in ran["L0-in-whole"]["names"] if "parameters_grad" not in n] == [
        "Module._orig_mod.Net.forward.0",
        "Module._orig_mod.Net.backward.0",
    ]
    assert [n for n in ran["L1-out-whole"]["names"] if not n.startswith("Tensor.add_")] == [
        "Tensor.square.0.forward",
        "Tensor.sum.0.forward",
        "Tensor.sum.0.backward",
        "Tensor.square.0.backward",
    ]
    assert "Functional.linear.2.forward" in ran["mix-in-function"]["names"]
    assert not [n for n in ran["mix-in-function"]["names"] if "tanh" in n]


def test_one_notice() -> None:
    """Every capture says once that the inside of compiled code is not seen."""
    said = [line for line in run(SOME)["log"].splitlines() if "compiled code runs while it is dumped" in line]
    assert len(said) == 2 * len(SOME)
