"""The core checks for one version of megatron-core: the installed one (`nox -t megatron` installs others).

Its own loop: gradients, activations, parameters, sums over groups and moments against float64. Megatron's loop, where the version has it:
losses as Megatron logs them.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
import re
import sys
from pathlib import Path

import pytest
from launches import EXAMPLES, launch
from layout_checks import check_gradients, check_outputs, check_parameters, check_sums
from layout_job import seen_by

from msprobe_integrations.megatron import reliance
from msprobe_integrations.requirements import find_missing

pytestmark = pytest.mark.framework
VERSION = sys.modules["megatron.core"].__version__  # imported after the shim
LAYOUTS = {
    "DP 2, distributed optimizer, overlapped": "--distopt --overlap --overlap-param",
    "TP 2, fp16 with loss scale": "--tp 2 --fp16",
    "PP 2, interleaved": "--pp 2 --vpp 2 --layers 4 --untie",
    "EP 2": "--ep 2 --experts 4",
}
FAST = ("PP 2, interleaved",)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS])
@pytest.mark.slow
def test_own_loop(layout: str) -> None:
    """What is seen in a loop of one's own on megatron-core equals references in float64."""
    run = seen_by(2, LAYOUTS[layout], "mix")
    for rank in run:
        for step, seen in enumerate(rank["seen"]):
            check_outputs(rank["norms"][step], seen, "mix", False)
            check_gradients(rank["reference"][step], seen["samples"], bf16=False)
            if "overlap" not in layout:
                check_parameters(rank["parameters"][step], seen["samples"])
    check_sums([rank["seen"][1]["sums"] for rank in run], run)


def test_what_is_relied_on_is_there() -> None:
    """Nothing that the probe touches in megatron-core is missing, as far as the table says that this version has it."""
    version = tuple(int(part) for part in re.findall(r"\d+", VERSION)[:2])
    lost = [row for row in reliance.CORE if row in find_missing(reliance.CORE)]
    assert [row for row in lost if tuple(int(x) for x in row.versions.split(" ")[0].split(".")) <= version] == []
    logging.getLogger("msprobe").info("megatron-core %s: all there", VERSION)


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason=f"megatron-core {VERSION} has no megatron.training")
def test_megatron_loop(tmp_path: Path) -> None:
    """`pretrain` of this version: every iteration is a step, with the loss that Megatron logs, and nothing relied on is missing."""
    probe = tmp_path / "probe.yaml"
    probe.write_text(f"output_dir: {tmp_path / 'out'}\nstrict: true\nmonitor: {{gradients: true}}\n")
    done = launch(str(EXAMPLES / "pretrain_loop.py"), ["--use-distributed-optimizer"], probe=probe)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    assert "without it: no" not in text
    (file,) = (tmp_path / "out" / "monitor").glob("*rank1*/scalars_*.csv")
    with file.open() as stream:
        loss = {int(row["step"]): float(row["value"]) for row in csv.DictReader(stream) if row["name"] == "loss"}
    logged = [float(value) for value in re.findall(r"lm loss: (\S+)", text)]
    assert sorted(loss) == [0, 1, 2, 3]
    assert [loss[0], loss[2], loss[3]] == pytest.approx([logged[0], logged[2], logged[3]], rel=1e-6)
