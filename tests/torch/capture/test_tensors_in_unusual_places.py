"""Tensors in unusual homes: model outputs, dataclasses, caches, wrappers, transforms, TorchScript."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from capturing import capture, entries, stat
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

from msprobe_engine.core.records import Entry, Frame, Opaque, TensorRef, leaves


class ModelOutput(collections.OrderedDict):
    """As the model outputs of Hugging Face: a dict of what is not None, readable as attributes and by number."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


@dataclasses.dataclass
class Batch:
    a: torch.Tensor
    more: list[torch.Tensor]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Around(nn.Module):
    """Calls a function as a module does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def fresh(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (2, 3)), requires_grad=True) * 1


def run(function: Callable[..., Any], call: Callable[[nn.Module], Any], level: str = "L0") -> tuple[Frame, dict[str, Entry]]:
    model = nn.ModuleDict({"m": Around(function)})
    frame = capture(model, lambda: call(model["m"]), level)[0]
    return frame, entries(frame)


def backward_of(found: dict[str, Entry]) -> Entry:
    return found["Module.m.Around.backward.0"]


def places(entry: Entry) -> list[str]:
    return [place for place, _ in leaves(entry)]


def test_model_output() -> None:
    """The items of the output by name, its class, and the gradients of both tensors, for inputs that come by keyword only."""
    linear = nn.Linear(3, 3)

    def forward(ids: torch.Tensor, scale: float = 1.0) -> CausalOutput:
        hidden = linear(ids) * scale
        return CausalOutput(loss=hidden.sum(), logits=hidden)

    frame, found = run(forward, lambda m: m(ids=fresh(), scale=1.0).loss.backward())
    record = found["Module.m.Around.forward.0"]
    assert places(record) == ["kwargs.ids", "output.0.loss", "output.0.logits"]
    assert record.sections["output"][0]["class_type"] == Opaque(f"{__name__}.CausalOutput")
    assert places(backward_of(found)) == ["input.0", "input.1", "output.0"]
    assert stat(frame, backward_of(found).sections["input"][0]).max == 1.0


def test_dataclass_and_named_tuple() -> None:
    """Fields by name, the class beside them; gradients of every tensor inside, in order."""

    def forward(batch: Batch, pair: Pair) -> tuple[Batch, Pair]:
        return Batch(batch.a * 2, [batch.more[0] * 3]), Pair(pair.x * 5, pair.y * 7)

    def call(module: nn.Module) -> None:
        batch, pair = module(Batch(fresh(), [fresh()]), Pair(fresh(), fresh()))
        (batch.a + batch.more[0] + pair.x + pair.y).sum().backward()

    frame, found = run(forward, call)
    record = found["Module.m.Around.forward.0"]
    assert places(record) == [f"{side}.{p}" for side in ("input", "output") for p in ("0.a", "0.more.0", "1.x", "1.y")]
    assert record.sections["input_args"][0]["class_type"] == Opaque(f"{__name__}.Batch")
    assert record.sections["output"][1]["class_type"] == Opaque(f"{__name__}.Pair")
    assert [stat(frame, ref).max for ref in backward_of(found).sections["output"]] == [2.0, 3.0, 5.0, 7.0]


def test_plain_containers_have_no_class() -> None:
    """Dicts, lists and return types stay what they are in the existing format."""
    _, found = run(lambda *a: [a[0]["t"] * 2], lambda m: m({"t": fresh()}, torch.max(fresh(), 0), {1, 2}, collections.deque([fresh()])))
    args = found["Module.m.Around.forward.0"].sections["input_args"]
    assert list(args[0]) == ["t"]
    assert [type(a).__name__ for a in args[1]] == ["TensorRef", "TensorRef"]
    assert [a.json["value"] for a in args[2]] == [1, 2]
    assert isinstance(args[3][0], TensorRef)


def test_generators_are_not_used_up() -> None:
    """An iterator keeps what it has for the module."""
    taken: list[Any] = []
    _, found = run(lambda *its: taken.extend(list(it) for it in its), lambda m: m((i for i in range(3)), iter([4]), map(str, [5])))
    assert taken == [[0, 1, 2], [4], ["5"]]
    assert [a.json["value"] for a in found["Module.m.Around.forward.0"].sections["input_args"]] == [None] * 3


def test_packed_sequence() -> None:
    """The parts of a packed sequence, and the gradients of its data."""
    model = nn.ModuleDict({"m": nn.LSTM(3, 3, batch_first=True)})
    packed = nn.utils.rnn.pack_sequence([fresh(), fresh()[:1]])
    found = entries(capture(model, lambda: model["m"](packed)[0].data.sum().backward(), "L0")[0])
    assert places(found["Module.m.LSTM.forward.0"])[:2] == ["input.0.data", "input.0.batch_sizes"]
    assert places(found["Module.m.LSTM.backward.0"]) == ["input.0", "output.0"]


def test_containers_of_the_users_framework() -> None:
    """Classes registered with torch's pytree are opened; other objects are named and left alone."""

    class Registered:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

    class Unknown:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

    _pytree.register_pytree_node(Registered, lambda r: ([r.t], None), lambda ts, _: Registered(*ts))
    try:
        _, found = run(lambda r, u: r.t * u.t, lambda m: m(Registered(fresh()), Unknown(fresh())))
    finally:
        _pytree.SUPPORTED_NODES.pop(Registered)
    record = found["Module.m.Around.forward.0"]
    assert places(record) == ["input.0.0", "output.0"]
    assert record.sections["input_args"][1].json["type"].endswith("Unknown")


def test_key_value_caches() -> None:
    """The caches of transformers, old (lists) and new (layers), are opened; what else such an object holds is not."""
    module = types.ModuleType("transformers.cache_utils")
    source = """
class Layer:
    def __init__(self, k, v): self.keys, self.values, self.dtype = k, v, k.dtype
class OldCache:
    def __init__(self, k, v): self.key_cache, self.value_cache, self._seen = [k], [v], 3
class NewCache:
    def __init__(self, k, v): self.layers, self.offloading = [Layer(k, v)], False
"""
    exec(source, module.__dict__)
    _, found = run(lambda *_: None, lambda m: m(module.OldCache(fresh(), fresh()), module.NewCache(fresh(), fresh())))
    record = found["Module.m.Around.forward.0"]
    assert places(record) == ["input.0.key_cache.0", "input.0.value_cache.0", "input.1.layers.0.keys", "input.1.layers.0.values"]
    assert set(record.sections["input_args"][0]) == {"key_cache", "value_cache", "class_type"}


class Mine(torch.Tensor):
    """A subclass without a say."""


class Scaled(torch.Tensor):
    """A wrapper of two tensors, as quantisation libraries have them."""

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)
        made.q, made.scale = q, scale
        return made

    q: torch.Tensor
    scale: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    def dequantize(self) -> torch.Tensor:
        return self.q * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale)
        plain = _pytree.tree_map(lambda t: t.dequantize() if isinstance(t, Scaled) else t, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Logged(torch.Tensor):
    """A wrapper of one tensor that does not say what it holds."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Logged:
        made: Logged = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
        made.elem = elem
        return made

    elem: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _pytree.tree_map(lambda t: t.elem if isinstance(t, Logged) else t, (args, kwargs or {}))
        return _pytree.tree_map(lambda t: Logged(t) if isinstance(t, torch.Tensor) else t, func(*plain[0], **plain[1]))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.full((2, 3), 4.0).as_subclass(Mine), "Mine"),
        (lambda: Scaled(torch.full((2, 3), 8, dtype=torch.int8), torch.tensor(0.5)), "Scaled"),
        (lambda: Logged(torch.full((2, 3), 4.0)), "Logged"),
    ],
)
def test_subclasses(make: Callable[[], torch.Tensor], kind: str) -> None:
    """Their class is in the record, their statistics are those of what they mean, and the calls around them are recorded."""
    value = make()
    frame = capture(None, lambda: F.linear(value, torch.ones(1, 3)), "L1")[0]
    record = entries(frame)["Functional.linear.0.forward"]
    ref = record.sections["input_args"][0]
    assert ref.description.type.endswith(kind)
    assert (stat(frame, ref).max, stat(frame, record.sections["output"][0]).max) == (4.0, 12.0)


def test_transforms_give_the_same_results() -> None:
    """vmap, grad, jvp, jacobians: results are those without a capture, the user's calls are recorded, torch's own are not."""
    x = torch.arange(6.0).view(2, 3)
    linear = nn.Linear(3, 2)

    def work() -> list[torch.Tensor]:
        def loss(weights: Any, row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(linear, weights, (row,)).square().sum()

        weights = dict(linear.named_parameters())
        return [
            torch.func.vmap(lambda row: (row * 2).sum())(x),
            torch.func.grad(lambda t: (t**2).sum())(x),
            torch.func.jvp(lambda t: t.sin(), (x,), (x,))[1],
            torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)["weight"],
            torch.func.jacrev(lambda t: t * t)(x[0]),
            torch.func.hessian(lambda t: (t**3).sum())(x[0]),
        ]

    results: list[torch.Tensor] = []
    frame = capture(nn.ModuleDict({"linear": linear}), lambda: results.extend(work()), "mix")[0]
    assert all(torch.equal(a, b) for a, b in zip(results, work(), strict=True))
    found = entries(frame)
    assert "Module.linear.Linear.forward.0" in found
    assert stat(frame, found["Tensor.sum.0.forward"].sections["output"][0]).max == 24.0
    assert not [n for n in found if "make_dual" in n or n.startswith("prims.")]


def test_torchscript_at_its_boundary() -> None:
    """Scripted and traced modules are records under the class that was scripted; what is inside is not, but for parameter gradients."""
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    traced = torch.jit.trace(nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3))
    model = nn.ModuleDict({"s": script, "t": traced})
    before = {id(m): dict(m.__dict__) for m in (script, traced)}

    found = entries(capture(model, lambda: traced(script(fresh())).sum().backward(), "L0")[0])
    assert set(found) == {
        *(f"Module.{m}.Sequential.{d}.0" for m in "st" for d in ("forward", "backward")),
        *(f"Module.{m}.0.Linear.parameters_grad.0" for m in "st"),
    }
    assert all(set(m.__dict__) == set(before[id(m)]) for m in (script, traced))


def test_frozen_parameters_do_not_hold_the_others_back() -> None:
    """The gradients of a module are recorded when those of its trained parameters are there, not at the end of the step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    names = [e.name for e in capture(model, lambda: model(torch.ones(2, 3)).sum().backward(), "L0")[0].entries]
    assert names.index("Module.1.Linear.parameters_grad.0") < names.index("Module.0.Linear.backward.0")


def test_replaced_parameters_are_recorded_as_they_are() -> None:
    """A parameter that was replaced after the hooks were put on: the record has the new one."""
    model = nn.Sequential(nn.Linear(3, 3))

    def work() -> None:
        model[0].weight = nn.Parameter(torch.full((3, 3), 9.0))
        model(torch.ones(1, 3))

    frame = capture(model, work, "L0")[0]
    assert stat(frame, entries(frame)["Module.0.Linear.forward.0"].sections["parameters"]["weight"]).max == 9.0


def test_places_of_gradients() -> None:
    """Numbers, index tensors and masks have no place; floating-point tensors without a gradient have an empty one at an API."""
    weight = torch.ones(4, 3, requires_grad=True)
    ids = torch.tensor([1, 0])

    def work() -> None:
        hidden = F.embedding(ids, weight)
        normed = F.layer_norm(hidden, (3,), torch.ones(3), None)
        torch.where(normed > 0, normed, 0.5).sum().backward()

    found = entries(capture(None, work, "L1")[0])
    shapes = {
        name.split(".")[1]: [None if r is None else r.description.shape for r in entry.sections["output"]]
        for name, entry in found.items()
        if name.endswith("backward")
    }
    assert shapes["embedding"] == [(4, 3)]
    assert shapes["layer_norm"] == [(2, 3), None]
    assert shapes["where"] == [(2, 3)]
    _, found = run(
        lambda x, k, mask, y, z=None: x * k * mask + y * z, lambda m: m(fresh(), 3, torch.ones(2, 3), fresh(), z=fresh()).sum().backward()
    )
    assert [r.description.shape for r in backward_of(found).sections["output"]] == [(2, 3)] * 3
