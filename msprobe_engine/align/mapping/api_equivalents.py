"""Functions of MindSpore and what they are called in PyTorch.

Compiled from the API references of both (mindspore.ops, mindspore.Tensor, mindspore.mint; torch, torch.nn.functional, torch.Tensor): most
functions of mindspore.ops bear the name of their PyTorch counterpart. What has to be said is which of them are in torch itself and not in
torch.nn.functional, and which ones are called otherwise. Names are those of records: ``{kind}.{function}``.
"""

from __future__ import annotations

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
