"""The core of the graph page: what its islands hold, and the tree and canvas that show them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_samples import Sample, page_of, ranks

from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.report.graph.nodes.model import API, MODULE, Comparison, Graph
from msprobe_engine.report.graph.page import flow, page_data
from msprobe_engine.report.graph.page.page import PageWriter

Open = Callable[..., Any]
KINDS = {"u1": np.uint8, "u2": np.uint16, "i2": np.int16, "i4": np.int32, "u4": np.uint32, "f4": np.float32}


def unpacked(island: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and columns of an island."""
    assert island[:4] == b"MPG1"
    start = 8 + int.from_bytes(island[4:8], "little")
    header = json.loads(island[8:start])
    return header, {
        name: np.frombuffer(island, KINDS[kind], length, start + offset) for name, (kind, offset, length) in header["columns"].items()
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two ranks, a module of the target is a hundredth off."""
    root = tmp_path_factory.mktemp("graph_core")
    target = ranks(root / "target", Sample(fault="layers.1.mlp"), Sample())
    return page_of(root / "page", target, ranks(root / "golden", Sample(), Sample()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of one rank with NaN."""
    root = tmp_path_factory.mktemp("graph_alone")
    return page_of(root / "page", ranks(root / "run", Sample(nan="layers.1.attn")))


def shown(opened: Open, path: Path, **options: Any) -> Any:
    """The page with its first pair on the screen."""
    page = opened(path, width=1440, height=900, **options)
    page.wait_for_selector("#graph.ready")
    still(page)
    return page


def still(page: Any) -> None:
    """Wait until nothing moves and all is drawn."""
    page.evaluate("""async () => {
        const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
        await frame(); // what is asked for begins in the next frame
        do await frame(); while (!Graph.view.isStill());
    }""")


def node(page: Any, name: str, side: int = 0) -> int:
    """Number of a node on the page."""
    found: int = page.evaluate("([side, name]) => Graph.store.find(side, name)", [side, name])
    assert found >= 0, name
    return found


def test_nodes_are_numbered_in_order_of_execution_and_sizes_say_the_hierarchy() -> None:
    """A parent that stands behind its children in the graph comes before them on the page."""
    graph = Graph(0, 0, None)
    call = graph.add("Functional.relu.0.forward", API, -1)
    module = graph.add("Module.a.A.forward.0", MODULE, 0)
    graph.parents[call] = module
    graph.children[module].append(call)
    last = graph.add("Torch.add.0.forward", API, 0)
    order = page_data.Order(graph)
    assert order.nodes.tolist() == [0, module, call, last]
    assert order.sizes.tolist() == [4, 2, 1, 1]
    assert order.places[call] == 2


def test_an_island_of_columns_holds_names_of_any_characters() -> None:
    """Ends of names count UTF-16 code units; half a surrogate pair becomes a question mark in place of an error."""
    graph = Graph(0, 0, None)
    for name in ("Module.模型.A.forward.0", "Module.\U0001f600.B.forward.0", "Module.\ud800.C.forward.0", "Module.\0\n.D.forward.0"):
        graph.add(name, MODULE, 0)
    island, flags = page_data.columns(graph, page_data.Order(graph))
    _, columns = unpacked(island)
    text = columns["names"].tobytes().decode().encode("utf-16-le")
    ends = [0, *(2 * columns["name_end"].astype(int)).tolist()]
    names = [text[a:b].decode("utf-16-le") for a, b in pairwise(ends)]
    assert names[1:3] == graph.names[1:3]
    assert names[3] == "Module.?.C.forward.0"
    assert names[4] == graph.names[4]
    assert not flags.any()


def test_partners_and_units_follow_the_numbers_of_the_page(tmp_path: Path) -> None:
    """A node without a partner is marked, the golden side has the units of its partners, and nothing to compare stays that."""
    target, golden = Graph(0, 0, None), Graph(0, 0, None)
    for one, names in ((target, ("a", "b")), (golden, ("b",))):
        for name in names:
            one.add(f"Functional.{name}.0.forward", API, 0)
    made = Comparison(target, golden, "structure", [0, -1, 1], [0, 2], [None] * 3, np.array([np.nan, np.nan, 7.0]), suspect=2)
    writer = PageWriter(tmp_path / "page.html", "page", "target", "golden")
    writer.add(made)
    assert writer.finish() == [tmp_path / "page.html"]
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640
    assert not list(tmp_path.glob(".*"))
    order = page_data.Order(target)
    island, flags = page_data.columns(target, order, partners=np.array([0, -1, 1]), units=made.units)
    _, columns = unpacked(island)
    assert columns["partner"].tolist() == [0, -1, 1]
    assert (flags & page_data.UNMATCHED > 0).tolist() == [False, True, False]
    assert np.isnan(columns["units"][:2]).all()


def test_opens_at_the_first_suspect_in_the_middle_with_all_around_it_open(opened: Open, compared: Path) -> None:
    """The page shows where the difference begins without a click, on both sides at one height."""
    page = shown(opened, compared)
    chosen = page.evaluate("Graph.store.selection")
    assert chosen["side"] == 0
    assert chosen["node"] == page.evaluate("Graph.store.pair.suspect")
    name = page.evaluate("Graph.store.sides[0].name(Graph.store.selection.node)")
    assert name.startswith("Functional."), name
    around = page.evaluate("Graph.store.sides[0].ancestors(Graph.store.selection.node).map((i) => Graph.store.isOpen(0, i))")
    assert around
    assert all(around)
    size = page.evaluate("(() => { const c = document.querySelector('.plane canvas'); return [c.clientWidth, c.clientHeight]; })()")
    place, twin = (page.evaluate(f"Graph.view.place({side}, Graph.store.selection.node)") for side in (0, 1))
    assert 0 < place["x"] < size[0] / 2 < twin["x"] < size[0]
    assert abs(place["y"] + place["h"] / 2 - size[1] / 2) < size[1] / 4
    assert abs(place["y"] - twin["y"]) < 2
    row = page.locator(".tree-row.chosen")
    assert row.count() == 1
    assert row.get_attribute("aria-selected") == "true"


def test_a_partner_opens_and_closes_with_its_node(opened: Open, compared: Path) -> None:
    """What is opened on one side is open on the other."""
    page = shown(opened, compared)
    module = node(page, "Module.layers.2.attn.Attention.forward.0")
    assert not page.evaluate(f"Graph.store.isOpen(0, {module})")
    before = page.evaluate("Graph.store.rows(1).length")
    page.evaluate(f"Graph.store.reveal(0, {module}); Graph.store.setOpen(0, {module}, true)")
    assert page.evaluate(f"Graph.store.isOpen(1, Graph.store.partner(0, {module}))")
    assert page.evaluate("Graph.store.rows(1).length") > before
    page.evaluate("Graph.store.closeBelow(0, 0)")
    assert page.evaluate(f"Graph.store.isOpen(1, Graph.store.partner(0, {module}))") is False


def test_the_tree_is_moved_by_keys(opened: Open, compared: Path) -> None:
    """Arrows go through rows, open and close; each row says its level, and the grid which row is active."""
    page = shown(opened, compared)
    page.evaluate("Graph.store.closeBelow(0, 0)")
    page.focus(".tree-grid")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    still(page)
    module = node(page, "Module.layers.0.Layer.forward.0")
    assert page.evaluate("Graph.store.selection.node") == module
    active = page.locator("#" + page.get_attribute(".tree-grid", "aria-activedescendant"))
    assert (active.get_attribute("aria-level"), active.get_attribute("aria-expanded")) == ("2", "false")
    page.keyboard.press("ArrowRight")
    still(page)
    assert active.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("Graph.store.sides[0].parent[Graph.store.selection.node]") == module
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    still(page)
    assert page.evaluate("Graph.store.selection.node") == module
    assert not page.evaluate(f"Graph.store.isOpen(0, {module})")


def test_mouse_on_the_canvas(opened: Open, compared: Path) -> None:
    """A click chooses, a click beside everything chooses nothing, a double click opens, the wheel scrolls, with Ctrl it zooms."""
    page = shown(opened, compared)
    page.evaluate("Graph.store.closeBelow(0, 0); Graph.view.fit()")
    still(page)
    module = node(page, "Module.layers.0.Layer.forward.0")
    corner = page.evaluate(
        "(() => { const b = document.querySelector('.plane canvas').getBoundingClientRect(); return [b.left, b.top]; })()"
    )

    def middle() -> tuple[float, float]:
        place = page.evaluate(f"Graph.view.place(0, {module})")
        return corner[0] + place["x"] + place["w"] / 2, corner[1] + place["y"] + min(place["h"] / 2, 12)

    page.mouse.click(*middle())
    assert page.evaluate("Graph.store.selection.node") == module
    page.mouse.dblclick(*middle())
    assert page.evaluate(f"Graph.store.isOpen(0, {module})")
    still(page)
    place, scale = page.evaluate(f"[Graph.view.place(0, {module}), Graph.view.scale()]")
    page.mouse.wheel(0, 50)
    still(page)
    after = page.evaluate(f"Graph.view.place(0, {module})")
    assert after["y"] == pytest.approx(place["y"] - 50, abs=1)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    still(page)
    assert page.evaluate("Graph.view.scale()") > scale
    page.mouse.click(corner[0] + 5, corner[1] + 60)
    assert page.evaluate("Graph.store.selection") is None


def test_the_way_of_nan_leads_from_its_birth_to_the_last_forward_call(opened: Open, alone: Path) -> None:
    """Every step of it is a call that takes NaN from the one before. It is shown at once; the button hides it, and opens all around it."""
    page = shown(opened, alone)
    assert page.get_attribute("#canvas-path", "aria-pressed") == "true"
    page.click("#canvas-path")
    assert page.evaluate("Graph.store.path") is None
    page.click("#canvas-path")
    path = page.evaluate("({kind: Graph.store.path.kind, names: [...Graph.store.path.nodes].map((i) => Graph.store.sides[0].name(i))})")
    assert path["kind"] == "nonfinite"
    assert path["names"][0] == page.evaluate("Graph.store.pair.suspectName")
    assert path["names"][-1] == "Distributed.all_reduce.0.forward"
    shut = "[...Graph.store.path.nodes].filter((i) => !Graph.store.sides[0].ancestors(i).every((one) => Graph.store.isOpen(0, one)))"
    assert page.evaluate(shut) == []


def test_a_collective_leads_to_the_other_rank(opened: Open, compared: Path) -> None:
    """A link opens the pair of that rank at the call that belongs to it."""
    page = shown(opened, compared)
    call = node(page, "Distributed.all_reduce.0.forward")
    assert page.evaluate(f"Graph.store.link(0, {call}).nodes.map((one) => one.rank)") == [1]
    assert page.evaluate(f"Graph.store.follow(0, {call}, 1)")
    assert page.evaluate("Graph.store.pair.rank") == 1
    assert page.evaluate("Graph.store.sides[0].name(Graph.store.selection.node)") == "Distributed.all_reduce.0.forward"


def test_a_filter_leaves_what_passes_and_what_is_around_it(opened: Open, compared: Path) -> None:
    """The tree shows every match, whatever was open before; without the filter all is as it was."""
    page = shown(opened, compared)
    page.evaluate("Graph.store.closeBelow(0, 0)")
    before = page.evaluate("[...Graph.store.rows(0)]")
    page.evaluate("Graph.store.filter((columns, i) => columns.kind(i) === 'gelu')")
    kinds = page.evaluate("[...Graph.store.rows(0)].filter((i) => Graph.store.sides[0].isLeaf(i)).map((i) => Graph.store.sides[0].kind(i))")
    assert kinds == ["gelu"] * 3
    assert page.evaluate("Graph.store.matchCount") == [3, 3]
    page.evaluate("Graph.store.filter(null)")
    assert page.evaluate("[...Graph.store.rows(0)]") == before


def test_details_are_the_numbers_of_the_dump(opened: Open, compared: Path) -> None:
    """Statistics come back as float32 has them, shapes and dtypes as the file has them."""
    page = shown(opened, compared)
    call = node(page, "Functional.softmax.0.forward")
    found = page.evaluate(f"Graph.store.details(0, {call})")
    dump = json.loads((compared.parent.parent / "target/step0/rank0/dump.json").read_text(encoding="utf-8"))
    (expected,) = dump["data"]["Functional.softmax.0.forward"]["output"]
    (row,) = found["outputs"]
    assert (row["place"], row["dtype"], row["shape"], row["partner"]) == ("output.0", "torch.float32", [2, 8], "output.0")
    for key in ("Max", "Min", "Mean", "Norm"):
        assert np.float32(row[key.lower()]) == np.float32(expected[key])
    assert [one["value"] for one in found["inputs"] if "value" in one] == [1e-05]
    assert page.evaluate(f"Graph.store.stack(0, {call})")[0].startswith("File /job/model/attention.py, line 10")


@pytest.mark.parametrize(("deep", "flat"), [(1500, 0), (0, 30_000)])
def test_extreme_hierarchies_open(opened: Open, tmp_path: Path, deep: int, flat: int) -> None:
    """Neither a very deep nor a very wide hierarchy ends in an error; the tree has only as many elements as fit."""
    graph = Graph(0, 0, None)
    inner = 0
    for i in range(deep):
        inner = graph.add(f"Module.m{i}.M.forward.0", MODULE, inner)
    for i in range(flat):
        graph.add(f"Functional.relu.{i}.forward", API, inner)
    writer = PageWriter(tmp_path / "page.html", "page", "target")
    writer.add(graph)
    page = shown(opened, *writer.finish())
    page.evaluate("Graph.store.openBelow(0, 0, 100000); Graph.store.select(0, Graph.store.sides[0].count - 1)")
    still(page)
    assert page.evaluate("Graph.store.rows(0).length") == page.evaluate("Graph.store.sides[0].count") > deep + flat
    assert page.locator(".tree-row").count() < 80
    assert page.locator(".tree-row.chosen").count() == 1


def test_the_sign_of_a_module_opens_it(opened: Open, compared: Path) -> None:
    """One click on the arrow opens or closes and leaves the choice; a double click there ends where it began."""
    page = shown(opened, compared)
    page.evaluate("Graph.store.closeBelow(0, 0); Graph.view.fit()")
    still(page)
    module, chosen = node(page, "Module.layers.0.Layer.forward.0"), page.evaluate("Graph.store.selection")
    place, box = page.evaluate(f"Graph.view.place(0, {module})"), page.locator(".plane canvas").bounding_box()
    at = box["x"] + place["x"] + 14, box["y"] + place["y"] + place["h"] / 2
    page.mouse.click(*at)
    assert page.evaluate(f"Graph.store.isOpen(0, {module})")
    assert page.evaluate("Graph.store.selection") == chosen
    page.mouse.dblclick(*at)
    assert page.evaluate(f"Graph.store.isOpen(0, {module})")


def test_the_small_map_moves_the_view(opened: Open, compared: Path) -> None:
    """A press on the map shows that place; what is in view as a whole has no map."""
    page = shown(opened, compared)
    page.evaluate("Graph.store.openBelow(0, 0, 9); Graph.store.select(0, 1)")
    still(page)
    before = page.evaluate("Graph.view.place(0, 0)")
    box = page.locator(".plane canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2 - 45, box["y"] + box["height"] - 20)
    still(page)
    assert page.evaluate("Graph.view.place(0, 0)")["y"] < before["y"] - 500
    assert page.evaluate("Graph.store.selection.node") == 1


def chain(nan_from: int, calls: int = 5) -> tuple[Graph, DumpTable]:
    """Calls that each take the output of the one before; from one on all outputs are NaN. Call 2 gives a value that only call 4 takes."""
    side = DumpTable(Path("dump.json"), {"framework": "pytorch", "task": "statistics"})
    graph = Graph(0, 0, side)
    outputs: list[float] = []
    for i in range(calls):
        source = {3: 1, 4: 2}.get(i, i - 1)
        taken = 0.5 if i == 0 else outputs[source]
        outputs.append(math.nan if i >= nan_from else float(i + 1))
        name = f"Functional.f{i}.0.forward"
        side.ops.append(name)
        for place, role, value in (("input.0", INPUT, taken), ("output.0", OUTPUT, outputs[i])):
            side.op.append(i)
            side.role.append(role)
            side.name.append(f"{name}.{place}")
            side.dtype.append("torch.float32")
            side.shape.append(SHAPE)
            side.numbers.extend([value] * 4)
            side.md5.append(None)
            side.requires_grad.append(False)
            side.data_name.append("")
        side.offsets.append(len(side.name))
        graph.add(name, API, 0, i)
    return graph, side


SHAPE = [2, 8]


def test_nan_is_followed_from_call_to_call_and_as_the_other_run_goes() -> None:
    """All NaN look alike: they come from the last call that gave some, unless the golden run, which is finite, says from which."""
    bad, side = chain(1)
    good, _ = chain(99)
    assert flow.producers(good)[::2].tolist() == [-1, 1, 2, 2, 3]
    found = flow.producers(bad)
    assert found[::2].tolist() == [-1, 1, 2, 3, 4]
    flow.follow_partners(found, bad, good, flow.producers(good), np.arange(len(side)), list(range(len(good))))
    assert found[::2].tolist() == [-1, 1, 2, 2, 3]
