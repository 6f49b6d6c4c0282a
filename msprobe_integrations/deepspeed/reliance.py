"""What is relied on in DeepSpeed, and what is lost where a version has it no longer. Checked when an engine is attached.

Objects: ``engine`` (a DeepSpeedEngine), and its optimizer by kind: ``unfused`` (FP16_UnfusedOptimizer), ``fused`` (FP16_Optimizer),
``bf16`` (BF16_Optimizer), ``zero12`` (DeepSpeedZeroOptimizer), ``zero3`` (DeepSpeedZeroOptimizer_Stage3), ``parameter`` of the last.
"""

from __future__ import annotations

import sys
from typing import Any

from msprobe_integrations.requirements import Requirement, check

NAME = "DeepSpeed"
PACKAGE = "deepspeed"
_ALL = "0.15 to 0.19"
_PARAMETERS = "gradients, parameters, updates and optimizer states"
_REDUCED = "reduced gradients"
_STEPS = "steps of the training"

MODULE_TABLE = (
    Requirement("deepspeed:initialize", "enabling by the key msprobe of ds_config.json", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.forward", _STEPS, _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.backward", "loss and micro batch numbers", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.step", "ends of steps", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint", "pause while a checkpoint is saved", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.save_16bit_model", "pause while weights are saved", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint", "pause while a checkpoint is loaded", _ALL),
    Requirement("deepspeed.runtime.engine:DeepSpeedEngine.destroy", "other engine to follow after one is destroyed", _ALL),
    Requirement("deepspeed.runtime.pipe.engine:PipelineEngine.train_batch", "steps of the pipeline engine", _ALL),
    Requirement("deepspeed.runtime.pipe.engine:PipelineEngine.eval_batch", "pause in evaluations of the pipeline engine", _ALL),
    Requirement("deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP", "micro batch numbers of the pipeline engine", _ALL),
    Requirement("deepspeed.runtime.hybrid_engine:DeepSpeedHybridEngine.generate", "pause while text is generated", _ALL),
)
ENGINE_TABLE = (
    Requirement("engine.module", "names of modules and parameters", _ALL),
    Requirement("engine.optimizer", _PARAMETERS, _ALL),
    Requirement("engine.global_steps", "step numbers that go on after a checkpoint, and ends of steps", _ALL),
    Requirement("engine.skipped_steps", "scalar skipped", _ALL),
    Requirement("engine.global_samples", "the axis of events in DeepSpeed's monitor", _ALL),
    Requirement("engine._global_grad_norm", "scalar grad_norm of DeepSpeed", _ALL),
    Requirement("engine.monitor", "DeepSpeed's own events, and its monitor as a sink", _ALL),
    Requirement("engine._take_model_step", f"{_PARAMETERS} (the moments of an update)", _ALL),
    Requirement("engine.buffered_allreduce_fallback", "gradients before the reduction without ZeRO", _ALL),
    Requirement("engine.seq_data_parallel_group", "the replica check over data-parallel ranks", _ALL),
)
_SHARED = (
    ("optimizer", "the inner optimizer's gradients, settings and states", True),
    ("overflow", "scalar skipped where updates themselves do not tell", False),
    ("loss_scale", "scalar loss_scale", False),
    ("_global_grad_norm", "scalar grad_norm", False),
)
_KINDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "unfused": (("fp16_groups", _PARAMETERS, True), ("fp32_groups", _PARAMETERS, True)),
    "fused": (("fp16_groups", _PARAMETERS, True), ("fp32_groups_flat", _PARAMETERS, True)),
    "bf16": (
        ("bf16_groups", _PARAMETERS, True),
        ("fp32_groups_flat_partition", _PARAMETERS, True),
        ("real_dp_process_group", _PARAMETERS, True),
        ("fp32_groups_gradients", _REDUCED, True),
        ("fp32_groups_has_gradients", _REDUCED, True),
    ),
    "zero12": (
        ("bit16_groups", _PARAMETERS, True),
        ("single_partition_of_fp32_groups", _PARAMETERS, True),
        ("real_dp_process_group", _PARAMETERS, True),
        ("grad_start_offset", _PARAMETERS, True),
        ("grad_partition_insertion_offset", _PARAMETERS, True),
        ("params_in_partition", _PARAMETERS, True),
        ("partition_size", _PARAMETERS, True),
        ("get_param_id", _PARAMETERS, True),
        ("averaged_gradients", _REDUCED, False),
        ("cpu_offload", "reduced gradients with an offloaded optimizer", False),
        ("get_gradient_for_reduction", "gradients before the reduction", False),
        ("reduce_ready_partitions_and_remove_grads", "gradients before the reduction", False),
        ("is_gradient_accumulation_boundary", "gradients before the reduction", False),
    ),
    "zero3": (
        ("fp16_groups", _PARAMETERS, True),
        ("fp32_partitioned_groups_flat", _PARAMETERS, True),
        ("grad_position", _PARAMETERS, True),
        ("get_param_id", _PARAMETERS, True),
        ("sub_group_to_group_id", "settings of the parameter groups", False),
        ("averaged_gradients", _REDUCED, False),
        ("offload_optimizer", "reduced gradients with an offloaded optimizer", False),
    ),
}


PARAMETER_TABLE = tuple(
    Requirement(f"parameter.{name}", f"{_PARAMETERS} (ZeRO 3)", _ALL) for name in ("ds_tensor", "ds_numel", "ds_shape", "ds_process_group")
)
"""Of a parameter under ZeRO 3, where it is empty between its uses."""
KIND_TABLES = {
    kind: tuple(Requirement(f"{kind}.{name}", needed_for, _ALL) for name, needed_for, _ in (*_KINDS[kind], *_SHARED)) for kind in _KINDS
}
NEEDED = {f"{kind}.{name}" for kind in _KINDS for name, _, needed in (*_KINDS[kind], *_SHARED) if needed}
"""Rows without which there is no parameter side at all."""
TABLE = (*MODULE_TABLE, *ENGINE_TABLE, *PARAMETER_TABLE, *(row for table in KIND_TABLES.values() for row in table))


def check_engine(engine: Any) -> None:
    """Say by name what the engine that is followed lacks, and the modules of DeepSpeed that are imported."""
    modules = [row for row in MODULE_TABLE if row.on.partition(":")[0] in sys.modules]
    check(NAME, PACKAGE, (*modules, *ENGINE_TABLE), {"engine": engine})


def usable(kind: str, optimizer: Any) -> bool:
    """Does an optimizer of this kind have what the parameter side cannot do without? What is missing is said by name."""
    if kind not in KIND_TABLES:
        return True
    lost = check(NAME, PACKAGE, KIND_TABLES[kind], {kind: optimizer})
    if kind == "zero3":
        parameter = next((p for group in getattr(optimizer, "fp16_groups", None) or () for p in group), None)
        lost += [] if parameter is None else check(NAME, PACKAGE, PARAMETER_TABLE, {"parameter": parameter})
    return not any(row.on in NEEDED or row in PARAMETER_TABLE for row in lost)


def unknown(optimizer: Any) -> bool:
    """Is this an optimizer of DeepSpeed's own that none of the tables above describes? Said by name."""
    if not type(optimizer).__module__.startswith("deepspeed.runtime."):
        return False
    row = Requirement(
        "optimizer.fp32_partitioned_groups_flat | optimizer.single_partition_of_fp32_groups | optimizer.fp32_groups_flat_partition"
        " | optimizer.fp32_groups_flat | optimizer.fp32_groups",
        f"{_PARAMETERS} ({type(optimizer).__name__} keeps them in a way that is not known)",
    )
    return bool(check(NAME, PACKAGE, (row,), {"optimizer": optimizer}))
