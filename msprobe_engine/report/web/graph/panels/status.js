"use strict";
// The line below everything: where the chosen node is, and what the colours mean.
Graph.status = (() => {
  const { make, word } = Kit;
  let store = null, trail = null, legend = null;

  function mount(parent, given) {
    store = given;
    trail = make("nav", parent, null, "breadcrumbs");
    Graph.panel.label(trail, "graph.breadcrumbs");
    legend = make("div", parent, null, "colour-legend");
    for (const event of ["select", "open"]) store.on(event, crumbs);
    const all = () => { crumbs(); colours(legend); };
    Kit.on("language", all);
    all();
  }

  // The way from the whole model to the chosen node; each part can be chosen.
  function crumbs() {
    const chosen = store.selection, list = make("ol");
    if (chosen) {
      const columns = store.sides[chosen.side];
      for (const node of [...columns.ancestors(chosen.node), chosen.node]) {
        const item = make("li", list), part = make("button", item);
        part.type = "button";
        make("bdi", part, node === 0 ? Kit.t("graph.one_root") : Graph.panel.title(columns, node, 40));
        if (node === chosen.node) part.setAttribute("aria-current", "true");
        part.addEventListener("click", () => store.select(chosen.side, node));
      }
    }
    trail.replaceChildren(list);
    trail.scrollLeft = trail.scrollWidth;
  }

  // One colour after the other with the largest difference that it stands for.
  function colours(parent, long = false) {
    parent.replaceChildren();
    const two = store.manifest.comparison;
    const item = (tone, text) => {
      const node = make("span", parent, null, "legend-item");
      make("i", node, null, "swatch " + tone).setAttribute("aria-hidden", "true");
      make("span", node, text);
    };
    if (!two) {
      for (const [tone, text] of Graph.TONES_OF_ONE) item(tone, Kit.t(text));
      return;
    }
    if (long) {
      for (const scale of Kit.scale.legend()) item("u" + scale.level, scale.label);
      item("unone lonely", Kit.t("graph.legend_none"));
      return;
    }
    word(make("span", parent, null, "soft legend-title"), "graph.legend");
    const short = (most) => (most < 1e6 ? String(most) : most.toExponential(0).replace("+", ""));
    const label = (most, level, all) => (level === 0 ? Kit.t("graph.legend_equal") : most < Infinity ? "≤ " + short(most) : "> " + short(all[level - 1]));
    for (const [level, text] of Kit.scale.bounds.map(label).entries()) item("u" + level, text);
    item("ubad", Kit.t("graph.legend_bad"));
    item("unone lonely", Kit.t("graph.legend_none"));
  }

  return { mount, colours };
})();
