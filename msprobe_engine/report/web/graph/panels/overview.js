"use strict";
// All steps and ranks of the page as cells of a table, their first suspects, and what has to be known about the dumps.
Graph.overview = (() => {
  const { make, word } = Kit;
  const MOST_SUSPECTS = 50, MOST_CELLS = 4000, CELLS_PER_LINE = 32;
  let store = null, place = null;

  function mount(parent, given) {
    store = given;
    place = parent;
    store.on("open", draw);
    Kit.on("language", draw);
  }

  const worst = (pair) => (pair.worst === "inf" ? Infinity : pair.worst);
  const compared = () => store.manifest.comparison;
  const tone = (pair) => (compared() ? "u" + Kit.scale(worst(pair)).level : pair.nonfinite ? "ubad" : "ufine");
  const inWords = (pair) => (pair.suspect >= 0 ? Kit.name(pair.suspectName ?? "", 120) : compared() && worst(pair) > 1 ? Graph.compare.units(worst(pair)) : Kit.t("graph.pair_clean"));

  function draw() {
    if (place.hidden || !store.pair) return;
    const made = make("div", null, null, "overview");
    runs(part(made, "runs"));
    if (store.manifest.pairs.length > 1) pairs(part(made, "all_pairs"));
    if (store.manifest.map) ranks(part(made, "map"), store.manifest.map);
    const first = store.manifest.pairs[Graph.panel.firstSuspect()];
    const suspects = store.manifest.pairs.filter((pair) => pair.suspect >= 0).sort((a, b) => Number(b === first) - Number(a === first));
    if (suspects.length) firsts(part(made, "first_suspects"), suspects);
    figures(part(made, "step_rank", store.pair.step, store.pair.rank));
    problems(made);
    place.replaceChildren(made);
  }

  function part(parent, key, ...args) {
    const node = make("div", parent, null, "part");
    word(make("h2", node), "graph." + key, ...args);
    return node;
  }

  function facts(parent, rows) {
    const list = make("dl", parent, null, "facts-list");
    for (const [key, value, name] of rows) {
      const line = make("div", list);
      word(make("dt", line), "graph." + key);
      make("bdi", make("dd", line, null, name ? "name" : ""), value);
    }
  }

  function runs(parent) {
    const { target, golden, task } = store.manifest;
    const rows = [["target", Kit.name(target ?? "", 500), true]];
    if (golden) rows.push(["golden", Kit.name(golden, 500), true]);
    if (golden && task) rows.push(["compared_by", Kit.t("graph.task_" + task), false]);
    facts(parent, rows);
  }

  function pairs(parent) {
    const all = store.manifest.pairs, steps = [...new Set(all.map((pair) => pair.step))].sort((a, b) => a - b), ranks = [...new Set(all.map((pair) => pair.rank))].sort((a, b) => a - b);
    if (steps.length * ranks.length > MOST_CELLS) { word(make("p", parent, null, "soft"), "graph.pairs_many", Kit.count(all.length)); return; }
    word(make("p", parent, null, "soft small"), compared() ? "graph.pairs_what" : "graph.pairs_what_alone");
    const table = make("table", make("div", parent, null, "scroll pairs-scroll"), null, "pairs"), top = make("tr", make("thead", table)), body = make("tbody", table);
    make("td", top, null, "corner");
    for (const step of steps) make("th", top, Kit.t("graph.step_n", step)).scope = "col";
    for (const rank of ranks) {
      const line = make("tr", body);
      make("th", line, Graph.panel.ranks(store.pair.step, rank)).scope = "row";
      for (const step of steps) {
        const cell = make("td", line), index = store.pairOf(step, rank);
        if (index < 0) continue;
        const pair = all[index], node = make("button", cell, null, "pair " + tone(pair));
        node.type = "button";
        node.textContent = compared() ? (worst(pair) === Infinity ? "NaN" : worst(pair) > 1 ? Graph.compare.multiple(worst(pair)) : "✓") : pair.nonfinite ? Kit.count(pair.nonfinite) : "✓";
        const text = Kit.t("graph.open_pair", step, rank, inWords(pair));
        node.title = text;
        node.setAttribute("aria-label", text);
        if (index === store.pairIndex) node.setAttribute("aria-current", "true");
        node.addEventListener("click", async () => { await store.open(index, { keep: true }); place.querySelector("[aria-current]")?.focus(); });
      }
    }
  }

  // Where all ranks stand in the job: a field each, in the colour of the graph that shows them. Lines are places on all axes but the longest.
  function ranks(parent, { axes, ranks: all, places }) {
    const lengths = places.map((column) => new Set(column).size), along = lengths.indexOf(Math.max(...lengths));
    const place = (i, axis) => axes[axis] + " " + places[axis][i], lines = new Map();
    for (const i of all.keys()) {
      const name = axes.length ? axes.map((_, axis) => axis).filter((axis) => axis !== along).map((axis) => place(i, axis)).join(", ") : "";
      if (!lines.has(name)) lines.set(name, []);
      lines.get(name).push(i);
    }
    word(make("p", parent, null, "soft small"), axes.length ? "graph.map_axes" : "graph.map_numbers", axes[along] ?? "");
    const list = make("div", parent, null, "rank-map"), said = make("p", parent, null, "soft small rank-said");
    said.setAttribute("aria-live", "polite");
    for (const [name, members] of lines) {
      if (axes.length) members.sort((a, b) => places[along][a] - places[along][b]);
      make("span", list, name, "soft small");
      fields(list, members.map((i) => all[i]), (j) => (axes.length ? ` (${axes.map((_, axis) => place(members[j], axis)).join(", ")})` : ""), said);
    }
  }

  function fields(parent, some, where, said) {
    const SVG = "http://www.w3.org/2000/svg", image = document.createElementNS(SVG, "svg"), shapes = new Map();
    const wide = Math.min(CELLS_PER_LINE, some.length), step = store.pair.step;
    image.setAttribute("viewBox", `0 0 ${CELLS_PER_LINE} ${Math.ceil(some.length / wide)}`);
    image.setAttribute("aria-hidden", "true"); // the table above opens the same graphs
    for (const [j, rank] of some.entries()) {
      const index = store.pairOf(step, rank);
      if (index >= 0) shapes.set(index, (shapes.get(index) ?? "") + `M${(j % wide) + 0.08} ${Math.floor(j / wide) + 0.08}h.84v.84h-.84z`);
    }
    for (const [index, shape] of shapes) {
      const node = document.createElementNS(SVG, "path"), now = index === store.pairIndex ? " now" : "";
      node.setAttribute("d", shape);
      node.setAttribute("class", tone(store.manifest.pairs[index]) + now);
      image.append(node);
    }
    const at = (event) => {
      const box = image.getBoundingClientRect(), size = box.width / CELLS_PER_LINE, x = Math.floor((event.clientX - box.left) / size);
      return x < wide ? Math.floor((event.clientY - box.top) / size) * wide + x : -1;
    };
    image.addEventListener("pointermove", (event) => {
      const j = at(event), pair = store.manifest.pairs[store.pairOf(step, some[j])];
      if (pair) said.textContent = Kit.t(pair.rank === some[j] ? "graph.map_rank" : "graph.map_same", some[j], where(j), inWords(pair), pair.rank);
    });
    image.addEventListener("click", (event) => {
      const index = store.pairOf(step, some[at(event)]);
      if (index >= 0) store.open(index, { keep: true });
    });
    parent.append(image);
  }

  function firsts(parent, suspects) {
    const list = make("div", parent, null, "links");
    const first = Graph.panel.firstSuspect();
    for (const pair of suspects.slice(0, MOST_SUSPECTS)) {
      const node = make("button", list, null, "node-link");
      node.type = "button";
      make("i", node, null, "swatch " + tone(pair)).setAttribute("aria-hidden", "true");
      const texts = make("span", node, null, "texts");
      make("bdi", texts, Kit.name(pair.suspectName ?? "", 200), "label name");
      make("span", texts, Kit.t("graph.step_rank", pair.step, pair.rank), "around");
      if (suspects.length > 1 && pair === store.manifest.pairs[first]) word(make("span", node, null, "badge bad"), "graph.most_likely");
      node.addEventListener("click", () => store.open(store.pairOf(pair.step, pair.rank), { side: 0, node: pair.suspect }));
    }
    if (suspects.length > MOST_SUSPECTS) make("p", parent, Kit.t("graph.more", Kit.count(suspects.length - MOST_SUSPECTS)), "soft");
  }

  function figures(parent) {
    const { pair } = store, two = (numbers) => numbers.map((one) => Kit.count(one)).join(" · ");
    const rows = [["nodes_n", two(pair.nodes), false]];
    if (compared()) rows.push(["unmatched_n", two(pair.unmatched), false]);
    rows.push(["nonfinite_n", Kit.count(pair.nonfinite), false]);
    facts(parent, rows);
  }

  function problems(parent) {
    const all = [...new Set((store.pair.problems || []).map(Kit.said))];
    if (!all.length) return;
    const node = part(parent, "problems"), list = make("ul", node);
    for (const one of all.slice(0, 100)) make("li", list, Kit.name(one, 1000));
  }

  return { mount, draw, worst };
})();
