"""The same small transformer with the same weights in PyTorch and MindSpore: aligned without a mapping, no difference beyond round-off,
and a planted difference is the first suspect. Both are dumped by our own PrecisionDebugger; the environment with MindSpore is named by
MINDSPORE_ENVIRONMENT.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MINDSPORE_ENVIRONMENT" not in os.environ, reason="MINDSPORE_ENVIRONMENT names no environment with mindspore"),
    pytest.mark.timeout(1800),
]

SAME = [
    ("mint", "mix", "plain"),
    ("named", "L0", "plain"),
    ("fused", "mix", "plain"),
    ("plain", "L0", "plain"), ("plain", "mix", "plain"), ("plain", "L1", "plain"), ("mint", "L1", "fused"),
    ("primitive", "L1", "plain"), ("named", "mix", "plain"),
    ("fused", "L0", "plain"), ("fused", "L1", "fused"), ("functions", "mix", "plain"), ("plain", "L0", "fused"),
    ("plain", "mix", "fused"),
]  # fmt: skip
"""Style of MindSpore, level, style of PyTorch."""

FAULTS = [
    ("scale", "mix", "blocks.0.attn"),
    ("transposed", "L0", "blocks.1.attn.q"),
    ("epsilon", "L0", "blocks.1.ln2"),
    ("mask", "mix", "blocks.0.attn"), ("default_epsilon", "L0", "blocks.0.ln1"), ("mask", "L0", "blocks.0.attn"),
    ("scale", "L0", "blocks.0.attn"),
    ("transposed", "mix", "blocks.1.attn.q"), ("exchanged", "L0", "blocks.1.attn.k"), ("gelu", "L0", "blocks.0.mlp.act"),
    ("relu", "L0", "blocks.0.mlp.act"), ("dropout", "L0", "blocks.0.attn"), ("order", "L0", "blocks.1"),
    ("residual", "L0", "blocks.0"), ("bias", "L0", "blocks.0.attn.o"), ("half", "L0", "blocks.0.mlp.down"),
    ("embedding_scale", "L0", "emb"), ("axis", "mix", "blocks.0.attn"), ("no_final_norm", "L0", "norm"),
    ("heads", "L0", "blocks.0.attn"), ("smoothing", "L0", "head"), ("cut", "L0", "blocks.1.attn"), ("rate", "L0", "emb"),
    ("decay", "L0", "emb"), ("frozen", "L0", "blocks.0.mlp.up"),
]  # fmt: skip
"""What is planted on the MindSpore side, level, and the module that must be the first suspect."""
LATER = {"rate": 1, "decay": 1, "frozen": 1}
"""Faults of the optimizer show in the step behind its first."""


STEPS = 3
"""Of runs without a fault: the first, and those behind an update."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All dumps, made by a framework in processes that one has forked: ``t_{style}_{level}`` of PyTorch,
    ``m_{style}_{level}[_{fault}]`` of MindSpore, with a fault up to the step in which it shows."""
    root = tmp_path_factory.mktemp("two")
    pairs = dict.fromkeys([(style, level) for _, level, style in SAME] + [("plain", level) for _, level, _ in FAULTS])
    golden = [[str(root / f"t_{style}_{level}"), level, "statistics", style, str(STEPS)] for style, level in pairs]
    wanted = dict.fromkeys([(style, level, "") for style, level, _ in SAME] + [("plain", level, f) for f, level, _ in FAULTS])
    targets = [
        [
            str(root / f"m_{style}_{level}{fault and '_' + fault}"),
            *(level, "statistics", style),
            str(LATER.get(fault, 0) + 1 if fault else STEPS),
            fault,
        ]
        for style, level, fault in wanted
    ]
    golden.append([str(root / "t_plain_tensor"), "mix", "tensor", "plain", "1"])
    targets.append([str(root / "m_tensor_transposed"), "mix", "tensor", "plain", "1", "transposed"])
    mindspore = str(Path(os.environ["MINDSPORE_ENVIRONMENT"]) / "bin" / "python")
    for python, program, jobs in ((sys.executable, "train_torch", golden), (mindspore, "train_mindspore", targets)):
        file = root / f"{program}.json"
        file.write_text(json.dumps(jobs))
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONPATH": str(HERE.parents[1])}
        done = subprocess.run([python, str(HERE / "many.py"), program, str(file)], cwd=root, env=env, capture_output=True, text=True)
        logs = {job[0]: Path(f"{job[0]}.log").read_text()[-600:] for job in jobs if not list(Path(job[0]).glob("step0/*/dump.json"))}
        assert not logs, logs
        assert done.returncode == 0, done.stderr[-600:]
    return root


def test_no_false_divergence(root: Path) -> None:
    """However the model is written, at least 95 % of Cells and APIs are aligned by themselves and nothing beyond round-off is reported, in
    forward and backward passes, gradients of parameters, and after optimizer steps; in both directions."""
    faults = []
    for style, level, golden in SAME:
        pair = root / f"m_{style}_{level}", root / f"t_{golden}_{level}"
        for target, right in (pair, pair[::-1]):
            found = diagnose(target, right)
            assert found.looked_at["steps"] == ", ".join(map(str, range(STEPS)))
            aligned = all(some >= 0.95 * of for side in found.aligned.values() for some, of in side.values())
            if found.finding != "none" or not aligned:
                faults.append(f"{target.name} against {right.name}: {found.text()}")
    assert not faults, "\n".join(faults)


def test_a_planted_difference_is_the_first_suspect(root: Path) -> None:
    """What is planted on the MindSpore side is where the numbers part, in the step in which it works for the first time."""
    faults = []
    for fault, level, module in FAULTS:
        found = diagnose(root / f"m_plain_{level}_{fault}", root / f"t_plain_{level}")
        suspect = found.first_suspect
        right = suspect is not None and suspect.step == LATER.get(fault, 0) and f"{suspect.module}.".startswith(f"{module}.")
        if found.finding != "divergence" or not right:
            faults.append(f"{fault} at level {level}: {found.text()}")
    assert not faults, "\n".join(faults)


def test_saved_tensors(root: Path) -> None:
    """With saved tensors (.npy here, .pt there) a transposed weight differs itself, which its statistics do not show."""
    found = diagnose(root / "m_tensor_transposed", root / "t_plain_tensor")
    suspect = found.first_suspect
    assert suspect is not None
    assert suspect.module == "blocks.1.attn.q"
    assert suspect.kind == "taken in"


def test_tables(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`msprobe compare` without a mapping: no row fails, rows of equal meaning stand beside each other, the rest says why it is alone, and
    the exit code is 0; with a fault it is 1."""
    assert main(["compare", "-tp", str(root / "m_mint_mix"), "-gp", str(root / "t_plain_mix"), "-o", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "No difference beyond round-off" in text
    assert "unmatched" not in text
    with next((tmp_path / "a" / "step1").glob("compare_result*.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["Result"] for row in rows} == {"pass"}
    partners = {row["NPU Name"]: row["Bench Name"] for row in rows}
    assert partners["Cell.blocks.0.ln1.LayerNorm.forward.0.parameters.gamma"] == "Module.blocks.0.ln1.LayerNorm.forward.0.parameters.weight"
    assert partners["Mint.matmul.0.forward.input.1"] == "Torch.matmul.0.forward.input.1"
    assert all(row["Err_message"] for row in rows if "N/A" in (row["NPU Name"], row["Bench Name"]))
    fault = ["compare", "-tp", str(root / "m_plain_mix_scale"), "-gp", str(root / "t_plain_mix"), "-o", str(tmp_path / "b")]
    assert main(fault) == 1
    assert "Tensor.__truediv__.0.forward" in capsys.readouterr().out.splitlines()[0]


def test_names_that_differ_become_a_mapping(root: Path, tmp_path: Path) -> None:
    """Cells of other names are matched, and their names are written as a cell mapping that can be given back; then nothing is proposed."""
    pair = [str(root / "m_named_L0"), str(root / "t_plain_L0")]
    assert main(["diagnose", *pair, "-o", str(tmp_path)]) == 0
    mapping = tmp_path / "cell_mapping.yaml"
    assert "layers.0.self_attention.query.Dense: blocks.0.attn.q.Linear" in mapping.read_text()
    assert main(["diagnose", *pair, "-o", str(tmp_path / "again"), "-cm", str(mapping)]) == 0
    assert not (tmp_path / "again" / "cell_mapping.yaml").exists()
