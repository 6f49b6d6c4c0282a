"""The code of docs/frameworks/deepspeed.md runs as it stands there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import pytest
import torch
from forkpool import run_ranks

from msprobe_integrations.deepspeed import key
from msprobe_integrations.torch.training import owner

pytestmark = pytest.mark.framework
PAGE = (Path(__file__).parents[3] / "docs" / "frameworks" / "deepspeed.md").read_text()
PROBE = "monitor: {activations: true}\nsinks: {jsonl: {enabled: true}}\n"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found


def callback(directory: str, code: str) -> Any:
    os.chdir(directory)
    harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    names = {"deepspeed": harness.deepspeed, "model": harness.Net(), "data": harness.batches("fp32", 3)}
    exec(code, names)  # the page's own code
    return owner.current()


def test_callback(tmp_path: Path) -> None:
    """The loop with a callback leaves the records of its three steps."""
    (tmp_path / "probe.yaml").write_text(PROBE)
    (tmp_path / "ds_config.json").write_text(json.dumps(harness.config(2, "fp32")))
    assert run_ranks(1, callback, str(tmp_path), blocks("python")[0]) == [None]
    (file,) = tmp_path.glob("**/rank0.jsonl")
    assert [record["step"] for line in file.read_text().splitlines() if "step" in (record := json.loads(line))] == [0, 1, 2]


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the key are taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.yaml").write_text(PROBE)
    changes = [key.parse(json.loads(block)["msprobe"], "page")[1] for block in blocks("json")]
    assert changes == [(), ("dump.step=[5]", 'output_dir="out"', "sinks.deepspeed.enabled=true")]
