"use strict";
// The panel at the side: three tabs, one place.
Graph.side = (() => {
  const { make, word } = Kit;
  const TABS = ["details", "worst", "overview"];
  const tabs = {}, panes = {};
  let store = null, now = "details";

  function mount(parent, given) {
    store = given;
    parent.setAttribute("aria-label", Kit.t("graph.tabs"));
    Kit.on("language", () => parent.setAttribute("aria-label", Kit.t("graph.tabs")));
    const line = make("div", parent, null, "tabs");
    line.setAttribute("role", "tablist");
    Graph.panel.label(line, "graph.tabs");
    for (const name of TABS) {
      const tab = (tabs[name] = make("button", line)), pane = (panes[name] = make("div", parent, null, "pane " + name + "-pane"));
      tab.type = "button";
      tab.id = "graph-tab-" + name;
      pane.id = "graph-pane-" + name;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", pane.id);
      pane.setAttribute("role", "tabpanel");
      pane.setAttribute("aria-labelledby", tab.id);
      pane.tabIndex = 0;
      tab.addEventListener("click", () => show(name));
      tab.addEventListener("keydown", (event) => {
        const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
        if (!by) return;
        event.preventDefault();
        show(TABS[(TABS.indexOf(name) + by + TABS.length) % TABS.length]);
        tabs[now].focus();
      });
    }
    words();
    Graph.details.mount(panes.details, store);
    Graph.worst.mount(panes.worst, store);
    Graph.overview.mount(panes.overview, store);
    show("details");
  }

  function words() {
    word(tabs.details, "graph.tab_details");
    word(tabs.worst, store.manifest.comparison ? "graph.tab_worst" : "graph.tab_worst_alone");
    word(tabs.overview, "graph.tab_overview");
  }

  function show(name) {
    now = name;
    for (const one of TABS) {
      panes[one].hidden = one !== name;
      tabs[one].setAttribute("aria-selected", String(one === name));
      tabs[one].tabIndex = one === name ? 0 : -1;
    }
    if (name !== "details") Graph[name].draw();
  }

  return { mount, show, names: TABS };
})();
