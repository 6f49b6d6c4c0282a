"""Derived numbers of single layers, once per call or once per step: attention, spectral norms, routing of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.records import Sample
from msprobe_engine.core.settings.schema import LayerFeatureSettings
from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.common.monitor.targets import Named, is_named, matches
from msprobe_integrations.torch.hooks.modules import ModuleHooks, Post, Pre
from msprobe_integrations.torch.monitor import feature_math
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.tensors.describe import resolve
from msprobe_integrations.torch.tensors.devices import accelerator, is_any_capturing

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_KINDS = {
    "attention_hook": "attention",
    "linear_hook": "linear",
    "moe_router_weight_hook": "moe_router",
    "moe_router_logit_hook": "moe_router",
}
"""What the existing tool puts behind the name of the module, by family."""
_WEIGHTS = ("weight", "wg")
_TOP = ("topk", "top_k", "num_experts_per_tok", "moe_router_topk", "num_experts_per_token")
_WARM = 5
"""On a device every step but the first has so many times fewer iterations: it goes on from where the last one ended."""


class LayerFeatures:
    """Features of the modules that the settings name.

    A weight is looked at just before the first call of its module in a step, where frameworks that shard parameters have it whole.
    Where it is still a shard (tensor parallel layers) the numbers are those of the shard, and the sample says ``scope: shard``.

    Args:
        settings: section ``monitor.layer_features``.
    """

    def __init__(self, side: ModuleMonitor, settings: LayerFeatureSettings) -> None:
        self._side = side
        self._probe = side.probe
        self._settings = settings
        self._taken: set[tuple[str, int]] = set()
        self._vectors: dict[tuple[str, int], torch.Tensor] = {}

    def add(self, named: Named, hooks: ModuleHooks) -> None:
        """Hook the module for every feature it is named in."""
        s, name, chunk = self._settings, named.name, named.chunk
        if is_named(name, s.attention, chunk):
            hooks.add(named, self._before("attention_hook", named, self._attention), None, self)
        if s.linear and matches(name, s.linear, chunk) and _weight(named.module) is not None and not _is_embedding(named.module):
            hooks.add(named, self._before("linear_hook", named, self._linear), None, self)
        if is_named(name, s.router_weights, chunk):
            hooks.add(named, self._before("moe_router_weight_hook", named, self._router_weight), None, self)
        if is_named(name, s.router_logits, chunk):
            hooks.add(named, None, self._after("moe_router_logit_hook", named, self._router_logits), self)

    def end_step(self) -> None:
        """The next step looks at every weight again."""
        self._taken.clear()

    def _before(self, family: str, named: Named, take: Callable[..., None]) -> Pre:
        return lambda _module, args, kwargs: self._run_guarded(family, named, take, args, kwargs)

    def _after(self, family: str, named: Named, take: Callable[..., None]) -> Post:
        return lambda _module, _args, _kwargs, result: self._run_guarded(family, named, take, result)

    def _run_guarded(self, family: str, named: Named, take: Callable[..., None], *seen: Any) -> None:
        part = f"{family} of {named.name}"
        try:
            if self._sees(named, part):
                with _plain():
                    take(named, *seen)
        except Exception as error:
            raise_of_training(error)
            self._probe.faults.fail(part, error)

    def _sees(self, named: Named, part: str) -> bool:
        if torch.compiler.is_compiling() or not self._side.on or not named.root.training:
            return False
        if is_any_capturing():  # what is computed here would become a part of the user's graph
            return False
        return _graph_task() == -1 and self._probe.faults.is_enabled(part)

    def _once(self, family: str, named: Named) -> bool:
        """True the first time in a step."""
        key = (f"{family}:{named.name}", named.chunk)
        if key in self._taken:
            return False
        self._taken.add(key)
        return True

    def _attention(self, named: Named, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        tensors += [
            kwargs[key] for key in ("query", "query_layer", "q", "key", "key_layer", "k") if isinstance(kwargs.get(key), torch.Tensor)
        ]
        if len(tensors) < 2:
            raise UsageError(
                f"attention feature of {named.name}: the module got {len(tensors)} tensors; its first two inputs must be q and k"
            )
        q, k = (_data(tensor, named) for tensor in tensors[:2])
        try:
            entropy, largest = feature_math.attention(q, k, self._settings.attention_layout)
        except ValueError as error:
            raise UsageError(f"attention feature of {named.name}: {error}; name the module that gets q and k (core attention)") from None
        self._add_samples(
            "attention_hook", named, {"entropy": entropy, "softmax_max": largest}, micro_step=self._side.micro_step(named.chunk)
        )

    def _linear(self, named: Named, _args: Any, _kwargs: Any) -> None:
        if not self._once("linear_hook", named):
            return
        parameter = _weight(named.module)
        if parameter is None:
            return
        weight = _data(parameter, named)
        key = (named.name, named.chunk)
        start = self._vectors.get(key)
        iterations = self._settings.power_iterations
        if start is None or start.shape[0] != weight.shape[1] or start.device != weight.device:
            start = feature_math.start_vector(weight.shape[1], weight.device)
        elif weight.device.type != "cpu":
            iterations = -(-iterations // _WARM)
        norm, self._vectors[key] = feature_math.spectral_norm(weight, start, iterations)
        ratio = torch.linalg.vector_norm(weight.detach(), dtype=torch.float64 if weight.device.type == "cpu" else torch.float32) / norm
        numbers = {"sr": ratio, "kernel_norm": norm, "stable_rank": ratio.square()}
        self._add_samples("linear_hook", named, numbers, scope=_scope(parameter))

    def _router_weight(self, named: Named, _args: Any, _kwargs: Any) -> None:
        if not self._once("moe_router_weight_hook", named):
            return
        parameter = _weight(named.module)
        if parameter is None:
            raise UsageError(f"router feature of {named.name}: the module has no two-dimensional weight or wg")
        value = feature_math.similarity(_data(parameter, named))
        self._add_samples("moe_router_weight_hook", named, {"router_weight_similarity": value}, scope=_scope(parameter))

    def _router_logits(self, named: Named, result: Any) -> None:
        values = result if isinstance(result, (list, tuple)) else [result]
        tensors = [_data(v, named) for v in values if isinstance(v, torch.Tensor)]
        logits = next((t for t in tensors if t.is_floating_point() and t.dim() >= 2), None)
        if logits is None:
            raise UsageError(f"router feature of {named.name}: the module returns no logits (a float tensor [tokens, experts])")
        tokens = logits.numel() // logits.shape[-1]
        said = next((t for t in tensors if t.dtype == torch.bool and t.numel() == logits.numel() and t.shape[-1] == logits.shape[-1]), None)
        numbers = {"per_token_expert_entropy": feature_math.token_entropy(logits)}
        if tokens:
            loads = feature_math.expert_load(logits, self._top(named), said)
            numbers |= dict(zip(("load_min_ratio", "load_max_ratio", "dead_experts"), loads))
        self._add_samples("moe_router_logit_hook", named, numbers, micro_step=self._side.micro_step(named.chunk))

    def _top(self, named: Named) -> int:
        """Experts per token: from the router, the module around it, or their configurations; 1 when nobody says."""
        around = [named.module]
        if "." in named.name:
            parent = named.name.rpartition(".")[0]
            around += [m for n, m in named.root.named_modules() if n == parent]
        for owner in around:
            for holder in (owner, getattr(owner, "config", None)):
                for key in _TOP:
                    value = getattr(holder, key, None)
                    if isinstance(value, int) and value > 0:
                        return value
        warn_once(f"experts per token {named.name}", f"monitor: {named.name} does not say how many experts a token goes to; taken for 1")
        return 1

    def _add_samples(self, family: str, named: Named, found: Mapping[str, torch.Tensor], *, micro_step: int = -1, scope: str = "") -> None:
        for column, value in found.items():
            extra = {"column": column, "scope": scope} if scope else {"column": column}
            ref = self._probe.backend.reduce(value)
            self._probe.pipeline.samples.append(Sample(family, f"{named.name}.{_KINDS[family]}", ref, "", micro_step, named.chunk, extra))


@contextmanager
def _plain() -> Iterator[None]:
    """No autograd, no modes of the user, and the precision that is asked for."""
    device = accelerator()
    with quiet(), torch.autocast("cpu", enabled=False):
        if device is None:
            yield
        else:
            with torch.autocast(device.type, enabled=False):
                yield


def _data(tensor: torch.Tensor, named: Named) -> torch.Tensor:
    found, _, why = resolve(tensor)
    if found is None:
        raise UsageError(f"feature of {named.name}: a tensor without data ({why})")
    return found


def _weight(module: nn.Module) -> torch.Tensor | None:
    for name in _WEIGHTS:
        weight = getattr(module, name, None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
            return weight
    return None


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or hasattr(module, "num_embeddings") or hasattr(module, "vocab_start_index")


def _scope(parameter: torch.Tensor) -> str:
    return "shard" if hasattr(parameter, "device_mesh") or getattr(parameter, "tensor_model_parallel", False) else ""
