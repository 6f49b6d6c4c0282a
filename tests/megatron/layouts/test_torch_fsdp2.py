"""Megatron's own loop with torch's FSDP2 (`--use-torch-fsdp2`): parameters are DTensors, and there are no buckets."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from launches import EXAMPLES, launch

CONFIG = """
output_dir: {output}
strict: true
monitor:
  gradients: true
  gradient_phases: [reduced, unscaled, clipped]
  parameters: true
  optimizer_states: true
  activations: true
  replica_check: {{interval: 1}}
"""
SCRIPT = """
import os, sys
sys.path.insert(0, {examples!r})
import pretrain_loop
from torch.distributed.device_mesh import DeviceMesh
from megatron.core import parallel_state
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")  # Megatron does not want it with FSDP
make = DeviceMesh.from_group
DeviceMesh.from_group = staticmethod(lambda group, kind, *args, **kwargs: make(group, "cpu", *args, **kwargs))
parallel_state.get_nccl_options = lambda *_: None
pretrain_loop.main(sys.argv[1:])
"""
FAMILIES = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
Key = tuple[str, ...]


def run(place: Path, arguments: list[str]) -> list[dict[Key, float]]:
    """Norms by family, name, step and phase, and scalars, of both ranks."""
    mcore = os.environ.get("MCORE19_ENVIRONMENT", "")
    if not mcore:
        pytest.skip("MCORE19_ENVIRONMENT does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    place.mkdir()
    script, probe = place / "script.py", place / "probe.yaml"
    script.write_text(SCRIPT.format(examples=str(EXAMPLES)))
    probe.write_text(CONFIG.format(output=place / "out"))
    arguments = [*arguments, "--untie-embeddings-and-output-weights", "--train-iters", "3", "--ckpt-format", "torch_dist"]
    done = launch(str(script), arguments, probe=probe, path=mcore)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    assert "replica_mismatch" not in text
    assert "scope: shard" not in text
    return [read(place / "out", rank) for rank in (0, 1)]


def read(output: Path, rank: int) -> dict[Key, float]:
    found: dict[Key, float] = {}
    (directory,) = (output / "monitor").glob(f"*rank{rank}-*")
    for family in FAMILIES:
        with (directory / f"{family}_0-99.csv").open() as stream:
            found.update({(family, r["name"], r["step"], r.get("phase", ""), r["shape"]): float(r["norm"]) for r in csv.DictReader(stream)})
    with (directory / "scalars_0-99.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["name"] in ("loss", "grad_norm", "learning_rate")]
        found.update({("scalar", row["name"], row["step"]): float(row["value"]) for row in rows})
    return found


@pytest.mark.slow
@pytest.mark.framework
def test_rows_are_of_whole_parameters(tmp_path: Path) -> None:
    """Gradients of all phases, parameters and moments under FSDP2 are those of the same training under plain data parallelism, with the
    shapes of whole parameters, on both ranks; the replica check compares no shards with each other."""
    plain = run(tmp_path / "plain", [])
    sharded = run(tmp_path / "sharded", ["--use-torch-fsdp2"])
    assert {key[0] for key in plain[0]} == {*FAMILIES, "scalar"}
    for whole, merged in zip(plain, sharded):
        assert merged == pytest.approx(whole, rel=2e-3, abs=1e-6)
    assert {k: v for k, v in sharded[0].items() if k[0] != "scalar"} == {k: v for k, v in sharded[1].items() if k[0] != "scalar"}
