"""Memory for copies stays within its budget and is used again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.formats.dump.writing.host_memory import HostMemory, Slab

KIB = 1024


@given(st.integers(64 * KIB, 4096 * KIB), st.lists(st.tuples(st.integers(0, 900 * KIB), st.booleans()), max_size=60))
def test_within_the_budget_and_apart(budget: int, wishes: list[tuple[int, bool]]) -> None:
    """Slabs never take more than the budget, or one copy that is larger than it; copies do not overlap and begin at multiples of 64."""
    held: list[tuple[Slab, int, int]] = []

    def hurry() -> None:
        slab, _, _ = held.pop(0)
        memory.release(slab)

    memory = HostMemory(budget, hurry, patience=5.0)
    for nbytes, give in wishes:
        found = memory.allocate(nbytes)
        assert found is not None
        slab, offset = found
        assert offset % 64 == 0
        assert offset + nbytes <= slab.capacity == len(slab.view)
        assert not any(s is slab and offset < o + n and o < offset + nbytes for s, o, n in held)
        slab.view[offset : offset + nbytes] = b"x" * nbytes
        held.append((slab, offset, nbytes))
        largest = max(s.capacity for s, _, _ in held)
        assert memory.held <= max(budget, largest)
        assert memory.held <= budget or len({id(s) for s, _, _ in held}) == 1
        if give:
            memory.release(held.pop(0)[0])
    while held:
        memory.release(held.pop()[0])
    memory.trim()
    assert memory.held == 0


def test_memory_is_used_again() -> None:
    """Copies of the same sizes, step after step, take the memory of the first step."""
    memory = HostMemory(64 << 20)
    seen = set()
    for _ in range(5):
        slabs = [memory.allocate(n) for n in (100, 3 << 20, 5000, 3 << 20, 1 << 20)]
        seen |= {slab[0].address for slab in slabs if slab is not None}
        for slab in slabs:
            assert slab is not None
            memory.release(slab[0])
    assert len(seen) <= 6
    before = memory.held
    assert 0 < before <= 64 << 20
    memory.trim()
    assert memory.held == 0


def waiting(memory: HostMemory, nbytes: int, then: Callable[[], None]) -> object:
    """The result of a `take` during which `then` runs on another thread."""
    timer = threading.Timer(0.05, then)
    timer.start()
    found = memory.allocate(nbytes)
    timer.join()
    return found


def test_waits_for_what_comes_free() -> None:
    """A full budget makes the caller wait, and the wait is measured."""
    memory = HostMemory(1 << 20)
    first = memory.allocate(900 * KIB)
    assert first is not None
    assert waiting(memory, 800 * KIB, lambda: memory.release(first[0])) is not None
    assert 0.04 < memory.waited < 30
    assert memory.waiting == 0


def test_gives_up_when_nothing_moves() -> None:
    """When nothing comes free in time there is no memory, and later there is again."""
    memory = HostMemory(1 << 20, patience=0.05)
    first = memory.allocate(900 * KIB)
    assert first is not None
    assert memory.allocate(800 * KIB) is None
    memory.release(first[0])
    assert memory.allocate(800 * KIB) is not None


def test_one_copy_larger_than_the_budget_is_alone() -> None:
    """It waits until nothing else is there, and its memory goes at once."""
    memory = HostMemory(1 << 20)
    first = memory.allocate(100)
    assert first is not None
    large = waiting(memory, 5 << 20, lambda: memory.release(first[0]))
    assert isinstance(large, tuple)
    assert memory.held >= 5 << 20
    memory.release(large[0])
    assert memory.held == 0


def test_no_memory_of_a_kind() -> None:
    """What the system says reaches the caller, and nothing is counted as held."""
    memory = HostMemory(1 << 20)

    def refuse(_: int) -> tuple[memoryview, int, object]:
        raise OSError("no pinned memory")

    memory.allocators["pinned"] = refuse
    with pytest.raises(OSError, match="pinned"):
        memory.allocate(10, "pinned")
    assert memory.held == 0
