"""One script, public names only, that runs unchanged under this project and under the existing tool: uses of `PrecisionDebugger`.

python tests/probe/existing_debugger.py OUT_DIR
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

CASES = ("save", "tokens", "custom", "focus", "pairs", "lists", "windows")


def config(dump_path: str, level: str, **keys: Any) -> str:
    """A config.json next to the dump."""
    path = Path(dump_path).with_name("config.json")
    section: dict[str, Any] = {"scope": [], "list": []}
    document = {"task": "statistics", "dump_path": dump_path, "rank": [], "step": [], "level": level, "risk_level": "ALL", **keys}
    path.write_text(json.dumps({**document, "statistics": section}))
    return str(path)


def main(case: str, dump_path: str) -> None:
    """Run one case."""
    import torch

    from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end

    torch.manual_seed(3)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(self.a(t)))

    net, x = Net(), torch.linspace(-1, 1, 6).reshape(2, 3)
    if case == "save":
        debugger = PrecisionDebugger(config(dump_path, "debug"))
        for _ in range(2):
            given = (x * 1).requires_grad_()
            h = net.a(given)
            PrecisionDebugger.save(h, "h")
            PrecisionDebugger.save(net.a.weight, "w")
            PrecisionDebugger.save({"a": [h, (1, 2.5)], "b": "s", "n": {}}, "nest")
            PrecisionDebugger.save({"x": given}, "given")
            PrecisionDebugger.save(5, "five")
            PrecisionDebugger.save(h, "h", save_backward=False)
            PrecisionDebugger.save(h * 1, "unused")
            (h * 2).sum().backward(retain_graph=True)
            (h * 3).sum().backward()
            debugger.step()
    elif case == "tokens":
        debugger = PrecisionDebugger(config(dump_path, "mix"))
        for _ in range(2):
            debugger.start(net, token_range=[1, 2])
            for _ in range(5):
                torch.sin(net(x))
            debugger.stop()
            debugger.step()
    elif case == "custom":
        debugger = PrecisionDebugger(config(dump_path, "mix"))
        pkg: Any = types.ModuleType("my.pkg")
        pkg.f = lambda t, y=1: torch.matmul(net.a(t), t.t()) * y
        debugger.register_custom_api(pkg, "f")
        debugger.start(net)
        pkg.f(x)
        torch.matmul(x, torch.tanh(x).t())
        given = (x + 0).requires_grad_()
        pkg.f(given, y=2).sum().backward()
        debugger.restore_custom_api(pkg, "f")
        pkg.f(x)
        debugger.stop()
        debugger.step()
    elif case == "focus":
        debugger = PrecisionDebugger(config(dump_path, "L1"))
        debugger.start()
        net(x)
        module_dump(net.b, "mine")
        y = net(x)
        torch.sin(x)
        module_dump_end()
        torch.cos(x)
        y.sum().backward()
        debugger.stop()
        debugger.step()
    elif case == "pairs":
        debugger = PrecisionDebugger(config(dump_path, "mix"))
        for _ in range(2):
            debugger.start(net)
            torch.sin(net.a(x))
            debugger.stop()
            torch.sin(net.a(x))
            debugger.start(net)
            torch.sin(net.a(x))
            debugger.stop()
            debugger.step()
    elif case == "lists":
        debugger = PrecisionDebugger(config(dump_path, "L0"))
        second = torch.nn.Sequential(torch.nn.Linear(3, 2))
        debugger.start([net, second])
        second(net(x)).sum().backward()
        debugger.stop()
        debugger.step()
    elif case == "windows":
        debugger = PrecisionDebugger(config(dump_path, "L0", step=[3, "5-6"]))
        debugger.set_init_step(2)
        for _ in range(6):
            debugger.start(net)
            net(x)
            debugger.stop()
            debugger.step()


def every_case(out: Path) -> None:
    """Each case in a forked process of its own: one import for all."""
    import torch  # noqa: F401

    import msprobe.pytorch  # noqa: F401

    for case in CASES:
        child = os.fork()
        if child == 0:
            (out / case).mkdir()
            main(case, str(out / case / "dump"))
            sys.exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"case {case} failed")


if __name__ == "__main__":
    every_case(Path(sys.argv[1]).absolute())
