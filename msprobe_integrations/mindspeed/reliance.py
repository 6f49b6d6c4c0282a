"""What the probe touches in MindSpeed and MindSpeed-LLM, beside what it touches in Megatron."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "MindSpeed"
PACKAGE = "mindspeed"
_FEATURES = "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager"
_PATCHES = "mindspeed.patch_utils:MindSpeedPatchesManager"
_VERSIONS = "master of 2026-07 (Megatron core_v0.12.1)"

FEATURES = (
    Requirement(f"{_FEATURES}.set_features_list", "launch arguments in MindSpeed's own parser (Megatron's has them)", _VERSIONS),
    Requirement(f"{_FEATURES}.apply_features_patches", "Megatron's own functions while features register their patches", _VERSIONS),
    Requirement("mindspeed.features_manager.feature:MindSpeedFeature", "launch arguments in MindSpeed's own parser", _VERSIONS),
    Requirement(f"{_PATCHES}.apply_patches", "hooks that outlive patches applied after them", _VERSIONS),
    Requirement(f"{_PATCHES}.remove_patches", "patches that can be removed when ours are on top", _VERSIONS),
    Requirement(f"{_PATCHES}.patches_info", "names of what MindSpeed has replaced", _VERSIONS),
)
FSDP2 = (
    Requirement("trainer.training_step", "steps of the FSDP2 backend", "MindSpeed-LLM master of 2026-08"),
    Requirement("trainer.global_step", "step numbers of the FSDP2 backend", "MindSpeed-LLM master of 2026-08"),
    Requirement("trainer.optimizer", "ends of steps and updates in the FSDP2 backend", "MindSpeed-LLM master of 2026-08"),
    Requirement("engine.train_step", "steps of MindSpeed-MM's FSDP2 backend", "MindSpeed-MM master of 2026-08"),
    Requirement("engine.iteration", "step numbers of MindSpeed-MM's FSDP2 backend", "MindSpeed-MM master of 2026-08"),
    Requirement("engine.get_batch", "numbers of micro batches in MindSpeed-MM's FSDP2 backend", "MindSpeed-MM master of 2026-08"),
    Requirement("engine.optimizer", "ends of steps and updates in MindSpeed-MM's FSDP2 backend", "MindSpeed-MM master of 2026-08"),
)
TABLE = (*FEATURES, *FSDP2)
