"""Our feature in MindSpeed's lists: its launch arguments, and the moment at which the probe is switched on.

MindSpeed asks every feature for its arguments twice: for a parser of its own, when its adaptor is imported, and for Megatron's parser. A
feature that applies is asked for patches before Megatron is imported, and once more after that. Ours registers no patch: what is
hooked in Megatron is wrapped by the Megatron integration, on top of whatever MindSpeed has made of it (`order`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_integrations.autoload import request
from msprobe_integrations.megatron import flags

_log = get_logger()
NAME = "msprobe-config"
"""MindSpeed takes a feature's name for the name of the argument that switches it on."""
DATADUMP = "npu_datadump"
_failed: list[Exception] = []
_Method = TypeVar("_Method", bound=Callable[..., Any])


def add_feature(features: Sequence[Any]) -> list[Any]:
    """`features`, with ours at the end, once."""
    extended = list(features)
    if len(without(extended)) == len(extended):
        extended.append(feature_class()(NAME, optimization_level=2))
    return extended


def without(features: Sequence[Any]) -> list[Any]:
    """`features`, less ours."""
    return [feature for feature in features if getattr(feature, "feature_name", "") != NAME.replace("-", "_")]


def contain_errors(method: _Method) -> _Method:
    """Nothing but the end of a launch (`SystemExit`) comes out of a method of ours that MindSpeed calls."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise_of_training(error)
            if not _failed:
                _failed.append(error)
                _log.error("the probe is no feature of MindSpeed, training goes on: %s: %s", type(error).__name__, error)
            return None

    return call  # type: ignore[return-value]  # None also means: does not apply


@functools.cache
def feature_class() -> type:
    """The class; its base comes from MindSpeed, which must have been imported."""
    from mindspeed.features_manager.feature import MindSpeedFeature  # type: ignore[import-not-found,unused-ignore]

    class ProbeFeature(MindSpeedFeature):  # type: ignore[misc,unused-ignore]
        """The probe as a feature of MindSpeed. Of every optimization level: it changes no computation."""

        @contain_errors
        def is_need_apply(self, args: Any) -> bool:
            """Is a probe asked for, by an argument or by the environment?"""
            return flags_of(args) != flags.Flags() or request.current() is not None

        @contain_errors
        def register_args(self, parser: Any) -> None:
            """``--msprobe-config`` and the others, as Megatron's parser gets them without MindSpeed."""
            flags.add(parser)

        @contain_errors
        def pre_register_patches(self, _patch_manager: Any, args: Any) -> None:
            """Before Megatron is imported, and before any feature registers its patches."""
            switch_on(args)
            one_dump(args)

        @contain_errors
        def pre_validate_args(self, args: Any) -> None:
            """Megatron's own arguments: MindSpeed-LLM's loop looks at them. Also called with configurations of models."""
            one_dump(args)

    return ProbeFeature


def flags_of(args: Any) -> flags.Flags:
    """The probe's arguments in what a parser made of them, or in a mapping that `repatch` was given.

    Args:
        args: any object; one that knows nothing of them has none.
    """
    changes = getattr(args, "msprobe_set", None) or ()
    changes = (changes,) if isinstance(changes, str) else tuple(changes)
    if getattr(args, "msprobe_output_dir", None):
        changes += (f"output_dir={args.msprobe_output_dir}",)
    if getattr(args, "msprobe_strict", False):
        changes += ("strict=true",)
    return flags.Flags(getattr(args, "msprobe_config", None) or "", changes)


def switch_on(args: Any) -> None:
    """Let the Megatron integration follow the training that these arguments describe.

    Raises:
        SystemExit: with code 2, for a mistake in what the arguments ask for; nothing has begun to train.
    """
    from msprobe_integrations.megatron import autoload

    given = flags_of(args)
    asked = request.current()
    if given != flags.Flags() and (asked is None or asked.by != flags.CONFIG):
        try:
            flags.request_probe(given)
        except ProbeError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"msprobe: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
    autoload.arm()


def one_dump(args: Any) -> None:
    """MindSpeed's ``--npu-datadump`` makes a dump of its own, with settings inside of its package. Where our settings have a dump too,
    that argument is switched off: two dumps at once would describe each other."""
    asked = request.current()
    if asked is None or not getattr(args, DATADUMP, False):
        return
    try:
        settings = asked.settings()
    except ProbeError:  # said when the training begins; the existing dump stays
        return
    if settings.dump is not None or settings.grad_probe is not None:
        setattr(args, DATADUMP, False)
        _warn_once(
            "--npu-datadump is left out: '%s' has a dump of its own, which is made; take its section away to have MindSpeed's", asked.config
        )
    else:
        _warn_once("--npu-datadump dumps as config.json in the package mindspeed says; '%s' does the rest", asked.config)


@functools.cache
def _warn_once(message: str, *args: str) -> None:
    """Once; rank 0 speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning(message, *args)
