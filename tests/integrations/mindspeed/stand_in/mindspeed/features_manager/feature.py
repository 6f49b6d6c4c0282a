from __future__ import annotations

from typing import Any


class MindSpeedFeature:
    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: Any) -> Any:
        wanted = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return wanted or self.default_patches

    def register_args(self, parser: Any) -> None: ...
    def pre_validate_args(self, args: Any) -> None: ...
    def validate_args(self, args: Any) -> None: ...
    def post_validate_args(self, args: Any) -> None: ...
    def pre_register_patches(self, patch_manager: Any, args: Any) -> None: ...
    def register_patches(self, patch_manager: Any, args: Any) -> None: ...
