"use strict";
// The bar above everything: which step and rank, the search, the filters, the first suspect.
Graph.bar = (() => {
  const { make, word } = Kit;
  const { button } = Graph.panel;
  let store = null, step = null, rank = null, suspect = null, path = null;

  function mount(parent, given) {
    store = given;
    parent.setAttribute("role", "toolbar");
    Graph.panel.label(parent, "graph.tools");
    const where = make("div", parent, null, "group");
    step = chooser(where, "step");
    rank = chooser(where, "rank");
    button(where, "graph.back", () => store.back(), { cls: "icon", sign: "left" });
    button(where, "graph.forth", () => store.forward(), { cls: "icon", sign: "right" });
    Graph.search.mount(parent, store);
    Graph.filters.mount(parent, store);
    const go = make("div", parent, null, "group end");
    suspect = make("button", go, null, "suspect");
    suspect.type = "button";
    suspect.addEventListener("click", toSuspect);
    path = make("button", go);
    path.type = "button";
    path.setAttribute("aria-pressed", "false");
    path.addEventListener("click", togglePath);
    button(go, "graph.help", () => Graph.keys.help(), { cls: "icon", sign: "help" });
    for (const event of ["open", "path"]) store.on(event, draw);
    Kit.on("language", draw);
    draw();
  }

  function chooser(parent, key) {
    const node = make("select", parent);
    Graph.panel.label(node, "graph." + key);
    node.addEventListener("change", change);
    return node;
  }

  const numbers = (key) => [...new Set(store.manifest.pairs.map((pair) => pair[key]))].sort((a, b) => a - b);

  function fill(node, key) {
    node.replaceChildren(...numbers(key).map((one) => new Option(key === "rank" ? Graph.panel.ranks(store.pair?.step, one) : Kit.t("graph.step_n", one), one)));
    node.disabled = node.options.length < 2;
    if (store.pair) node.value = String(store.pair[key]);
  }

  // Of the chosen step and rank; where that rank has not that step, the first pair that has what was just chosen.
  function change(event) {
    let index = store.pairOf(Number(step.value), Number(rank.value));
    if (index < 0) index = store.manifest.pairs.findIndex((pair) => (event.target === step ? pair.step === Number(step.value) : pair.rank === Number(rank.value)));
    store.open(index, { keep: true });
  }

  function draw() {
    fill(step, "step");
    fill(rank, "rank");
    const first = store.manifest.pairs[Graph.panel.firstSuspect()], some = first !== undefined;
    const unknown = store.manifest.task === "structure"; // no numbers, so nothing is known to be right
    word(suspect, some ? "graph.suspect" : unknown ? "graph.task_structure" : "graph.no_suspect");
    suspect.classList.toggle("unknown", unknown);
    suspect.disabled = !some;
    suspect.title = some ? [Kit.t("graph.suspect_go"), Kit.t("graph.step_rank", first.step, first.rank), Kit.name(first.suspectName ?? "", 300)].join("\n") : "";
    word(path, "graph.path");
    path.title = Kit.t(store.manifest.comparison ? "graph.path_difference" : "graph.path_nonfinite");
    path.setAttribute("aria-pressed", String(store.path !== null));
    path.disabled = !store.pair || (store.pair.suspect < 0 && !store.pair.nonfinite);
  }

  // Of all ranks and steps; once there, a further press goes nowhere else.
  async function toSuspect() {
    const first = Graph.panel.firstSuspect();
    if (first < 0) return;
    const node = store.manifest.pairs[first].suspect;
    if (first === store.pairIndex) store.select(0, node);
    else await store.open(first, { side: 0, node });
    Graph.side.show("details");
  }

  const togglePath = () => store.showPath(store.path === null);

  return { mount, toSuspect, togglePath };
})();
