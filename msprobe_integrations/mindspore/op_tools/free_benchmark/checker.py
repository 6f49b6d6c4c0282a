"""Makes the training's calls, and those it looks at a second time on changed inputs.

The second run works on copies, outside of autograd, and draws no random numbers, so with handler ``check`` the training computes what it
would without. Its failures are counted, not raised: higher precision may have no kernel. MindSpore reports them when a result is
read, so results are read at once; those of the training first, whose failures are the training's. A failure that was reported
may be reported again, in any number of later calls, until somebody waits for all of them (run on 2.10), so that is done too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mindspore
import numpy as np

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.judge import judge
from msprobe_engine.accuracy.free_benchmark.perturb import Unperturbed
from msprobe_engine.core.guard import Faults, of_training, raise_of_training
from msprobe_integrations.common.op_tools.free_benchmark.choice import PART, Choice
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture.api_names import Api
from msprobe_integrations.mindspore.hooks import autograd
from msprobe_integrations.mindspore.op_tools.free_benchmark.calls import copy_tensor, kind, left_out, mapped, tensors_of, values_of


class _Later(NamedTuple):
    """A call whose gradients are looked at when the step is over."""

    api: Api
    name: str
    base: str
    arguments: Any


class Checker:
    """Takes the calls of one thread (`wrappers.Takes`).

    Args:
        choice: which calls, and what becomes of them.
        budget: bytes of inputs that are kept until the end of a step, for gradients.
    """

    def __init__(self, choice: Choice, faults: Faults, budget: int) -> None:
        self._choice, self._faults = choice, faults
        self._mode, self._table = choice.mode, choice.table
        self._budget = budget
        self._later: list[_Later] = []
        self._held = 0
        self._thread = -1
        self._inside = False
        self.on = False

    def open(self, step: int, rank: int | None) -> None:
        """Look at the calls of this thread from now on."""
        self._choice.step, self._choice.rank = step, rank
        self._thread = threading.get_ident()
        self.on = True

    def end_step(self) -> None:
        """Look at the gradients of the step's calls; count calls anew."""
        self.on = False
        self._inside = True
        try:
            for call in self._later:
                if self._faults.is_enabled(PART):
                    with self._faults.guard(PART):
                        self._gradients(call)
        finally:
            self._inside = False
            self._later.clear()
            self._held = 0
            self._choice.end_step()

    def sees(self) -> bool:
        """Is a call made now looked at?"""
        return self.on and not self._inside and threading.get_ident() == self._thread

    def make_call(self, api: Api, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of the training; what it calls inside is not looked at."""
        self._inside = True
        try:
            base = f"{api.prefix}.{api.name}"
            name, wanted = self._choice.name(base)
            result = api.function(*args, **kwargs)
            if wanted and self._faults.is_enabled(PART):
                with self._faults.guard(PART):
                    return self._looked_at(api, base, name, (args, dict(kwargs)), result)
            return result
        finally:
            self._inside = False

    def _looked_at(self, api: Api, base: str, name: str, arguments: Any, result: Any) -> Any:
        looked = self._table.get_counts(base)
        try:
            why = left_out(api, *arguments)
            if why is not None:
                raise Unperturbed(why)
            if self._choice.backward:
                self._queue_call(_Later(api, name, base, arguments))
            elif self._choice.fix:
                return self._improve_result(api, arguments, result)
            else:
                self._compare_results(api, base, name, arguments, result)
        except Unperturbed as error:
            looked.skip(str(error))
        return result

    # ---- forward ----

    def _compare_results(self, api: Api, base: str, name: str, arguments: Any, result: Any) -> None:
        results = _wait_for_tensors(result)
        if not results:
            raise Unperturbed("no float result")
        originals = [values_of(tensor) for tensor in results]
        with environment.no_grad():
            (args, kwargs), change = self._perturb_arguments(arguments)
            try:
                again = [tensor for tensor in tensors_of(api.function(*args, **kwargs)) if kind(tensor)]
                values = [values_of(tensor) for tensor in again]
            except Exception as error:
                raise_of_training(error)
                _forget()
                raise Unperturbed(f"no second run ({type(error).__name__})") from None
        if len(results) != len(again):
            raise Unperturbed("results of other shapes")
        self._judge_results(base, name, list(zip(results, originals, again, values)), change, range(len(results)))

    def _judge_results(self, base: str, name: str, read: list[tuple[Any, ...]], change: float, places: Sequence[int]) -> None:
        """Compare results, each with its values and those of the second run; write what is not consistent."""
        if any(values.shape != others.shape for _, values, _, others in read):
            raise Unperturbed("results of other shapes")
        for at, (tensor, values, other, others) in zip(places, read):
            judgement = judge(values, others, kind(tensor) or "", kind(other) or "", self._mode, self._choice.backward, change)
            place = str(at) if len(read) > 1 else ""
            self._choice.add_result(base, name, judgement, change, str(tensor.dtype), str(tuple(tensor.shape)), place)

    def _perturb_arguments(self, arguments: Any) -> tuple[Any, float]:
        """Changed copies of arguments, and by how much the changed one differs, relative to its size.

        Raises:
            Unperturbed: there is nothing to change.
        """
        if self._mode == perturb.IMPROVE:
            if not any(kind(tensor) in perturb.HIGHER for tensor in tensors_of(arguments)):
                raise Unperturbed("nothing in low precision")
            return mapped(arguments, _improve_precision), 0.0
        change = -1.0

        def change_tensor(tensor: Any) -> Any:
            nonlocal change
            name = kind(tensor)
            if change >= 0 or name is None:
                return copy_tensor(tensor)
            values = values_of(tensor)
            moved = perturb.perturb(values, name, self._mode)
            change = _relative(values, moved)
            return mindspore.Tensor(moved, tensor.dtype)

        made = mapped(arguments, change_tensor)
        if change < 0:
            raise Unperturbed("no float input")
        return made, change

    def _improve_result(self, api: Api, arguments: Any, result: Any) -> Any:
        """The result in higher precision, in the type of the original; autograd follows it."""
        _wait_for_tensors(result)
        results = tensors_of(result)
        if not any(kind(tensor) in perturb.HIGHER for tensor in tensors_of(arguments)):
            raise Unperturbed("nothing in low precision")
        try:
            args, kwargs = mapped(arguments, lambda tensor: tensor.astype(mindspore.float32) if kind(tensor) in perturb.HIGHER else tensor)
            made = tensors_of(api.function(*args, **kwargs))
            if [tuple(tensor.shape) for tensor in made] != [tuple(tensor.shape) for tensor in results]:
                raise Unperturbed("results of other shapes")
            fixed = iter([new.astype(old.dtype) if kind(old) else old for new, old in zip(made, results)])
            replaced = mapped(result, lambda _: next(fixed))
            for tensor in tensors_of(replaced):
                values_of(tensor) if kind(tensor) else tensor.asnumpy()
        except Unperturbed:
            raise
        except Exception as error:
            raise_of_training(error)
            _forget()
            raise Unperturbed(f"no second run ({type(error).__name__})") from None
        self._table.get_counts(f"{api.prefix}.{api.name}").checked += 1
        return replaced

    # ---- gradients ----

    def _queue_call(self, call: _Later) -> None:
        if not _wait_for_tensors(call.arguments):
            raise Unperturbed("no float input")
        size = sum(int(tensor.nbytes) for tensor in tensors_of(call.arguments))
        if self._held + size > self._budget:
            raise Unperturbed("memory_budget_mb is used up")
        self._held += size
        with environment.no_grad():
            self._later.append(call._replace(arguments=mapped(call.arguments, copy_tensor)))

    def _gradients(self, call: _Later) -> None:
        looked = self._table.get_counts(call.base)
        try:
            results = _vjp(call.api, call.arguments)
            made, change = self._perturb_arguments(call.arguments)
            again = _vjp(call.api, made)
            pairs = {position: pair for position, pair in enumerate(zip(results, again)) if pair[0] is not None and pair[1] is not None}
            if not pairs:
                raise Unperturbed("no gradients")
            read = [(old, values_of(old), new, values_of(new)) for old, new in pairs.values()]
            self._judge_results(call.base, call.name, read, change, list(pairs))
        except Unperturbed as error:
            looked.skip(str(error))
        except Exception as error:
            raise_of_training(error)
            _forget()
            looked.skip(f"no gradients ({type(error).__name__})")


def _wait_for_tensors(structure: Any) -> list[Any]:
    """The float tensors of what the training has computed, when they are there. An error is the training's own: it goes on as it
    would have come out of the program's next read."""
    try:
        autograd.executor.sync()
        found = [tensor for tensor in tensors_of(structure) if kind(tensor)]
        for tensor in found:
            values_of(tensor)
    except Exception as error:
        raise_of_training(error)
        raise of_training(error) from None
    return found


def _forget() -> None:
    """A failure of a second run is not reported again in calls of the training."""
    for _ in range(3):
        try:
            autograd.executor.sync()
        except Exception as error:
            raise_of_training(error)
            continue
        return


def _improve_precision(tensor: Any) -> Any:
    if kind(tensor) in perturb.HIGHER:
        return mindspore.Tensor(values_of(tensor).astype(np.float32), mindspore.float32)
    return copy_tensor(tensor)


def _relative(values: Any, moved: Any) -> float:
    """L2 norm of the change by that of the values, over finite ones."""
    with np.errstate(all="ignore"):
        before = values.astype(np.float64)
        difference = moved.astype(np.float64) - before
        finite = np.isfinite(difference)
        size = float(np.linalg.norm(before[finite]))
        return float(np.linalg.norm(difference[finite])) / size if size else 0.0


def _vjp(api: Api, arguments: Any) -> list[Any]:
    """Gradients of the sum of all float results with respect to all float inputs, in their order; None where there is none. By a backward
    pass of its own: ``mindspore.grad`` of many different functions breaks later passes of the training (run on 2.10)."""
    inputs: list[Any] = []

    def leaf(tensor: Any) -> Any:
        made = copy_tensor(tensor)
        if kind(made):
            made._requires_grad = True
            inputs.append(made)
        return made

    args, kwargs = mapped(arguments, leaf)
    recorded = autograd.executor.grad_flag()
    autograd.executor.set_grad_flag(True)
    try:
        results = [tensor for tensor in tensors_of(api.function(*args, **kwargs)) if kind(tensor)]
        if not results:
            raise Unperturbed("no float result")
        ones = tuple(mindspore.Tensor(np.ones(tuple(tensor.shape), np.float32), tensor.dtype) for tensor in results)
        run = mindspore._c_expression.run_backward
        gradients = run(tuple(results), ones, False, False, tuple(inputs), True, accumulate_grad=False)
    finally:
        autograd.executor.set_grad_flag(recorded)
    return list(gradients)
