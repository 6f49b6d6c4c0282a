"""One call: run the benchmark, judge every result, write what came of it."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.accuracy.dispatch_table import Compared, Difference, DispatchTables, difference
from msprobe_engine.accuracy.results import ERROR, PASS, WARNING, TensorResult
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_integrations.torch.op_tools.accuracy.operators.ties import equally_right
from msprobe_integrations.torch.op_tools.accuracy.types import coarsest, floats_of
from msprobe_integrations.torch.op_tools.dispatch_compare import references
from msprobe_integrations.torch.op_tools.dispatch_compare.bench import NOT_PLAIN, SAME, Bench, NoBench, Ran, is_plain, results_of, tensors
from msprobe_integrations.torch.op_tools.dispatch_compare.operators import Operator, api_of
from msprobe_integrations.torch.op_tools.dispatch_compare.tensor_files import TensorFiles, number_results
from msprobe_integrations.torch.tensors.arrays import as_array, kind_of

_CHANGES = (1, 2)
_SURE = 0.5
"""Units that are right whatever the condition is."""
_WAITING = 16
"""Calls per process that wait to be judged; with more the training waits."""


class Seen(NamedTuple):
    """A call before it runs.

    Attributes:
        name: ``"addmm_3"``.
        direction, source: of `Sources.of`.
        args, kwargs: as they are before the call.
        drawn: states of random generators; None: nobody asks.
    """

    operator: Operator
    name: str
    direction: str
    source: str
    args: list[Any]
    kwargs: dict[str, Any]
    drawn: list[bytes] | None


class _Pair(NamedTuple):
    """One result of both sides, as the verdict takes it.

    Attributes:
        gradient: it is one.
        judged_as: type whose precision is asked of the device's.
    """

    api: str
    name: str
    bench: Any
    device: Any
    bench_dtype: str
    device_dtype: str
    gradient: bool
    judged_as: str


class Calls:
    """Compares calls, in this process or in others.

    Args:
        tables: where verdicts go.
        processes: that judge; 0: this one does.
    """

    def __init__(self, tables: DispatchTables, files: TensorFiles, processes: int) -> None:
        self._tables, self._files = tables, files
        self._waiting: deque[tuple[Seen, str, Future[Any], Any]] = deque()
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def add(
        self, seen: Seen, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, bench: Bench, random: bool, dump: str
    ) -> None:
        """Compare a call that has run.

        Args:
            args, kwargs, result: after the call.
            random: it drew random numbers.
            dump: ``"all"``: write its tensors; ``"auto"``: if it is no pass.
        """
        device = results_of(seen.operator, args, kwargs, result)
        if not any(value is not None for value in device):
            self._tables.operator(seen.operator.name).skip("no result")
            return
        if not all(map(is_plain, tensors(device))):
            self._tables.operator(seen.operator.name).skip(NOT_PLAIN)
            return
        try:
            ran = bench.run(func, seen.operator, seen.args, seen.kwargs, result, random)
        except NoBench as error:
            if str(error) == SAME:
                self._tables.operator(seen.operator.name).skip(SAME)
                return
            self._tables.add(Compared(seen.name, seen.operator.name, seen.direction, "", seen.source, message=str(error)))
            return
        problem = _structure(seen.operator, device, ran.leaves)
        pairs = _pairs(seen, device, ran.leaves)
        if self._processes and dump != "auto":
            self._send(seen, ran, pairs, problem)
            status = PASS
        else:
            results = [_judge(pair) for pair in pairs]
            if any(map(_is_open, results)):
                results = self._again(seen, ran, pairs, device, results)
            status = self._write(seen, ran.how, results, [difference(*_two(pair)) for pair in pairs], problem)
        if dump == "all" or (dump == "auto" and status in (WARNING, ERROR)):
            self._files.write(seen.name, seen.args, seen.kwargs, device, ran.leaves)

    def _send(self, seen: Seen, ran: Ran, pairs: list[_Pair], problem: str) -> None:
        """Let another process judge. It cannot ask for more runs of the benchmark, so these are made now."""
        changed = [ran.change(n) for n in _CHANGES] if any("float" in pair.device_dtype for pair in pairs) else []
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._processes, multiprocessing.get_context("spawn"))
        while len(self._waiting) >= _WAITING * self._processes:
            self._write_next()
        arrays = [[as_array(run[n]) for run in changed] for n in range(len(pairs))]
        self._waiting.append((seen, ran.how, self._pool.submit(_judge_all, pairs, arrays, _coarsest(seen)), problem))

    def _write_next(self) -> None:
        seen, how, future, problem = self._waiting.popleft()
        results, differences = future.result()
        self._write(seen, how, results, differences, problem)

    def finish(self) -> None:
        """Everything is judged and written."""
        while self._waiting:
            self._write_next()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._tables.finish()

    def _again(self, seen: Seen, ran: Ran, pairs: list[_Pair], device: list[Any], results: list[TensorResult]) -> list[TensorResult]:
        """Verdicts that are open, with what the operator makes of a change of its inputs."""
        changed = [ran.change(n) for n in _CHANGES]
        kind = _coarsest(seen)
        found = []
        for n, (pair, result) in enumerate(zip(pairs, results)):
            if _is_open(result):
                result = _judge(pair, [as_array(run[n]) for run in changed if n < len(run)], kind)
            if result.status == ERROR and _equally_right(seen, device[n], ran.leaves[n]):
                result = dataclasses.replace(result, status=PASS, message="other places of equal values")
            found.append(result)
        return found

    def _write(self, seen: Seen, how: str, results: list[TensorResult], differences: list[Difference], problem: str) -> str:
        if problem:
            results = [dataclasses.replace(result, status=ERROR, message=problem) for result in results]
        call = Compared(seen.name, seen.operator.name, seen.direction, how, seen.source, tuple(results), tuple(differences), problem)
        self._tables.add(call)
        return call.status


def _pairs(seen: Seen, device: list[Any], bench: list[Any]) -> list[_Pair]:
    pairs = []
    api = api_of(seen.operator, seen.args, seen.kwargs)
    for n, ((suffix, target), golden) in enumerate(zip(number_results(device), bench)):
        name, kind = f"{seen.name}_output{suffix}", kind_of(target)
        judged_as = kind
        if n >= seen.operator.main and kind == "torch.float32":
            judged_as = _coarsest(seen) or kind
        pairs.append(_Pair(api, name, as_array(golden), as_array(target), kind_of(golden), kind, seen.operator.gradient, judged_as))
    return pairs


def _structure(operator: Operator, device: list[Any], bench: list[Any]) -> str:
    """What is wrong with the number of results; empty: nothing."""
    if len(bench) == len(device) or (len(bench) < len(device) and operator.name in references.PARTIAL):
        return ""
    return f"{len(device)} results, {len(bench)} of the benchmark"


def _coarsest(seen: Seen) -> str:
    """Type with the largest unit of round-off among the floating inputs, by which they are changed; empty: there is none."""
    kind = coarsest(floats_of(tensors([seen.args, seen.kwargs])))
    return "" if kind is None else str(kind)


def _is_open(result: TensorResult) -> bool:
    """Does it take a measured condition to say whether this is right? Without one the verdict assumes a bad one."""
    return result.status in (WARNING, ERROR) or (result.units is not None and result.units > _SURE)


def _equally_right(seen: Seen, device: Any, bench: Any) -> bool:
    if not isinstance(device, torch.Tensor) or not isinstance(bench, torch.Tensor):
        return False
    args = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in seen.args]
    return equally_right(seen.operator.name, args, seen.kwargs, device.cpu(), bench.cpu())


def _judge(pair: _Pair, changed: Sequence[Any] = (), kind: str = "") -> TensorResult:
    if pair.bench is None and pair.device is None:
        return TensorResult(pair.name, (), pair.bench_dtype, pair.device_dtype, message="None on both sides")
    like = [c for c in changed if isinstance(c, np.ndarray) and isinstance(pair.bench, np.ndarray) and c.shape == pair.bench.shape]
    name = f"{pair.name}.backward." if pair.gradient else pair.name
    result = judge(pair.api, name, pair.bench, pair.device, pair.bench_dtype, pair.judged_as, changed=like, input_dtype=kind)
    return dataclasses.replace(result, name=pair.name, device_dtype=pair.device_dtype)


def _judge_all(pairs: list[_Pair], changed: list[list[Any]], kind: str) -> tuple[list[TensorResult], list[Difference]]:
    return [_judge(pair, runs, kind) for pair, runs in zip(pairs, changed)], [difference(*_two(pair)) for pair in pairs]


def _two(pair: _Pair) -> tuple[Any, Any]:
    return np.asarray(pair.bench), np.asarray(pair.device)
