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
      item("ufine", Kit.t("graph.legend_finite"));
      item("ubad", Kit.t("graph.legend_bad"));
      item("ubad hollow", Kit.t("graph.legend_bad_inside"));
      return;
    }
    if (long) {
      for (const scale of Kit.scale.legend()) item("u" + scale.level, scale.label);
      item("unone lonely", Kit.t("graph.legend_none"));
      return;
    }
    word(make("span", parent, null, "soft legend-title"), "graph.legend");
    item("u0", Kit.t("graph.legend_equal"));
    for (const [level, most] of ["≤ 1", "≤ 4", "≤ 32", "≤ 1024", "≤ 1e6", "> 1e6"].entries()) item("u" + (level + 1), most);
    item("ubad", Kit.t("graph.legend_bad"));
    item("unone lonely", Kit.t("graph.legend_none"));
  }

  return { mount, colours };
})();
