"""Rows of a node as the dictionaries of text that the existing formats hold.

Both releases write the same fields; 26.2.0 adds whether a tensor requires gradients. Percentages have six digits in both,
numbers in 8.1.1 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any

from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import MD5
from msprobe_engine.measure.columns import RELATIVE
from msprobe_engine.report.graph.nodes.model import Cell, Graph, Items

_STATISTICS = ("Max", "Min", "Mean", "Norm")
_GROUP = "torch.ProcessGroup"
_GROUP_FIELDS = ("group_ranks", "group_id")
_NO_FILE = "-1"
_DIGITS = 6
_QUOTE = "'"
Metrics = Mapping[str, Mapping[str, Cell]]


def items(graph: Graph, node: int, metrics: Metrics | None = None, old: bool = False) -> tuple[Items, Items]:
    """``input_data`` and ``output_data`` of a node.

    Args:
        graph: has the node.
        metrics: row name -> column -> value, added to the fields of the row.
        old: as 8.1.1 writes them; else as 26.2.0.
    """
    made: tuple[Items, Items] = ({}, {})
    text = _text_old if old else _text
    for node_items, rows in zip(made, (graph.inputs(node), graph.outputs(node))):
        for row in rows:
            name, item = _build_item_with_metrics(graph, row, metrics, old)
            # most fields are plain text already, and a graph has millions of them
            node_items[name] = {key: value if type(value) is str and "'" not in value else text(value) for key, value in item.items()}
    return made


def texts(graph: Graph, node: int, metrics: Metrics | None = None) -> tuple[str, str]:
    """`items` of 26.2.0 as json without spaces, written at once: half of the time that the dictionaries and their encoding take."""
    made = []
    for rows in (graph.inputs(node), graph.outputs(node)):
        shown = []
        for row in rows:
            name, item = _build_item_with_metrics(graph, row, metrics, False)
            fields = [
                # a number needs no quoting, and a graph has millions of them
                f'"{key}":"{value!r}"' if type(value) is float else f'"{key}":{_quoted(value if type(value) is str else _text(value))}'
                for key, value in item.items()
            ]
            shown.append(f"{_quoted(name)}:{{{','.join(fields).replace(_QUOTE, '')}}}")
        made.append("{" + ",".join(shown) + "}")
    return made[0], made[1]


def saved_tensors(graph: Graph) -> str | None:
    """Where the tensors of a dump of task ``tensor`` lie (``dump_data_dir``); None of any other."""
    if graph.side is None or graph.side.task != "tensor":
        return None
    return str(Path(graph.side.path).parent / layout.TENSORS)


def _build_item_with_metrics(graph: Graph, row: int, metrics: Metrics | None, old: bool) -> tuple[str, dict[str, Any]]:
    """Name and fields of a row, those of its comparison behind those of the dump."""
    name, item = _item(graph, row, old)
    if metrics:
        for column, value in metrics.get(name, {}).items():
            item[column] = _percent(value) if column in RELATIVE and type(value) is str else value
    return name, item


def _item(graph: Graph, row: int, old: bool) -> tuple[str, dict[str, Any]]:
    side = graph.side
    assert side is not None
    name, dtype = side.name[row], side.dtype[row]
    item: dict[str, Any] = {"data_name": side.data_name[row] or _NO_FILE}
    facts = side.extra.get(row, {})
    if dtype is None:
        return name, {"value": None}
    if dtype == _GROUP:
        return name, {"type": dtype, **{key: facts.get(key) for key in _GROUP_FIELDS}, **item}
    if row in side.values:
        plain = dtype.removeprefix("<class '").removesuffix("'>")
        item = {"type": facts.get("type", plain), "value": side.values[row], **item}
    else:
        item["type"] = "mindspore.Tensor" if side.framework == "mindspore" else "torch.Tensor"
        if "class_type" in facts:
            item["class_type"] = facts["class_type"]
    item |= {"dtype": dtype, "shape": list(shape) if isinstance(shape := side.shape[row], tuple) else shape}
    item |= zip(_STATISTICS, side.stats_of(row))
    if side.mode == MD5:
        item["md5"] = side.checksum(row)
    for key, counts in (("nan_count", side.nans), ("inf_count", side.infs)):
        if row in counts:
            item[key] = counts[row]
    if not old:
        item["requires_grad"] = side.requires_grad[row]
    return name, item


def _text(value: object) -> str:
    if type(value) is float:
        return repr(value)
    return "null" if value is None else str(value).replace("'", "")


def _text_old(value: object) -> str:
    return _round_number(value) if type(value) is float else _text(value)


def _percent(text: str) -> str:
    """A number with more than six digits behind the point keeps six, one with an exponent keeps all."""
    digits = text[:-1].partition(".")[2]
    return f"{float(text[:-1]):.{_DIGITS}f}%" if text[-1:] == "%" and "e" not in digits and len(digits) > _DIGITS else text


def _round_number(value: float) -> str:
    """Six digits behind the point, or of a number that is written with an exponent."""
    return f"{value:.{_DIGITS}e}" if "e" in str(value) else str(round(value, _DIGITS))
