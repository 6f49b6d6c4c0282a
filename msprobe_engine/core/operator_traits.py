"""What operators do to memory and to numbers: which hand out memory that nobody has written, which only move elements, which fill
memory with a value of the caller's, which are products of matrices.

Names are those of torch's functions and methods.
"""

from __future__ import annotations

UNINITIALISED = frozenset((
    "empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "_empty_affine_quantized", "empty_with_format",
    "new_empty", "new_empty_strided",
))  # fmt: skip
"""Operators whose result is memory that nobody has written."""

MOVES = UNINITIALISED | frozenset((
    "resize_", "__getitem__", "__setitem__", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to",
    "permute", "transpose", "transpose_", "t", "t_", "T", "mT", "adjoint", "contiguous", "clone", "detach", "detach_", "squeeze",
    "squeeze_", "unsqueeze", "unsqueeze_", "flatten", "ravel", "unflatten", "narrow", "select", "slice", "chunk", "split",
    "split_with_sizes", "tensor_split", "unbind", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "movedim",
    "moveaxis", "swapaxes", "swapdims", "copy_", "cpu", "cuda", "repeat", "repeat_interleave", "tile", "roll", "flip", "index_select",
    "gather", "take", "as_strided", "diagonal", "unfold", "alias", "data", "requires_grad_", "index_copy", "index_copy_", "index_put",
    "index_put_", "scatter", "scatter_", "slice_scatter", "select_scatter", "masked_select", "view_as_real", "view_as_complex", "real",
    "imag", "untyped_storage", "flatten_dense_tensors", "unflatten_dense_tensors", "_flatten_dense_tensors", "_unflatten_dense_tensors",
    "full", "full_like", "new_full", "fill_", "tensor", "as_tensor", "scalar_tensor", "new_tensor",
))  # fmt: skip
"""Operators that hand out memory or move elements, and compute nothing."""

PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm")
"""Products of matrices."""

CONVOLUTIONS = frozenset(f"conv{form}{dimensions}d" for form in ("", "_transpose") for dimensions in (1, 2, 3))
"""Convolutions, and their transposes."""

FILLS = frozenset(
    (
        *("maskedfill", "where", "full", "fulllike", "newfull", "fill", "triu", "tril", "maskedscatter", "indexfill", "setitem"),
        *("tensor", "scalartensor", "astensor", "constantpadnd", "pad"),
    )
)
"""Operations that write an infinity because the caller asked for it, in the spelling of `normal_op`."""


def normal_op(op: str) -> str:
    """``all_reduce``, ``allreduce_`` and ``_allgather_base_`` style names in one spelling: lower case, no underscores, without the
    prefix of calls that did not come through a public function."""
    return op.removeprefix("c10d_").removeprefix("functional_").replace("_", "").lower()


OVERWRITES = frozenset((
    "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
))  # fmt: skip
"""Operators that write over all of the tensor that they are given: what stood in it before goes nowhere."""

PRODUCTS_WITH_ADDEND = frozenset(("addmm", "baddbmm", "addbmm", "addmv"))
"""Products whose first argument is added to them."""

ADDITIONS = frozenset((
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub", "subtract", "bias_add",
))  # fmt: skip
"""Operators that add or subtract tensors element by element."""

ACCUMULATIONS = ADDITIONS | {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "__setitem__"}
"""Calls that add something to what is there, or write it into a part of it."""

SCALINGS = frozenset((
    "mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__", "div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__",
))  # fmt: skip
"""Operators that multiply or divide element by element."""

RANDOM_MASKS = frozenset((
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "native_dropout",
))  # fmt: skip
"""Operators that draw which elements they leave out."""

MASKINGS = frozenset(("masked_fill", "masked_fill_", "where", "triu", "tril", "masked_scatter", "index_fill", "index_fill_"))
"""Operators that put a value of the caller's in place of some elements."""

SUMS = frozenset(("sum", "mean", "nansum", "nanmean"))
"""Operators that sum over elements."""

NORMALISATIONS = frozenset((
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "native_layer_norm", "fast_layer_norm",
))  # fmt: skip
"""Operators that divide by the spread of the elements."""

LOSSES = frozenset((
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "log_softmax_loss",
))  # fmt: skip
"""Loss functions."""

PARAMETERS_OF = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), frozenset(("1", "2", "weight", "bias"))),
    "embedding": frozenset(("1", "weight")),
    **dict.fromkeys(("layer_norm", "group_norm"), frozenset(("2", "3", "weight", "bias"))),
    "rms_norm": frozenset(("2", "weight")),
}
"""Function -> its arguments that are parameters where no call has made them."""

LOSSES_OF_CLASSES = frozenset(("cross_entropy", "nll_loss", "kl_div", "log_softmax_loss"))
"""Those of them whose last dimension is that of classes."""

SWITCHES = frozenset(("relu", "relu_", "threshold", "threshold_", "relu6", "hardtanh"))
"""Functions that hand elements on, or not: the gradient of each is all there or none."""

SORTS = frozenset(("sort", "argsort", "msort"))
"""Operators that give the places of elements."""

LOSSES_OF_LABELS = frozenset(("cross_entropy", "nll_loss"))
"""Those that leave labels out (``ignore_index``): their mean is over the labels that count, and pieces of a batch have unlike numbers of
them."""

CASTS = frozenset(("to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy", "cast"))
"""Operators that give elements another type, and compute nothing else."""

HANDS_ON = CASTS | frozenset((
    "relu", "relu_", "dropout", "neg", "neg_", "__neg__",
    "abs", "__abs__", "embedding", "zero_", "clamp", "clamp_", "clip", "clip_", "max", "min", "amax", "amin", "topk", "item", "maximum",
    "minimum", "sort", "identity",
))  # fmt: skip
"""Operators that hand on elements, or values near zero or a bound: whatever is not zero is an element that went in, maybe rounded."""

LOOKUPS = frozenset(("embedding", "gather", "index_select", "take", "take_along_dim", "embedding_bag"))
"""Operators that hand on a few elements of a table."""

BY_INDEX = LOOKUPS | frozenset((
    "__getitem__", "__setitem__", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add",
    "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "one_hot", "bincount", "histc", "cumsum", "argsort",
    "searchsorted", "where", "_grouped_mm", "grouped_mm",
))  # fmt: skip
"""Operators whose result is another one altogether where whole numbers that they take in (tokens of an expert) are others."""

ELEMENTWISE = frozenset((
    "gelu", "silu", "swish", "mish", "elu", "selu", "softplus", "sigmoid", "logsigmoid", "tanh", "exp", "expm1", "log", "log1p", "sqrt",
    "rsqrt", "pow", "pow_", "__pow__", "square", "erf", "sin", "cos", "hardswish", "glu", "lerp", "lerp_",
    "addcmul", "addcmul_",
))  # fmt: skip
"""Functions of each element, and averages of elements that keep their relative noise."""

EXPONENTIALS = frozenset(("exp", "exp_", "exp2", "exp2_"))
"""Functions that make a factor of what is added to an element."""

OPTIMIZER_UPDATES = frozenset(("addcdiv", "addcdiv_"))
"""What adds a quotient of moments to a parameter."""


def is_softmax(op: str) -> bool:
    return op.lower().endswith("softmax")


def is_product(op: str) -> bool:
    """A product of matrices, also of another framework's spelling."""
    return op in PRODUCTS or op.lower() in ("dense", "matmul", "batchmatmul", "linear")


def sums_products(op: str) -> bool:
    """Each element is a sum of products: of matrices, or a convolution."""
    return is_product(op) or op in CONVOLUTIONS


def multiplies_inside(op: str) -> bool:
    """It computes products of matrices, whatever else: autocast casts what they are given, also where that is handed over in float32."""
    return sums_products(op) or op == "scaled_dot_product_attention"


def of_reducer(name: str) -> bool:
    """A record of a collective that torch's own reducer of gradients calls (`DistributedDataParallel`): its buckets, and their layout, are
    no part of the model."""
    return name.startswith("Distributed.c10d_")


NO_OPERATIONS = frozenset((
    "__get__", "__set__", "__delete__", "size", "dim", "ndimension", "stride", "storage_offset", "numel", "nelement",
    "element_size", "data_ptr", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_set_to", "is_same_size",
    "is_nonzero", "is_tensor", "is_storage", "is_pinned", "is_shared", "is_distributed", "is_inference", "is_neg", "is_conj",
    "is_coalesced", "is_sparse", "get_device", "layout", "storage", "untyped_storage", "type_as_", "requires_grad_",
    "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "has_names", "dense_dim", "sparse_dim", "result_type",
    "can_cast", "promote_types", "broadcast_shapes", "__len__", "__hash__", "__repr__", "__format__", "__str__", "__reduce_ex__",
    "__reduce__", "__setstate__", "__dir__", "__deepcopy__", "__array__", "__array_wrap__", "__dlpack__", "__dlpack_device__",
    "__cuda_array_interface__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "data_ptr",
    "backward", "set_", "record_stream", "share_memory_", "get_default_dtype", "set_default_dtype", "is_grad_enabled",
    "is_inference_mode_enabled", "finfo", "iinfo", "manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state",
    "_is_view", "_base", "_version", "_nested_tensor_size", "_has_compatible_shallow_copy_type", "__torch_function__",
    "unflatten_names", "is_autocast_enabled", "get_autocast_dtype", "typename", "is_deterministic_algorithms_enabled", "dtype",
    "shape", "device", "grad", "grad_fn", "__setattr__", "__getattribute__", "type", "is_cpu", "is_cuda_enabled", "rename_",
    "refine_names", "__iter__", "_set_grad_enabled", "_record_function_enter_new", "_record_function_exit", "sym_size",
    "sym_numel", "sym_stride", "sym_storage_offset", "_typed_storage", "__cuda_array_interface__",
))  # fmt: skip
"""Answers about a tensor, and what changes only what is kept about it: never recorded. `detach_` and friends are operations; `item`,
`tolist` and `__iter__` give no tensors, and what they lead to is seen at the next call. The existing format has records of `__bool__` and
`numpy`."""
