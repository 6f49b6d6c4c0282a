"""What `msprobe acc_check` says at its end."""

from __future__ import annotations

import math

from msprobe_engine.accuracy.precheck.summary import Tally, source_line, text
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, CallResult, TensorResult, not_judged, skipped


def call(name: str, status: str, units: float | None) -> CallResult:
    tensor = TensorResult(f"{name}.forward.output.0", (2, 3), "torch.float64", "torch.bfloat16", status=status, units=units)
    return CallResult(name, status, tensors=(tensor,))


def test_the_worst_come_first_and_errors_before_warnings() -> None:
    """An error without a number, or of NaN, is worse than any number."""
    tally = Tally()
    for result in (
        call("Torch.a.0", WARNING, 1e9), call("Torch.b.0", ERROR, 50.0), call("Torch.c.0", ERROR, 7e3),
        call("Torch.d.0", ERROR, math.nan), call("Torch.e.0", PASS, 1.0),
    ):  # fmt: skip
        tally.add(result)
    shown = text(tally, {})
    assert shown.splitlines()[:2] == [
        "5 calls, 5 checked: 3 error, 1 warning, 1 pass forward; none backward",
        "4 calls do not pass, the worst first:",
    ]
    assert [line.split(":")[0].strip() for line in shown.splitlines() if line.startswith("  Torch")] == [
        "Torch.d.0", "Torch.c.0", "Torch.b.0", "Torch.a.0",
    ]  # fmt: skip
    assert "forward.output.0 (bfloat16 2x3): 7e+03 times what round-off makes of it" in shown
    assert tally.errors == 3


def test_reasons_of_skipped_calls_are_counted_without_their_numbers() -> None:
    """What a dump calls its APIs cannot steer a terminal, and a long list ends."""
    tally = Tally()
    for n in range(30):
        tally.add(skipped(f"Torch.x.{n}", f"no kernel for Torch.x.{n}\nsecond line"))
        tally.add(skipped(f"Torch.y.{n}", f"reason {'abcdefghijklmnopqrstuvwxyzABCD'[n]}\x1b[31m"))
    shown = text(tally, {})
    assert "60 calls, 0 checked: 60 skipped forward; none backward" in shown
    assert "      30  no kernel for API" in shown
    assert "and for 19 more reasons" in shown
    assert "\x1b" not in shown
    assert tally.checked == 0
    assert SKIP in shown.upper()


def test_the_source_line_is_the_innermost_of_the_user() -> None:
    """Frames inside of torch and of this package are passed over, unless there is no other."""
    inside = "File /venv/lib/python3.11/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n return F.linear("
    own = "File /job/model.py, line 7, in block, \n x = self.fc(x)"
    assert source_line([inside, own]) == "/job/model.py:7 in block"
    assert source_line([inside]) == "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 in forward"
    assert source_line([]) == source_line(["no frame"]) == ""


def test_a_fault_of_the_check_is_no_skipped_call() -> None:
    """It is counted apart, with the place, and the check was not complete; the operator's own refusal is a reason to skip."""
    tally = Tally()
    tally.add(skipped("Torch.a.0", "RuntimeError: the operator does not take this"))
    assert not tally.incomplete
    try:
        {}["standard"]
    except KeyError as error:
        tally.add(not_judged("Torch.b.0", error))
    assert tally.incomplete
    assert tally.checked == 0
    shown = text(tally, {})
    assert "1 skipped:\n       1  RuntimeError: the operator does not take this" in shown
    assert "1 calls could not be judged: a fault of the check" in shown
    assert "  Torch.b.0: KeyError: 'standard'" in shown


def test_with_compat_the_reason_is_that_of_the_old_rule() -> None:
    """Units of round-off are ours: a status of the existing tool's rules has the numbers that these look at."""
    tensor = TensorResult(
        "Torch.a.0.forward.output.0", (2,), "torch.float64", "torch.float32", {"cosine": 0.5, "max_abs": 2.0}, status=ERROR, units=0.0
    )
    tally = Tally()
    tally.add(CallResult("Torch.a.0", ERROR, tensors=(tensor,)))
    shown = text(tally, {}, by_old_rules=True)
    assert "(float32 2): by the existing tool's rule: cosine 0.5, largest error 2" in shown
    assert "round-off" not in shown


def test_a_check_of_few_of_the_calls_says_so() -> None:
    """More than half not checked is a warning, unless nobody wanted them checked, or nobody can."""
    for reason, warned in (("torch 2 has no operator Torch.x", True), ("API x is in black_list", False), ("draws random numbers", False)):
        tally = Tally()
        for n in range(3):
            tally.add(call(f"Torch.a.{n}", PASS, 1.0))
        for n in range(4):
            tally.add(skipped(f"Torch.x.{n}", reason))
        assert ("warning: 4 of 7 calls could not be checked" in text(tally, {})) is warned


def test_versions_in_reasons_stay_as_they_are() -> None:
    """Only numbers of calls are taken out."""
    tally = Tally()
    tally.add(skipped("Torch.z.0", "torch.v2.13.0+cpu and v2.13.0+cpu have no operator for Torch.linalg.z.0"))
    shown = text(tally, {})
    assert "v2.13.0+cpu have no operator for API" in shown
