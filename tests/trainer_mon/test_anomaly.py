"""``anomaly.json`` (`msprobe_engine.probe.sinks.anomaly`)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.records import Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.probe.sinks import anomaly
from msprobe_engine.probe.sinks.anomaly import AnomalySink

OF = TensorDescription("torch.Tensor", "torch.float32", (3,), None)
SHAPE = {"rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id", "tag_name", "message", "group_mates"}
"""Fields of a record in the existing tool."""


def frame(step: int = 2) -> Frame:
    samples = [
        Sample("grad_unreduced", "1.mlp.2.bias", TensorRef(0, OF), "accumulated", -1, 0),
        Sample("actv", "fc.input", TensorRef(1, OF), "", 3, 1),
    ]
    return Frame(step, 5, np.zeros((2, 16)), samples=samples)


def alert(order: int = 0, rule: str = "nan_inf", step: int = 2, **keys: Any) -> Alert:
    name = {0: "1.mlp.2.bias", 1: "fc.input"}.get(order, "loss")
    keys.setdefault("value", math.nan)
    return Alert(rule, "critical", "grad", name, step, 5, expected="", message=f"{rule}: {name}", order=order, **keys)


def read(root: Path) -> dict[str, Any]:
    found = json.loads((root / "anomaly_detected/rank5/anomaly.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert isinstance(found, dict)
    return found


def test_records_have_the_known_shape(tmp_path: Path) -> None:
    """Key and fields are those of the existing tool, with tag, stage, micro step and order of the sample; ours come after them. Numbers
    that JSON has no word for are text."""
    sink = AnomalySink(output_dir=tmp_path, rank=5)
    sink.place(1, [1, 5])
    sink.write(frame(), [alert(0), alert(1, micro_step=3, value=7.0, extra={"op": "max"}), alert(9, value=math.inf)])
    found = read(tmp_path)
    assert list(found) == [
        "0:1.mlp.2.bias/rank5/acc_grad_step_2_call_0",
        "1:fc.input:3/rank5/actv_step_2_call_1",
        "loss/rank5/grad_step_2_call_9",
    ]
    first, second, third = found.values()
    assert set(first) >= SHAPE
    assert {key: second[key] for key in SHAPE - {"message"}} == {
        "rank": 5, "step": 2, "micro_step": 3, "pp_stage": 1, "vpp_stage": 1, "call_id": 1, "tag_name": "1:fc.input:3/rank5/actv",
        "group_mates": [1, 5],
    }  # fmt: skip
    assert (first["micro_step"], first["value"], second["value"], third["value"]) == (0, "nan", 7.0, "inf")
    assert (sink.path.stat().st_mode & 0o777, sink.path.parent.stat().st_mode & 0o777) == (0o640, 0o750)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Several alerts about one tensor of one step have a record each, and what another configuration collected stays."""
    for _ in range(2):
        sink = AnomalySink(output_dir=tmp_path, rank=5)
        sink.write(frame(), [alert(0, "turbulence", extra={"op": op}) for op in ("norm", "mean")] + [alert(0)])
        sink.write(frame(3), [])
        sink.close()
    found = read(tmp_path)
    assert len(found) == 6
    assert sorted((r["rule"], r["op"]) for r in found.values()) == sorted(
        [("turbulence", "norm"), ("turbulence", "mean"), ("nan_inf", "")] * 2
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\x00" * 10])
def test_a_file_that_is_none_is_put_aside(tmp_path: Path, content: str) -> None:
    """A damaged file is kept under another name and a new one begun."""
    place = tmp_path / "anomaly_detected/rank5"
    place.mkdir(parents=True)
    (place / "anomaly.json").write_text(content)
    sink = AnomalySink(output_dir=tmp_path, rank=5)
    sink.write(frame(), [alert()])
    assert len(read(tmp_path)) == 1
    (aside,) = (p for p in place.iterdir() if p.name.endswith(".unreadable"))
    assert aside.read_text() == content


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link in place of the file is refused: whoever put it there chooses no file of ours."""
    place = tmp_path / "anomaly_detected/rank5"
    place.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", place / "anomaly.json")
    (tmp_path / "elsewhere").write_text("{}")
    with pytest.raises(SinkError, match="cannot read"):
        AnomalySink(output_dir=tmp_path, rank=5)


def test_an_endless_alarm_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more records than the limit; how many were left out is said at the end."""
    monkeypatch.setattr(anomaly, "MAX_RECORDS", 3)
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(anomaly._log, "warning", lambda *words: said.append(words))
    sink = AnomalySink(output_dir=tmp_path, rank=5)
    for step in range(5):
        sink.write(frame(step), [alert(step=step)])
    sink.close()
    assert len(read(tmp_path)) == 3
    assert said[0][-1] == 2
