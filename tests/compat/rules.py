"""The reasoned differences between our dumps and those of the existing tool.

Every rule has an id, one sentence and a predicate; docs/reference/compatibility.md lists the same ids with the same sentences, and a test
holds the two together. What no rule names is a failure of the comparison.
"""

from __future__ import annotations

import reasons as why
from matching import Rule

RULES: tuple[Rule, ...] = (
    # what a tensor says
    Rule("counts", "Tensors that hold NaN or Inf say how many: `nan_count`, `inf_count`.", why.counts),
    Rule("integer-means", "26.2.0: Mean and Norm of integers and float64 are null; here they are numbers.", why.no_integer_means),
    Rule(
        "float32",
        "8.1.1 turns integers and float64 into float32 first: large ones are rounded or Infinity; here exact.",
        why.through_float32,
    ),
    Rule("complex", "Complex tensors: of the absolute values in double here, Norm too; in float32 without Norm there.", why.complex_values),
    Rule("low-precision", "Mean and Norm of float16 and bfloat16: summed in that dtype there, in double here.", why.low_precision),
    Rule(
        "scalar-norm", "Norm of a tensor without dimensions: its value there, so maybe negative; its absolute value here.", why.scalar_norm
    ),
    Rule("late-scalar", "8.1.1 reads tensors without dimensions at the end: later writes in place show; here not.", why.late_scalar),
    Rule(
        "uninitialised",
        "Memory without values yet (`empty`): nulls, no file and the reason here; its chance content there.",
        why.uninitialised,
    ),
    Rule("empty-files", "Tensors without elements are saved too.", why.empty_files),
    # checksums
    Rule("late-checksum", "26.2.0 computes checksums in a thread: what is written in place meanwhile shows; here not.", why.late_checksum),
    Rule("wide-checksum", "8.1.1 turns bfloat16 into float32 for its checksum; here the raw bytes count, as in 26.2.0.", why.wide_checksum),
    Rule("scalar-xor", "xor of a tensor without dimensions: a checksum like any other here; the value itself there.", why.scalar_xor),
    # which records, and their names
    Rule("not-listed", "Functions that are in no list of the existing tool are recorded.", why.not_listed),
    Rule("own-calls", "8.1.1 records calls of its own hooks (`view_as`) and of the start of `backward` (`ones_like`).", why.own_calls),
    Rule("unseen-collectives", "Collectives that C++ starts, such as DDP's, are recorded (`c10d_*`).", why.unseen_collectives),
    Rule("core-linear", "risk_level CORE has `linear`, which is missing in 26.2.0 for want of a comma.", why.core_linear),
    Rule("gradient-name", "8.1.1: `parameters_grad` without a number, right after the forward pass; here as in 26.2.0.", why.gradient_name),
    Rule(
        "inside-batch",
        "26.2.0: calls inside `batch_isend_irecv` overwrite earlier records, its buffers are read too early.",
        why.inside_batch,
    ),
    Rule("scope-end", "A range that ends with a module has that module's output and what runs inside it.", why.scope_end),
    # order and place
    Rule("gradient-order", "A backward record comes with its last gradient: it may swap with others of its module.", why.gradient_order),
    Rule(
        "outer-backward",
        "A module without input gradient: its backward record comes after those inside it, as their parent.",
        why.no_input_gradient,
    ),
    Rule("input-only", "data_mode without outputs: 26.2.0 orders records by their start, 8.1.1 keeps `parameters`.", why.input_only),
    Rule("without-record", "construct.json and stack.json name what was recorded; there also what was filtered out.", why.without_record),
    Rule("stack-frames", "Stacks have no frames of the tool and of torch's own calling on (module calls, wrappers).", why.stack_frames),
    # arguments
    Rule("positional-dtype", "A dtype or device passed by position: its value here, `{}` there.", why.positional_dtype),
    Rule("collective-facts", "Collectives say in `tags` their group_ranks, reduce, async, root, peer.", why.collective_facts),
    Rule(
        "written-buffers",
        "8.1.1: buffers that a collective only writes are recorded as inputs; here null, as in 26.2.0.",
        why.written_buffers,
    ),
    # gradients
    Rule(
        "gradient-places",
        "Gradients that an API call produces: one per argument here; in the order of its autograd node there.",
        why.gradient_places,
    ),
    Rule(
        "last-node",
        "API calls of several autograd nodes (`linear`, `matmul`): their gradients here, those of the last node there.",
        why.last_node,
    ),
    Rule("inner-gradient", "An output that its module itself uses on: its whole gradient here; null there.", why.inner_gradient),
    Rule("no-dropout", "Dropout with p = 0: 26.2.0 has no API backward record, 8.1.1 puts it below another module.", why.no_dropout),
    Rule("in-place", "An activation in place: its gradients and those of the module before it are here; lost there.", why.in_place),
    Rule("accumulated", "Several backward passes: 8.1.1 has the last increment of a parameter gradient; here the sum.", why.accumulated),
    # head and facts
    Rule(
        "header",
        "Further keys before `data`: nonfinite_counts, rank, world_size, dumped_ranks, summary_mode, selection and more.",
        why.header,
    ),
    Rule("shapes-file", "Task structure writes shapes.json, from which `msprobe estimate` tells sizes.", why.shapes_file),
    Rule(
        "settings-pack",
        "config_check_pack.zip in the directory of the first rank, in its first dumped step: what the run was started with.",
        why.settings_pack,
    ),
    Rule("recompute", "`is_recompute` stands where it is true (8.1.1: always; 26.2.0: never).", why.recompute_said),
    Rule("rank-directory", "Without a process group: directory `proc{pid}`, as in 26.2.0; 8.1.1: `rank`.", why.rank_directory),
)
