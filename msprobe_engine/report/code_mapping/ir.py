"""The text form of MindSpore's intermediate representation (``save_graphs``), as far as it tells where operators come from.

A node is a line ``%1(x) = PrimFunc_MatMul(%0, ...) ... {unique_id: "12"}`` and indented lines after it. Of these the full name and
the source lines are read, in the forms of all layouts that are known:

=============  ==============================================  ===========================================
MindSpore      full name                                       source line
=============  ==============================================  ===========================================
1.x            ``: (Default/conv3-Conv2d/Conv2D-op107)``       ``# In file net.py(175)/  x = self.conv3(x)/``
1.8 to 2.0     ``: full_name_with_scope: (Default/...)``       the same
before naming  ``# Scope: (Default/conv3-Conv2d)``             either; 1.x writes ``scope``
2.x            ``# Fullname with scope: (Default/...)``        ``# In file net.py:16, 12~25/  a = ops.sub(x, 1)/``
=============  ==============================================  ===========================================

The file is read line by line, and nothing in it is trusted: lines, nodes and source lines per node are bounded.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.input_files import open_input

MAX_BYTES = 4 << 30
MAX_NODES = 5_000_000
MAX_LINES = 1_000
"""Source lines of one node; a call stack of MindSpore has some tens."""
_LONGEST = 64 << 10
"""Characters of a line that are looked at; a constant in a node's line may be megabytes."""

_SCOPE = ("# Fullname with scope: (", ": full_name_with_scope: (")
_PATH = ("# Scope: (", "# scope: (")
"""Of nodes that have no name yet."""
_SOURCE = "# In file "
_REMARKS = ("# Corresponding forward node candidate:", "# Corresponding code candidate:")
_UNIQUE = re.compile(r'(?<![a-z_])unique_id: "(\d{1,20})"', re.ASCII)
_FORWARD = re.compile(r'forward_unique_id: "(\d{1,20})"', re.ASCII)
_INPUT = re.compile(r"%\d{1,9}(?!\w)", re.ASCII)
_OLD_SCOPE = re.compile(r": \(((?:Default|Gradients|recompute_Default)/[^()<>]*)\)")


@dataclass
class Node:
    """An operator of a graph.

    Attributes:
        op: as the graph names it, without ``PrimFunc_``: ``MatMul``.
        scope: full name (``Default/fc1-Dense/MatMul-op0``); in files written before nodes have names the path only; "" when there is none.
        named: the scope ends with the operator's own name.
        lines: source lines as the file has them, outermost call first, after remarks such as ``Corresponding forward node candidate:``.
        unique_id, forward_id: of the node, and of the forward node that a node of the backward graph belongs to; "" when not said.
        function: source line of the function that its graph was made of; "" when not said.
        inputs: nodes of the same graph that it takes results of.
    """

    op: str
    scope: str = ""
    named: bool = True
    lines: list[str] = field(default_factory=list)
    unique_id: str = ""
    forward_id: str = ""
    function: str = ""
    inputs: list[Node] = field(default_factory=list, repr=False)

    @property
    def has_source(self) -> bool:
        """Is there any source line, remarks aside?"""
        return any(line.startswith("In file ") for line in self.lines)


def read_nodes(path: Path) -> list[Node]:
    """The nodes of an IR file, in its order. A node without source lines gets, with a remark, those of its forward node, else of the
    nearest node whose result it takes, else the line of the function that its graph was made of.

    Raises:
        DumpFormatError: it cannot be read, is too large, or has no node in it.
    """
    try:
        with open_input(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise DumpFormatError(f"{path}: has more than {MAX_BYTES >> 30} GiB; give an IR file that MindSpore wrote")
            nodes = list(_parse(io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="\n"), path))
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read ({error.strerror}); give an IR file that MindSpore wrote (save_graphs)") from error
    if not nodes:
        raise DumpFormatError(
            f"{path}: has no node of a graph in it; give a text IR file that MindSpore wrote with save_graphs (trace_code_graph_* or *.ir)"
        )
    _inherit(nodes)
    return nodes


def _lines(stream: IO[str]) -> Iterator[str]:
    """Lines, cut; the end of a long one is kept too, because a node's ids stand there."""
    while True:
        line = stream.readline(_LONGEST)
        if not line:
            return
        rest, tail = line, ""
        while not rest.endswith("\n") and (rest := stream.readline(_LONGEST)):
            tail = (tail + rest)[-_LONGEST:]
        yield (line + tail).rstrip("\n")


def _parse(stream: IO[str], path: Path) -> Iterator[Node]:
    node: Node | None = None
    known: dict[str, Node] = {}
    """Of this graph, by number: ``%4``."""
    count, inside, function = 0, False, ""
    for line in _lines(stream):
        text = line.strip()
        starts = line[:1].isspace() and text.startswith("%") and " = " in text
        ends = line.startswith("}") or (line[:1].isspace() and text.startswith("Return("))
        if (starts or ends) and node is not None:
            yield node
            node = None
        if starts:
            node = _node(text, function)
            node.inputs = [known[number] for number in dict.fromkeys(_INPUT.findall(_arguments(text))) if number in known]
            known[text[: text.index("(")] if "(" in text else text] = node
            count += 1
            if count > MAX_NODES:
                raise DumpFormatError(f"{path}: has more than {MAX_NODES:,} nodes; this is no IR file that can be mapped")
        elif line.startswith("subgraph @"):
            inside, known = True, {}
        elif line.startswith("}"):
            inside, function = False, ""
        elif node is not None:
            _detail(node, text)
        elif not inside and text.startswith(_SOURCE):
            function = _source(text)
    if node is not None:
        yield node


def _node(text: str, function: str) -> Node:
    right = text.partition(" = ")[2]
    op = right.partition("(")[0].strip()
    unique, forward = _UNIQUE.search(right), _FORWARD.search(right)
    return Node(
        op.removeprefix("PrimFunc_"), unique_id=unique[1] if unique else "", forward_id=forward[1] if forward else "", function=function
    )


def _arguments(text: str) -> str:
    """What stands in the brackets of a call, as far as it is looked at; attributes follow behind."""
    right = text.partition(" = ")[2]
    return right.partition("(")[2].partition(") {")[0].partition(") primitive_attrs")[0].partition(") cnode_")[0][:4096]


def _detail(node: Node, text: str) -> None:
    if text.startswith(_SOURCE):
        if len(node.lines) < MAX_LINES:
            node.lines.append(_source(text))
    elif text in _REMARKS:
        node.lines.append(text[2:])
    elif not node.scope:
        start = next((start for start in (*_SCOPE, *_PATH) if text.startswith(start)), None)
        if start is not None and text.endswith(")"):
            node.scope, node.named = text[len(start) : -1], start in _SCOPE
        elif (old := _OLD_SCOPE.fullmatch(text)) is not None:
            node.scope = old[1]


def _source(text: str) -> str:
    """``In file net.py:16, 12~25/        a = ops.sub(x, 1)``: without the marks around it."""
    return text[2:].removesuffix("/")


def _inherit(nodes: list[Node]) -> None:
    own = {id(node) for node in nodes if node.has_source}
    forward = {node.unique_id: node for node in nodes if node.unique_id and id(node) in own}
    for node in nodes:
        if id(node) in own:
            continue
        if (origin := forward.get(node.forward_id)) is not None:
            node.lines = [_REMARKS[0][2:], *origin.lines]
        elif (near := _nearest(node, own)) is not None:
            node.lines = [f"No line of its own; it takes the result of {near.scope or near.op}:", *near.lines]
        elif node.function:
            node.lines = ["No line of its own; the function of its graph:", node.function]


def _nearest(node: Node, own: set[int]) -> Node | None:
    """The first node with lines that it takes results of, over a few others."""
    level = node.inputs
    for _ in range(4):
        for found in level:
            if id(found) in own:
                return found
        level = [further for found in level[:16] for further in found.inputs]
    return None
