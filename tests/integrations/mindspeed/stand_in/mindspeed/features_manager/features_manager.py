from __future__ import annotations

from typing import Any

from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeaturesManager:
    FEATURES_LIST: list[Any] = []

    @classmethod
    def set_features_list(cls, features_list: list[Any]) -> None:
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def register_features_args(cls, parser: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def pre_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def remove_patches(cls) -> None:
        MindSpeedPatchesManager.remove_patches()
