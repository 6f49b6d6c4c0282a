"use strict";
// Keys that work wherever the focus is, but in fields; and the page of help. Arrows, Enter and Space belong to the tree and the canvas;
// the tree has them as long as nothing has the focus.
Graph.keys = (() => {
  const { make, word } = Kit;
  let store = null, dialog = null;

  const KEYS = [
    [["↑", "↓", "←", "→"], "key_arrows"],
    [["Space"], "key_space"],
    [["+", "-"], "key_zoom"],
    [["/"], "key_search"],
    [["n", "N"], "key_hits"],
    [["g"], "key_suspect"],
    [["w", "W"], "key_worst"],
    [["m"], "key_partner"],
    [["p"], "key_path"],
    [["f"], "key_filters"],
    [["1", "2", "3"], "key_tabs"],
    [["[", "]"], "key_back"],
    [["c"], "key_copy"],
    [["Esc"], "key_escape"],
  ];

  const actions = {
    "/": () => Graph.search.focus(),
    n: () => Graph.search.step(1),
    N: () => Graph.search.step(-1),
    g: () => Graph.bar.toSuspect(),
    w: () => Graph.worst.step(1),
    W: () => Graph.worst.step(-1),
    m: partner,
    p: () => Graph.bar.togglePath(),
    f: () => Graph.filters.open(),
    1: () => Graph.side.show("details"),
    2: () => Graph.side.show("worst"),
    3: () => Graph.side.show("overview"),
    "[": () => store.back(),
    "]": () => store.forward(),
    c: copy,
    "?": help,
  };

  const TREE = new Set(["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "PageDown", "PageUp", "Home", "End", "Enter", " "]);

  function toTree(event) {
    const grid = /** @type {HTMLElement | null} */ (document.querySelector("#graph-tree .tree-grid"));
    if (!grid) return;
    event.preventDefault();
    grid.focus();
    grid.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
  }

  function mount(given) {
    store = given;
    document.addEventListener("keydown", (event) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
      if (event.target === document.body && TREE.has(event.key)) { toTree(event); return; }
      const field = /** @type {Element} */ (event.target).closest?.("input:not([type=checkbox]), textarea, select, dialog");
      if (field || !Object.hasOwn(actions, event.key) || !store.pair) return;
      event.preventDefault();
      actions[event.key]();
    });
    Kit.on("language", () => { if (dialog) fill(); });
  }

  function partner() {
    const chosen = store.selection, other = chosen ? store.partner(chosen.side, chosen.node) : -1;
    if (other >= 0) store.select(1 - chosen.side, other);
    else if (chosen && store.sides.length === 2) Graph.panel.say(Kit.t("graph.no_partner"));
  }

  function copy() {
    const chosen = store.selection;
    if (chosen) Graph.panel.copy(store.sides[chosen.side].name(chosen.node));
  }

  function help() {
    if (!dialog) {
      dialog = make("dialog", document.body, null, "graph-help");
      dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    }
    fill();
    dialog.showModal();
  }

  function fill() {
    dialog.replaceChildren();
    const title = word(make("h2", dialog), "graph.help_title");
    title.id = "graph-help-title";
    dialog.setAttribute("aria-labelledby", title.id);
    const columns = make("div", dialog, null, "columns"), left = make("div", columns), right = make("div", columns);
    word(make("h3", left), "graph.keys");
    const list = make("dl", left);
    for (const [names, key] of KEYS) {
      const line = make("div", list), term = make("dt", line);
      for (const name of names) make("kbd", term, name);
      word(make("dd", line), "graph." + key);
    }
    word(make("h3", right), "graph.colours");
    Graph.status.colours(make("div", right, null, "colour-legend long"), true);
    if (store.manifest.comparison) word(make("p", right, null, "soft"), "graph.colours_what");
    Graph.panel.button(dialog, "graph.close", () => dialog.close(), { cls: "main" });
  }

  return { mount, help };
})();

// All panels, in the order in which they are put into the page.
(Graph.panels ||= []).push(
  (store) => Graph.side.mount(document.getElementById("graph-details"), store),
  (store) => Graph.bar.mount(document.getElementById("graph-bar"), store),
  (store) => Graph.status.mount(document.getElementById("graph-status"), store),
  (store) => Graph.address.mount(store),
  () => Graph.split.mount(),
  (store) => Graph.keys.mount(store),
);
