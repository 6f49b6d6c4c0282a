"""What is doubtful about the weights that a run begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from msprobe_engine.probe.rules.builtin.parameters.initial_weights import not_finite, not_tied, parted
from msprobe_integrations.torch.config.tensors import Collected
from msprobe_integrations.torch.monitor.targets import unwrap_model
from msprobe_integrations.torch.tensors.dtensors import is_dtensor


def find_doubtful(models: Sequence[nn.Module], found: Collected) -> dict[str, str]:
    """Parameters to words: those that are not finite, and output layers that are meant to be tied to the embedding and are not."""
    said = {name: not_finite(bad, count) for name, (bad, count) in found.broken.items()}
    for number, model in enumerate(models):
        prefix = f"{number}:" if number else ""
        for name, words in _untied(model, lambda name, prefix=prefix: found.digests.get(prefix + name, {})):  # type: ignore[misc]
            said.setdefault(prefix + name, words)
    return said


def _untied(model: nn.Module, facts: Callable[[str], dict[str, Any]]) -> Iterator[tuple[str, str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = list(model.modules())
    embeddings = [m.weight for m in modules if isinstance(m, nn.Embedding) and not is_dtensor(m.weight)]
    by_digest = {
        (about["digest"], tuple(about["shape"])): names[id(weight)]
        for weight in embeddings
        if (about := facts(names.get(id(weight), ""))).get("digest") and not _is_constant(weight)
    }
    for weight in (m.weight for m in modules if isinstance(m, nn.Linear)):
        name = names.get(id(weight), "")
        about = facts(name)
        other = by_digest.get((about.get("digest"), tuple(about.get("shape", ()))))
        if other is not None and other != name:
            yield name, parted(other)
    root: Any = unwrap_model(model)
    with suppress(AttributeError, NotImplementedError):
        if root.config.tie_word_embeddings is True:
            head, embedding = root.get_output_embeddings().weight, root.get_input_embeddings().weight
            if head is not embedding and id(head) in names and id(embedding) in names and not is_dtensor(head):
                yield names[id(head)], not_tied(names[id(embedding)])


def _is_constant(weight: Any) -> bool:
    """All elements are the same, as those of weights that are zero at first."""
    first = weight.detach().reshape(-1)[:64]
    return bool((first == first[0]).all()) if first.numel() else True
