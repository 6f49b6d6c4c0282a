"""API mapping (``-am``): functions of MindSpore and their positions, as PyTorch has them.

The built-in names (`api_equivalents`) come first, then the user's entries::

    - ms_api: Functional.gelu
      pt_api: Functional.gelu
      ms_args: [0]          # positions on the MindSpore side ...
      pt_args: [0]          # ... and those they belong to
      ms_output: [0]        # ms_outputs, pt_outputs do as well
      pt_output: [0]

A file holds a list of entries, one entry alone, entries under names of their own, or a plain map ``ms_api: pt_api``. Positions that an
entry does not list match nothing; a kind of positions that it does not mention stays as it is.

Functions of MindSpore and what they are called in PyTorch.

Compiled from the API references of both (mindspore.ops, mindspore.Tensor, mindspore.mint; torch, torch.nn.functional, torch.Tensor): most
functions of mindspore.ops bear the name of their PyTorch counterpart. What has to be said is which of them are in torch itself and not in
torch.nn.functional, and which ones are called otherwise. Names are those of records: ``{kind}.{function}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.mapping_file import read_mapping

_KINDS = {
    "args": (".input.", ".kwargs."),
    "output": (".output.",),
    "parameters": (".parameters.",),
    "parameters_grad": (".parameters_grad.",),
}


@dataclass(frozen=True)
class Entry:
    """One function: ``{kind}.{name}`` of both sides, and positions by kind as (of the target, of the golden side)."""

    target: str
    golden: str
    places: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


class ApiMapping:
    """Renames functions.

    Args:
        entries: the user's.
        loose: positions are compared by how they begin (8.1.1: 1 stands for 10 too).
    """

    def __init__(self, entries: Iterable[Entry], loose: bool) -> None:
        self.entries = {entry.target: entry for entry in entries}
        self.loose = loose

    @classmethod
    def read(cls, source: Any, loose: bool) -> ApiMapping | None:
        """From a file or plain data; True: the built-in names only. None without one.

        Raises:
            UsageError: it cannot be read, or an entry is none; which and why is said.
        """
        if source is None or source is False or source == "":
            return None
        return cls([] if source is True else _entries(read_mapping(source, "api mapping")), loose)

    def record_name(self, name: str, known: frozenset[str]) -> str:
        """What a record is called on the golden side, whose functions are `known`."""
        entry = self._entry(name, known)
        return self._rename_function(name) if entry is None else name.replace(entry.target, entry.golden, 1)

    def row_names(self, names: Sequence[str], records: Sequence[str], golden: DumpTable) -> list[str]:
        """What rows are called on the golden side, one per row; a row that an entry does not list gets a name that matches nothing.

        Args:
            names, records: row names and the names of their records.
            golden: the other side; entries for functions that it has not are left out.
        """
        known = functions(golden)
        renamed = []
        for name, record in zip(names, records):
            entry = self._entry(record, known)
            renamed.append(self._rename_function(name) if entry is None else self._rename_by_entry(entry, name))
        return renamed

    def _entry(self, record: str, known: frozenset[str]) -> Entry | None:
        entry = self.entries.get(function_of(record))
        return entry if entry is not None and entry.golden in known else None

    def _rename_function(self, name: str) -> str:
        kind, _, rest = name.partition(".")
        function, dot, tail = rest.partition(".")
        return f"{in_pytorch(kind, function)}{dot}{tail}" if dot else name

    def _rename_by_entry(self, entry: Entry, name: str) -> str:
        name = name.replace(entry.target, entry.golden, 1)
        for kind, words in _KINDS.items():
            for word in words:
                head, separator, place = name.partition(word)
                if not separator:
                    continue
                if kind not in entry.places:
                    return name
                for target_place, golden_place in entry.places[kind]:
                    if place == target_place or place.startswith(target_place if self.loose else f"{target_place}."):
                        return f"{head}{word}{golden_place}{place[len(target_place) :]}"
                return f"{name}.abandoned"
        return name


def function_of(name: str) -> str:
    """``{kind}.{function}``: the first two parts of a name."""
    return ".".join(name.split(".", 2)[:2])


def functions(side: DumpTable) -> frozenset[str]:
    """`function_of` all records of a side."""
    return frozenset(function_of(name) for name in side.ops)


def _entries(content: Any) -> list[Entry]:
    if isinstance(content, Mapping):
        if "ms_api" in content or "pt_api" in content:
            content = [content]
        elif all(isinstance(value, Mapping) for value in content.values()):
            content = [{"ms_api": key, **value} for key, value in content.items()]
        else:
            content = [{"ms_api": key, "pt_api": value} for key, value in content.items()]
    return [_entry_of(item, number) for number, item in enumerate(content)]


def _shorten_entry(item: Any) -> str:
    """Text of an entry that is none; the text of a few nested aliases may be gigabytes."""
    if isinstance(item, Mapping):
        item = {key: value if isinstance(value, str) else type(value).__name__ for key, value in list(item.items())[:9]}
    return repr(str(item)[:120]) if isinstance(item, (Mapping, str, int, float)) else f"a {type(item).__name__}"


def _entry_of(item: Any, number: int) -> Entry:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("ms_api", "pt_api")):
        raise UsageError(f"compare: entry {number} of the api mapping is {_shorten_entry(item)}; it needs the names ms_api and pt_api")
    places = {}
    for kind in _KINDS:
        target_positions, golden_positions = (_positions(item, f"{side}_{kind}", number) for side in ("ms", "pt"))
        if target_positions is None and golden_positions is None:
            continue
        if target_positions is None or golden_positions is None or len(target_positions) != len(golden_positions):
            raise UsageError(
                f"compare: entry {number} of the api mapping ({item['ms_api']}) lists {len(target_positions or ())} ms_{kind} "
                f"and {len(golden_positions or ())} pt_{kind}; as many are needed on both sides"
            )
        places[kind] = tuple(zip(target_positions, golden_positions))
    return Entry(item["ms_api"], item["pt_api"], places)


def _positions(item: Mapping[str, Any], key: str, number: int) -> list[str] | None:
    listed = item.get(key, item.get(f"{key}s"))
    if listed is None:
        return None
    if not isinstance(listed, (list, tuple)):
        raise UsageError(f"compare: entry {number} of the api mapping has {key}: {str(listed)[:80]!r}; a list of positions is needed")
    return [str(place) for place in listed]


_OPERATORS = """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all amax amin aminmax angle any arange arccos
    arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere asin asinh atan atan2 atanh atleast_1d atleast_2d
    atleast_3d baddbmm bartlett_window bernoulli bincount bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    blackman_window block_diag bmm broadcast_to bucketize cartesian_prod cat cdist ceil cholesky cholesky_solve chunk clamp clip
    clone column_stack combinations concat conj copysign cos cosh count_nonzero cov cross cummax cummin cumprod cumsum deg2rad det
    diag diag_embed diagflat diagonal diff digamma dist div divide dot dsplit dstack einsum empty empty_like eq erf erfc erfinv exp
    exp2 expm1 eye flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac full full_like gather gcd ge geqrf
    greater greater_equal gt hamming_window hann_window heaviside histc hsplit hstack hypot i0 igamma igammac imag index_add
    index_fill index_select inner inverse is_complex is_floating_point is_nonzero is_tensor isclose isfinite isinf isnan isneginf
    isposinf isreal kaiser_window kron lcm ldexp le lerp less less_equal lgamma linspace log log10 log1p log2 logaddexp logaddexp2
    logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp lt lu_solve lu_unpack masked_fill
    masked_select matmul matrix_exp max maximum mean median meshgrid min minimum mm moveaxis movedim msort mul multinomial multiply
    mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg negative nextafter nonzero norm normal not_equal numel
    ones ones_like orgqr ormqr outer permute pinverse poisson polar polygamma positive pow prod qr quantile rad2deg rand rand_like
    randint randint_like randn randn_like randperm range ravel real reciprocal remainder renorm repeat_interleave reshape roll rot90
    round rsqrt scatter scatter_add searchsorted select select_scatter sgn sign signbit sin sinc sinh slice_scatter slogdet sort
    split sqrt square squeeze stack std std_mean sub subtract sum svd swapaxes swapdims t take tan tensor_split tensordot tile topk
    trace transpose trapz tril tril_indices triu triu_indices true_divide trunc unbind unique unique_consecutive unsqueeze vander
    var var_mean view_as_complex view_as_real vsplit vstack where xlogy zeros zeros_like
"""
OPERATORS = frozenset(_OPERATORS.split())
"""Functions of mindspore.ops that torch has by the same name."""

RENAMED = {
    "Functional.addn": "Torch.add",
    "Functional.assign": "Tensor.copy_",
    "Functional.bias_add": "Torch.add",
    "Functional.cast": "Tensor.to",
    "Functional.clip_by_norm": "Functional.normalize",
    "Functional.clip_by_value": "Torch.clamp",
    "Functional.dense": "Functional.linear",
    "Functional.equal": "Torch.eq",
    "Functional.expand": "Tensor.expand",
    "Functional.expand_dims": "Torch.unsqueeze",
    "Functional.fill": "Torch.full",
    "Functional.fills": "Torch.full_like",
    "Functional.flash_attention_score": "NPU.npu_fusion_attention",
    "Functional.floor_div": "Torch.floor_divide",
    "Functional.floor_mod": "Torch.remainder",
    "Functional.gather": "Torch.index_select",
    "Functional.gather_d": "Torch.gather",
    "Functional.gather_elements": "Torch.gather",
    "Functional.invert": "Torch.bitwise_not",
    "Functional.log_matrix_determinant": "Torch.slogdet",
    "Functional.masked_scatter": "Tensor.masked_scatter",
    "Functional.matrix_band_part": "Torch.tril",
    "Functional.matrix_determinant": "Torch.det",
    "Functional.random_categorical": "Torch.multinomial",
    "Functional.repeat": "Tensor.repeat",
    "Functional.repeat_elements": "Torch.repeat_interleave",
    "Functional.reverse": "Torch.flip",
    "Functional.rotary_position_embedding": "NPU.npu_rotary_mul",
    "Functional.scalar_to_tensor": "Torch.tensor",
    "Functional.shape": "Tensor.size",
    "Functional.standard_normal": "Torch.randn",
    "Functional.strided_slice": "Tensor.__getitem__",
    "Functional.swiglu": "NPU.npu_swiglu",
    "Functional.tensor_add": "Torch.add",
    "Functional.tensor_div": "Torch.div",
    "Functional.tensor_dot": "Torch.tensordot",
    "Functional.tensor_exp": "Torch.exp",
    "Functional.tensor_expm1": "Torch.expm1",
    "Functional.tensor_floordiv": "Torch.floor_divide",
    "Functional.tensor_ge": "Torch.ge",
    "Functional.tensor_gt": "Torch.gt",
    "Functional.tensor_le": "Torch.le",
    "Functional.tensor_lt": "Torch.lt",
    "Functional.tensor_mod": "Torch.fmod",
    "Functional.tensor_mul": "Torch.mul",
    "Functional.tensor_pow": "Torch.pow",
    "Functional.tensor_scatter_elements": "Torch.scatter",
    "Functional.tensor_sub": "Torch.sub",
    "Functional.type_as": "Tensor.type_as",
    "Functional.view_as": "Tensor.view_as",
    "Functional.where": "Torch.where",
    "Tensor.asnumpy": "Tensor.numpy",
    "Tensor.astype": "Tensor.to",
    "Tensor.broadcast_to": "Tensor.expand",
    "Tensor.choose": "Torch.where",
    "Tensor.copy": "Tensor.clone",
    "Tensor.equal": "Tensor.eq",
    "Tensor.expand_dims": "Tensor.unsqueeze",
    "Tensor.fills": "Tensor.fill_",
    "Tensor.floor_mod": "Tensor.remainder",
    "Tensor.gather_elements": "Tensor.gather",
    "Tensor.invert": "Tensor.bitwise_not",
    "Tensor.log_matrix_determinant": "Tensor.slogdet",
    "Tensor.matrix_determinant": "Tensor.det",
    "Tensor.random_categorical": "Tensor.multinomial",
    "Tensor.resize": "Tensor.resize_",
    "Tensor.tensor_scatter_elements": "Tensor.scatter",
    "Tensor.tensordot": "Torch.tensordot",
    "Tensor.value": "Tensor.clone",
}
"""The others."""

PREFIXES = {"Mint": "Torch", "MintFunctional": "Functional", "MintDistributed": "Distributed"}
"""mindspore.mint has PyTorch's names throughout; its parts are called otherwise."""


def in_pytorch(kind: str, function: str) -> str:
    """``{kind}.{function}`` of MindSpore as PyTorch calls it; the same when there is nothing to say about it."""
    name = f"{kind}.{function}"
    if kind in PREFIXES:
        return f"{PREFIXES[kind]}.{function}"
    if name in RENAMED:
        return RENAMED[name]
    return f"Torch.{function}" if kind == "Functional" and function in OPERATORS else name
