"""A process that is killed while tensor files of finished steps are still being written."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path

import pytest
import warm

from msprobe_engine.dump.reader import open_dump
from msprobe_integrations.torch.backend import TorchBackend

RUN = """
    import sys
    import torch
    from torch import nn
    from msprobe_integrations.torch.debugger import PrecisionDebugger
    torch.set_num_threads(1)
    debugger = PrecisionDebugger(sys.argv[1])
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    while True:
        debugger.start(model)
        model(torch.rand(64, 256)).sum().backward()
        debugger.stop()
        debugger.step()
"""


@pytest.mark.framework
@pytest.mark.parametrize("form", ["files", "packed"])
def test_a_step_that_says_it_is_complete_has_all_its_tensors(tmp_path: Path, form: str) -> None:
    """After SIGKILL in the middle of a quick loop every step that is complete, recovered from its log or not, has a file that can be read
    for every tensor its records name; the last step is not taken for complete unless it is."""
    config, root = tmp_path / "config.json", tmp_path / "dump"
    config.write_text(json.dumps({"task": "tensor", "level": "mix", "dump_path": str(root), "tensor": {"tensor_format": form}}))
    with warm.started(textwrap.dedent(RUN), config):
        until = time.monotonic() + 60
        while time.monotonic() < until and not (len(list(root.glob("step*"))) >= 6 and list(root.glob("step*/*/dump.json"))):
            time.sleep(0.01)
    dump, backend = open_dump(root), TorchBackend()
    loaded = 0
    for step in dump.steps:
        one = dump.load(step)
        wanted = {tensor.data_name for entry in one.entries.values() for _, tensor in entry.tensors() if tensor.data_name}
        there = set(one.files.names())
        if one.complete:
            assert wanted
            for name in wanted:
                assert one.files.load(name, backend) is not None
                loaded += 1
        elif one.entries:
            assert not wanted <= there, "nothing is missing, yet the step is called incomplete"
    assert loaded


def test_a_recovered_step_without_its_files_is_incomplete(tmp_path: Path) -> None:
    """What the log names and the disk does not have makes a step incomplete, and the message of a missing tensor says how that can be."""
    config, root = tmp_path / "config.json", tmp_path / "dump"
    config.write_text(json.dumps({"task": "tensor", "level": "L0", "dump_path": str(root), "tensor": {}}))
    code = textwrap.dedent(RUN).replace("while True:", "for _ in range(1):")
    # the log stays when the last file cannot get its name: the step's dump.json is a directory
    code = code.replace(
        "debugger.start(model)", "debugger.start(model); import os, glob; os.mkdir(glob.glob(sys.argv[2] + '/step0/*')[0] + '/dump.json')"
    )
    done = warm.run(code, config, root)
    assert done.returncode == 0, done.stderr
    folder = next(root.glob("step0/*"))
    (folder / "dump.json").rmdir()
    whole = open_dump(root).load(0)
    assert (whole.recovered, whole.complete) == (True, True)
    victim = next(iter((folder / "dump_tensor_data").glob("*.pt")))
    victim.unlink()
    assert not open_dump(root).load(0).complete
    with pytest.raises(Exception, match="the process was killed before it was written"):
        whole.files.load(victim.name, TorchBackend())
