"use strict";
// What is left to be seen. The state is plain data; `Graph.filters.test` makes of it the question that the store asks of every node.
Graph.filters = (() => {
  const { make, word } = Kit;
  const { button } = Graph.panel;
  const FLAG = Graph.FLAG, LEVELS = { medium: 64, high: 128, critical: 192 };
  const UNITS = [0, 1, 4, 32, 1024, 1e6, Infinity];
  const none = () => ({ direction: "", micro: -1, states: new Set(), levels: new Set(), types: new Set(), least: 0 });
  let state = none(), masks = null, store = null, content = null, opener = null, over = null;

  // Of each group at least one choice has to fit; all groups have to. `null`: everything passes.
  function test(wanted, among = null) {
    const { direction, micro, states, levels, types, least } = wanted;
    if (!direction && micro < 0 && !states.size && !levels.size && !types.size && !least && !among) return null;
    let flags = 0;
    for (const one of states) flags |= STATES[one];
    return (columns, node, side) => {
      const own = columns.flags[node];
      if (direction && (direction === "backward") !== ((own & FLAG.BACKWARD) !== 0)) return false;
      if (micro >= 0 && columns.micro[node] !== micro) return false;
      if (flags && !(own & flags)) return false;
      if (levels.size && ![...levels].some((level) => (own & FLAG.OVERFLOW) === LEVELS[level])) return false;
      if (types.size && !types.has(String(columns.type[node]))) return false;
      if (least && !(columns.units[node] >= least)) return false;
      return !among || among[side][node] === 1;
    };
  }
  const STATES = { unmatched: FLAG.UNMATCHED, nonfinite: FLAG.NONFINITE_IN | FLAG.NONFINITE_OUT, by_structure: FLAG.BY_STRUCTURE, collective: FLAG.COLLECTIVE | FLAG.LINKED, recompute: FLAG.RECOMPUTE, needless: FLAG.NEEDLESS };
  const TYPES = { module: Graph.MODULE, api: Graph.API, collection: Graph.API_COLLECTION, multi_collection: Graph.MULTI_COLLECTION };

  const count = () => (state.direction ? 1 : 0) + (state.micro >= 0 ? 1 : 0) + state.states.size + state.levels.size + state.types.size + (state.least ? 1 : 0);

  function apply() {
    store.filter(test(state, masks));
    drawOpener();
    drawCount();
  }

  // Nodes that a search found, one mask per side; null: no search.
  function among(found) {
    if (!found && !masks) return;
    masks = found;
    apply();
  }

  function clear() {
    state = none();
    apply();
    draw();
  }

  // ---- What is shown of it ----

  function mount(parent, given) {
    store = given;
    const place = make("div", parent, null, "filters");
    opener = make("button", place, null, "filters-opener");
    opener.type = "button";
    content = make("div", place, null, "popover");
    content.setAttribute("role", "dialog");
    Graph.panel.label(content, "graph.filters");
    over = Graph.panel.popover(opener, content, draw);
    store.on("open", () => {
      masks = null; // of the pair before; the search makes them anew
      if (state.micro >= store.pair.microSteps) state.micro = -1;
      const wanted = test(state);
      if (wanted) store.filter(wanted);
      draw();
      drawOpener();
    });
    Kit.on("language", () => { draw(); drawOpener(); });
    drawOpener();
  }

  function drawOpener() {
    const on = count();
    opener.textContent = on ? Kit.t("graph.filters_on", on) : Kit.t("graph.filters");
    opener.classList.toggle("on", on > 0);
  }

  function drawCount() {
    const line = content.querySelector(".left");
    if (!line) return;
    const all = store.sides[0].count - 1, some = store.matchCount ? store.matchCount[0] : all, other = store.matchCount?.[1] ?? 0;
    line.textContent = some || other ? Kit.t("graph.filters_left", Kit.count(some), Kit.count(all)) : Kit.t("graph.filters_none");
    content.querySelector(".clear").disabled = !count();
  }

  // How many nodes each choice has, so that nobody tries one without any.
  function tally() {
    const found = { states: {}, levels: {}, types: {}, directions: { forward: 0, backward: 0 } };
    const add = (group, name) => { group[name] = (group[name] || 0) + 1; };
    for (const [side, columns] of store.sides.entries()) {
      for (let i = 1; i < columns.count; i++) {
        const flags = columns.flags[i];
        if (side && !(flags & (FLAG.UNMATCHED | FLAG.NEEDLESS))) continue; // its partner is counted
        for (const name in STATES) if (flags & STATES[name]) add(found.states, name);
        for (const name in LEVELS) if ((flags & FLAG.OVERFLOW) === LEVELS[name]) add(found.levels, name);
        add(found.types, columns.type[i]);
        found.directions[flags & FLAG.BACKWARD ? "backward" : "forward"]++;
      }
    }
    return found;
  }

  function draw() {
    if (!store.sides.length || content.hidden) return;
    const had = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset?.choice, counts = tally();
    content.replaceChildren();
    const group = (key) => {
      const node = make("fieldset", content);
      word(make("legend", node), "graph." + key);
      return make("div", node, null, "choices");
    };
    const chip = (parent, text, on, press, figure = null) => {
      const node = make("button", parent, null, "chip");
      node.type = "button";
      node.dataset.choice = text;
      make("span", node, text);
      if (figure !== null) make("span", node, Kit.count(figure), "count");
      node.setAttribute("aria-pressed", String(on));
      node.disabled = figure === 0 && !on;
      node.addEventListener("click", () => { press(); apply(); draw(); });
    };
    const flip = (set, name) => () => { if (!set.delete(name)) set.add(name); };
    const t = (key, ...args) => Kit.t("graph." + key, ...args);

    const direction = group("direction");
    for (const one of ["", "forward", "backward"]) chip(direction, t(one || "direction_all"), state.direction === one, () => { state.direction = one; }, one ? counts.directions[one] : null);
    if (store.pair.microSteps > 1) micro(group("micro_step"));
    const states = group("state");
    for (const one in STATES) if (counts.states[one] || state.states.has(one) || one === "nonfinite" || (one === "unmatched" && store.sides.length === 2)) chip(states, t(one), state.states.has(one), flip(state.states, one), counts.states[one] || 0);
    if (Object.keys(counts.levels).length || state.levels.size) {
      const levels = group("overflow");
      for (const one of ["critical", "high", "medium"]) chip(levels, t(one), state.levels.has(one), flip(state.levels, one), counts.levels[one] || 0);
    }
    const types = group("type");
    for (const one in TYPES) if (counts.types[TYPES[one]]) chip(types, t(one), state.types.has(String(TYPES[one])), flip(state.types, String(TYPES[one])), counts.types[TYPES[one]]);
    if (store.sides.length === 2) least(group("at_least"), chip);
    const foot = make("div", content, null, "foot");
    make("span", foot, null, "left soft").setAttribute("role", "status");
    button(foot, "graph.filters_clear", clear, { cls: "clear" });
    drawCount();
    if (had) [...content.querySelectorAll("[data-choice]")].find((node) => node.dataset.choice === had)?.focus();
  }

  function micro(parent) {
    const select = make("select", parent);
    Graph.panel.label(select, "graph.micro_step");
    select.append(new Option(Kit.t("graph.micro_all"), "-1"));
    for (let i = 0; i < store.pair.microSteps; i++) select.append(new Option(Kit.t("graph.micro_step_n", i), String(i)));
    select.value = String(state.micro);
    select.addEventListener("change", () => { state.micro = Number(select.value); apply(); draw(); });
  }

  function least(parent, chip) {
    for (const one of UNITS) {
      const text = !one ? Kit.t("graph.any_difference") : one === Infinity ? Kit.t("graph.legend_bad") : Graph.compare.multiple(one) + " ×";
      chip(parent, text, state.least === one, () => { state.least = one; });
    }
  }

  return { test, mount, among, clear, none, open: () => over.set(!over.open), get state() { return state; }, get active() { return count() > 0 || masks !== null; } };
})();
