"use strict";
// All steps and ranks of the page as cells of a table, their first suspects, and what has to be known about the dumps.
Graph.overview = (() => {
  const { make, word } = Kit;
  const MOST_SUSPECTS = 50, MOST_CELLS = 4000;
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
      make("th", line, Kit.t("graph.rank_n", rank)).scope = "row";
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
