"""Calls as they are aligned: lists of units, and by what two units are told to be the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from msprobe_engine.align.frameworks.canonical import Terms
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT

_PRODUCTS = frozenset(("linear", "matmul", "addmm"))


@dataclass(frozen=True)
class Unit:
    """Calls that stand together in a list of one side: one, or some that a rule puts together.

    Attributes:
        ops: records, in order.
        word: what they mean together.
        main: the one of `ops` whose name stands for all.
    """

    ops: tuple[int, ...]
    word: str
    main: int

    @property
    def last(self) -> int:
        """The record that gives out the result."""
        return self.ops[-1]


Key = Callable[[Terms, Unit], Hashable]
"""None of a unit that is not to be matched in this way."""


def units(side: Terms, ops: Sequence[int]) -> list[Unit]:
    """The calls of a list; a product and the vector that is added to it are one linear layer."""
    grouped: list[Unit] = []
    product: tuple[int, int] | None = None  # place in `found` and record of the last product
    for op in ops:
        word = side.words[op]
        if product is not None and word == "add" and _is_bias(side, product[1], op):
            position, product_op = product
            grouped[position] = Unit((product_op, op), "linear", product_op)
            product = None
            continue
        grouped.append(Unit((op,), word, op))
        if word == "matmul" and not side.is_module(op):
            product = (len(grouped) - 1, op)
        elif not side.moves(op):
            product = None
    return grouped


def _is_bias(side: Terms, product: int, add: int) -> bool:
    """An addition of a vector, as long as the rows of what a product gave out."""
    given, taken = side.rows(product, OUTPUT), side.rows(add, INPUT)
    if len(given) != 1 or len(taken) != 2 or side.size(given[0]) not in (side.size(row) for row in taken):
        return False
    shape = side.side.shape
    vectors = [row for row in taken if len(shape[row]) == 1 and shape[row][-1:] == shape[given[0]][-1:]]
    return len(vectors) == 1 and any(side.same(given[0], row) for row in taken if row != vectors[0])


def by_name(side: Terms, unit: Unit) -> Hashable:
    """Modules by name and class, functions by meaning and result."""
    if side.is_module(unit.main):
        return ("module", side.below(unit.main), unit.word)
    return by_numbers(side, unit)


def by_numbers(side: Terms, unit: Unit) -> Hashable:
    """Meaning and result: sizes and numbers."""
    marks = side.marks(unit.last)
    return None if marks is None or side.moves(unit.main) else (_kind(side, unit), unit.word, side.sizes(unit.last, OUTPUT), marks)


def by_result(side: Terms, unit: Unit) -> Hashable:
    """Modules by path, whatever their class, or else by result; functions by meaning and all sizes."""
    if side.is_module(unit.main):
        marks = side.marks(unit.last)
        return None if marks is None else ("module", side.sizes(unit.last, OUTPUT), marks)
    if side.moves(unit.main):
        return None
    return ("function", unit.word, side.sizes(unit.last, OUTPUT), tuple(sorted(side.sizes(unit.main, INPUT))))


def by_sizes(side: Terms, unit: Unit) -> Hashable:
    """Modules by class, sizes of result and of all parameters in them; functions by meaning and size of the result."""
    if side.is_module(unit.main):
        return ("module", unit.word, side.sizes(unit.last, OUTPUT), side.elements_of_modules.get(side.path(unit.main), 0))
    return None if side.moves(unit.main) else ("function", unit.word, side.sizes(unit.last, OUTPUT))


def by_form(side: Terms, unit: Unit) -> Hashable:
    """Modules by sizes of result and parameters; functions by meaning and size of the first result, all products alike."""
    if side.is_module(unit.main):
        return ("module", side.sizes(unit.last, OUTPUT), side.elements_of_modules.get(side.path(unit.main), 0), _holds_modules(side, unit))
    if side.moves(unit.main):
        return None
    return ("function", "product" if unit.word in _PRODUCTS else unit.word, side.sizes(unit.last, OUTPUT)[:1])


def moved_by_numbers(side: Terms, unit: Unit) -> Hashable:
    """Calls that compute nothing: by meaning, sizes and numbers."""
    marks = side.marks(unit.last)
    return (
        None
        if marks is None or not side.moves(unit.main)
        else (unit.word, side.sizes(unit.main, INPUT), side.sizes(unit.last, OUTPUT), marks)
    )


def moved_by_shape(side: Terms, unit: Unit) -> Hashable:
    """Calls that compute nothing: by meaning and shape of the result."""
    rows = side.rows(unit.last, OUTPUT)
    if not rows or not side.moves(unit.main):
        return None
    return (unit.word, *(tuple(side.side.shape[row]) for row in rows))


LEVELS: tuple[Key, ...] = (by_name, by_numbers, by_result, by_sizes, by_form)
"""From what is certain to what is likely."""


def _kind(side: Terms, unit: Unit) -> str:
    return "module" if side.is_module(unit.main) else "function"


def _holds_modules(side: Terms, unit: Unit) -> bool:
    return any(side.is_module(child) for child in side.tree.children.get(unit.main, ()))
