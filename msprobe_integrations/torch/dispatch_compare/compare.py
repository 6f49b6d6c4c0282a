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
from msprobe_engine.accuracy.judge import judge
from msprobe_engine.accuracy.results import ERROR, PASS, WARNING, TensorResult
from msprobe_integrations.torch.accuracy.values import as_array, kind_of
from msprobe_integrations.torch.dispatch_compare import references
from msprobe_integrations.torch.dispatch_compare.bench import Bench, NoBench, Ran, leaves, results_of
from msprobe_integrations.torch.dispatch_compare.operators import Operator, same_values
from msprobe_integrations.torch.dispatch_compare.tensor_files import TensorFiles, numbered

_CHANGES = (1, 2)
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
    """One result of both sides, as the verdict takes it."""

    api: str
    name: str
    bench: Any
    device: Any
    bench_dtype: str
    device_dtype: str


class Calls:
    """Compares calls, in this process or in others.

    Args:
        tables: where verdicts go.
        files: where tensors go.
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
        device = results_of(func, seen.operator, args, kwargs, result)
        if not any(value is not None for value in device):
            self._tables.operator(seen.operator.name).skip("no result")
            return
        try:
            ran = bench.run(func, seen.operator, seen.args, seen.kwargs, result, random)
        except NoBench as error:
            self._tables.add(Compared(seen.name, seen.operator.name, seen.direction, "", seen.source, message=str(error)))
            return
        problem = _structure(seen.operator, device, ran.leaves)
        pairs = _pairs(seen, device, ran.leaves)
        if self._processes and dump != "auto":
            self._send(seen, ran, pairs, problem)
            status = PASS
        else:
            results = [_judge(pair) for pair in pairs]
            if any(result.status in (WARNING, ERROR) for result in results):
                results = self._again(seen, func, ran, pairs, device, results)
            status = self._write(seen, ran.how, pairs, results, [difference(*_two(pair)) for pair in pairs], problem)
        if dump == "all" or (dump == "auto" and status in (WARNING, ERROR)):
            self._files.write(seen.name, seen.args, seen.kwargs, device, ran.leaves)

    def _send(self, seen: Seen, ran: Ran, pairs: list[_Pair], problem: str) -> None:
        """Let another process judge. It cannot ask for more runs of the benchmark, so these are made now."""
        changed = [ran.change(n) for n in _CHANGES] if any("float" in pair.device_dtype for pair in pairs) else []
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._processes, multiprocessing.get_context("spawn"))
        while len(self._waiting) >= _WAITING * self._processes:
            self._take()
        arrays = [[as_array(run[n]) for run in changed] for n in range(len(pairs))]
        self._waiting.append((seen, ran.how, self._pool.submit(_judge_all, pairs, arrays, _coarsest(seen)), problem))

    def _take(self) -> None:
        seen, how, future, problem = self._waiting.popleft()
        pairs, results, differences = future.result()
        self._write(seen, how, pairs, results, differences, problem)

    def finish(self) -> None:
        """Everything is judged and written."""
        while self._waiting:
            self._take()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._tables.finish()

    def _again(
        self, seen: Seen, func: Any, ran: Ran, pairs: list[_Pair], device: list[Any], results: list[TensorResult]
    ) -> list[TensorResult]:
        """The verdict of what is no pass, with what the operator makes of a change of its inputs."""
        changed = [ran.change(n) for n in _CHANGES]
        kind = _coarsest(seen)
        found = []
        for n, (pair, result) in enumerate(zip(pairs, results)):
            if result.status in (WARNING, ERROR):
                result = _judge(pair, [as_array(run[n]) for run in changed if n < len(run)], kind)
            if result.status == ERROR and isinstance(device[n], torch.Tensor) and isinstance(ran.leaves[n], torch.Tensor):
                if same_values(func, seen.args, seen.kwargs, device[n], ran.leaves[n]):
                    result = dataclasses.replace(result, status=PASS, message="other places of equal values")
            found.append(result)
        return found

    def _write(
        self, seen: Seen, how: str, pairs: list[_Pair], results: list[TensorResult], differences: list[Difference], problem: str
    ) -> str:
        if problem:
            results = [dataclasses.replace(result, status=ERROR, message=problem) for result in results]
        call = Compared(seen.name, seen.operator.name, seen.direction, how, seen.source, tuple(results), tuple(differences), problem)
        self._tables.add(call)
        return call.status


def _pairs(seen: Seen, device: list[Any], bench: list[Any]) -> list[_Pair]:
    found = []
    for (suffix, d), b in zip(numbered(device), bench):
        name = f"{seen.name}_output{suffix}"
        found.append(_Pair(seen.operator.api, name, as_array(b), as_array(d), kind_of(b), kind_of(d)))
    return found


def _structure(operator: Operator, device: list[Any], bench: list[Any]) -> str:
    """What is wrong with the number of results; empty: nothing."""
    if len(bench) == len(device) or (len(bench) < len(device) and operator.name in references.PARTIAL):
        return ""
    return f"{len(device)} results, {len(bench)} of the benchmark"


def _coarsest(seen: Seen) -> str:
    """Type with the largest unit of round-off among the floating inputs, by which they are changed."""
    kinds = [t.dtype for t in leaves([seen.args, seen.kwargs]) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    kinds = [kind for kind in kinds if kind.itemsize > 1]
    return str(max(kinds, key=lambda kind: torch.finfo(kind).eps)) if kinds else ""


def _judge(pair: _Pair, changed: Sequence[Any] = (), kind: str = "") -> TensorResult:
    if pair.bench is None and pair.device is None:
        return TensorResult(pair.name, (), pair.bench_dtype, pair.device_dtype, message="None on both sides")
    like = [c for c in changed if isinstance(c, np.ndarray) and isinstance(pair.bench, np.ndarray) and c.shape == pair.bench.shape]
    return judge(*pair, changed=like, input_dtype=kind)


def _judge_all(
    pairs: list[_Pair], changed: list[list[Any]], kind: str
) -> tuple[list[_Pair], list[TensorResult], list[Difference]]:
    """What a process does; its results come without the values."""
    results = [_judge(pair, runs, kind) for pair, runs in zip(pairs, changed)]
    differences = [difference(*_two(pair)) for pair in pairs]
    return [pair._replace(bench=None, device=None) for pair in pairs], results, differences


def _two(pair: _Pair) -> tuple[Any, Any]:
    return np.asarray(pair.bench), np.asarray(pair.device)
