"""What the monitor of communication does with calls that the settings do not ask for."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn

from msprobe.mindspore import MindSporeProbe
from msprobe_integrations.mindspore.watch_collectives import CollectiveWatch


@pytest.mark.parametrize("setting", ["collectives: true, collective_sites: [nowhere]", "collective_stacks: true"])
def test_a_call_without_a_sample_hides_no_later_ones(setting: str, tmp_path: Path) -> None:
    """While such a function runs its operators are left out; behind it, calls are looked at again."""
    file = tmp_path / "probe.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmonitor: {{enabled: true, {setting}}}\n")
    probe = MindSporeProbe.from_config(file)
    try:
        probe.attach(nn.Dense(3, 2))
        probe.begin_step(0)
        assert probe._watch is not None
        watch = CollectiveWatch(probe._watch)
        watch._installed = True  # as it is where ranks are joined
        note = watch.begin("MintDistributed", "all_reduce", (ms.Tensor([1.0]),), {})
        assert not watch.sees()
        watch.end(note, None)
        assert watch.sees()
    finally:
        probe.close()
