"""Settings of a Lightning Trainer and hyperparameters of its module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import Resolved, flags_of, flatten_tree, plain_data, resolve_settings

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_DIRECT = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("precision", "num_nodes", "num_devices", "world_size", "limit_train_batches", "limit_val_batches", "overfit_batches"),
    *("check_val_every_n_epoch", "reload_dataloaders_every_n_epochs", "log_every_n_steps", "val_check_interval", "fast_dev_run"),
)


def read_resolved(reach: Reach) -> dict[str, Resolved]:
    """Of the first Trainer in reach: its arguments under their names, and ``hparams`` of its module below ``hparams.``."""
    trainers = [*reach.instances("lightning", "Trainer"), *reach.instances("pytorch_lightning", "Trainer")]
    if not trainers:
        return {}
    trainer = trainers[0]
    values: dict[str, Any] = {name: plain_data(getattr(trainer, name)) for name in _DIRECT if hasattr(trainer, name)}
    values["strategy"] = type(getattr(trainer, "strategy", None)).__name__
    values["accelerator"] = type(getattr(trainer, "accelerator", None)).__name__
    clusters = getattr(getattr(trainer, "_accelerator_connector", None), "use_distributed_sampler", None)
    if clusters is not None:
        values["use_distributed_sampler"] = clusters
    defaults = {name: p.default for name, p in inspect.signature(type(trainer)).parameters.items() if p.default is not p.empty}
    module = getattr(trainer, "lightning_module", None)
    hparams = plain_data(dict(getattr(module, "hparams", {}) or {}))
    line = list(reach.arguments)
    flags = {**_of_cli(line, "trainer.", values), **flags_of(line, values)}
    resolved = resolve_settings(
        {name: value for name, value in values.items() if value is not None}, "lightning", defaults=defaults, flags=flags
    )
    own = flatten_tree({"hparams": hparams}) if hparams else {}
    given = {f"hparams.{name}": flag for name, flag in {**_of_cli(line, "model.", hparams), **flags_of(line, hparams)}.items()}
    return {**resolved, **resolve_settings(own, "lightning", flags=given)}


def _of_cli(line: list[str], prefix: str, names: Any) -> dict[str, str]:
    """Flags of LightningCLI: ``--trainer.max_epochs``."""
    given = {word.partition("=")[0] for word in line if word.startswith(f"--{prefix}")}
    return {name: f"--{prefix}{name}" for name in names if f"--{prefix}{name}" in given}
