"""Records of MindSpeed's own operators, which call C++ extensions, by the names of the existing tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forkpool import run_ranks
from mindspeed_world import STAND_IN

from msprobe_integrations.autoload import imports
from msprobe_integrations.torch.capture import operator_libraries

TESTS = Path(__file__).parents[2]
OPERATORS = ("npu_rotary_position_embedding", "npu_gmm", "npu_moe_token_permute", "npu_matmul_add_fp32")
MODULES = dict(zip(OPERATORS, ("npu_rotary_position_embedding", "gmm", "npu_moe_token_permute", "npu_matmul_add")))


def _functions() -> dict[str, Any]:
    """The operators, as a module of MindSpeed takes them: by name."""
    return {name: getattr(__import__(f"mindspeed.ops.{module}", fromlist=[name]), name) for name, module in MODULES.items()}


def _model(functions: dict[str, Any], main_grad: torch.Tensor) -> torch.Tensor:
    """Every operator once, and uses of what they have made."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    turned = functions["npu_rotary_position_embedding"](x, torch.ones(8), sin=torch.zeros(8))
    product = functions["npu_gmm"](turned, weight)
    tokens, _ = functions["npu_moe_token_permute"](product, torch.tensor([3, 1, 0, 2]))
    loss = torch.sum(tokens)
    loss.backward()
    torch.neg(main_grad)
    functions["npu_matmul_add_fp32"](x.detach(), product.detach(), main_grad)
    torch.abs(main_grad)
    return loss.detach()


def _recorded(taken: str) -> dict[str, Any]:
    """What a capture sees of two steps; `taken`: when the program takes the names."""
    sys.path[:0] = [str(STAND_IN), str(TESTS / "torch")]
    from capturing import capture, entries, stat

    imports.forget(operator_libraries.PACKAGE, operator_libraries._package)  # as in a process that has captured nothing yet
    operator_libraries._asked = False
    early = _functions() if taken == "before" else None
    program = sys.modules[__name__]  # a module that keeps them under names of its own
    if early is not None:
        vars(program).update({f"own_{name}": function for name, function in early.items()})
    grad = torch.ones(8, 8)

    def functions() -> dict[str, Any]:
        return {name: vars(program)[f"own_{name}"] for name in OPERATORS} if early is not None else _functions()

    frames = capture(None, lambda: _model(functions(), grad), "L1", 2)
    found: dict[str, Any] = {"names": [e.name for e in frames[0].entries], "again": [e.name for e in frames[1].entries]}
    seen = entries(frames[0])

    def means(name: str, section: str) -> list[float | None]:
        values = seen[name].sections[section] or []
        refs = [v for v in (values.values() if isinstance(values, dict) else values) if hasattr(v, "row")]
        return [stat(frames[0], ref).mean if ref.row >= 0 else None for ref in refs]

    found["output"] = {name: means(name, "output") for name in seen if name.startswith("MindSpeed.")}
    found["kwargs"] = sorted(seen["MindSpeed.npu_rotary_position_embedding.0.forward"].sections["input_kwargs"])
    found["before"], found["after"] = means("Torch.neg.0.forward", "input_args"), means("Torch.abs.0.forward", "input_args")
    plain = torch.ones(8, 8)
    _model(_functions(), plain)
    found["main_grad"] = float(plain.double().mean())
    return found


@pytest.mark.parametrize("taken", ["before", "within"])
def test_operators_have_records(taken: str) -> None:
    """Forward and backward of each, in order and numbered, with values, whether the program took the name before the first capture or
    after; what is below them is theirs. What one has written by pointer is read anew."""
    (found,) = run_ranks(1, _recorded, taken)
    ours = [name for name in found["names"] if not name.startswith(("Torch.", "Tensor."))]
    assert ours == [
        *(f"MindSpeed.{name}.0.forward" for name in OPERATORS[:3]),
        *(f"MindSpeed.{name}.0.backward" for name in reversed(OPERATORS[:3])),
        f"MindSpeed.{OPERATORS[3]}.0.forward",
    ]
    assert found["again"] == found["names"]
    values = {name: means for name, means in found["output"].items() if name != "MindSpeed.npu_matmul_add_fp32.0.forward"}
    assert all(means and None not in means for means in values.values()), values
    assert found["kwargs"] == ["sin"]
    assert found["before"] == [1.0]
    assert found["after"] == [pytest.approx(found["main_grad"], rel=1e-6)]


def _spaces() -> list[str]:
    sys.path.insert(0, str(TESTS / "torch"))
    from capturing import capture

    made = []
    for space, name in (("mindspeed", "npu_new"), ("atb", "npu_mla_preprocess")):
        library = torch.library.Library(space, "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeImplicitAutograd")
        made.append(library)
    x = torch.ones(2, requires_grad=True)
    work = lambda: torch.ops.atb.npu_mla_preprocess(torch.ops.mindspeed.npu_new(x)).backward(torch.ones(2))  # noqa: E731
    return [e.name for e in capture(None, work, "L1")[0].entries if not e.name.startswith("Torch.")]


def test_operators_of_the_dispatcher() -> None:
    """``torch.ops.mindspeed.X`` is ``MindSpeed.X``, ``torch.ops.atb.X`` is ``NPU.X``."""
    names = ["MindSpeed.npu_new.0", "NPU.npu_mla_preprocess.0"]
    (found,) = run_ranks(1, _spaces)
    assert found == [f"{name}.forward" for name in names] + [f"{name}.backward" for name in reversed(names)]
