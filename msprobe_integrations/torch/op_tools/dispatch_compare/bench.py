"""The benchmark of an operator: the same call on another device, in a wider type, or under other settings.

Arguments are converted for each run, so nothing that the training holds is ever written, and neither modes of the program nor
autograd nor its random streams see the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.capture.nested import leaves_of
from msprobe_integrations.torch.op_tools.accuracy.types import BENCHES, KEPT, Types, nudge_tensor
from msprobe_integrations.torch.op_tools.dispatch_compare import references
from msprobe_integrations.torch.op_tools.dispatch_compare.operators import Operator

NOT_PLAIN = "tensors without plain values (meta, sparse, nested, quantized)"
SAME = "the benchmark would be the same run"


class NoBench(Exception):
    """The operator does not run on the benchmark; the text says why."""


class Ran(NamedTuple):
    """What a run of the benchmark gave.

    Attributes:
        leaves: results, then written arguments that are no results.
        how: ``"cpu float64"``.
        change: the same call with its inputs changed by one unit of round-off, the number says which way.
    """

    leaves: list[Any]
    how: str
    change: Callable[[int], list[Any]]


class Bench:
    """Runs calls a second time.

    Args:
        device: of the benchmark, ``"cpu"``, ``"cuda:1"``.
        dtype: ``"float64"``; ``"raised"``: one step up; ``"same"``: the types of the training.
        context: entered around every run, for settings that are to differ (``lambda: torch.backends.mkldnn.flags(enabled=False)``).

    Raises:
        UsageError: no such device or type.
    """

    def __init__(self, device: str, dtype: str, context: Callable[[], AbstractContextManager[Any]] | None) -> None:
        if dtype not in BENCHES:
            raise UsageError(f"bench_dtype={dtype!r} is not known; allowed: {', '.join(map(repr, BENCHES))}")
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise UsageError(f"bench={device!r} cannot be used: {(str(error).splitlines() or [''])[0]}; 'cpu' always can") from None
        self._dtype, self._context = dtype, context or nullcontext
        self._tells = context is not None

    def run(self, func: Any, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, random: bool) -> Ran:
        """Run a call.

        Args:
            args, kwargs: as they were before the call (`snapshot`).
            result: of the call itself, for operators whose benchmark starts from a part of it (a dropout's mask).
            random: the call drew random numbers.

        Raises:
            NoBench: it cannot run.
        """
        if random and operator.name not in references.FROM_RESULT:
            raise NoBench("draws random numbers")
        problem = ""
        only = self._dtype == "same" or operator.api in KEPT
        for name in ("same",) if only else dict.fromkeys((self._dtype, "raised", "same")):
            types = BENCHES[name]
            if not self._differs(args, kwargs, types):
                continue

            def once(change: int | None = None, types: Types = types) -> list[Any]:
                return self._once(func, operator, args, kwargs, result if random else None, types, change)

            try:
                return Ran(once(), self._text(name), once)
            except (
                RuntimeError,
                NotImplementedError,
                ValueError,
                TypeError,
                IndexError,
            ) as error:  # what a kernel says of a type it has not
                problem = problem or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        raise NoBench(f"no benchmark on {self.device}: {problem}" if problem else SAME)

    def _differs(self, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> bool:
        """Is it another run at all? Integers on one device, float64 in float64 are not."""
        return self._tells or any(t.device != self.device or types.get(t.dtype, t.dtype) != t.dtype for t in tensors([args, kwargs]))

    def _text(self, dtype: str) -> str:
        return f"{self.device} {'same types' if dtype == 'same' else dtype}"

    def _once(
        self, func: Any, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, types: Types, change: int | None
    ) -> list[Any]:
        with ExitStack() as stack:
            stack.enter_context(hide_from_modes())
            generator = None if change is None else torch.Generator().manual_seed(change)
            conversion = Conversion(self.device, types, generator)
            converted, named = conversion.of(list(args)), conversion.of(dict(kwargs))
            if operator.random or operator.foreign:
                devices = [self.device] if self.device.type != "cpu" else []
                stack.enter_context(torch.random.fork_rng(devices=devices, device_type=self.device.type if devices else "cuda"))
            stack.enter_context(self._context())
            if result is not None:
                got = references.FROM_RESULT[operator.name](converted, named, Conversion(self.device, types, None).of(result))
            else:
                got = references.run(func, operator.name, converted, named)
            return results_of(operator, converted, named, got)


def results_of(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Any]:
    """What is compared of a call: leaves of its result, then what it wrote into and does not return."""
    results = list(leaves_of(result))[: 1 if operator.first_only else None]
    if not operator.writes:
        return results
    if results == [None]:
        results = []
    returned = {id(value) for value in results}
    for place, name in operator.writes:
        written = args[place] if place < len(args) else kwargs.get(name)
        results.extend(t for t in tensors(written) if id(t) not in returned)
    return results


def snapshot(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as they are before a call that writes: what shares memory with a written one is copied, the rest is taken as it is."""
    written = [args[n] if n < len(args) else kwargs.get(name) for n, name in operator.writes]
    memory = {t.untyped_storage().data_ptr() for t in tensors(written) if t.layout is torch.strided}

    def copy_if_shared(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            same = value.layout is not torch.strided or value.untyped_storage().data_ptr() in memory
            return value.detach().clone() if same else value
        if type(value) in (list, tuple):
            return type(value)(map(copy_if_shared, value))
        return value

    with hide_from_modes():
        return [copy_if_shared(v) for v in args], {key: copy_if_shared(v) for key, v in kwargs.items()}


class Conversion:
    """Makes the arguments of one run. The same tensor given twice stays one tensor.

    Args:
        device, types: where they go, and which types take the place of others. Every tensor is copied, also where nothing changes: what
            an operator writes into is not always in its schema.
        generator: of signs by which floating inputs move one unit of round-off; None: they stay.
    """

    def __init__(self, device: torch.device, types: Types, generator: torch.Generator | None) -> None:
        self._device, self._types, self._generator = device, types, generator
        self._made: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = self._tensor(value)
            return self._made[id(value)]
        if isinstance(value, torch.dtype):
            return self._types.get(value, value)
        if isinstance(value, torch.device):
            return self._device
        if isinstance(value, torch.Generator):
            return None
        if type(value) is dict:
            return {key: (False if key == "pin_memory" and child else self.of(child)) for key, child in value.items()}
        return type(value)(map(self.of, value)) if type(value) in (list, tuple) else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().to(device=self._device, dtype=self._types.get(tensor.dtype, tensor.dtype), copy=True)
        if self._generator is not None and tensor.dtype.is_floating_point and wide.layout is torch.strided:
            moved = nudge_tensor(tensor.detach(), tensor.dtype, lambda shape: self._signs(shape).to(tensor.device))
            return moved.to(device=self._device, dtype=wide.dtype)
        return wide

    def _signs(self, shape: torch.Size) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=self._generator) * 2 - 1


@contextmanager
def hide_from_modes() -> Iterator[None]:
    """Neither modes of the program, nor autograd, nor autocast see what happens inside."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def is_plain(tensor: torch.Tensor) -> bool:
    """Does it have values of its own, in strides?"""
    special = tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn or tensor.layout is not torch.strided
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not special


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among the leaves."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))
