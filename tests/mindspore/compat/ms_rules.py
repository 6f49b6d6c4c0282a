"""The reasoned differences between our dumps on MindSpore and those of the existing tool.

As on torch: an id, one sentence and a predicate each; docs/reference/compatibility.md lists the same ids with the same sentences. What no
rule names is a failure of the comparison.
"""

from __future__ import annotations

import ms_reasons as own
import reasons as shared
from matching import Rule

RULES: tuple[Rule, ...] = (
    Rule("ms-counts", "A tensor with NaN or Inf has `nan_count` and `inf_count`, one of bools `true_count`.", shared.counts),
    Rule("ms-nan", "Max and Min of a tensor with NaN are NaN; there those of its other elements.", own.without_nan),
    Rule("ms-float32", "Integers and float64 are exact; there they are rounded to float32.", own.through_float32),
    Rule(
        "ms-scalar-norm",
        "Norm of a tensor without dimensions is its absolute value; there its value, so maybe negative.",
        shared.scalar_norm,
    ),
    Rule("ms-header", "Further keys before `data`: nonfinite_counts, rank, world_size, summary_mode and more.", shared.header),
    Rule("ms-low-precision", "Mean and Norm of float16 are in double; there rounded to float16.", own.low_precision),
    Rule("ms-xor", "xor checksums are written; there `md5` is null.", own.no_xor),
    Rule(
        "ms-gradient-name",
        "8.1.1 writes `parameters_grad` without a number, right after the forward pass; here as in 26.2.0.",
        shared.gradient_name,
    ),
    Rule("ms-rank-directory", "Without communication the directory is `proc{pid}`, as in 26.2.0; in 8.1.1 `rank`.", shared.rank_directory),
    Rule(
        "ms-settings-pack",
        "config_check_pack.zip is in the first dumped step of the first rank: what the run was started with.",
        shared.settings_pack,
    ),
    Rule("ms-shapes-file", "Task structure writes shapes.json for `msprobe estimate`.", shared.shapes_file),
    Rule("ms-astype", "`Tensor.astype` is recorded as such; there as the `to` that it calls.", own.astype),
    Rule(
        "ms-gradient-places",
        "Gradients that an API call produces have one place per argument; there reversed, without empty places.",
        own.gradient_places,
    ),
    Rule("ms-scope-end", "A range that ends with a Cell has that Cell's output and what runs inside it.", shared.scope_end),
    Rule(
        "ms-input-only",
        "Without outputs in data_mode 26.2.0 orders records by their start and 8.1.1 keeps `parameters`.",
        shared.input_only,
    ),
    Rule(
        "ms-outer-backward",
        "The backward record of a Cell without input gradient comes after those inside it, as their parent.",
        own.no_input_gradient,
    ),
    Rule("ms-inner-gradient", "An output that its Cell also uses has its whole gradient; there null.", own.inner_gradient),
    Rule(
        "ms-gradient-order",
        "A backward record comes with its last gradient, so it may swap places with others of its Cell.",
        own.gradient_order,
    ),
    Rule(
        "ms-without-record",
        "construct.json and stack.json name recorded calls only; there also those that were filtered out.",
        shared.without_record,
    ),
    Rule("ms-stack-frames", "Stacks have no frames of the tool and of MindSpore's own calls.", own.stack_frames),
)
