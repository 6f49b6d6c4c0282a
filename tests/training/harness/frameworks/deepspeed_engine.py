"""An engine of DeepSpeed.

Parallelism: ``dp`` with ``zero`` (stage 0 to 3), ``pp`` (the pipeline engine, two stages), ``ep`` (the model ``moe``). Features: ``hpz``
(hierarchical partitions and quantized gradients of ZeRO++).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import deepspeed_harness
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.pipe import PipelineModule
from torch import nn

from harness.case import Training, TrainingCase
from harness.models import MODELS as SHARED
from harness.models import OPTIMIZER, Model, mlp_loss
from harness.spy import Spy

ARM = ("deepspeed", "torch")
SCALARS = ("loss", "learning_rate", "skipped")
deepspeed = deepspeed_harness.deepspeed


class Experts(nn.Module):
    """A linear layer, norms, and two experts, one on each rank; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, auxiliary, _ = self.moe(self.last(self.second(torch.tanh(self.norm(self.first(x))))))
        loss: torch.Tensor = (y - x).float().pow(2).mean() + 0.01 * auxiliary
        return loss


def make_experts() -> Experts:
    torch.manual_seed(3)
    return Experts()


MODELS = {"moe": Model(make_experts, SHARED["mlp"].batch, lambda model, x: model(x), ("LayerNorm", "layer_norm"), "last", "first.weight")}


def make_config(case: TrainingCase, **more: Any) -> dict[str, Any]:
    """Of DeepSpeed; ``optimizer=None`` leaves the optimizer to the script."""
    adam = {"type": "Adam", "params": {**OPTIMIZER, "torch_adam": True}}
    hpz = {"zero_hpz_partition_size": 2, "zero_quantized_gradients": True} if "hpz" in case.features else {}
    stage = case.parallelism.get("zero", 1 if "ep" in case.parallelism else 0)
    found = deepspeed_harness.config(stage, case.precision, case.micro_batches, case.clip, zero=hpz, **{"optimizer": adam, **more})
    return {**{k: v for k, v in found.items() if v is not None}, "zero_allow_untested_optimizer": True}


def make_engine(training: Training) -> Any:
    """The same on all ranks."""
    case = training.case
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    net: Any = {**SHARED, **MODELS}[case.model].make()
    if "pp" in case.parallelism:
        layers = list(net)
        loss = lambda output, _target: output.float().square().mean()  # noqa: E731
        net = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    parameters: Any = list(net.parameters())
    if case.model == "moe":
        parameters = split([{"params": parameters, "name": "all", "lr": OPTIMIZER["lr"]}])
    net = training.model(net)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=training.launch(make_config(case)))
    return engine


def weights_of(engine: Any) -> dict[str, bytes]:
    """The bits of all parameters, gathered one by one: of several, versions until 0.18 wait for the last only."""
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=engine.zero_optimization_stage() == 3):
            found[name] = p.detach().clone().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def note_whole(engine: Any, spy: Spy) -> None:
    """DeepSpeed's own gathered gradients and parameters; all ranks call it."""
    named = dict(engine.module.named_parameters())
    with spy.looking_away(), deepspeed.zero.GatheredParameters(list(named.values()), enabled=engine.zero_optimization_stage() == 3):
        spy.note("param_origin", named)
    with spy.looking_away():
        gradients = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in named.items()}
        spy.note("grad_reduced", {name: g for name, g in gradients.items() if g is not None})


def train(training: Training) -> Any:
    """Weights, gathered, and losses."""
    case = training.case
    engine = make_engine(training)
    dtype = torch.float32 if "pp" in case.parallelism else deepspeed_harness.DTYPES[case.precision]
    kind = SHARED.get(case.model, MODELS.get(case.model))
    assert kind is not None
    micros = range(case.micro_batches)
    batches = training.data([[kind.batch(step, micro, training.data_rank()).to(dtype) for micro in micros] for step in range(case.steps)])
    spy = training.watcher
    whole = isinstance(spy, Spy) and (case.model == "moe" or "hpz" in case.features)
    training.start(engine, engine.module, engine.optimizer, engine.monitor)
    losses = []
    for samples in batches:
        if "pp" in case.parallelism:
            losses.append(float(engine.train_batch(data_iter=_pairs(samples))))
        else:
            for micro, x in enumerate(samples):
                loss = engine(x) if case.model == "moe" else mlp_loss(engine, x)
                engine.backward(loss)
                if micro == len(samples) - 1:
                    training.clipping(engine.module)
                    if whole:
                        note_whole(engine, spy)  # type: ignore[arg-type]
                engine.step()
                losses.append(float(loss.detach()))
        training.updated()
    weights = weights_of(engine)
    return hashlib.sha256(b"".join(weights[name] for name in sorted(weights))).hexdigest(), losses


def _pairs(samples: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets that nobody looks at."""
    return iter([(x, x) for x in samples])
