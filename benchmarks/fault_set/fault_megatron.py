"""Small trainings of megatron-core in any layout, with the weights and the data of one process; dumps of their first steps.

Weights follow from the names that parameters have in one process, so every layout cuts its own out of the same tensors. The micro
batches of a step are dealt out as Megatron does it: micro batch m of data-parallel rank r is number m * ranks + r.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]
for _place in (ROOT / "tests" / "frameworks", ROOT / "examples" / "megatron"):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import train_gpt  # noqa: E402
from forkpool import run_ranks  # noqa: E402
from megatron.core import parallel_state as state  # noqa: E402

from msprobe_engine.core.settings.load import load_settings  # noqa: E402
from msprobe_engine.core.settings.schema import CsvSettings, DumpSettings, IncidentSettings, ProbeSettings, SinkSettings  # noqa: E402
from msprobe_integrations.megatron import patches  # noqa: E402
from msprobe_integrations.megatron.layout import unwrap_model  # noqa: E402
from msprobe_integrations.megatron.observer import TrainingObserver  # noqa: E402

STEPS = 2
LEARNING_RATE = ("--lr", "1e-6")
"""Small: Adam makes a whole step of a gradient that is nothing but round-off, as that of the keys' bias, and layouts round otherwise."""

Plant = Callable[[list[Any]], None]
"""Changes the model chunks of a rank before its first step."""


class _NoDropout(train_gpt.TransformerConfig):  # type: ignore[name-defined,misc]
    """Random masks are other ones on each stage and each rank. `more` are entries that the example has no argument for."""

    more: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        self.attention_dropout = self.hidden_dropout = 0.0
        for key, value in self.more.items():
            setattr(self, key, value)
        super().__post_init__()


def dump(path: Path, ranks: int, argv: str, plant: Plant | None = None, level: str = "mix", steps: int = STEPS) -> Path:
    """Train in `ranks` processes of its own and leave the dump at `path`; an existing one is kept. Returns the root of the dump.

    Raises:
        RuntimeError: a rank failed.
    """
    if not (path / "done").exists():
        shutil.rmtree(path, ignore_errors=True)
        run_ranks(ranks, _train, argv, str(path), plant, level, steps, timeout=240)
        (path / "done").touch()
    return path / "dump"


def _train(argv: str, path: str, plant: Plant | None, level: str, steps: int) -> None:
    settings = _monitored(path) if level == "monitor" else _dumped(path, level, steps)
    observer = TrainingObserver(settings)
    patches.observe(lambda: observer)
    train_gpt.TransformerConfig, train_gpt.batches = _NoDropout, _batches  # type: ignore[misc]
    words = argv.split()
    while "--set" in words:  # --set num_query_groups=2
        at = words.index("--set")
        key, _, value = words[at + 1].partition("=")
        _NoDropout.more[key] = json.loads(value)
        del words[at : at + 2]
    layers = {"qk_layernorm": True} if _NoDropout.more.get("qk_layernorm") else {}
    train_gpt.get_gpt_layer_local_spec = functools.partial(train_gpt.get_gpt_layer_local_spec, **layers)
    a = train_gpt.arguments(["--quiet", "--steps", str(steps), *LEARNING_RATE, *words])
    _, chunks, optimizer = train_gpt.build(a)
    for chunk in chunks:
        _fill(unwrap_model(chunk), a)
    if plant is not None:
        plant([unwrap_model(chunk) for chunk in chunks])
    optimizer.reload_model_params()  # the optimizer of 16 bit weights has copies of those that the model was made with
    train_gpt.train(a, chunks, optimizer)
    observer.close()


def _dumped(path: str, level: str, steps: int) -> ProbeSettings:
    return ProbeSettings(
        output_dir=path,
        strict=True,
        log_level="silent",
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=False),
        dump=DumpSettings(level=level, step=tuple(range(steps))),
    )


def _monitored(path: str) -> ProbeSettings:
    families = ("gradients", "parameters", "optimizer_states", "updates", "activations", "activation_gradients")
    return load_settings(
        {
            "output_dir": f"{path}/monitor",
            "strict": True,
            "log_level": "silent",
            "monitor": dict.fromkeys(families, True),
            "rules": [{"rule": "recommended"}],
            "sinks": {"csv": {"enabled": True}},
        }
    )


def _fill(model: Any, a: argparse.Namespace) -> None:
    """Give a chunk its part of the weights."""
    first = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    experts = state.get_expert_model_parallel_rank() * (a.experts // a.ep)
    for name, parameter in model.named_parameters():
        known = re.sub(r"^decoder\.layers\.\d+\.", lambda found: f"decoder.layers.{first[found.group()]}.", name)
        known = re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found.group()) + experts), known)
        if known == "output_layer.weight" and not a.untie:
            known = "embedding.word_embeddings.weight"
        tp = a.etp if ".experts." in known else a.tp
        cut = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        dimension = parameter.partition_dim if cut else 0
        shape = [size * tp if cut and at == dimension else size for at, size in enumerate(parameter.shape)]
        generator = torch.Generator().manual_seed(zlib.crc32(known.encode()))
        whole = torch.randn(shape, generator=generator)
        whole = 1 + 0.1 * whole if "layernorm" in known and known.endswith("weight") else 0.1 * whole
        own = whole.chunk(tp, dimension)[state.get_tensor_model_parallel_rank()] if cut else whole
        parameter.data.copy_(own)


def _batches(a: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    mask = torch.tril(torch.ones(1, 1, a.seq, a.seq)) < 0.5
    positions = torch.arange(a.seq)[None].expand(a.mbs, -1).contiguous()
    number = state.get_data_parallel_rank()
    while True:
        tokens = torch.randint(0, a.vocab, (a.mbs, a.seq + 1), generator=torch.Generator().manual_seed(number))
        number += state.get_data_parallel_world_size()
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "mask": mask, "positions": positions}
