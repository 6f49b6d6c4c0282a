"""What functions, classes and parameters of MindSpore and PyTorch mean, in one vocabulary.

Compiled from the API references of both (mindspore.ops, mindspore.mint, mindspore.nn, mindspore.Tensor, operators; torch,
torch.nn.functional, torch.nn, torch.Tensor). Names are compared without case and underscores, so ``BatchMatMul``, ``batch_mat_mul`` and
``__matmul__`` need one word each. What is not in the tables means itself: most functions bear one name in both frameworks.
"""

from __future__ import annotations

from functools import lru_cache

_FUNCTIONS = """
    matmul: mm bmm batchmatmul matmulext batchmatmulext dot mv inner vdot rmatmul batchdot
    linear: dense
    addmm: addbmm baddbmm
    add: scalaradd biasadd addn tensoradd radd iadd addext addscalar accumulaten accumulaten2 accumulatenv2 inplaceadd assignadd
    sub: scalarsub subtract tensorsub isub subext inplacesub assignsub
    rsub: rsubext
    mul: scalarmul multiply tensormul rmul imul muls tensormuls
    div: scalardiv divide truediv truedivide itruediv realdiv tensordiv xdivy divs
    rdiv: rtruediv rdivide
    floordivide: floordiv ifloordiv tensorfloordiv divfloor
    remainder: floormod mod imod tensormod
    fmod: truncatemod
    pow: tensorpow ipow power powtensorscalar
    neg: negative
    eq: equal
    ne: notequal
    lt: less tensorlt
    le: lessequal tensorle
    gt: greater tensorgt
    ge: greaterequal tensorge
    logicalnot: not
    bitwisenot: invert
    bitwiseand: and iand logicaland
    bitwiseor: or ior logicalor
    bitwisexor: xor ixor logicalxor
    abs: absolute
    exp: tensorexp
    expm1: tensorexpm1
    arccos: acos
    arcsin: asin
    arctan: atan
    arctan2: atan2
    arccosh: acosh
    arcsinh: asinh
    arctanh: atanh
    reciprocal: inv
    square: squareext
    sum: reducesum sumext
    mean: reducemean meanext
    prod: reduceprod prodext
    amax: reducemax
    amin: reducemin
    all: reduceall
    any: reduceany
    std: reducestd
    max: argmaxwithvalue maxdim
    min: argminwithvalue mindim
    argmax: argmaxext
    argmin: argminext
    clamp: clip clipbyvalue clampmin clampmax clamptensor clampscalar
    softmax: softmaxext softmaxv2
    logsoftmax: logsoftmaxext
    sigmoid: expit
    relu: reluv2
    gelu: geluext fastgelu gelufast
    silu: swish silufunc inplacesilu
    elu: eluext inplaceelu
    hardshrink: hshrink
    hardsigmoid: hsigmoid
    hardswish: hswish
    hardtanh: hardtanhop
    threshold: thresholdop
    layernorm: layernormext layernormv3 fusedlayernorm
    rmsnorm: npurmsnorm
    batchnorm: batchnormext
    dropout: dropoutext dropoutdomask inplacedropout
    embedding: embeddinglookup sparsegatherv2
    crossentropy: crossentropyloss
    nllloss: nllloss2d
    bcewithlogits: binarycrossentropywithlogits bcewithlogitsloss sigmoidcrossentropywithlogits
    kldiv: kldivloss
    smoothl1loss: smoothl1
    attention: scaleddotproductattention flashattentionscore npufusionattention promptflashattention
    rotary: rotarypositionembedding npurotarymul applyrotaryposemb
    swiglu: npuswiglu
    cat: concat concatenate
    stack: pack
    unbind: unstack unpack
    split: chunk tensorsplit splitext splitv splitwithsize
    tile: repeat
    repeatinterleave: repeatelements
    roll: rollext
    flip: reverse reversev2
    outer: ger
    sort: sortext
    topk: topkext
    cumsum: cumsumext
    maskedfill: maskedfillscalar
    maskedscatter:
    where: choose
    gather: gatherd gatherelements take_along_dim
    scatter: tensorscatterelements scatterelements
    scatteradd: tensorscatteradd
    indexadd: inplaceindexadd
    indexput: tensorscatterupdate
    getitem: stridedslice slice narrow select selectview gathernd indexselect take
    setitem: copywithslice
    reshape: view viewas reshapeas flatten unflatten ravel squeeze unsqueeze expanddims getreshape
    permute: transpose swapaxes swapdims t movedim moveaxis transposeview transposeextview adjoint mt h
    contiguous:
    identity: detach stopgradient clone copy assign alias value data identityn requiresgrad depend dataidentity loadtensor
    to: cast astype type typeas float half bfloat16 double int long bool cpu cuda npu totensor castext
    expand: broadcastto expandas broadcasttensors broadcast
    shape: size tensorshape dynamicshape dim ndim numel nelement elementsize rank stride len dtype isfloatingpoint istensor
    triu: triuext
    tril: trilext matrixbandpart
    ones: onesext newones
    zeros: zerosext newzeros
    oneslike: oneslikeext
    zeroslike: zeroslikeext
    full: fill fillv2 fillscalar newfull
    fulllike: fills fullikeext
    arange: range rangeext
    onehot: onehotext
    tensor: scalartotensor scalartoarray tupletoarray astensor fromnumpy
    rand: uniform uniformreal randext
    randn: standardnormal normal randnext
    bitwiseleftshift: leftshift
    bitwiserightshift: rightshift
    round: rint
    trunc: fix
    det: matrixdeterminant
    slogdet: logmatrixdeterminant
    inverse: matrixinverse linalginv
    svd: linalgsvd
    qr: linalgqr
    linspace: linspaceext
    upsample: interpolate
    localresponsenorm: lrn
    i0: besseli0
    i0e: besseli0e
    i1: besseli1
    i1e: besseli1e
    diagembed: matrixdiag
    diagonal: matrixdiagpart
    pad: padv3 constantpadnd mirrorpad
    unfold: im2col
    fold: col2im
    conv2d: conv2dext
    conv3d: conv3dext
    convtranspose2d: conv2dtranspose conv2dbackpropinput
    convtranspose3d: conv3dtranspose
    maxpool2d: maxpool
    maxpool3d: maxpool3dext
    avgpool2d: avgpool
    adaptiveavgpool2d:
    allreduce: innercommallreduce
    allgather: allgatherintotensor innercommallgather
    reducescatter: reducescattertensor innercommreducescatter
    isend: innercommisend
    irecv: innercommirecv receive
    alltoall: alltoallsingle
    norm: lpnorm linalgvectornorm euclideannorm normext vectornorm
    numpy: asnumpy
    item: asscalar
"""
"""Word: names that mean the same."""

_MINDSPORE = {
    "gather": "getitem",
    "gatherv2": "getitem",
    "size": "shape",
    "select": "where",
    "l2normalize": "normalize",
    "clipbynorm": "normalize",
}
"""Names of mindspore.ops, of its operators and of its tensors that mean something else in PyTorch (and in mindspore.mint)."""

_CLASSES = """
    linear: dense columnparallellinear rowparallellinear
    layernorm: layernormext fusedlayernorm
    rmsnorm: llamarmsnorm
    conv1d: conv1dext
    conv2d: conv2dext
    convtranspose2d: conv2dtranspose
    sequential: sequentialcell
    modulelist: celllist
    embedding: embeddinglookup
    dropout: dropoutext
    gelu: fastgelu
    silu: swish
    crossentropyloss: softmaxcrossentropywithlogits
    bcewithlogitsloss: bcewithlogitsloss
    multiheadattention:
    batchnorm1d:
    batchnorm2d:
    hardsigmoid: hsigmoid
    hardswish: hswish
    hardshrink: hshrink
    identity: nop
"""

_PARAMETERS = """
    weight: gamma embedding_table embeddingtable kernel
    bias: beta
    running_mean: moving_mean
    running_var: moving_variance
"""

MOVES = frozenset((
    "shape", "reshape", "permute", "contiguous", "identity", "to", "expand", "getitem", "split", "unbind", "cat", "stack", "tile",
    "ones", "zeros", "oneslike", "zeroslike", "full", "fulllike", "arange", "tensor", "triu", "tril", "onehot", "empty", "emptylike",
    "numpy", "item", "iscontiguous", "requiresgrad", "register_hook", "meshgrid",
))  # fmt: skip
"""Words of calls that compute nothing: what they give out are elements they were given, or constants."""

PLAIN, MINDSPORE = "pytorch", "mindspore"
"""The vocabularies. MSAdapter (``mindtorch``) has PyTorch's."""


def _table(text: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for line in text.strip().splitlines():
        word, _, names = line.strip().partition(":")
        for name in (word, *names.split()):
            words.setdefault(_plain(name), word)
    return words


def _plain(name: str) -> str:
    return name.strip("_").replace("_", "").lower()


_WORDS, _KINDS, _PLACES = _table(_FUNCTIONS), _table(_CLASSES), _table(_PARAMETERS)


def vocabulary(framework: str) -> str:
    """Which of the two a dump of this framework is written in."""
    return MINDSPORE if framework == MINDSPORE else PLAIN


@lru_cache(maxsize=8192)
def of_function(kind: str, function: str, framework: str) -> str:
    """The word for a function.

    Args:
        kind, function: as record names have them (``Functional``, ``linear``; ``Primitive.matmul``, ``MatMul``).
        framework: of the dump.
    """
    name = _plain(function)
    if vocabulary(framework) == MINDSPORE and not kind.startswith("Mint") and name in _MINDSPORE:
        return _MINDSPORE[name]
    word = _WORDS.get(name)
    if word is None and name.endswith(("ext", "v2", "v3")):
        short = name.removesuffix("ext").removesuffix("v2").removesuffix("v3")
        word = _WORDS.get(short, short)
    return word if word is not None else name


@lru_cache(maxsize=8192)
def of_class(name: str) -> str:
    """The word for a class of modules."""
    plain = _plain(name)
    return _KINDS.get(plain, plain)


@lru_cache(maxsize=8192)
def of_parameter(name: str) -> str:
    """What a parameter is called in PyTorch: ``gamma`` -> ``weight``; the last part of a dotted name counts."""
    head, dot, last = name.rpartition(".")
    return f"{head}{dot}{_PLACES.get(_plain(last), last)}"


def moves(word: str) -> bool:
    """A call of this word computes nothing."""
    return word in MOVES
