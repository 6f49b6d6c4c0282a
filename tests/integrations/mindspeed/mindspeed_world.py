"""A process in which MindSpeed's stand-in and a small `megatron` can be imported, again and again, and everything is as before after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from msprobe_integrations.autoload import request
from msprobe_integrations.megatron import patches

STAND_IN = Path(__file__).parent / "stand_in"
_ROOTS = ("megatron", "mindspeed", "mindspeed_mm", "user_loop")
TRAINING = """
trace = []
def train_step(*args):
    trace.append("megatron")
    return ("done",)
def evaluate(*args):
    return "evaluated"
"""
LOOP = """
from megatron.training.training import train_step
def run():
    return train_step(None, None, [], None, None, None)
"""
PARSER = """
import argparse
def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
"""


def write_megatron(place: Path) -> Path:
    """A `megatron.training` with as much as a patch manager touches, and a loop that has taken `train_step` by name."""
    training = place / "megatron" / "training"
    training.mkdir(parents=True)
    for file, text in {"__init__.py": "", "training.py": TRAINING, "arguments.py": PARSER}.items():
        (training / file).write_text(text)
    (place / "megatron" / "__init__.py").write_text("")
    (place / "user_loop.py").write_text(LOOP)
    return place


@contextmanager
def imported_anew(*places: Path) -> Iterator[None]:
    """Modules of `places` come first and are gone again afterwards; the probe observes nobody before and after."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ROOTS}
    path = list(sys.path)

    def clear() -> None:
        patches.observe(None)
        request.forget()
        for name in [name for name in sys.modules if name.partition(".")[0] in _ROOTS]:
            del sys.modules[name]

    clear()
    sys.path[:0] = [str(place) for place in places]
    try:
        yield
    finally:
        clear()
        sys.path[:] = path
        sys.modules.update(kept)


def observer() -> Any:
    """Something that takes every event and swallows nothing."""
    seen = MagicMock()
    for name in ("iteration", "driven", "safely", "evaluation"):
        getattr(seen, name).return_value.__exit__.return_value = False
    seen.iteration.return_value.__enter__.return_value = {}
    return seen
