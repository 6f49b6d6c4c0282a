"""How much memory a call takes when it is checked, from the shapes in its record, and how much there is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.accuracy.precheck.calls import Call

PER_PROCESS = 1 << 29
"""Bytes of a process that has imported its framework and checks small calls."""
SMALL = 1 << 24
"""Bytes that a call may take whatever else there is."""
PER_BYTE = 4
"""Bytes that a check takes for each byte that the tensors of its call have in float64 (docs/evidence/benchmarks.md): results of the bench,
those on changed inputs, what the operator needs inside."""
LEAST = 2
"""Of these the ones without which there is nothing to compare."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Plan(NamedTuple):
    """Which calls are checked together.

    Attributes:
        together: so small that every process may have one of them at a time.
        large: the others.
        processes: for the large ones.
        refused: calls that do not fit, with the reason.
    """

    together: list[Call]
    large: list[Call]
    processes: int
    refused: list[tuple[Call, str]]


def plan(calls: Sequence[Call], processes: int, free: int | None) -> Plan:
    """Share calls out so that the machine's memory is enough for those that are checked at the same time.

    Args:
        processes: as many as there would be for small calls.
        free: bytes there are; None: nobody knows.
    """
    planned = Plan([], [], processes, [])
    if free is None:
        return Plan(list(calls), [], processes, [])
    largest = 0
    for call in calls:
        size = bytes_of(call)
        if LEAST * size > max(free, SMALL):
            planned.refused.append((call, _reason(size, free)))
        elif PER_BYTE * size <= max(free // processes - PER_PROCESS, SMALL):
            planned.together.append(call)
        else:
            planned.large.append(call)
            largest = max(largest, PER_PROCESS + PER_BYTE * size)
    return planned._replace(processes=max(1, min(processes, free // largest))) if largest else planned


def _reason(size: int, free: int) -> str:
    return (
        f"too large for this machine: its tensors have {size / 2**30:.1f} GiB in float64, a check takes {LEAST} to {PER_BYTE} times "
        f"as much, and {free / 2**30:.1f} GiB of memory are free"
    )


def bytes_of(call: Call) -> int:
    """Of all tensors of a call in float64: arguments, results, and both gradients if it has a backward."""
    size = sum(map(_bytes, _tensors(call.record)))
    if call.backward is not None:
        gradients = [_bytes(item) for item in _tensors(call.backward.get("output"))]
        arguments = [_bytes(item) for item in _tensors([call.record.get("input_args"), call.record.get("input_kwargs")])]
        size += sum(map(_bytes, _tensors(call.backward.get("input")))) + (sum(gradients) or sum(arguments))
    return size


def _tensors(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        if "dtype" in node and "shape" in node:
            yield node
            return
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _tensors(child)


def _bytes(item: Mapping[str, Any]) -> int:
    shape, dtype = item["shape"], str(item["dtype"])
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        return 0
    return math.prod(shape) * (16 if "complex" in dtype else 8 if "float" in dtype.lower() or "int64" in dtype else 4)


def free_memory() -> int | None:
    """Bytes that new processes can have without swapping, the limit of a container included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit, used in _CGROUPS:
        try:
            free = min(free, max(0, int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii"))))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return free
