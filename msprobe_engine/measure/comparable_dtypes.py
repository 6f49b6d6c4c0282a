"""Names of dtypes of both frameworks, and which of them the existing tool takes for comparable."""

from __future__ import annotations

_WIDTHS = ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64")
_FLOATS = ("Float16", "Float32", "BFloat16")
_COMPLEX = ("Complex64", "Complex128")


def _both(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names) | frozenset(f"torch.{name.lower()}" for name in names)


_CLASSES = {
    name: kind
    for kind, names in (("int", _WIDTHS), ("float", (*_FLOATS, "Float64")), ("bool", ("Bool",)), ("complex", _COMPLEX))
    for name in _both(names)
}


def plain(dtype: str | None) -> str | None:
    """``float32`` for ``torch.float32``, ``Float32`` and ``mindspore.float32``; other texts as they are."""
    if dtype is None:
        return None
    if dtype in _CLASSES or dtype.startswith(("torch.", "mindspore.")):
        return dtype.rpartition(".")[2].lower()
    return dtype


def kind_of(dtype: str | None) -> str | None:
    """`plain`, with one word for integers of any width: frameworks count tokens in others."""
    name = plain(dtype)
    return "int" if name is not None and name.startswith(("int", "uint")) else name


def comparable(target: str | None, golden: str | None, cross_framework: bool, with_double: bool) -> bool:
    """The rule of the existing tool, which leaves a row without a partner when its dtype is of another kind.

    Args:
        target, golden: dtypes as the file has them.
        cross_framework: the sides come from different frameworks: only int, float, bool and complex are told apart.
        with_double: 26.2.0, where float64 is one of the group.
    """
    target_type, golden_type = str(target), str(golden)
    if cross_framework:
        target_type, golden_type = _CLASSES.get(target_type, target_type), _CLASSES.get(golden_type, golden_type)
    if target_type == golden_type:
        return True
    floats = (*_FLOATS, "Float64") if with_double else _FLOATS
    return (target_type in floats and golden_type in floats) or (target_type in _torch(floats) and golden_type in _torch(floats))


def _torch(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"torch.{name.lower()}" for name in names)
