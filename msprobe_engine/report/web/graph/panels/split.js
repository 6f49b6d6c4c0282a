"use strict";
// The edges between tree, graph and side panel: dragged, moved with the arrows, and brought back with a double click.
Graph.split = (() => {
  const { make } = Kit;
  const EDGES = {
    tree: { key: "edge_tree", least: 180, most: 0.45, sign: 1 },
    details: { key: "edge_details", least: 345, most: 0.6, sign: -1 },
  };
  const widths = { tree: null, details: null };
  let app = null;

  function mount() {
    app = document.getElementById("graph");
    for (const name of Object.keys(EDGES)) edge(name);
    addEventListener("resize", () => { if (widths.tree || widths.details) apply(); });
  }

  const element = (name) => document.getElementById("graph-" + name);
  const now = (name) => Math.round(element(name).getBoundingClientRect().width);
  const bounded = (name, width) => Math.round(Math.max(EDGES[name].least, Math.min(app.clientWidth * EDGES[name].most, width)));

  // Widths that were never changed follow the window, as the style sheet says.
  function apply() {
    for (const name of Object.keys(EDGES)) {
      if (widths[name] === null) app.style.removeProperty("--" + name + "-width");
      else app.style.setProperty("--" + name + "-width", bounded(name, widths[name]) + "px");
    }
  }

  function edge(name) {
    const { key, sign, least } = EDGES[name], node = make("div", element(name), null, "edge edge-" + name);
    node.tabIndex = 0;
    node.setAttribute("role", "separator");
    node.setAttribute("aria-orientation", "vertical");
    Graph.panel.label(node, "graph." + key);
    const told = () => {
      node.setAttribute("aria-valuemin", least);
      node.setAttribute("aria-valuemax", Math.round(app.clientWidth * EDGES[name].most));
      node.setAttribute("aria-valuenow", now(name));
    };
    const set = (width) => { widths[name] = width; apply(); told(); };
    node.addEventListener("focus", told);
    told();
    node.addEventListener("pointerdown", (event) => {
      const from = event.clientX, before = now(name);
      event.preventDefault();
      node.setPointerCapture(event.pointerId);
      node.classList.add("moving");
      const move = (moved) => set(before + sign * (moved.clientX - from));
      const end = () => { node.classList.remove("moving"); node.removeEventListener("pointermove", move); };
      node.addEventListener("pointermove", move);
      node.addEventListener("pointerup", end, { once: true });
      node.addEventListener("pointercancel", end, { once: true });
    });
    node.addEventListener("dblclick", () => set(null));
    node.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowRight" ? 20 : event.key === "ArrowLeft" ? -20 : 0;
      if (event.key === "Home") set(null);
      else if (by) set(bounded(name, now(name) + sign * by));
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  return { mount };
})();
