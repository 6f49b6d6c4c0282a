"""Two features of the stand-in's own: the one that lets Megatron's parser know all features' arguments, and one that puts a train_step
of its own in place of Megatron's, which calls it."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature


def parse_args_wrapper(parse_args: Any) -> Any:
    @functools.wraps(parse_args)
    def wrapper(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

        def provider(parser: Any) -> Any:
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            MindSpeedFeaturesManager.register_features_args(parser)
            return parser

        return parse_args(provider, ignore_unknown_args)

    return wrapper


class Basic(MindSpeedFeature):
    def __init__(self) -> None:
        super().__init__("basic", optimization_level=0)

    def register_args(self, parser: Any) -> None:
        parser.add_argument_group("mindspeed").add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)

    def register_patches(self, patch_manager: Any, _args: Any) -> None:
        patch_manager.register_patch("megatron.training.arguments.parse_args", parse_args_wrapper)


class OwnStep(MindSpeedFeature):
    def __init__(self) -> None:
        super().__init__("own-step")

    def register_args(self, parser: Any) -> None:
        parser.add_argument_group(self.feature_name).add_argument("--own-step", action="store_true")

    def register_patches(self, patch_manager: Any, _args: Any) -> None:
        import megatron.training.training as training  # type: ignore[import-not-found]

        original = training.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        patch_manager.register_patch("megatron.training.training.train_step", train_step)


class Datadump(MindSpeedFeature):
    def __init__(self) -> None:
        super().__init__("npu-datadump")

    def register_args(self, parser: Any) -> None:
        parser.add_argument_group(self.feature_name).add_argument("--npu-datadump", action="store_true")


def own_features() -> list[Any]:
    return [Basic(), OwnStep(), Datadump()]
