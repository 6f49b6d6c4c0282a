"""Links between the communication calls of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from existing_graph import cases, outcome, unpack
from graph_dumps import Record, call, graph, nan, number, tensor

from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.existing import overflow
from msprobe_engine.report.graph.nodes import links
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import Graph, Link
from msprobe_engine.report.graph.options import NEW, VIS, GraphOptions

OPTIONS = GraphOptions(generation=NEW, formats=(VIS,), overflow=True)


def _group(*ranks: int) -> Record:
    return {"type": "torch.ProcessGroup", "group_ranks": list(ranks), "group_id": "".join(map(str, ranks))}


def _linked(tmp_path: Path, ranks: dict[int, dict[str, Record]]) -> dict[int, dict[str, tuple[Link, ...]]]:
    graphs = {rank: graph(tmp_path, records, rank=rank) for rank, records in ranks.items()}
    for one in graphs.values():
        overflow.mark(one)
    found = links.link({rank: links.calls(one, OPTIONS)[0] for rank, one in graphs.items()}, graphs)
    return {rank: {graphs[rank].names[node]: some for node, some in nodes.items()} for rank, nodes in found.items()}


def test_links_hold_all_of_the_existing_tool(tmp_path: Path) -> None:
    """What 26.2.0 links is linked the same way, with the same marks; it links nothing of the default group."""
    case = next(case for case in cases(NEW) if case.name == "job-nan")
    target, _ = unpack(case, tmp_path)
    graphs: dict[int, Graph] = {}
    for rank in (0, 1):
        graphs[rank] = build(read_side(target / f"rank{rank}/dump.json"), 1, rank)
        overflow.mark(graphs[rank], exact=True)
    found = links.link({rank: links.calls(one, OPTIONS)[0] for rank, one in graphs.items()}, graphs)
    theirs = ours = 0
    for pair in outcome(case).pairs:
        made = graphs[pair.rank]
        for name, node in pair.npu.items():
            mine = [
                {
                    "communications_type": one.communications_type,
                    "nodes_info": {str(r): [v or "Nan", n] for r, (v, n) in one.nodes_info.items()},
                }
                for one in found[pair.rank].get(made.index[name], ())
            ]
            ours += bool(mine)
            if node["matched_distributed"]:
                theirs += 1
                assert mine == [node["matched_distributed"]], name
    assert 0 < theirs < ours


def test_collectives_of_a_group_and_of_all(tmp_path: Path) -> None:
    """The k-th call of an operation by every rank of its group; without a group it is that of all ranks."""
    reduce = "Distributed.all_reduce.{}.forward"
    ranks = {}
    for rank in range(4):
        pair = _group(0, 1) if rank < 2 else _group(2, 3)
        ranks[rank] = {reduce.format(0): call([tensor()], [tensor()], group=pair), reduce.format(1): call([tensor()], [tensor()])}
    found = _linked(tmp_path, ranks)
    assert found[0][reduce.format(0)] == (Link("send_receive", {1: (None, reduce.format(0))}),)
    assert found[3][reduce.format(1)] == (Link("send_receive", {rank: (None, reduce.format(1)) for rank in range(3)}),)


def test_roots_send_and_receive(tmp_path: Path) -> None:
    """Of a broadcast the root sends to all, of a gather it receives from all; by name and by position."""
    names = ("Distributed.broadcast.0.forward", "Distributed.broadcast.1.forward", "Distributed.gather.0.forward")
    records = dict(
        zip(
            names,
            (
                call([tensor(), number(1)], [tensor()]),
                call([tensor()], [tensor()], src=number(0)),
                call([tensor()], [tensor()], dst=number(1)),
            ),
        )
    )
    found = _linked(tmp_path, dict.fromkeys(range(3), records))
    words = {name: [found[rank][name][0].communications_type for rank in range(3)] for name in names}
    assert words[names[0]] == ["receive", "send", "receive"]
    assert words[names[1]] == ["send", "receive", "receive"]
    assert words[names[2]] == ["send", "receive", "send"]
    assert found[0][names[0]][0].nodes_info == {1: (None, names[0])}
    assert set(found[1][names[2]][0].nodes_info) == {0, 2}


def test_messages_with_nan_are_linked_and_marked(tmp_path: Path) -> None:
    """8.1.1 does not link a message that carries NaN, because NaN is not equal to NaN; the mark is the level of the other call."""
    send, receive = "Distributed.send.0.forward", "Distributed.recv.0.forward"
    ranks = {0: {send: call([nan()], [nan()], dst=number(1))}, 1: {receive: call([tensor()], [nan()], src=number(0))}}
    found = _linked(tmp_path, ranks)
    assert found[0][send] == (Link("send", {1: ("high", receive)}),)
    assert found[1][receive] == (Link("receive", {0: ("high", send)}),)


def test_a_batch_of_messages_has_a_link_each(tmp_path: Path) -> None:
    """``batch_isend_irecv`` in a ring of three: one link to the next rank, one from the one before."""
    name = "Distributed.batch_isend_irecv.0.forward"

    def message(op: str, peer: int) -> dict[str, Any]:
        return {"class_type": "torch.distributed.P2POp", "op": op, "peer": peer, "tensor": tensor(), "tag": 0, "group_id": "g"}

    ranks = {rank: {name: call([[message("isend", (rank + 1) % 3), message("irecv", (rank - 1) % 3)]], [])} for rank in range(3)}
    found = _linked(tmp_path, ranks)
    for rank in range(3):
        to, back = (rank + 1) % 3, (rank - 1) % 3
        assert found[rank][name] == (Link("send", {to: (None, name)}), Link("receive", {back: (None, name)}))


def test_a_call_without_its_other_half_is_not_linked(tmp_path: Path) -> None:
    """The dump of the other rank may be missing."""
    ranks = {
        0: {"Distributed.send.0.forward": call([tensor()], [], dst=number(7))},
        1: {"Torch.add.0.forward": call([tensor()], [tensor()])},
    }
    assert _linked(tmp_path, ranks) == {0: {}, 1: {}}
