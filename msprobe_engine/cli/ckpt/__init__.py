"""Compare checkpoints of any format and parallel layout, look into them, and keep their digests. Nothing in a checkpoint is executed."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "diff": Command("ckpt.diff", "compare two checkpoints: verdict, every tensor that differs, and by how much"),
    "digest": Command("ckpt.digest", "write a manifest of digests, to be compared with later in place of the checkpoint"),
    "show": Command("ckpt.show", "list format, layout, tensors, sizes and values of a checkpoint"),
}

EXAMPLES = """\
examples:
  msprobe ckpt diff run_a/iter_0001000 run_b/iter_0001000
  msprobe ckpt diff megatron/checkpoints hf/snapshot -o report
  msprobe ckpt digest run_a/iter_0001000 -o iter_0001000.digests.json
  msprobe ckpt show run_a --tensors"""
