"""The reasoned differences between our dumps and those of the existing tool.

Every rule has an id, one sentence and a predicate; docs/reference/compatibility.md lists the same ids with the same sentences, and a test
holds the two together. What no rule names is a failure of the comparison.
"""

from __future__ import annotations

import reasons as why
from matching import Rule

RULES: tuple[Rule, ...] = (
    # what a tensor says
    Rule("counts", "A tensor with NaN or Inf has `nan_count` and `inf_count`, one of bools `true_count`.", why.counts),
    Rule("integer-means", "Mean and Norm of integers and float64 are numbers; in 26.2.0 they are null.", why.no_integer_means),
    Rule("float32", "8.1.1 rounds integers and float64 to float32; large ones become Infinity.", why.through_float32),
    Rule(
        "complex",
        "Statistics of complex tensors are those of the absolute values in double, with Norm; there in float32, without.",
        why.complex_values,
    ),
    Rule("low-precision", "Mean and Norm of float16 and bfloat16 are summed in double; there in that dtype.", why.low_precision),
    Rule("scalar-norm", "Norm of a tensor without dimensions is its absolute value; there its value, so maybe negative.", why.scalar_norm),
    Rule("late-scalar", "8.1.1 reads tensors without dimensions at the end, after later writes in place.", why.late_scalar),
    Rule(
        "uninitialised",
        "Memory without values yet (`empty`) has nulls, no file and the reason; there its chance content.",
        why.uninitialised,
    ),
    Rule("empty-files", "Tensors without elements are saved too.", why.empty_files),
    # checksums
    Rule("late-checksum", "26.2.0 computes checksums in a thread, maybe after later writes in place.", why.late_checksum),
    Rule(
        "wide-checksum", "8.1.1 computes the checksum of bfloat16 in float32; here, as in 26.2.0, the raw bytes count.", why.wide_checksum
    ),
    Rule("scalar-xor", "xor of a tensor without dimensions is a checksum; there the value itself.", why.scalar_xor),
    # which records, and their names
    Rule("not-listed", "Functions that are in no list of the existing tool are recorded.", why.not_listed),
    Rule("own-calls", "8.1.1 records calls of its own hooks (`view_as`) and of the start of `backward` (`ones_like`).", why.own_calls),
    Rule("unseen-collectives", "Collectives that C++ starts, such as DDP's, are recorded (`c10d_*`).", why.unseen_collectives),
    Rule("core-linear", "risk_level CORE has `linear`; 26.2.0 lacks it for want of a comma.", why.core_linear),
    Rule(
        "gradient-name",
        "8.1.1 writes `parameters_grad` without a number, right after the forward pass; here as in 26.2.0.",
        why.gradient_name,
    ),
    Rule(
        "inside-batch",
        "In 26.2.0 calls inside `batch_isend_irecv` overwrite earlier records and its buffers are read too early.",
        why.inside_batch,
    ),
    Rule("scope-end", "A range that ends with a module has that module's output and what runs inside it.", why.scope_end),
    # order and place
    Rule(
        "gradient-order",
        "A backward record comes with its last gradient, so it may swap places with others of its module.",
        why.gradient_order,
    ),
    Rule(
        "outer-backward",
        "The backward record of a module without input gradient comes after those inside it, as their parent.",
        why.no_input_gradient,
    ),
    Rule("input-only", "Without outputs in data_mode 26.2.0 orders records by their start and 8.1.1 keeps `parameters`.", why.input_only),
    Rule(
        "without-record",
        "construct.json and stack.json name recorded calls only; there also those that were filtered out.",
        why.without_record,
    ),
    Rule("stack-frames", "Stacks have no frames of the tool and of torch's own calls (module calls, wrappers).", why.stack_frames),
    # arguments
    Rule("positional-dtype", "A dtype or device passed by position has its value; there `{}`.", why.positional_dtype),
    Rule("collective-facts", "Collectives have group_ranks, reduce, async, root and peer in `tags`.", why.collective_facts),
    Rule("written-buffers", "Buffers that a collective only writes are null, as in 26.2.0; in 8.1.1 they are inputs.", why.written_buffers),
    # gradients
    Rule(
        "gradient-places",
        "Gradients that an API call produces are one per argument; there in the order of its autograd node.",
        why.gradient_places,
    ),
    Rule(
        "last-node",
        "API calls of several autograd nodes (`linear`, `matmul`) have their gradients; there those of the last node.",
        why.last_node,
    ),
    Rule("inner-gradient", "An output that its module also uses has its whole gradient; there null.", why.inner_gradient),
    Rule(
        "no-dropout", "Dropout with p = 0 has an API backward record; 26.2.0 has none, 8.1.1 puts it below another module.", why.no_dropout
    ),
    Rule("in-place", "An activation in place and the module before it have their gradients; there they are lost.", why.in_place),
    Rule("accumulated", "Several backward passes give the sum of a parameter gradient; in 8.1.1 the last increment.", why.accumulated),
    # head and facts
    Rule(
        "header",
        "Further keys before `data`: nonfinite_counts, rank, world_size, dumped_ranks, summary_mode, selection and more.",
        why.header,
    ),
    Rule("shapes-file", "Task structure writes shapes.json for `msprobe estimate`.", why.shapes_file),
    Rule(
        "settings-pack",
        "config_check_pack.zip is in the first dumped step of the first rank: what the run was started with.",
        why.settings_pack,
    ),
    Rule("recompute", "`is_recompute` is written only if it is true (8.1.1: always; 26.2.0: never).", why.recompute_said),
    Rule("rank-directory", "Without a process group the directory is `proc{pid}`, as in 26.2.0; in 8.1.1 `rank`.", why.rank_directory),
)
