"""How the probe gets into a training on MindSpeed that knows nothing of it: every list of features that MindSpeed is given has ours."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.autoload import request
from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.patching import MARK, Patches

MANAGER = "mindspeed.features_manager.features_manager"
PATCHES = "mindspeed.patch_utils"
FSDP2_TRAINER = "mindspeed_llm.fsdp2.train.trainer"
FSDP2_ENGINE = "mindspeed_mm.fsdp.train.train_engine"
DATADUMP = "mindspeed.functional.npu_datadump.npu_datadump"
_patches = Patches()


def arm() -> None:
    """MindSpeed or what is built on it is about to be imported. Without a request, and without an argument of ours, nothing is done."""
    if request.off() or (request.current() is None and not request.has_probe_argument()):
        return
    from msprobe_integrations.mindspeed.fsdp2 import patch_engine, patch_trainer
    from msprobe_integrations.mindspeed.patch_ordering import watch

    after_import(PATCHES, watch)
    after_import(MANAGER, _manager)
    after_import(DATADUMP, _datadump)
    after_import(FSDP2_TRAINER, patch_trainer)
    after_import(FSDP2_ENGINE, patch_engine)


def disarm() -> None:
    """Take back `arm`: MindSpeed's lists and managers, and Megatron's functions, are as they would be without the probe. Patches that
    MindSpeed itself has put on stay."""
    from msprobe_integrations.megatron import patches
    from msprobe_integrations.mindspeed import feature, fsdp2, patch_ordering

    trainers = ((FSDP2_TRAINER, fsdp2.patch_trainer), (FSDP2_ENGINE, fsdp2.patch_engine))
    for name, hook in ((PATCHES, patch_ordering.watch), (MANAGER, _manager), (DATADUMP, _datadump), *trainers):
        forget(name, hook)
    patches.observe(None)
    patch_ordering.put_back()
    fsdp2.put_back()
    manager: Any = getattr(sys.modules.get(MANAGER), "MindSpeedFeaturesManager", None)
    if hasattr(getattr(manager, "set_features_list", None), MARK):
        _patches.undo()
        manager.FEATURES_LIST[:] = feature.without(manager.FEATURES_LIST)


def _manager(module: ModuleType) -> None:
    """Put our feature into the list there is and into all that are set later; MindSpeed-LLM sets one of its own."""
    from msprobe_integrations.mindspeed import reliance
    from msprobe_integrations.requirements import check

    check(reliance.NAME, reliance.PACKAGE, reliance.FEATURES)
    manager: Any = getattr(module, "MindSpeedFeaturesManager", None)
    setter = getattr(manager, "set_features_list", None)
    if setter is None or hasattr(setter, MARK):
        return
    from msprobe_integrations.mindspeed.patch_ordering import watch_features

    watch_features(manager)
    _patches.around(manager, "set_features_list", _set_features_list)
    if manager.FEATURES_LIST:
        manager.FEATURES_LIST[:] = _with_ours(manager.FEATURES_LIST)


def _set_features_list(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["features_list"] = _with_ours(given.arguments["features_list"])
    return original(*given.args, **given.kwargs)


def _datadump(_: ModuleType) -> None:
    """MindSpeed has made a `PrecisionDebugger` for its ``--npu-datadump``. That is no probe of the script's own, before which ours would
    yield: the two go on side by side."""
    from msprobe_integrations.torch.training import owner

    if owner.current() is None:
        owner.release()


def _with_ours(features: Sequence[Any]) -> Sequence[Any]:
    """The list, with our feature at its end."""
    from msprobe_integrations.mindspeed import feature

    try:
        return feature.add_feature(features)
    except Exception as error:  # MindSpeed's own features matter more
        raise_of_training(error)
        from msprobe_engine.core.log import get_logger

        get_logger().error("cannot become a feature of MindSpeed, training goes on: %s: %s", type(error).__name__, error)
        return features
