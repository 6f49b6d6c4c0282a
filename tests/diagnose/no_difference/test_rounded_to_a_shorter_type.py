"""Numbers in float32 that one run alone has rounded to a shorter type, told by the bits of the extremes that both have written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from written_monitor import PARAMETERS, Monitor

from msprobe_engine.find.run import diagnose
from msprobe_engine.measure.coarse_values import rounded_on_one_side


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(40, 2)).astype(np.float32).astype(np.float64)


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


FULL, SHORT, SUM, HALF = drawn(0), bf16(drawn(0)), bf16(drawn(0)) + bf16(drawn(1)), drawn(0).astype(np.float16).astype(np.float64)


@pytest.mark.parametrize(
    ("target", "golden", "told"),
    [
        (SHORT, FULL, ("bfloat16", True)),
        (FULL, SHORT, ("bfloat16", False)),
        (HALF, FULL, ("float16", True)),
        (bf16(SUM), SUM, ("bfloat16", True)),
        (SHORT, bf16(SHORT * 1.01), None),
        (SUM, SUM * (1 + 2.0**-8), None),
        (FULL, drawn(2), None),
        (SHORT[:2], FULL[:2], None),
        (np.zeros((40, 2)), FULL, None),
    ],
    ids=["target", "golden", "float16", "a sum of two", "both", "two sums", "neither", "too few", "zeros"],
)
def test_all_numbers_of_one_run_are_those_of_a_shorter_type(target: np.ndarray, golden: np.ndarray, told: tuple[str, bool] | None) -> None:
    assert rounded_on_one_side(target, golden) == told


@pytest.mark.parametrize(("rounded", "finding"), [((True, False), "structure"), ((True, True), "none"), ((False, False), "none")])
def test_gradients_in_float32_that_one_run_has_summed_up_in_bf16(rounded: tuple[bool, bool], finding: str, tmp_path: Path) -> None:
    """What differs by less than round-off of a training in bf16, and is no round-off."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    for root, short in zip(roots, rounded):
        (place,) = (root / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"bfloat16": "autocast"}}))
        lines = ["vpp_stage,name,step,norm,min,max,shape,dtype"]
        for at, name in enumerate(PARAMETERS):
            high, low = (bf16(FULL) if short else FULL)[at].tolist()
            lines += [f'0,{name},{step},{2 + at},{-abs(low)!r},{abs(high)!r},"[64]",torch.float32' for step in range(3)]
        (place / "grad_reduced_0-9.csv").write_text("\n".join(lines) + "\n")
        (place / "actv_0-9.csv").write_text(
            "vpp_stage,name,step,micro_step,norm,min,max,shape,dtype\n0,up.output,0,0,1,-1,1,[4],torch.bfloat16\n"
        )
    found = diagnose(*roots)
    assert found.finding == finding, found.text()
    assert (found.first_suspect is None) == (finding == "none")
    assert finding == "none" or found.first_suspect.cause == "bfloat16, golden float32"  # type: ignore[union-attr]
