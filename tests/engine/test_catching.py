"""Whoever catches more than its own errors on the training's thread lets through what is the training's (`raise_of_training`).

A handler for `Exception` has to call it, to hand the error on (`raise`), or to be of a module that runs on no training's thread.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msprobe_engine

ROOT = Path(msprobe_engine.__file__).parents[1]
OFFLINE = (
    "compare", "checkpoint", "diagnose", "graph", "monitor", "cli", "code_mapping", "parse", "trends", "web", "report", "workflow",
)  # fmt: skip
"""Packages of the engine that commands use, after the training."""
BELOW = ("core", "settings")
"""What knows nothing of a training: these hand on what they catch as errors of files."""
ELSEWHERE = {
    "msprobe_engine/accuracy": "the pre-check: commands, servers, and threads that send; but for the queue of messages",
    "msprobe_engine/config_check/background.py": "a thread",
    "msprobe_engine/dump": "threads that write",
    "msprobe_engine/grad_probe/background.py": "a thread",
    "msprobe_engine/guard.py": "the helper",
    "msprobe_engine/incident/notify.py": "a thread",
    "msprobe_engine/pending_steps.py": "handed to the training's thread, which raises it",
    "msprobe_engine/rules/stalled.py": "a thread",
    "msprobe_engine/sinks": "the writer's thread, and servers",
    "msprobe_engine/writer.py": "a thread",
    "msprobe_integrations/autoload": "before there is a training",
    "msprobe_integrations/common/directory_channel.py": "a thread",
    "msprobe_integrations/common/exits.py": "the process is ending, and all is to be finished",
    "msprobe_integrations/doctor": "a command",
    "msprobe_integrations/mindspore/accuracy": "a command",
    "msprobe_integrations/reliance.py": "before there is a training",
    "msprobe_integrations/torch/accuracy": "a command",
    "msprobe_integrations/torch/plain_loop_sight.py": "raises it when all is taken off",
    "msprobe_integrations/torch/step_exchange.py": "a thread",
}
TOLD = ("raise_of_training", "is_of_training")


def files() -> Iterator[Path]:
    for file in sorted((ROOT / "msprobe_integrations").rglob("*.py")):
        yield file
    for file in sorted((ROOT / "msprobe_engine").rglob("*.py")):
        if file.relative_to(ROOT / "msprobe_engine").parts[0] not in (*OFFLINE, *BELOW):
            yield file


def catches_too_much(node: ast.ExceptHandler) -> bool:
    names = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    if not any(name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")) for name in names):
        return False
    last = node.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    return not any(isinstance(part, ast.Name) and part.id in TOLD for part in ast.walk(node))


def test_what_is_of_the_training_is_let_through_wherever_more_is_caught() -> None:
    """Also `contextlib.suppress(Exception)`, in whose place is `suppress_faults`."""
    wrong = []
    for file in files():
        name = file.relative_to(ROOT).as_posix()
        if any(name == part or name.startswith(f"{part}/") for part in ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            suppresses = isinstance(node, ast.Call) and ast.unparse(node) in ("contextlib.suppress(Exception)", "suppress(Exception)")
            if suppresses or (isinstance(node, ast.ExceptHandler) and catches_too_much(node)):
                wrong.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong
