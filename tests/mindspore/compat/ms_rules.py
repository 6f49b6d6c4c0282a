"""The reasoned differences between our dumps on MindSpore and those of the existing tool.

As on torch: an id, one sentence and a predicate each; docs/reference/compatibility.md lists the same ids with the same sentences. What no
rule names is a failure of the comparison.
"""

from __future__ import annotations

import ms_reasons as own
import reasons as shared
from matching import Rule

RULES: tuple[Rule, ...] = (
    Rule("ms-counts", "Tensors that hold NaN or Inf say how many: `nan_count`, `inf_count`.", shared.counts),
    Rule("ms-nan", "Max and Min of a tensor with NaN are NaN; those of its other elements there.", own.without_nan),
    Rule("ms-float32", "Integers and float64 are turned into float32 there: large ones are rounded; here exact.", own.through_float32),
    Rule(
        "ms-scalar-norm",
        "Norm of a tensor without dimensions: its value there, so maybe negative; its absolute value here.",
        shared.scalar_norm,
    ),
    Rule("ms-header", "Further keys before `data`: nonfinite_counts, rank, world_size, summary_mode and more.", shared.header),
    Rule("ms-low-precision", "Mean and Norm of float16: rounded to float16 there, in double here.", own.low_precision),
    Rule("ms-xor", "xor checksums are written; `md5` is null there.", own.no_xor),
    Rule(
        "ms-gradient-name",
        "8.1.1: `parameters_grad` without a number, right after the forward pass; here as in 26.2.0.",
        shared.gradient_name,
    ),
    Rule("ms-rank-directory", "Without communication: directory `proc{pid}`, as in 26.2.0; 8.1.1: `rank`.", shared.rank_directory),
    Rule(
        "ms-settings-pack",
        "config_check_pack.zip in the directory of the first rank, in its first dumped step: what the run was started with.",
        shared.settings_pack,
    ),
    Rule("ms-shapes-file", "Task structure writes shapes.json, from which `msprobe estimate` tells sizes.", shared.shapes_file),
    Rule("ms-astype", "`Tensor.astype` is recorded as such; there as the `to` that it calls.", own.astype),
    Rule(
        "ms-gradient-places",
        "Gradients that an API call produces: one place per argument here; reversed, and without empty places there.",
        own.gradient_places,
    ),
    Rule("ms-scope-end", "A range that ends with a Cell has that Cell's output and what runs inside it.", shared.scope_end),
    Rule("ms-input-only", "data_mode without outputs: 26.2.0 orders records by their start, 8.1.1 keeps `parameters`.", shared.input_only),
    Rule(
        "ms-outer-backward",
        "A Cell without input gradient: its backward record comes after those inside it, as their parent.",
        own.no_input_gradient,
    ),
    Rule("ms-inner-gradient", "An output that its Cell itself uses on: its whole gradient here; null there.", own.inner_gradient),
    Rule("ms-gradient-order", "A backward record comes with its last gradient: it may swap with others of its Cell.", own.gradient_order),
    Rule(
        "ms-without-record",
        "construct.json and stack.json name what was recorded; there also what was filtered out.",
        shared.without_record,
    ),
    Rule("ms-stack-frames", "Stacks have no frames of the tool and of MindSpore's own calling on.", own.stack_frames),
)
