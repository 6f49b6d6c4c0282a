"""Megatron-LM's own `pretrain_gpt.py`, unmodified: opt-in, MSPROBE_MEGATRON_LM names a checkout (0.12 or newer). It also needs six,
sentencepiece, regex, pyyaml and triton, in the environment or on PYTHONPATH."""

from __future__ import annotations

import csv
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 4200 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style constant
--make-vocab-size-divisible-by 8 --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
--attention-backend unfused --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --position-embedding-type rope --seed 1234
--use-cpu-initialization --split 90,5,5 --log-params-norm --log-num-zeros-in-grad --save-interval 2 --ckpt-format torch
"""
CONFIG = """
strict: true
monitor: {gradients: true, parameters: true, activations: true}
incident: {level: mix}
"""
LAYOUTS = {
    "1 rank": (1, ""),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "DP 2, distributed optimizer, overlapped": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16"),
}
pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(not os.environ.get("MSPROBE_MEGATRON_LM"), reason="MSPROBE_MEGATRON_LM names no checkout of Megatron-LM"),
]


def run(place: Path, ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """One launch line; losses and weights of every step are in ``losses<rank>``."""
    checkout = Path(os.environ["MSPROBE_MEGATRON_LM"])
    bootstrap = ROOT / "msprobe_integrations" / "autoload" / "bootstrap"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(Path(__file__).parents[1] / "pretrain_runner.py"), str(checkout / "pretrain_gpt.py"), *FLAGS.split(), *arguments]
    path = os.pathsep.join(p for p in (str(bootstrap), str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "LOSSES": str(place / "losses%r"), "OMP_NUM_THREADS": "1"}
    command += ["--save", str(place / "checkpoint")]
    return subprocess.run([*command, *arguments], cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)


def bits(place: Path, ranks: int) -> list[str]:
    return [(place / f"losses{rank}").read_text() if (place / f"losses{rank}").exists() else "" for rank in range(ranks)]


@functools.cache
def without(ranks: int, arguments: str) -> list[str]:
    """Bits of a run without the probe."""
    with tempfile.TemporaryDirectory() as place:
        done = run(Path(place), ranks, arguments.split())
        assert done.returncode == 0, done.stderr[-6000:]
        return bits(Path(place), ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pretrain_gpt(tmp_path: Path, layout: str) -> None:
    """With nothing but ``--msprobe-config`` in the launch line the script trains, evaluates and saves as ever, bit by bit; every step is
    there on every rank, numbered as Megatron counts, with the loss, gradient norm and parameter norm that Megatron logs."""
    ranks, arguments = LAYOUTS[layout]
    probe = tmp_path / "probe.yaml"
    probe.write_text(CONFIG)
    done = run(tmp_path, ranks, [*arguments.split(), "--msprobe-config", str(probe), "--msprobe-output-dir", str(tmp_path / "out")])
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-9000:]
    assert "has no " not in text, "something that the probe relies on is missing"
    found = bits(tmp_path, ranks)
    assert found == without(ranks, arguments)
    assert all(one.count("weights") == 4 for one in found)
    last = scalars(tmp_path, ranks - 1)
    assert set(last) == {0, 1, 2, 3}
    assert [step for step in last if "checkpoint_saved" in last[step]] == [2]
    logged = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) .*?params norm: (\S+)", text)
    assert len(logged) == 4
    for step in (0, 2, 3):  # the first log line does not reset the sum of losses
        ours = [last[step][name] for name in ("loss", "grad_norm", "params_norm")]
        assert ours == pytest.approx([float(value) for value in logged[step]], rel=2e-3)


def version() -> str:
    """Of the checkout's megatron-core."""
    text = (Path(os.environ["MSPROBE_MEGATRON_LM"]) / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.search(rf"^{part} = (\d+)", text, re.MULTILINE)[1] for part in ("MAJOR", "MINOR", "PATCH"))  # type: ignore[index]


def scalars(place: Path, rank: int) -> dict[int, dict[str, float]]:
    (file,) = (place / "out" / "monitor").glob(f"*rank{rank}*/scalars_*.csv")
    found: dict[int, dict[str, float]] = {}
    with file.open() as stream:
        for row in csv.DictReader(stream):
            found.setdefault(int(row["step"]), {})[row["name"]] = float(row["value"])
    return found


def test_wrong_settings(tmp_path: Path) -> None:
    """A mistake in the arguments of the probe ends every rank with exit code 2 before the training, with one message."""
    probe = tmp_path / "probe.yaml"
    probe.write_text(CONFIG)
    done = run(tmp_path, 2, ["--msprobe-config", str(probe), "--msprobe-set", "monitor.gradient=true"])
    text = done.stdout + done.stderr
    assert text.count("monitor.gradient: unknown key") == 1, text[-3000:]
    assert "iteration" not in text
    codes = set(re.findall(r"exitcode +: (\S+)", text))
    assert codes in ({"2"}, {"2", "-15"})  # torchrun ends the others when it sees the first
