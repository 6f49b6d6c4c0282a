"""Rows of a node as the dictionaries of text that the existing formats hold."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.compare.side import MD5
from msprobe_engine.graph.model import Cell, Graph, Items

_STATISTICS = ("Max", "Min", "Mean", "Norm")


def items(graph: Graph, node: int, metrics: Mapping[str, Mapping[str, Cell]] | None = None) -> tuple[Items, Items]:
    """``input_data`` and ``output_data`` of a node.

    Args:
        graph: has the node.
        node: its number.
        metrics: row name -> column -> value, added to the fields of the row.
    """
    made: tuple[Items, Items] = ({}, {})
    for found, rows in zip(made, (graph.inputs(node), graph.outputs(node))):
        for row in rows:
            name, item = _item(graph, row)
            for column, value in (metrics or {}).get(name, {}).items():
                item[column] = _text(value)
            found[name] = item
    return made


def _item(graph: Graph, row: int) -> tuple[str, dict[str, str]]:
    side = graph.side
    assert side is not None
    name = side.name[row]
    if row in side.values:
        return name, {"type": _text(side.dtype[row]), "value": _text(side.values[row])}
    if side.dtype[row] is None:
        return name, {"value": "null"}
    item = {"type": "torch.Tensor", "dtype": _text(side.dtype[row]), "shape": _text(side.shape[row])}
    item |= {key: _text(value) for key, value in zip(_STATISTICS, side.four(row))}
    if side.mode == MD5 and side.md5[row] is not None:
        item["md5"] = str(side.md5[row])
    if side.data_name[row]:
        item["data_name"] = side.data_name[row]
    return name, item


def _text(value: object) -> str:
    return str(round(value, 6)) if type(value) is float else "null" if value is None else str(value)
