"""The panels of the graph page in a browser: opened, searched, filtered, compared, gone through by keys; in two languages."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from graph_samples import FILE, HOSTILE, Sample, page_of, ranks

from msprobe_engine.report.graph.nodes.model import MODULE, Graph
from msprobe_engine.report.graph.page.page import PageWriter
from msprobe_engine.report.graph.same_graphs import Alike

CHOSEN = "(() => { const { selection, sides } = Graph.store; return selection && sides[selection.side].name(selection.node); })()"
FAULTY = "Functional.linear.6.forward"
"""The call in ``layers.1.mlp`` of rank 1 where the sample's fault is."""

LEFT = "[...Graph.store.matches(0).keys()].filter((i) => Graph.store.matches(0)[i])"
"""Nodes of the target that the filters leave."""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("graphs")
    golden = ranks(root / "golden", Sample(1), Sample(2), steps=2)
    target = ranks(root / "target", Sample(1), Sample(2, fault="layers.1.mlp", extra=True), steps=2)
    nan = ranks(root / "nan", Sample(1), Sample(2, nan="layers.1.mlp"))
    hostile = ranks(root / "hostile", Sample(3, names=HOSTILE, fault="layers.2.mlp"))
    clean = ranks(root / "clean", Sample(3))
    return {
        "two": page_of(root / "page_two", target, golden),
        "nan": page_of(root / "page_nan", nan),
        "hostile": page_of(root / "page_hostile", hostile, clean),
        "missing": page_of(root / "page_missing", ranks(root / "missing", Sample(3, missing=True)), clean),
        "same": page_of(root / "page_same", clean, clean),
        "long": page_of(root / "page_long", ranks(root / "long", Sample(4, layers=250))),
    }


@pytest.fixture
def show(pages: Mapping[str, Path], opened: Open) -> Open:
    """``show(name, address="", ...)``: a page of the samples, ready."""

    def show_(name: str, address: str = "", **how: Any) -> Any:
        page = opened(pages[name], address=address, **how)
        page.wait_for_selector("#graph.ready")
        page.wait_for_selector(".details, .details-pane .empty")
        return page

    return show_


def chosen(page: Any) -> str | None:
    """Name of the chosen node."""
    name: str | None = page.evaluate(CHOSEN)
    return name


def names(page: Any, nodes: str) -> list[str]:
    """Names of nodes of the target that an expression gives."""
    found: list[str] = page.evaluate(f"({nodes}).map((node) => Graph.store.sides[0].name(node))")
    return found


def until(page: Any, expression: str) -> None:
    """Wait for something to be so. The page's policy allows no evaluation of texts inside of it, so it is asked from outside."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never so: {expression}")


def search(page: Any, query: str) -> int:
    """Search for something; how many there are."""
    page.locator("#graph-search").fill(query)
    page.wait_for_timeout(250)  # the search waits for a pause in the typing
    found: int = page.evaluate("Graph.search.hits.length")
    return found


@pytest.mark.slow
def test_it_opens_at_the_first_suspect_of_all_ranks(show: Open) -> None:
    """The fault is on rank 1, so the page shows rank 1, says what is wrong there in words, and g leads back from anywhere."""
    page = show("two")
    assert page.evaluate("[Graph.store.pair.step, Graph.store.pair.rank]") == [0, 1]
    assert chosen(page) == FAULTY
    assert "First suspect" in page.locator(".callout.bad").inner_text()
    assert "round-off" in page.locator(".measure").inner_text()
    assert [text.strip() for text in page.locator(".breadcrumbs li").all_inner_texts()] == ["Whole model", "layers.1", "mlp", "linear ·6"]
    page.get_by_label("Rank", exact=True).select_option("0")
    until(page, "Graph.store.pair.rank === 0")
    page.keyboard.press("Escape")
    page.locator("#graph-tab-details").focus()
    page.keyboard.press("g")
    until(page, "Graph.store.pair.rank === 1")
    assert chosen(page) == FAULTY


def test_a_call_that_only_the_golden_run_makes(show: Open) -> None:
    """The page opens where the target misses it, not at another call that has its number in the target; the sentence names it."""
    page = show("missing")
    text = page.locator(".callout.bad").inner_text()
    assert "Functional.mul.1.forward: only the golden run makes this call" in text
    assert chosen(page) == "Functional.softmax.1.forward"


def test_details_hold_both_sides_against_each_other(show: Open) -> None:
    """Rows of target and golden with their difference, the shape, the line of source, neighbours that can be gone to, and the partner."""
    page = show("two")
    output = page.locator(".part", has=page.locator("h3", has_text="Outputs")).first
    assert "output.0" in output.inner_text()
    assert "float32 [2, 8]" in output.inner_text()
    assert page.evaluate("document.querySelectorAll('.row.differs tbody tr').length") == 3
    assert output.locator(".delta td.changed").count() == 4
    assert "1 %" in output.locator(".delta").inner_text()
    assert "attention.py" in page.locator(".stack .innermost").inner_text()
    assert ":21" in page.locator(".stack .innermost").inner_text()
    rows = page.locator(".row").count()
    page.get_by_label("Only what differs").check()
    assert page.locator(".row").count() < rows
    assert "more are the same" in page.locator(".rows").inner_text() or "are the same" in page.locator(".rows").inner_text()
    page.locator(".part", has_text="Inputs come from").locator(".node-link").first.click()
    assert chosen(page) == "Functional.gelu.1.forward"
    page.keyboard.press("m")
    assert page.evaluate("Graph.store.selection.side") == 1
    assert page.locator(".badges").inner_text().startswith("Golden")


def test_a_module_says_where_the_worst_inside_is(show: Open) -> None:
    """A module without a difference of its own leads to the largest one inside, and to the suspect."""
    page = show("two")
    page.locator(".breadcrumbs button").nth(1).click()
    assert chosen(page) == "Module.layers.1.Layer.forward.0"
    assert "The first suspect is inside" in page.locator(".callout").inner_text()
    page.locator(".callout .node-link").click()
    assert chosen(page) == FAULTY


def test_collectives_lead_to_the_other_rank(show: Open) -> None:
    """The partner of a collective is a click away, in its own rank."""
    page = show("two")
    search(page, "all_reduce")
    page.keyboard.press("Enter")
    until(page, f"{CHOSEN} === 'Distributed.all_reduce.0.forward'")
    page.locator(".rank-link", has_text="Rank 0").click()
    until(page, "Graph.store.pair.rank === 0")
    assert chosen(page) == "Distributed.all_reduce.0.forward"


def test_search_finds_names_types_lines_and_patterns(show: Open) -> None:
    """Words in any order, type:, line:, expressions and quotes; a broken expression is said; Enter, n and N go through what was found."""
    page = show("two")
    assert search(page, "mlp layers.1") == 1
    assert search(page, "type:attention") == 3
    assert search(page, "line:attention.py line:train.py gelu") == 3
    assert search(page, "/^Functional\\.gelu\\.[02]\\./") == 2
    assert search(page, '"Module.layers.0.mlp"') == 1
    assert search(page, "nowhere") == 0
    assert "Nothing is called so" in page.locator(".search-help").inner_text()
    assert search(page, "/[/") == 0
    assert "no regular expression" in page.locator(".search-help").inner_text()
    assert search(page, "gelu") == 3
    hits = page.evaluate("Graph.search.hits.map((hit) => hit.node)")
    page.keyboard.press("Home")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.evaluate("Graph.search.hits.length") == 0
    search(page, "gelu")
    page.keyboard.press("Enter")
    first = page.evaluate("Graph.store.selection.node")
    page.locator("#graph-tab-details").focus()
    page.keyboard.press("n")
    second = page.evaluate("Graph.store.selection.node")
    page.keyboard.press("N")
    assert hits.index(second) == (hits.index(first) + 1) % 3
    assert page.evaluate("Graph.store.selection.node") == first


def test_escape_leads_from_a_hit_back_to_the_page(show: Open) -> None:
    """After Enter has gone to a hit, Escape closes the list and leaves the field with its words, so that n goes on to the next hit."""
    page = show("two")
    assert search(page, "gelu") == 3
    page.keyboard.press("Enter")
    first = page.evaluate("Graph.store.selection.node")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    assert page.evaluate("Graph.store.selection.node") != first
    assert page.evaluate("Graph.search.hits.length") == 3


def test_thousands_of_hits_are_a_few_elements(show: Open) -> None:
    """Of thousands of hits the list holds those in view; they can be scrolled to the last, and the tree can be left with them alone."""
    page = show("long")
    assert search(page, "functional") == 1500
    assert page.locator(".hit").count() < 30
    page.locator(".hits").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    page.wait_for_selector("#graph-hit-1499")
    page.get_by_label("Show only these in the tree").check()
    assert page.evaluate("Graph.store.matchCount[0]") == 1500
    page.locator("#graph-hit-1499").click()
    assert chosen(page) == "Functional.linear.749.forward"


def test_filters_leave_what_was_asked_for(show: Open) -> None:
    """Each choice counts its nodes, groups have to fit together, and all of it can be taken back."""
    page = show("two")
    page.keyboard.press("f")

    def chip(text: str) -> Any:
        return page.locator(".chip", has_text=re.compile(f"^{text}"))

    chip("Backward").click()
    assert page.evaluate("Graph.store.matchCount[0]") == 3
    assert "3 of" in page.locator(".popover .left").inner_text()
    chip("Functions").click()
    assert page.evaluate("Graph.store.matchCount[0]") == 0
    assert "No node passes" in page.locator(".popover .left").inner_text()
    chip("Functions").click()
    page.get_by_role("button", name="Clear all").click()
    assert page.evaluate("Graph.store.matchCount") is None
    chip("No partner").click()
    assert "Module.layers.1.adapter.Adapter.forward.0" in names(page, LEFT)
    chip("No partner").click()
    chip("1,024").click()
    left = page.evaluate(f"{LEFT}.map((i) => Graph.store.sides[0].units[i])")
    assert min(left) >= 1024
    page.keyboard.press("Escape")
    assert page.locator(".popover").is_hidden()
    assert page.locator(".filters-opener").inner_text() == "Filters · 1"
    page.get_by_label("Rank", exact=True).select_option("0")
    until(page, "Graph.store.pair.rank === 0")
    assert page.evaluate("Graph.store.matchCount[0]") == 0  # the filter stays, rank 0 has no such difference


def test_the_worst_come_first_and_go_into_a_file(show: Open, tmp_path: Path) -> None:
    """The list falls from the largest difference, in time it begins with the suspect; the file has the same nodes in the same order."""
    page = show("two")
    page.keyboard.press("2")
    page.wait_for_selector(".worst-row")
    units = page.evaluate("Graph.worst.collect(Graph.store.sides[0], true).map((i) => Graph.store.sides[0].units[i])")
    assert units == sorted(units, reverse=True)
    assert min(units) > 1
    page.get_by_label("Order").select_option("time")
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    download.value.save_as(tmp_path / "worst.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "worst.csv").read_text(encoding="utf-8-sig"))))
    assert rows[0]["node"] == FAULTY
    assert rows[0]["golden_node"].startswith("Functional.linear.")
    assert len(rows) == len(units)
    page.locator(".worst-list").focus()
    page.keyboard.press("Home")
    assert chosen(page) == FAULTY
    page.keyboard.press("ArrowDown")
    assert chosen(page) == rows[1]["node"]


def test_a_run_alone_lists_nan_in_order_of_execution(show: Open) -> None:
    """Without a golden run the list has the calls that NaN comes out of, the first one where it was born."""
    page = show("nan")
    assert "no tensor that went in holds it" in page.locator(".node-head").inner_text()
    page.keyboard.press("2")
    page.wait_for_selector(".worst-row")
    assert "begins here" in page.locator(".worst-row").first.inner_text()
    page.locator(".worst-row").nth(1).click()
    assert names(page, "Graph.worst.collect(Graph.store.sides[0], false)")[1] == chosen(page)


def test_all_ranks_are_cells_to_open(show: Open) -> None:
    """Every step and rank is a cell with its largest difference; the most likely first suspect is said; a click opens it."""
    page = show("two")
    page.keyboard.press("3")
    assert page.locator("button.pair").count() == 4
    assert page.locator("button.pair[aria-current]").get_attribute("aria-label").startswith("Open step 0, rank 1")
    assert "first of all" in page.locator(".overview .node-link").first.inner_text()
    page.get_by_role("button", name=re.compile("Open step 1, rank 0")).click()
    until(page, "Graph.store.pair.step === 1 && Graph.store.pair.rank === 0")
    assert "nothing found" in page.locator("button.pair[aria-current]").get_attribute("aria-label")


@pytest.mark.slow
def test_ranks_without_a_graph_of_their_own(opened: Open, accessible: Callable[..., list[str]], tmp_path: Path) -> None:
    """Every rank is a field where it stands in the job. It says whose graph it has, and opens it; so does its address."""
    places = {rank: divmod(rank, 4) for rank in range(8)}
    writer = PageWriter(tmp_path / "page.html", "t", "a", alike=Alike({(0, 0): [1, 2, 3], (0, 5): [4, 6, 7]}, ("pp", "dp"), places))
    for rank in (0, 5):
        graph = Graph(0, rank, None)
        graph.add("Module.a.A.forward.0", MODULE, 0)
        writer.add(graph)
    writer.finish()
    page = opened(tmp_path / "page.html", address="#rank=6")
    page.wait_for_selector("#graph.ready")
    assert page.evaluate("Graph.store.pair.rank") == 5
    assert page.locator("#graph-bar select").nth(1).inner_text().split("\n") == ["Rank 0 and 3 alike", "Rank 5 and 3 alike"]
    page.keyboard.press("3")
    assert page.locator(".rank-map > span").all_inner_texts() == ["pp 0", "pp 1"]
    assert page.locator(".rank-map path.now").count() == 1
    box = page.locator(".rank-map svg").first.bounding_box()
    third = {"x": box["width"] * 2.5 / 32, "y": box["height"] / 2}
    page.locator(".rank-map svg").first.hover(position=third)
    assert page.locator(".rank-said").inner_text() == "Rank 2 (pp 0, dp 2) holds the same as rank 0: nothing found"
    assert accessible(page, ()) == []
    page.locator(".rank-map svg").first.click(position=third)
    until(page, "Graph.store.pair.rank === 0")


def test_keys_do_what_help_says(show: Open) -> None:
    """Help names the keys; brackets walk through what was chosen; a key pressed in a field is a letter."""
    page = show("two")
    page.keyboard.press("ArrowDown")  # nothing has the focus yet
    assert chosen(page) == "Module.layers.2.Layer.forward.0"
    page.keyboard.press("[")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    assert page.locator("dialog kbd").count() >= 18
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.locator(".breadcrumbs button").first.click()
    page.locator("#graph-tab-details").focus()
    page.keyboard.press("[")
    assert chosen(page) == FAULTY
    page.keyboard.press("]")
    assert chosen(page) == "DefaultModel"
    page.keyboard.press("w")
    assert chosen(page) != "DefaultModel"
    page.keyboard.press("/")
    page.keyboard.type("gn/?1")
    assert page.locator("#graph-search").input_value() == "gn/?1"
    assert page.locator("dialog[open]").count() == 0


def test_the_address_shows_the_same_again(show: Open) -> None:
    """Step, rank, side and node stand in the address; a page opened with it shows them; what is not there is said."""
    page = show("two", "#step=1&rank=0&side=golden&node=Functional.gelu.2.forward")
    assert page.evaluate("[Graph.store.pair.step, Graph.store.pair.rank, Graph.store.selection.side]") == [1, 0, 1]
    assert chosen(page) == "Functional.gelu.2.forward"
    page.locator(".breadcrumbs button").nth(1).click()
    until(page, "location.hash.includes('node=Module.layers.2.Layer.forward.0')")
    page.evaluate("location.hash = '#step=0&rank=1&node=Nobody'")
    until(page, "document.querySelector('.toast')?.textContent.includes('Nobody')")
    until(page, "Graph.store.pair.step === 0 && !location.hash.includes('Nobody')")  # opened, and the address is the page's own again
    page.evaluate("location.hash = '#step=9&rank=9'")
    until(page, "document.querySelector('.toast').textContent.includes('step 9')")


def test_the_panels_can_be_made_wider(show: Open) -> None:
    """The edges follow the mouse and the arrows, keep to their bounds, and a double click brings the first width back."""
    page = show("two")
    width = "document.getElementById('graph-details').clientWidth"
    before = page.evaluate(width)
    edge = page.get_by_role("separator", name="Width of the panel")
    edge.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(width) == before + 20
    edge.hover()
    page.mouse.down()
    page.mouse.move(5, 400, steps=3)
    page.mouse.up()
    assert before < page.evaluate(width) <= 768
    edge.dblclick()
    assert page.evaluate(width) == before
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_nothing_found_is_said(show: Open) -> None:
    """Equal runs have no suspect: the button says so, the list says so, the panel asks for a choice."""
    page = show("same")
    assert page.locator(".suspect").inner_text() == "No suspect"
    assert page.locator(".suspect").is_disabled()
    assert "No difference beyond round-off" in page.locator(".details-pane").inner_text()
    assert "Choose a node" in page.locator(".details-pane").inner_text()
    page.keyboard.press("2")
    assert "No difference beyond round-off" in page.locator(".worst-pane").inner_text()


def test_names_of_a_dump_are_text(show: Open) -> None:
    """Markup in names makes no element, nothing turns the direction of writing, 100,000 characters stay inside, a cell is no formula."""
    page = show("hostile")
    for name in HOSTILE:
        page.evaluate("name => Graph.store.select(0, Graph.store.find(0, name))", name)
        page.wait_for_selector(".node-head")
        for key in ("2", "3", "1"):
            page.keyboard.press(key)
        shown = page.evaluate("document.getElementById('graph').innerText")
        assert not re.search("[\u202e\u202c\x00\x07\x1b]", shown)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert page.evaluate("location.hash.length") < 4000
    assert page.locator("img").count() == 0
    assert page.title() != "run"
    assert search(page, "onerror") == 1
    assert search(page, "\u202egnp") == 1
    assert "\\u202e" in page.locator(".hit").inner_text()
    text = page.evaluate(
        "Graph.worst.csv(Graph.store.sides[0], Graph.store.sides[0].children(0), {step: 0, rank: 0}, Graph.store.sides[1])"
    )
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {10}
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@", "\t"))]
    assert rows[-1][3] == "中文"
    node = "{name: () => '=1', kind: () => '@x', flags: [0], micro: [0], units: [NaN], index: [NaN]}"
    assert page.evaluate(f"Graph.worst.csv({node}, [0], {{step: 0, rank: 0}})").endswith("\r\n0,0,'=1,'@x,forward,0,,,,\r\n")


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_accessible(theme: str, show: Open, accessible: Callable[..., list[str]]) -> None:
    """Axe has no serious finding in any view, in dark none of colours, and nothing sticks out of the window."""
    rules = () if theme == "light" else ("color-contrast",)  # what elements are does not depend on the colours
    page = show("two", theme=theme, language="zh-CN" if theme == "dark" else "en-US")
    assert accessible(page, rules) == []
    page.keyboard.press("2")
    page.keyboard.press("f")
    assert accessible(page, rules) == []
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    search(page, "linear")
    assert accessible(page, rules) == []
    page.keyboard.press("Escape")
    page.locator("#graph-tab-details").focus()
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert accessible(page, rules) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_every_word_is_there_in_both_languages(show: Open) -> None:
    """No key of a text is shown in place of the text, in any view; the language changes all of it at once."""
    page = show("two", language="zh-CN")
    panels = "['graph-bar', 'graph-details', 'graph-status'].map((id) => document.getElementById(id).innerText).join(' ')"
    for key in ("1", "2", "3"):
        page.keyboard.press(key)
        shown = page.evaluate(panels)
        assert re.search("[\u4e00-\u9fff]", shown)
        assert not re.search(r"\bgraph\.[a-z]", shown)
    page.locator("#kit-switches select").first.select_option("en")
    for key in ("1", "2", "3"):
        page.locator("#graph-tab-details").focus()
        page.keyboard.press(key)
        assert not re.search("[\u4e00-\u9fff]", page.evaluate(panels))


def test_every_word_that_scripts_name_is_in_the_texts() -> None:
    """Keys that the panels ask for by name exist, and each has English and Chinese."""
    folder = Path(__file__).parents[2] / "msprobe_engine" / "report" / "web" / "graph"
    texts = (folder / "texts.js").read_text(encoding="utf-8")
    known = set(re.findall(r'^  ([a-z_]+): \["[^"]+", "[^"]+"\],$', texts, re.MULTILINE))
    lines = [line for line in texts.splitlines() if re.match(r"  [a-z_]+: ", line)]
    assert len(known) == len(lines)
    asked = {key for script in folder.rglob("*.js") for key in re.findall(r'"graph\.([a-z_]*[a-z])"', script.read_text(encoding="utf-8"))}
    assert len(asked) > 60
    assert asked <= known


def test_the_sample_has_a_line_of_source() -> None:
    """The file that the tests search for is the one the sample writes."""
    assert FILE.endswith("attention.py")
