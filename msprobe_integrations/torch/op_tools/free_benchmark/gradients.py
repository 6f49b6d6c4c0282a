"""fuzz_stage backward: gradients of a call's inputs, for the gradient that really arrives at its results, with and without the change.

Both are computed in a backward pass of its own, of a second run of the call, when the training's backward pass comes by. So the sum
of gradients of a tensor that is used several times plays no part, and the training's graph is left alone. The gradient is scaled
by a power of two to about 1 before: gradients of a loss are small, and what is small is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.perturb import Unperturbed
from msprobe_engine.accuracy.free_benchmark.reference import Agreement
from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_integrations.common.op_tools.free_benchmark.choice import PART, Choice
from msprobe_integrations.torch.op_tools.free_benchmark.calls import apart
from msprobe_integrations.torch.op_tools.free_benchmark.cpu import compare
from msprobe_integrations.torch.op_tools.free_benchmark.pending import Pending, Waiting
from msprobe_integrations.torch.op_tools.free_benchmark.second import Change, Seen, find_autocast_type, outputs_of, precision
from msprobe_integrations.torch.op_tools.free_benchmark.values import kind, mapped, measure_difference, tensors_of


class _Watched:
    """A call whose gradient is waited for."""

    def __init__(self, seen: Seen, size: int, positions: list[int], rounded: torch.dtype | None) -> None:
        self.rounded = rounded
        arguments = mapped(seen.arguments, lambda tensor: tensor.detach())
        held = tensors_of(arguments)
        self.seen = seen._replace(arguments=arguments, tensors=held)
        self.size = size
        self.positions = positions
        self.needs = [tensor.requires_grad for tensor in seen.tensors]
        self.versions = [None if seen.writes or tensor.is_inference() else tensor._version for tensor in held]
        self.bytes = [tensor.untyped_storage().nbytes() for tensor in held]
        self.handle: Any = None


class Gradients:
    """The calls of a step whose gradients are looked at.

    Args:
        pending: takes results that are not judged yet.
        budget: bytes of inputs that are kept for it, which the training might have given back. Weights do not count.
    """

    def __init__(self, choice: Choice, pending: Pending, faults: Faults, budget: int) -> None:
        self._choice, self._pending, self._faults, self._budget = choice, pending, faults, budget
        self._mode = choice.mode
        self._watched: set[_Watched] = set()
        self._held = 0

    def watch(self, seen: Seen, result: Any) -> None:
        """Look at the gradients of a call that the training has made.

        Raises:
            Unperturbed: there will be none, or there is no memory to wait with it.
        """
        outputs = outputs_of(result, (seen.tensors, {}))
        given = {id(tensor) for tensor in seen.tensors}
        places = [
            position for position, t in enumerate(outputs) if t.requires_grad and not t.is_leaf and (seen.writes or id(t) not in given)
        ]
        if not places or not any(kind(tensor) and tensor.requires_grad for tensor in seen.tensors):
            raise Unperturbed("no gradients")
        size = sum(tensor.nbytes for tensor in tensors_of(seen.arguments) if seen.writes or not tensor.is_leaf or not tensor.requires_grad)
        if self._held + size > self._budget:
            raise Unperturbed("memory_budget_mb is used up")
        self._held += size
        watched = _Watched(seen, size, places, find_autocast_type(seen.autocast, outputs))
        arrived = partial(self._receive_gradients, watched)
        if len(places) == 1:
            watched.handle = outputs[places[0]].register_hook(lambda gradient: arrived([gradient]))
        else:
            watched.handle = torch.autograd.graph.register_multi_grad_hook([outputs[position] for position in places], arrived)
        self._watched.add(watched)

    def end_step(self) -> None:
        """Gradients that have not come do not come."""
        for watched in self._watched:
            watched.handle.remove()
            self._choice.table.get_counts(watched.seen.base).skip("no gradient came")
        self._watched.clear()
        self._held = 0

    def _receive_gradients(self, watched: _Watched, gradients: Sequence[torch.Tensor | None]) -> None:
        if watched not in self._watched or not self._faults.is_enabled(PART):
            return
        self._watched.discard(watched)
        self._held -= watched.size
        watched.handle.remove()
        with self._faults.guard(PART), torch._C.DisableTorchFunction():
            try:
                self._compare_gradients(watched, gradients)
            except Unperturbed as error:
                self._choice.table.get_counts(watched.seen.base).skip(str(error))

    def _compare_gradients(self, watched: _Watched, gradients: Sequence[torch.Tensor | None]) -> None:
        seen = watched.seen
        for tensor, version, size in zip(seen.tensors, watched.versions, watched.bytes):
            if tensor.untyped_storage().nbytes() < size:
                raise Unperturbed("its input was given back meanwhile")
            if version is not None and tensor._version != version:
                raise Unperturbed("its input was changed meanwhile")
        change = Change(self._mode, watched.rounded)
        scaled = _about_one(gradients)
        to_cpu = self._mode == perturb.TO_CPU
        try:
            with apart(seen.tensors, seen.autocast, gradients=True):
                before = _vjp(watched, seen.arguments, scaled)
            with torch.no_grad():
                arguments = change(seen.arguments, own=True)
            with apart(seen.tensors, precision(self._mode, seen.autocast), gradients=True):
                after = _vjp(watched, arguments, [g.cpu() if to_cpu and g is not None else g for g in scaled])
        except Unperturbed:
            raise
        except Exception as error:
            raise_of_training(error)
            raise Unperturbed(f"no gradients ({type(error).__name__})") from None
        pairs = {position: (old, new) for position, (old, new) in enumerate(zip(before, after)) if old is not None and new is not None}
        if not pairs:
            raise Unperturbed("no gradients")
        if any(old.shape != new.shape for old, new in pairs.values()):
            raise Unperturbed("results of other shapes")
        with torch.no_grad():
            for position, (old, new) in pairs.items():
                self._add(seen, position if len(watched.needs) > 1 else None, old, new, change)

    def _add(self, seen: Seen, position: int | None, old: torch.Tensor, new: torch.Tensor, change: Change) -> None:
        waiting = Waiting(
            seen.base,
            seen.name,
            str(old.dtype),
            kind(old) or "",
            str(old.shape),
            "" if position is None else str(position),
            (),
            change.how_much,
        )
        if self._mode != perturb.TO_CPU:
            self._pending.add(waiting._replace(numbers=measure_difference(old, new, self._mode, True)))
            return
        agreed = Agreement(kind(old) or "", 0.0)
        compare(agreed, old, new)
        self._pending.record_judgement(waiting, agreed.judgement())


def _about_one(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients by one power of two, so that the largest value of all is between 1 and 2. Does not wait for the device."""
    with torch.no_grad():
        largest = [torch.nan_to_num(g.detach().abs().max().float(), nan=0.0, posinf=0.0) for g in gradients if g is not None and g.numel()]
        if not largest:
            return list(gradients)
        exponent = torch.frexp(torch.stack(largest).max())[1] - 1
        return [None if g is None else torch.ldexp(g.detach(), -exponent).to(g.dtype) for g in gradients]


def _vjp(watched: _Watched, arguments: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of the inputs that needed one, None for the others, by a graph of their own."""
    needs = iter(watched.needs)
    leaves: list[torch.Tensor | None] = []
    made: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        wanted = next(needs) and tensor.is_floating_point()
        if id(tensor) in made:
            leaves.append(None)  # the gradient of both places stands at the first
            return made[id(tensor)]
        found = tensor.detach().requires_grad_(wanted)
        leaves.append(found if wanted else None)
        if watched.seen.writes:
            found = found.clone()  # no leaf, and not the tensor itself: the call writes into it
        made[id(tensor)] = found
        return found

    args, kwargs = mapped(arguments, leaf)
    results = outputs_of(watched.seen.func(*args, **kwargs), (args, kwargs))
    roots = [
        (results[position], g) for position, g in zip(watched.positions, gradients) if g is not None and results[position].requires_grad
    ]
    inputs = [tensor for tensor in leaves if tensor is not None]
    if not roots or not inputs:
        raise Unperturbed("no gradients")
    given = [gradient.to(root.device, root.dtype) for root, gradient in roots]
    found = iter(torch.autograd.grad([root for root, _ in roots], inputs, given, allow_unused=True))
    return [None if tensor is None else next(found) for tensor in leaves]
