"""Quantities that no single setting says: the global batch of micro batch, accumulation and ranks; warm-up in updates; data types of flags.

Each function gives what the term is on one side, said or computed, or None. `quantity` is the one way in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msprobe_engine.config.settings.normalize import Several
from msprobe_engine.config.settings.pack_settings import DERIVED, PackSettings, Quantity
from msprobe_engine.core.text.sentences import Sentence

_OF_FLAGS = ("megatron", "transformers", "deepspeed")
"""Without a flag for it, they compute in float32."""


def quantity(side: PackSettings, name: str) -> Quantity | None:
    """A term of one side: said, or computed of other settings. Defaults of the framework count in what is computed, not by themselves."""
    made = _RULES.get(name)
    if made is None:
        return side.quantity_of(name)
    side.unsettled.clear()
    found = made(side)
    if found is not None and not isinstance(found.value, Several) and side.unsettled:
        return None  # made of a setting that has several values: it has several too
    return found


def derived_terms() -> tuple[str, ...]:
    """The terms that can be computed."""
    return tuple(_RULES)


def _positive(side: PackSettings, name: str, default: bool = False) -> float | int | None:
    """A number above zero; frameworks write -1 or 0 for "not said"."""
    value = side.number(name, default=default)
    return value if value is not None and value > 0 else None


def _build_derived(value: float, text: str, names: tuple[str, ...]) -> Quantity:
    value = int(value) if float(value).is_integer() else value
    return Quantity(value, str(value) if text == f"{value} ranks" else f"{value} ({text})", names, DERIVED)


def _names(side: PackSettings, *terms: str) -> tuple[str, ...]:
    return tuple(name for term in terms if (said := side.quantity_of(term)) is not None for name in said.names)


def _world_size(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("world_size")
    if said is not None:
        return said
    per_node, nodes = _positive(side, "nproc_per_node"), _positive(side, "nnodes")
    if per_node is not None:
        return _build_derived(
            per_node * (nodes or 1), f"{per_node} processes x {nodes or 1} nodes", _names(side, "nproc_per_node", "nnodes")
        )
    return None if side.world_size is None else Quantity(side.world_size, str(side.world_size), ("ranks of the job",), DERIVED)


def _data_parallel(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("data_parallel")
    if said is not None and isinstance(said.value, int) and said.value > 0:
        return said
    world = _world_size(side)
    if world is None or not isinstance(world.value, int):
        return None
    parts = {name: _positive(side, name, default=True) or 1 for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    cut = math.prod(parts.values())
    if world.value % cut:
        return None
    text = " / ".join([f"{world.value} ranks", *(f"{value} {name.replace('_', ' ')}" for name, value in parts.items() if value != 1)])
    return _build_derived(world.value / cut, text, (*world.names, *_names(side, *parts)))


def _global_batch(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("global_batch_size")
    if said is not None and isinstance(said.value, int) and said.value > 0:
        return said
    micro, parallel = _positive(side, "micro_batch_size", default=True), _data_parallel(side)
    accumulation = _positive(side, "gradient_accumulation", default=True)
    if accumulation is None and "torchtitan" in side.frameworks:
        accumulation = 1
    if micro is None or parallel is None or accumulation is None:
        return None
    text = f"{micro} samples x {accumulation} micro batches x {parallel.value} data parallel"
    return _build_derived(
        micro * accumulation * parallel.value, text, (*_names(side, "micro_batch_size", "gradient_accumulation"), *parallel.names)
    )


def _accumulation(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("gradient_accumulation")
    if said is not None:
        return said
    micro, parallel, total = _positive(side, "micro_batch_size", default=True), _data_parallel(side), side.quantity_of("global_batch_size")
    if micro is None or parallel is None or total is None or not isinstance(total.value, int) or total.value <= 0:
        return None
    count = total.value / (micro * parallel.value)
    return _build_derived(count, f"{total.value} / {micro} / {parallel.value}", (*total.names, *_names(side, "micro_batch_size")))


def _train_steps(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("train_steps")
    if said is not None and isinstance(said.value, int) and said.value > 0:
        return said
    return _of_samples(side, "train_samples")


def _of_samples(side: PackSettings, name: str) -> Quantity | None:
    samples, total = _positive(side, name), _global_batch(side)
    if samples is None or total is None:
        return None
    return _build_derived(samples // total.value, f"{samples} samples / {total.value}", (*_names(side, name), *total.names))


def _decay_steps(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("decay_steps")
    if said is not None:
        return said
    of_samples = _of_samples(side, "decay_samples")
    if of_samples is not None:
        return of_samples
    ratio, steps = _positive(side, "decay_ratio"), _train_steps(side)
    if ratio is not None and steps is not None:
        return _build_derived(round(steps.value * ratio), f"{ratio} x {steps.value} steps", (*_names(side, "decay_ratio"), *steps.names))
    constant = side.quantity_of("lr_schedule")
    if steps is None or (constant is not None and constant.value == "constant"):
        return None
    return Quantity(steps.value, f"{steps.value} (all steps)", steps.names, DERIVED)


def _warmup_steps(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("warmup_steps")
    steps = said.value if said is not None else 0
    if said is not None and isinstance(steps, int) and steps > 0:
        return said
    of_samples = _of_samples(side, "warmup_samples")
    if of_samples is not None:
        return of_samples
    share = _positive(side, "warmup_fraction")
    if share is None and isinstance(steps, float) and 0 < steps < 1:  # Transformers 5: warmup_steps below one is a share
        share = steps
    whole = _decay_steps(side) if "megatron" in side.frameworks else _train_steps(side)
    if share is not None and whole is not None and isinstance(whole.value, (int, float)):
        made = math.ceil(round(share * whole.value, 6))
        return _build_derived(made, f"{share} x {whole.value} steps", (*_names(side, "warmup_fraction", "warmup_steps"), *whole.names))
    return said if share is None else None


def _min_lr(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("min_lr")
    if said is not None:
        return said
    share, rate = side.number("min_lr_ratio", default=False), side.number("learning_rate")
    if share is None or rate is None:
        return None
    return _build_derived(share * rate, f"{share} x {rate}", _names(side, "min_lr_ratio", "learning_rate"))


def _kv_heads(side: PackSettings) -> Quantity | None:
    heads, said, grouped = side.quantity_of("attention_heads"), side.quantity_of("kv_heads"), side.quantity_of("grouped_query_attention")
    if said is not None and not (grouped is not None and grouped.value is False):
        return said
    return None if heads is None else Quantity(heads.value, f"{heads.value} (as many as heads)", heads.names, DERIVED)


def _head_dim(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("head_dim")
    if said is not None:
        return said
    hidden, heads = _positive(side, "hidden_size"), _positive(side, "attention_heads")
    if hidden is None or heads is None or hidden % heads:
        return None
    return _build_derived(hidden / heads, f"{hidden} / {heads} heads", _names(side, "hidden_size", "attention_heads"))


def _padded_vocab(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("padded_vocab")
    if said is not None:
        return said
    rows, multiple, cut = (
        _positive(side, "vocab_size"),
        _positive(side, "vocab_padding", default=True),
        _positive(side, "tensor_parallel", True),
    )
    if rows is None or multiple is None or "megatron" not in side.frameworks:
        return None
    multiple *= cut or 1
    text = f"{rows} up to a multiple of {multiple}"
    return _build_derived(math.ceil(rows / multiple) * multiple, text, _names(side, "vocab_size", "vocab_padding", "tensor_parallel"))


def _compute_dtype(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("compute_dtype")
    for term, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        flag = side.quantity_of(term)
        if flag is not None and flag.value is True:
            return Quantity(dtype, f"{dtype} ({flag.names[0]})", flag.names, DERIVED)
    if said is not None and said.value not in (None, "no"):
        return said
    if any(name in side.frameworks for name in _OF_FLAGS):
        return Quantity("float32", "float32 (neither bf16 nor fp16)", _names(side, "bf16", "fp16"), DERIVED)
    return None


def _in_fp32(term: str, flag: str) -> Callable[[PackSettings], Quantity | None]:
    def derive_dtype(side: PackSettings) -> Quantity | None:
        said, switch = side.quantity_of(term), side.quantity_of(flag)
        if said is not None or switch is None:
            return said
        dtype = _compute_dtype(side)
        value = "float32" if switch.value else dtype.value if dtype is not None else None
        return None if value is None else Quantity(value, f"{value} ({switch.names[0]}: {switch.shown})", switch.names, DERIVED)

    return derive_dtype


def _activation(side: PackSettings) -> Quantity | None:
    said = side.quantity_of("activation")
    if said is not None or "megatron" not in side.frameworks:
        return said
    for name, function in (("swiglu", "silu"), ("squared_relu", "relu2"), ("quick_geglu", "quickgelu")):
        one = side.settings.get(name)
        if one is not None and one.value in (True, "true", "True"):
            return Quantity(function, f"{function} ({one.name})", (one.name,), DERIVED)
    return Quantity("gelu", Sentence("gelu (no other is asked for)"), (), DERIVED)


_RULES: dict[str, Callable[[PackSettings], Quantity | None]] = {
    "world_size": _world_size,
    "data_parallel": _data_parallel,
    "global_batch_size": _global_batch,
    "gradient_accumulation": _accumulation,
    "train_steps": _train_steps,
    "decay_steps": _decay_steps,
    "warmup_steps": _warmup_steps,
    "min_lr": _min_lr,
    "kv_heads": _kv_heads,
    "head_dim": _head_dim,
    "padded_vocab": _padded_vocab,
    "compute_dtype": _compute_dtype,
    "softmax_dtype": _in_fp32("softmax_dtype", "softmax_in_fp32"),
    "residual_dtype": _in_fp32("residual_dtype", "residual_in_fp32"),
    "activation": _activation,
}
