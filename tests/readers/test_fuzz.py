"""Whatever stands in a file, a command ends soon, with a documented exit code, writes nothing elsewhere and never says "this is a bug".

Each target is a command and a kind of file. It gets the inputs of its corpus and some new ones of a fixed seed, in the full tier sixteen
times as many; with ``MSPROBE_FUZZ_SECONDS`` new ones for that long, of a seed of their own, and what is found is left in
``MSPROBE_FUZZ_FOUND`` (default: the corpus).
"""

from __future__ import annotations

import os
import random
import resource
import time
from pathlib import Path

import pytest
from attack import CORPUS, Attack, keep, kept
from hypothesis import settings
from targets import TARGETS, Target

SECONDS = float(os.environ.get("MSPROBE_FUZZ_SECONDS", "0"))
FOUND = Path(os.environ.get("MSPROBE_FUZZ_FOUND", CORPUS))
MEMORY = 1 << 31
"""Bytes that the peak may grow by; the samples are small."""


@pytest.mark.timeout(300 + 2 * SECONDS)
@pytest.mark.parametrize(
    "target", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name == "acc_check-run")) for one in TARGETS]
)
def test_damaged_files_end_in_an_answer_or_a_clean_error(target: Target, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """See the module."""
    attack = Attack(target, tmp_path)
    assert attack.fault({}) == "", "the sample itself"
    assert attack.code in target.codes, f"the sample is not read: {attack.said[-500:]}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for files in kept(target.name):
        assert attack.fault(files) == ""
    first = int(time.time()) * 1000 if SECONDS else 1
    faults: dict[str, int] = {}
    end, count = time.monotonic() + SECONDS, 0
    few = max(1, target.few * 2 if settings().max_examples >= 100 else target.few // 8)
    while count < few if not SECONDS else time.monotonic() < end:
        seed = first + count
        files = attack.damaged(random.Random(seed))
        said = attack.fault(files)
        count += 1
        if said and said[:90] not in faults:
            faults[said[:90]] = seed
            if SECONDS:
                keep(FOUND / target.name, files, seed)
    record_property("inputs", count)
    print(f"{target.name}: {count} inputs, {len(faults)} different faults")
    assert faults == {}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < MEMORY
