"""Real runs of two ranks with planted differences: each is found, at its rank and step, and nothing else is reported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find.config.between_ranks import between_ranks
from msprobe_engine.find.config.packs import compare_packs

SCRIPT = Path(__file__).parents[1] / "planted_training.py"
LAUNCH = """\
ARGS=(
  --tensor-model-parallel-size 1 --micro-batch-size 2 --num-layers 4 --hidden-size 64 --norm-epsilon 1e-5
  --global-batch-size {batch} --seed 1234 --train-iters 100 --lr-warmup-fraction 0.1 --save {save}
)
torchrun --nproc_per_node 2 pretrain.py ${{ARGS[@]}} {more}
"""
PLANTED = {"bit", "buffer", "call", "eps", "sample", "order"}
Packs = dict[str, Path]
Fork = Callable[..., Any]


def _run(fork: Fork, place: Path, name: str, launch: str, what: set[str], variables: tuple[dict[str, str], dict[str, str]]) -> Path:
    """Two ranks, each with variables of its own."""
    script, pack = place / f"{name}.sh", place / f"{name}.zip"
    program = place / SCRIPT.name
    shutil.copy(SCRIPT, program)  # outside of a repository, whose commits between two runs would be a difference
    script.write_text(launch, encoding="utf-8")
    packages = place / f"{name}_packages" / "transformer_engine-2.1.dist-info"
    packages.mkdir(parents=True)
    version = "2.1" if not what else "2.2"
    (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n", encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_700 + os.getpid() % 200), "OMP_NUM_THREADS": "1"}
    job |= {"PYTHONPATH": str(packages.parent), "PLANTED": " ".join(sorted(what))}
    command = [str(program), str(pack), str(script)]
    said = [place / f"{name}.rank{rank}" for rank in range(2)]
    ranks = [fork(command, inherited | job | {"RANK": str(rank)} | variables[rank], said[rank]) for rank in range(2)]
    for rank, process in enumerate(ranks):
        process.join(240)
        assert process.exitcode == 0, said[rank].read_text()[-3000:]
    return pack


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, fork: Fork) -> Packs:
    """``base`` and ``again`` mean the same; ``planted`` has the differences."""
    place = tmp_path_factory.mktemp("planted")
    base = LAUNCH.format(batch=16, save="/a", more="--lr 3e-4")
    again = LAUNCH.format(batch=16, save="/b", more="--learning_rate=0.0003 --no-save-optim").replace("1e-5", "0.00001")
    planted = LAUNCH.format(batch=32, save="/a", more="--learning_rate=0.0002").replace("--norm-epsilon 1e-5", "--rms_norm_eps 1e-6")
    odd = {"NCCL_ALGO": "Tree"}
    return {
        "base": _run(fork, place, "base", base, set(), ({}, {})),
        "again": _run(fork, place, "again", again, set(), ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})),
        "planted": _run(fork, place, "planted", planted, PLANTED, ({"NVIDIA_TF32_OVERRIDE": "1"}, {"NVIDIA_TF32_OVERRIDE": "1"} | odd)),
    }


@pytest.mark.slow
def test_runs_that_mean_the_same_are_equal(packs: Packs) -> None:
    """A renamed option, another spelling of a number, paths and devices are no difference."""
    found = compare_packs(packs["base"], packs["again"])
    assert found.equal, [one.sentence() for one in found.differences]
    assert not found.problems
    assert set(found.summary()) == {"env", "pip", "dataset", "weights", "hyperparameters", "random", "system"}


def test_all_planted_differences_are_found_and_nothing_else(packs: Packs) -> None:
    """Two alias pairs, a batch that makes another accumulation, a setting of the optimizer, two variables (one on one rank), a package,
    a bit, a buffer, a sample of one rank, the order of two samples, and a random call."""
    found = compare_packs(packs["base"], packs["planted"])
    seen = {(one.sheet, one.bench_name, one.cmp_name, one.ranks, one.steps) for one in found.differences}
    assert seen == {
        ("hyperparameters", "lr", "learning_rate", (), ()),
        ("hyperparameters", "norm-epsilon", "rms_norm_eps", (), ()),
        ("hyperparameters", "global-batch-size", "global-batch-size", (), ()),
        ("hyperparameters", "optimizer.eps", "optimizer.eps", (), ()),
        ("env", "NVIDIA_TF32_OVERRIDE", "NVIDIA_TF32_OVERRIDE", (), ()),
        ("env", "NCCL_ALGO", "NCCL_ALGO", (1,), ()),
        ("pip", "transformer-engine", "transformer-engine", (), ()),
        ("weights", "1.weight", "1.weight", (), (0, 1)),
        ("weights", "", "extra", (), (0, 1)),
        ("dataset", "args.0", "args.0", (1,), (1,)),
        ("dataset", "args.0", "args.0", (0,), (0,)),
        ("random", "", "random.random", (), ()),
    }, [one.sentence() for one in found.differences]
    why = {(one.sheet, one.name, one.ranks): one.why for one in found.differences}
    assert "max, min, mean and norm agree" in why["weights", "1.weight", ()]
    assert why["dataset", "args.0", (1,)] == "1 of 4 samples are others (index 2)"
    assert why["dataset", "args.0", (0,)] == "the same samples in another order (index 0, 1)"
    assert found.derived["gradient_accumulation"][2] is False
    assert all(one.why and one.severity for one in found.differences)


def test_the_rank_that_differs_is_named(packs: Packs, capsys: pytest.CaptureFixture[str]) -> None:
    """Inside one pack the rank with a variable of its own is told; ranks that differ as ranks do are not."""
    found = between_ranks(packs["planted"])
    assert [(one.name, one.ranks) for one in found.matter] == [("NCCL_ALGO", found.matter[0].ranks)]
    assert main(["config_check", "--ranks", str(packs["planted"])]) == 1
    assert "NCCL_ALGO is" in capsys.readouterr().out
    assert main(["config_check", "--ranks", str(packs["again"]), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_diagnose_names_the_difference(packs: Packs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`msprobe diagnose` of two packs has finding config, a setting before what follows from it; equal ones have none."""
    assert main(["diagnose", str(packs["planted"]), str(packs["base"]), "-o", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "diagnosis.json").read_text(encoding="utf-8"))
    assert data["finding"] == "config"
    assert data["first_suspect"]["record"].startswith("hyperparameters ")
    assert data["differences"] == 12
    assert capsys.readouterr().out.startswith("The configurations differ: hyperparameters ")
    assert main(["diagnose", str(packs["again"]), str(packs["base"]), "-o", str(tmp_path)]) == 0
    assert main(["diagnose", str(packs["planted"]), "-o", str(tmp_path)]) == 1
    assert "NCCL_ALGO" in capsys.readouterr().out
