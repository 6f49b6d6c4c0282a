"""The grammar of record names and of tensor file names: parse and format, in one place.

Names are those of the existing dump format, versions 8.1.1 and 26.2.0 (`docs/guide/dump.md` has the table for users). Mind the number:
it stands before the direction in API names and after it in module names.

>>> parse("Functional.linear.2.forward")
ApiName(prefix='Functional', api='linear', number=2, direction='forward')
>>> str(ModuleName("Module", "blocks.0.fc", "Linear", "backward", 1))
'Module.blocks.0.fc.Linear.backward.1'
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from msprobe_engine.core.errors import DumpFormatError, UsageError

FORWARD, BACKWARD = "forward", "backward"
OPTIMIZER, CLIP_GRAD = "optimizer", "clip_grad"
MICRO_STEP_KEY = "megatron_micro_step_number"
"""A number among the nodes of construct.json, no node itself (26.2.0 with Megatron)."""

_API = re.compile(r"(?P<prefix>.+?)\.(?P<api>[^.]+)\.(?P<n>[0-9]+)\.(?P<dir>forward|backward)", re.DOTALL)
_MODULE = re.compile(r"(?P<kind>Module|Cell)\.(?P<path>.+)\.(?P<cls>[^.]+)\.(?P<dir>forward|backward)\.(?P<n>[0-9]+)", re.DOTALL)
_PARAMETERS_GRAD = re.compile(r"(?P<kind>Module|Cell)\.(?P<path>.+)\.(?P<cls>[^.]+)\.parameters_grad(?:\.(?P<n>[0-9]+))?", re.DOTALL)
_DEBUG = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<n>[0-9]+)\.debug", re.DOTALL)
_MAX_DIGITS = 18  # a call number beyond this is no number of ours, and int() of a huge text is slow
_FORBIDDEN = re.compile(r"[/\\\0-\x1f]|^\.+$")


OPERATOR_SPACES = {"aten": "Aten", "npu": "NPU", "atb": "NPU", "mindspeed": "MindSpeed"}
"""Namespaces of torch's operators that have a prefix of their own; ``npu`` and ``atb`` are those of torch_npu, whose Python names are
these operators."""
_PLACES = {
    "torch.nn.functional.": "Functional.",
    "nn.functional.": "Functional.",
    "F.": "Functional.",
    "torch.Tensor.": "Tensor.",
    "torch.linalg.": "Torch.",
    "torch.fft.": "Torch.",
    "torch.special.": "Torch.",
    "torch.distributed.": "Distributed.",
    **{f"torch.ops.{space}.": f"{prefix}." for space, prefix in OPERATOR_SPACES.items()},
    "torch.ops.": "",
    "torch_npu.": "NPU.",
    "torch.": "Torch.",
    "mindspore.mint.nn.functional.": "MintFunctional.",
    "mindspore.mint.distributed.": "MintDistributed.",
    "mindspore.mint.linalg.": "Mint.",
    "mindspore.mint.special.": "Mint.",
    "mindspore.mint.": "Mint.",
    "mindspore.ops.": "Functional.",
    "mindspore.Tensor.": "Tensor.",
}
"""Where a program has a function, a longer place before a shorter one: the prefix of its records."""
CALLS = tuple(dict.fromkeys(prefix for prefix in _PLACES.values() if prefix and not prefix.endswith("Distributed.")))
"""With what names of calls begin that are no collectives."""
_CLASS = re.compile(
    r"(?:torch\.nn|nn|mindspore\.nn|mindspore\.mint\.nn)\.(?:\w+\.)*(?P<cls>[A-Z]\w*)(?:\.(?P<method>forward|backward|__call__|construct))?"
)


class ApiName(NamedTuple):
    """One call of a function: ``{prefix}.{api}.{number}.{direction}``. The prefix may contain dots (custom functions,
    ``Primitive.{attribute}``)."""

    prefix: str
    api: str
    number: int
    direction: str

    def __str__(self) -> str:
        return f"{self.prefix}.{self.api}.{self.number}.{self.direction}"


class ModuleName(NamedTuple):
    """One call of a module: ``{kind}.{path}.{cls}.{direction}.{number}``; kind is ``Module`` or ``Cell``.

    ``Module.0.Linear.forward.0`` can be list index 0 (a list of models was given) or the child "0": `path` is not taken apart."""

    kind: str
    path: str
    cls: str
    direction: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.path}.{self.cls}.{self.direction}.{self.number}"


class ParametersGradName(NamedTuple):
    """Gradients of a module's own parameters: ``{kind}.{path}.{cls}.parameters_grad[.{number}]`` (8.1.1 has no number: None)."""

    kind: str
    path: str
    cls: str
    number: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind}.{self.path}.{self.cls}.parameters_grad"
        return text if self.number is None else f"{text}.{self.number}"


class DebugName(NamedTuple):
    """What the user saved: ``{name}[_grad].{number}.debug``. A name that ends in ``_grad`` reads as a gradient; the format has no
    way to tell them apart."""

    name: str
    number: int
    is_grad: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'_grad' if self.is_grad else ''}.{self.number}.debug"


RecordName = ApiName | ModuleName | ParametersGradName | DebugName


@lru_cache(maxsize=65536)  # the names of a step come back in every step
def parse(name: str) -> RecordName | None:
    """The parts of a record name; None when it follows no rule of the grammar (special nodes, other tools' names).

    ``str(parse(name)) == name`` holds for names with call numbers as the tools write them (no leading zeros)."""
    if name.endswith(".debug"):
        m = _DEBUG.fullmatch(name)
        return DebugName(m["name"], int(m["n"]), m["grad"] is not None) if m and _short(m["n"]) else None
    if name.startswith(("Module.", "Cell.")):
        m = _MODULE.fullmatch(name)
        if m:
            return ModuleName(m["kind"], m["path"], m["cls"], m["dir"], int(m["n"])) if _short(m["n"]) else None
        m = _PARAMETERS_GRAD.fullmatch(name)
        if m:
            number = m["n"]
            return ParametersGradName(m["kind"], m["path"], m["cls"], int(number) if number else None) if _short(number or "") else None
    m = _API.fullmatch(name)
    return ApiName(m["prefix"], m["api"], int(m["n"]), m["dir"]) if m and _short(m["n"]) else None


def is_number(word: str) -> bool:
    """Digits that are a number of ours: what `int` takes, unlike ``²``, and not thousands of them."""
    return word.isdecimal() and _short(word)


def _short(digits: str) -> bool:
    return len(digits) <= _MAX_DIGITS


def direction(name: str) -> str | None:
    """``forward``, ``backward`` (parameter gradients and saved gradients too) or None for what has no direction."""
    parsed = parse(name)
    if isinstance(parsed, (ApiName, ModuleName)):
        return parsed.direction
    if isinstance(parsed, ParametersGradName) or (isinstance(parsed, DebugName) and parsed.is_grad):
        return BACKWARD
    return None


PASS = 1_000_000
"""Added to the number of a call in the names of its backward records, for each further backward pass through it (``retain_graph``)."""


def of_first_pass(call: str) -> str:
    """The call that a further backward pass went through: ``Functional.linear.2`` of ``Functional.linear.1000002``; any other is itself."""
    base, _, number = call.rpartition(".")
    return f"{base}.{int(number) % PASS}" if number.isascii() and number.isdigit() and _short(number) and int(number) >= PASS else call


def is_module(name: str) -> bool:
    """True for the forward or backward call of a module."""
    return isinstance(parse(name), ModuleName)


def tensor_file(entry: str, place: str, suffix: str = ".pt") -> str:
    """Name of the file that holds one tensor: ``{entry}.{place}{suffix}``.

    Args:
        entry: record name.
        place: as `msprobe_engine.core.records.leaves` gives it (``input.0``, ``kwargs.mask``, ``output.0.1``, ``parameters.weight``,
            a parameter's name in gradient entries, ``""`` for a debug variable that is one tensor).
        suffix: ``.pt`` (PyTorch) or ``.npy`` (MindSpore).

    Raises:
        UsageError: the name would leave the directory or cannot be a file name.
    """
    file = f"{entry}.{place}{suffix}" if place else f"{entry}{suffix}"
    if _FORBIDDEN.search(file) or len(file.encode("utf-8", "surrogatepass")) > 255:
        raise UsageError(
            f"tensor file name {file[:120]!r}: at most 255 bytes, no / or \\ and no control "
            "characters; rename the module, argument or saved variable"
        )
    return file


def check_file_name(name: str, where: str) -> str:
    """`name` if it is a plain file name; the guard for names read from files.

    Raises:
        DumpFormatError: it could point outside its directory (`where` says which file holds it).
    """
    if not name or _FORBIDDEN.search(name) or len(name) > 1024:
        raise DumpFormatError(
            f"{where}: tensor file name {name[:120]!r} is not a plain file name; the dump is damaged or was tampered with, do not use it"
        )
    return name


def check_file_names(names: Collection[str], where: str) -> None:
    """`check_file_name` for thousands at once.

    Raises:
        DumpFormatError: one of them could point outside its directory.
    """
    short = max(map(len, names), default=0) <= 1024
    if not short or not all(map(str.strip, names, repeat("."))) or _FORBIDDEN.search("".join(names)):
        for name in names:
            check_file_name(name, where)


def forward_twin(name: str) -> str:
    """Record name of the forward call that a backward record belongs to."""
    return name.replace(".backward", ".forward", 1) if ".backward" in name else name


def backward_twin(name: str) -> str:
    """Record name of the backward call that belongs to a forward record."""
    return name.replace(".forward", ".backward", 1)


def is_collective(name: str) -> bool:
    """Is it a record of communication?"""
    return name.startswith(("Distributed.", "MintDistributed."))


def node_parent(node: Any) -> str | None:
    """The parent in a value of construct.json: text, null, ``""`` (8.1.1, first call) or ``[parent, micro step]`` (26.2.0, Megatron)."""
    if isinstance(node, (list, tuple)):
        node = node[0] if node else None
    return node if isinstance(node, str) and node else None


def node_parents(construct: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: node_parent(node) for name, node in construct.items() if name != MICRO_STEP_KEY}


def node_micro_step(node: Any) -> int | None:
    """The micro step in a value of construct.json; None: it has none."""
    return node[1] if isinstance(node, (list, tuple)) and len(node) > 1 and type(node[1]) is int else None


def layer_of(name: str, vpp_stage: int = 0) -> str:
    """The layer that a tensor belongs to: its name up to the first number; without a number the first two words of its module.

    ``decoder.layers.3.mlp.linear_fc1.weight`` -> ``decoder.layers.3``, ``embedding.word_embeddings.weight`` ->
    ``embedding.word_embeddings``. Leading ``module.`` words are wrappers and left out; chunk v > 0 gives ``v:`` in front.
    """
    words = name.split(".")
    while len(words) > 1 and words[0] in ("module", "_fsdp_wrapped_module", "_orig_mod", ""):
        words = words[1:]
    number = next((i for i, word in enumerate(words) if word.isdigit()), None)
    if number is not None and number > 0:
        layer = ".".join(words[: number + 1])
    else:
        layer = ".".join(words[:-1][:2]) or words[0] or "root"
    return f"{vpp_stage}:{layer}" if vpp_stage > 0 else layer


def name_in_records(name: str) -> str:
    """What records have in their names for a function, a class of modules or its pass as a program names it; another name as it is.

    >>> name_in_records("torch.nn.functional.softmax"), name_in_records("torch.linalg.norm"), name_in_records("nn.GRU.forward")
    ('Functional.softmax', 'Torch.norm', '.GRU.forward')
    """
    if found := _CLASS.fullmatch(name):
        direction = {None: "", "backward": BACKWARD}.get(found["method"], FORWARD)
        return f".{found['cls']}.{direction}"
    return next((prefix + name.removeprefix(place) for place, prefix in _PLACES.items() if name.startswith(place) and name != place), name)
