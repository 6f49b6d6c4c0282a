"""Trainers of the form of MindSpeed's own FSDP2 backends (`mindspeed_stand_in`), imported anew for each training.

Parallelism: ``fsdp2``. Features: ``engine`` (that of MindSpeed-MM; else the Trainer of MindSpeed-LLM). Both accumulate and clip.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from harness.case import Training
from harness.frameworks.torch_loop import wrap_model
from harness.models import MODELS as SHARED
from harness.models import OPTIMIZER
from harness.run import digest
from msprobe_integrations.mindspeed import fsdp2

ARM = ()
SCALARS = ("loss", "grad_norm", "learning_rate")
STAND_IN = "harness.frameworks.mindspeed_stand_in"


def import_anew() -> Any:
    """The module of the Trainer, which nobody follows yet."""
    sys.modules.pop(STAND_IN, None)
    return importlib.import_module(STAND_IN)


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and what the Trainer logs."""
    case, kind = training.case, SHARED[training.case.model]
    assert case.clip
    engine, module = "engine" in case.features, import_anew()
    (fsdp2.patch_engine if engine else fsdp2.patch_trainer)(module)
    model = wrap_model(training.model(kind.make()), case)
    optimizer = training.optimizer(torch.optim.AdamW(model.parameters(), **OPTIMIZER, foreach=False))
    micros = range(case.micro_batches)
    batches = training.data([[kind.batch(step, micro, training.data_rank()) for micro in micros] for step in range(case.steps)])
    trainer = (module.TrainEngine if engine else module.Trainer)(model, optimizer, batches)
    optimizer.register_step_post_hook(lambda *_: training.updated())
    training.start(model, optimizer, trainer)
    trainer.train()
    return digest(model.parameters()), trainer.log
