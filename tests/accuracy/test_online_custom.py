"""Functions that the user registered, in the online pre-check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from msprobe_integrations.torch.debugger import PrecisionDebugger


def test_registered_functions_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`register_custom_api`: calls of the function go to the benchmark, forward and backward, under its own name."""

    monkeypatch.setattr(PrecisionDebugger, "_instance", None)

    class Owner:
        share = staticmethod(lambda x: x.exp() / x.exp().sum(-1, keepdim=True))

    (tmp_path / "shared").mkdir()
    own = {"online_run_ut": True, "nfs_path": str(tmp_path / "shared")}
    settings = {"task": "tensor", "dump_path": str(tmp_path / "out"), "level": "L1", "step": [0], "rank": [], "tensor": own}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    around = PrecisionDebugger(str(tmp_path / "config.json"))
    around.register_custom_api(Owner, "share")
    model = torch.nn.Linear(4, 4)
    around.start(model)
    Owner.share(model(torch.randn(3, 4))).sum().backward()
    around.stop()
    around.step()
    around.run.extras.close()
    sent = b"".join(path.read_bytes() for path in (tmp_path / "shared").rglob("*.msg"))
    assert b'"Owner.share.0.forward"' in sent
    assert b'"Owner.share.0.backward"' in sent
