"""Importing this module patches Megatron: the line that MindSpeed's users have in their scripts."""

from __future__ import annotations

import argparse

from mindspeed.features_manager import MindSpeedFeaturesManager

_parser = argparse.ArgumentParser(description="MindSpeed Arguments", allow_abbrev=False)
MindSpeedFeaturesManager.register_features_args(_parser)
ARGS, _ = _parser.parse_known_args()
MindSpeedFeaturesManager.apply_features_pre_patches(ARGS)
MindSpeedFeaturesManager.apply_features_patches(ARGS)
