"""torchtitan on two ranks: FSDP2 and pipeline parallel, against the whole tensors of all ranks in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import titan_job
import torch
from trainer_checks import asked, compare, config, digest, everything, files, ranks, seen

from msprobe_integrations.torch import owner

titan_job.stand_in()
COLLECTIVES = {
    "dp": {"all_gather_single", "reduce_scatter_single"},
    "pp": {"irecv", "all_reduce"},
}
LAYOUTS = {"dp": "FSDP2, 2 ranks", "pp": "PP 2, 2 ranks"}


def whole(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks that have a part of it; float64."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).double()


def job(folder: Path, file: Path | None, keys: dict[str, int]) -> Any:
    """Train in this rank; bits, what was seen, and the norms of the whole tensors at the moments that the probe looks."""
    from torchtitan.distributed import utils

    asked(file, "torchtitan")
    trainer = titan_job.config(folder, **keys).build()
    norms: dict[Any, float] = {}
    clip = utils.clip_grad_norm_

    def note(family: str, tensor: Any) -> None:
        for part in trainer.model_parts:
            for name, p in part.named_parameters():
                norms[family, trainer.step - 1, name] = float(whole(tensor(p)).norm())

    def clipped(*args: Any, **kwargs: Any) -> Any:
        note("grad_reduced", lambda p: p.grad)
        note("param_origin", lambda p: p)
        return clip(*args, **kwargs)

    utils.clip_grad_norm_ = clipped
    step = trainer.optimizers.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        note("param_updated", lambda p: p)
        states = {p: state for optimizer in trainer.optimizers.optimizers for p, state in optimizer.state.items()}
        for name in ("exp_avg", "exp_avg_sq"):
            note(name, lambda p, name=name: states[p][name])
        return result

    trainer.optimizers.step = stepped
    trainer.train()
    found = seen()
    bits = digest(p for part in trainer.model_parts for p in part.parameters())
    owner.release()
    return bits, found, norms


@pytest.mark.parametrize("kind", ["dp", "pp"])  # tp is in the sample of test_titan_cells
def test_layout(tmp_path: Path, kind: str) -> None:
    """Same bits; norms of gradients, parameters and moments are those of the whole tensors; ranks of a pipeline have the layers of their
    stage; the layout's collectives are seen; steps are the Trainer's minus one; the gradient norm is the same on all ranks; everything
    that files are asked for is written."""
    titan_job.assets(tmp_path / "run")
    plain = ranks(2, job, tmp_path / "run", None, {kind: 2})
    followed = ranks(2, job, tmp_path / "run", config(tmp_path, **everything()), {kind: 2})
    assert [bits for bits, *_ in plain] == [bits for bits, *_ in followed]
    (_, first, _), (_, second, _) = followed
    for _, found, norms in followed:
        assert found["steps"] == [0, 1, 2]
        assert found["faults"] == []
        assert compare(found["norms"], norms) > 100
        assert COLLECTIVES[kind] <= {key[2] for key in found["norms"]}
        for number in (0, 1, 2):
            total = sum(norms[key] ** 2 for key in norms if key[:2] == ("grad_reduced", number))
            scalars = found["scalars"][number]
            assert {"learning_rate", "skipped", "grad_norm"} <= scalars.keys()
            assert kind == "pp" or abs(scalars["grad_norm"] - total**0.5) < 1e-4 * total**0.5
    for number in (0, 1, 2):
        assert first["scalars"][number]["grad_norm"] == second["scalars"][number]["grad_norm"]
        assert second["scalars"][number]["loss"] > 0
        assert ("loss" in first["scalars"][number]) == (kind != "pp")  # a pipeline's last stage has it
    assert ("global_avg_loss" in first["scalars"][1]) == (kind != "pp")
    assert files(tmp_path) == {"dump": True, "grad_probe": True, "incident": True}
