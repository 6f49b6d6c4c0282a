"""How the probe gets into an unchanged program: every interpreter of an environment that has the probe installed calls `install` at its
start (``msprobe_autoload.pth``; below ``msprobe run`` also ``bootstrap/sitecustomize.py``).

`install` imports nothing but this package. It puts a finder on ``sys.meta_path`` that waits for the frameworks of `FRAMEWORKS`; a process
that imports none of them is never touched again. Each framework has a function ``arm`` that is called when the framework is about to be
imported and may only say what is to be done after which of its modules (`imports.after_import`).
"""

from __future__ import annotations

import os
import sys

from msprobe_integrations.autoload import imports, report, request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FRAMEWORKS = {
    "torch": ("msprobe_integrations.torch.autoload", True, 10),
    "megatron": ("msprobe_integrations.megatron.autoload", False, 30),
    "mindspeed": ("msprobe_integrations.mindspeed.autoload", False, 30),
    "mindspeed_llm": ("msprobe_integrations.mindspeed.autoload", False, 30),
    "mindspeed_mm": ("msprobe_integrations.mindspeed.autoload", False, 30),
    "deepspeed": ("msprobe_integrations.deepspeed.autoload", False, 20),
    "transformers": ("msprobe_integrations.transformers.autoload", True, 30),
    "accelerate": ("msprobe_integrations.accelerate.autoload", True, 15),
    "lightning": ("msprobe_integrations.lightning.autoload", True, 30),
    "pytorch_lightning": ("msprobe_integrations.lightning.autoload", True, 30),
    "torchtitan": ("msprobe_integrations.torchtitan.autoload", True, 30),
}
"""Root package of a framework: the module whose ``arm()`` is called before its import; whether only when the environment asks for the probe
(the others have a way of their own to ask: an argument of their parser, a key of their configuration); and how much it knows of the
training: of all that see the same one, the probe belongs to the one that knows most (`torch.training.owner`)."""
NOT_FOLLOWED = ("mindspore", "jax", "tensorflow", "paddle")
"""Frameworks in which no training is found without a word in the program."""
NEEDS = ("numpy", "yaml")
"""What the probe imports besides the framework. Below ``msprobe run`` an interpreter may be of an environment that lacks them."""
_installed = _unfit = False


def install() -> None:
    """Wait for the frameworks. Costs some ten microseconds; never raises."""
    global _installed
    if _installed or request.off():
        return
    _installed = True
    asked = request.fix_config_path() is not None
    if asked and report.LAUNCH in os.environ:
        report.report_start()
        for name in NOT_FOLLOWED:
            imports.before_import(name, _make_import_report(name))
    for name, (module, only_when_asked, _) in FRAMEWORKS.items():
        if (asked or not only_when_asked) and name not in sys.modules:
            imports.before_import(name, _make_arming_hook(name, module))
    if not asked and request.may_be_mistyped():
        for name in ("torch", "mindspore"):
            imports.before_import(name, _warn_mistyped)


def _warn_mistyped() -> None:
    """Nobody reads settings in a training whose only word to us has a wrong name: it is said where a framework is imported."""
    from importlib import import_module

    if not request.is_helper() and _fit():
        import_module("msprobe_engine.core.process.variables").warn_unknown_variables()


def _make_import_report(name: str) -> Callable[[], None]:
    return lambda: report.report_event("imports", name)


def _make_arming_hook(name: str, module: str) -> Callable[[], None]:
    def arm() -> None:
        from importlib import import_module

        report.report_event("imports", name)
        if _fit():
            _announce()
            import_module(module).arm()

    return arm


def _announce() -> None:
    """This process imports a framework and was asked for a probe: what it starts from now on is of its training, if it trains."""
    from importlib import import_module

    if request.current() is not None and not request.is_helper():
        rank = import_module("msprobe_engine.core.process.launch").environment_rank()
        import_module("msprobe_engine.core.process.processes").announce_candidate(rank)


def _fit() -> bool:
    """Can the probe work in this interpreter? If not, that is said once, in a process that imports a framework."""
    global _unfit
    if _unfit:
        return False
    from importlib.util import find_spec

    lacks = [f"package {name}" for name in NEEDS if find_spec(name) is None]
    if sys.version_info < (3, 10):  # noqa: UP036 - below `msprobe run` there may be any
        lacks.append("Python 3.10")
    _unfit = bool(lacks)
    if lacks:
        report.report_event("unfit", ", ".join(lacks))
    if lacks and (request.current() is not None or request.has_probe_argument()):
        print(
            f"msprobe: no probe in this process, the program goes on: {sys.executable} lacks {', '.join(lacks)}; install msprobe there",
            file=sys.stderr,
        )
    return not _unfit
