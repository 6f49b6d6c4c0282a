"""The source of an operator script: what was recorded of one call, as Python that people read and change, and the code that runs it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msprobe_engine.accuracy.scripts.literals import DEVICE, DTYPE, Arguments, CannotWrite, Spec
from msprobe_engine.accuracy.verdict.standards import belongs, standard_of
from msprobe_engine.core import names

MARK = "# " + "-" * 118 + "\n"
"""Line of the support module behind which the code begins that scripts get; the imports stand before it."""
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
DIRECTIONS = {FORWARD: (FORWARD,), BACKWARD: (BACKWARD,), BOTH: (FORWARD, BACKWARD)}
_INSIDE = {FORWARD: "inside", BACKWARD: "inside_backward"}
"""Lists of standards.yaml: operators whose narrow kernels compute in float32."""
_WIDTH = 120
INDEXED = frozenset(("__getitem__", "__setitem__"))


class Function(Protocol):
    """How a script calls an API.

    Attributes:
        method: name of the method when it is one of tensors, and may be written behind a dot; else empty.
        imports: further modules that the script imports.
    """

    @property
    def expression(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def imports(self) -> tuple[str, ...]: ...


class Dialect(Protocol):
    """What a framework's integration knows: how things are called there.

    Attributes:
        framework: ``torch`` or ``mindspore``; as dumps and messages have it.
        suffix: of data files.
        says_gradients: do records of tensors say whether a gradient is wanted?
        tuples: do functions want tuples of whole numbers?
    """

    framework: str
    suffix: str
    says_gradients: bool
    tuples: bool

    def function(self, name: names.ApiName) -> Function:
        """The function of a record.

        Raises:
            CannotWrite: it is none that a script can call.
        """
        ...

    def explain_refusal(self, name: names.ApiName, record: Mapping[str, Any]) -> str | None:
        """Why a call is not worth a script though its function is known (it draws random numbers); None when it is."""
        ...

    def dtype(self, name: str) -> str | None:
        """Source of a type by its name in a dump (``torch.float32``, ``Float32``); None: there is no such type."""
        ...

    def raises(self, name: str) -> bool:
        """Does the bench calculate in a wider type than this one?"""
        ...

    def differentiable(self, name: str) -> bool:
        """Can a tensor of this type have a gradient?"""
        ...

    def special(self, kind: str, item: Mapping[str, Any]) -> str | None:
        """Source of a value that only this framework has; None for what it does not know."""
        ...

    def support(self) -> str:
        """Text of the support module."""
        ...

    def data(self, tensor: Any) -> bytes:
        """A tensor as the content of a data file."""
        ...


@dataclass(frozen=True)
class Recorded:
    """One call, as a dump has it.

    Attributes:
        backward: that of its backward; None: there is none.
        origin: where it was recorded, for people (``step 3, rank 0``).
    """

    name: names.ApiName
    forward: Mapping[str, Any]
    backward: Mapping[str, Any] | None
    origin: str


@dataclass(frozen=True)
class Script:
    """A script, not written yet.

    Attributes:
        files: data file to the ``data_name`` of the tensor in it.
        parts: inputs, outputs, incoming and outgoing gradients, by name.
    """

    text: str
    files: Mapping[str, str]
    parts: Mapping[str, Mapping[str, Spec]]


@dataclass(frozen=True)
class Options:
    """How the script is to run unless it is told otherwise.

    Attributes:
        direction: `FORWARD`, `BACKWARD` or `BOTH`.
        recorded: read saved tensors; otherwise all inputs are drawn.
        seed: of drawn inputs and random state.
        iterations: runs, each with inputs of its own, when they are drawn.
    """

    direction: str = BOTH
    recorded: bool = True
    seed: int = 0
    iterations: int = 1


def script(call: Recorded, dialect: Dialect, options: Options, stem: str, saved: frozenset[str] | set[str]) -> Script:
    """Make the script of a call.

    Args:
        stem: file name of the script without ``.py``.
        saved: names of the tensors that the dump holds.

    Raises:
        CannotWrite: the call cannot be repeated; the message says why.
    """
    if not all(part.isascii() and part.isidentifier() for part in (*call.name.prefix.split("."), call.name.api)):
        raise CannotWrite("its name is none that a function can have; the record is damaged")
    function = dialect.function(call.name)
    reason = dialect.explain_refusal(call.name, call.forward)
    if reason is not None:
        raise CannotWrite(reason)
    arguments = Arguments(dialect.dtype, dialect.raises, dialect.special, dialect.tuples)
    index = frozenset((1,)) if call.name.api in INDEXED else frozenset[int]()
    positional = arguments.positional(call.forward.get("input_args") or [], index)
    keywords = arguments.keywords(call.forward.get("input_kwargs") or {})
    backward = call.backward if options.direction != FORWARD else None
    if options.direction == BACKWARD and backward is None:
        raise CannotWrite("the dump has no backward of it; choose the direction forward")
    parts: dict[str, dict[str, Spec]] = {
        "inputs": arguments.tensors,
        "outputs": _leaves(arguments, call.forward.get("output"), "output.{}"),
    }
    wanted = _find_gradient_inputs(arguments, dialect, backward)
    if backward is not None and wanted:
        parts["incoming"] = _leaves(arguments, backward.get("input"), "gradient of output.{}")
        # of a gradient that came in and was not recorded nothing can be told: ones come in, and what was recorded is left out
        parts["gradients"] = _gradients(arguments, backward.get("output"), wanted) if parts["incoming"] else {}
    elif options.direction == BACKWARD:
        raise CannotWrite("no input of it has a gradient; choose the direction forward")
    directions = DIRECTIONS[options.direction] if "gradients" in parts else (FORWARD,)
    wanted = wanted if BACKWARD in directions else []
    files: dict[str, str] = {}
    shown = {part: _specs(part, specs, files, dialect.suffix, saved if options.recorded else frozenset()) for part, specs in parts.items()}
    body = _call(function, positional, keywords, list(arguments.tensors))
    text = _assemble_script(call, dialect, options, stem, function, body, shown, directions, wanted)
    return Script(text, files, parts)


def _find_gradient_inputs(arguments: Arguments, dialect: Dialect, backward: Mapping[str, Any] | None) -> list[str]:
    """Names of the inputs whose gradients are wanted."""
    able = [name for name, spec in arguments.tensors.items() if dialect.differentiable(spec.dtype)]
    if dialect.says_gradients:
        return [name for name in able if arguments.tensors[name].requires_grad]
    places = backward.get("output") if backward is not None else None  # null where no gradient was needed
    if not isinstance(places, list) or len(places) != len(able):
        return able
    return [name for name, item in zip(able, places) if item is not None]


def _leaves(arguments: Arguments, items: Any, pattern: str) -> dict[str, Spec]:
    """The tensors of results or gradients, by their place among the leaves; null and numbers are counted, and left out."""
    leaves: dict[str, Spec] = {}
    n = 0

    def collect_leaves(item: Any) -> None:
        nonlocal n
        if isinstance(item, list):
            for child in item:
                collect_leaves(child)
        elif isinstance(item, Mapping) and "dtype" in item and "shape" in item:
            leaves[pattern.format(n)] = arguments.tensor(item)
            n += 1
        elif isinstance(item, Mapping) and "type" not in item:
            for child in item.values():
                collect_leaves(child)
        else:
            n += 1

    collect_leaves(items)
    return leaves


def _gradients(arguments: Arguments, items: Any, wanted: Sequence[str]) -> dict[str, Spec]:
    """Recorded gradients by the name of the input. A record has null for tensors without a gradient, others leave these out: what is
    there belongs to the inputs that want one, in order, where the shapes agree."""
    there = list(_leaves(arguments, items, "{}").values())
    if len(there) != len(wanted):
        return {}
    pairs = {f"gradient of {name}": spec for name, spec in zip(wanted, there)}
    fit = all(arguments.tensors[name].shape == spec.shape for name, spec in zip(wanted, there))
    return pairs if fit else {}


def _specs(part: str, specs: Mapping[str, Spec], files: dict[str, str], suffix: str, saved: frozenset[str] | set[str]) -> str:
    lines = []
    for name, spec in specs.items():
        file = ""
        if spec.data_name is not None and spec.data_name in saved:
            plain = f"{name.replace(' ', '_')}{suffix}"
            files[plain] = spec.data_name
            file = f', "file": "{plain}"'
        lines.append(f'    "{name}": {{{spec.source}{file}}},\n')
    return f"{part.upper()} = {{\n{''.join(lines)}}}\n"


def _call(function: Function, positional: Sequence[str], keywords: Sequence[str], tensors: Sequence[str]) -> str:
    dotted = bool(function.method and positional and positional[0] in tensors)
    head = f"{positional[0]}.{function.method}" if dotted else function.expression
    words = [*(positional[1:] if dotted else positional), *keywords]
    line = f"    return {head}({', '.join(words)})\n"
    if len(line) > _WIDTH:
        line = f"    return {head}(\n" + "".join(f"        {_wrap_word(word)},\n" for word in words) + "    )\n"
    names_ = ", ".join((*tensors, "*", DTYPE, DEVICE))
    head = f"def call({names_}):\n"
    if len(head) > _WIDTH:
        head = "def call(\n" + "".join(f"    {name},\n" for name in (*tensors, "*", DTYPE, DEVICE)) + "):\n"
    text = '    """The call as it was recorded; `dtype` raises a type for the bench, `device` is where tensors are made."""\n'
    return head + text + line


def _wrap_word(word: str) -> str:
    if len(word) < _WIDTH - 10 or "'" in word or '"' in word:
        return word
    return textwrap.fill(word, _WIDTH - 10, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)


def _assemble_script(
    call: Recorded,
    dialect: Dialect,
    options: Options,
    stem: str,
    function: Function,
    body: str,
    shown: Mapping[str, str],
    directions: Sequence[str],
    wanted: Sequence[str],
) -> str:
    before, mark, after = dialect.support().partition(MARK)
    if not mark:
        raise CannotWrite("the support module has no mark")
    imports = before[before.index("from __future__") : before.index("from msprobe")].rstrip()
    imports += "".join(f"\nimport {module}  # noqa: F401" for module in function.imports)
    title = str(call.name)[: -len(call.name.direction) - 1]
    case: dict[str, Any] = {
        "name": title,
        "api": call.name.api,
        "standard": standard_of(call.name.api, "float32"),
        "inside": tuple(direction for direction, names_ in _INSIDE.items() if belongs(call.name.api, names_)),
        "hidden": belongs(call.name.api, "hidden"),
        "weights": belongs(call.name.api, "weights"),
        "casts": belongs(call.name.api, "casts"),
        "long_sums": belongs(call.name.api, "long_sums"),
        "decides": belongs(call.name.api, "decides"),
        "signs": belongs(call.name.api, "signs"),
        "directions": tuple(directions),
        "wanted": tuple(wanted),
        "data": f"{stem}.data",
        "mode": "recorded" if options.recorded else "random",
        "seed": options.seed,
        "iterations": options.iterations,
    }
    members = "".join(f"    {key!a}: {value!a},\n" for key, value in case.items()).replace("'", '"')
    parts = "".join(f'    "{part}": {part.upper()},\n' for part in shown)
    return (
        f'"""{title}, recorded in {call.origin}: the call once more, against a bench in higher precision.\n\n'
        f"Needs {dialect.framework}, and the tensors beside it if there are any; neither the dump nor msprobe.\n\n"
        f"    python {stem}.py --help\n"
        f"    python {stem}.py                       table and verdict; exit status 0: pass, 1: it is not, 2: it cannot run\n"
        f"    python {stem}.py --exact               and the recorded results must come out, bit for bit\n"
        f"    pytest --import-mode=importlib {stem}.py\n"
        f'"""\n\n{imports}\n\n'
        "# The tensors of the call: type, shape and what was measured of them; where the dump had their values, the file with them.\n"
        + "\n".join(shown.values())
        + f"\nCASE = {{\n{members}{parts}}}\n\n\n{body}\n\n{after.strip()}\n"
    )
