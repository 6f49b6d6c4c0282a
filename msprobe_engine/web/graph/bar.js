"use strict";
// The bar above everything: which step and rank, the search, the filters, the first suspect.
Graph.bar = (() => {
  const { make, word } = Kit;
  const { button } = Graph.panel;
  let store = null, step = null, rank = null, suspect = null, path = null;

  function mount(parent, given) {
    store = given;
    parent.setAttribute("role", "toolbar");
    Graph.panel.label(parent, "graph.panel");
    parent.title = "";
    const where = make("div", parent, null, "group");
    step = chooser(where, "step");
    rank = chooser(where, "rank");
    button(where, "graph.back", () => store.back(), { cls: "icon", sign: "←" });
    button(where, "graph.forth", () => store.forward(), { cls: "icon", sign: "→" });
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
    button(go, "graph.help", () => Graph.keys.help(), { cls: "icon", sign: "?" });
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
    node.replaceChildren(...numbers(key).map((one) => new Option(Kit.t(`graph.${key}_n`, one), one)));
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
    const some = store.pair && store.pair.suspect >= 0;
    word(suspect, some ? "graph.suspect" : "graph.no_suspect");
    suspect.disabled = !some;
    suspect.title = some ? Kit.t("graph.suspect_go") + "\n" + Kit.name(store.pair.suspectName ?? "", 300) : "";
    word(path, "graph.path");
    path.title = Kit.t(store.manifest.comparison ? "graph.path_difference" : "graph.path_nonfinite");
    path.setAttribute("aria-pressed", String(store.path !== null));
    path.disabled = !some && !(store.pair && store.pair.nonfinite);
  }

  function toSuspect() {
    if (!store.pair || store.pair.suspect < 0) return;
    store.select(0, store.pair.suspect);
    Graph.side.show("details");
  }

  const togglePath = () => store.showPath(store.path === null);

  return { mount, toSuspect, togglePath };
})();
