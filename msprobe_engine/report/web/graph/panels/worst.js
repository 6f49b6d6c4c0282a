"use strict";
// The calls that differ most (or, of one run, those that NaN and Inf come out of), as a list to go through and to take away.
Graph.worst = (() => {
  const { make, word } = Kit;
  const { button } = Graph.panel;
  const FLAG = Graph.FLAG, ROW = 48;
  let store = null, place = null, list = null, nodes = [], byTime = false, modules = false, stale = true;

  // Nodes of the target whose units are beyond round-off, or that are not finite where nothing is compared. `passes`: Uint8Array or null.
  // With `time` in order of execution, else the largest difference first; of equals the earlier call first.
  function collect(columns, compared, { time = false, withModules = false, passes = null } = {}) {
    const found = [];
    for (let i = 1; i < columns.count; i++) {
      if (passes && !passes[i]) continue;
      if (!withModules && columns.size[i] > 1) continue;
      if (compared ? columns.units[i] > 1 : columns.flags[i] & FLAG.NONFINITE_OUT) found.push(i);
    }
    if (compared && !time) found.sort((a, b) => (columns.units[a] === columns.units[b] ? a - b : columns.units[b] > columns.units[a] ? 1 : -1));
    return found;
  }

  // RFC 4180. Nothing in a cell may be run by a spreadsheet: a text that begins like a formula gets an apostrophe in front.
  function csv(columns, found, pair, golden) {
    const cell = (value) => {
      const text = typeof value === "number" ? (Number.isNaN(value) ? "" : String(value)) : /^[=+\-@\t\r\n'＝＋－＠]/.test(value) ? "'" + value : value;
      return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    const lines = [["step", "rank", "node", "type", "direction", "micro_step", "round_off_units", "precision_index", "golden_node", "nan_or_inf"]];
    for (const i of found) {
      const flags = columns.flags[i], partner = golden ? columns.partner[i] : -1;
      lines.push([
        pair.step, pair.rank, columns.name(i), columns.kind(i), flags & FLAG.BACKWARD ? "backward" : "forward", columns.micro[i], columns.units[i], columns.index[i],
        partner >= 0 ? golden.name(partner) : "", flags & FLAG.NONFINITE_OUT ? "output" : flags & FLAG.NONFINITE_IN ? "input" : "",
      ]);
    }
    return lines.map((line) => line.map(cell).join(",") + "\r\n").join("");
  }

  function mount(parent, given) {
    store = given;
    place = parent;
    const again = () => { stale = true; draw(); };
    for (const event of ["open", "filter"]) store.on(event, again);
    store.on("select", mark);
    Kit.on("language", again);
  }

  const compared = () => store.sides.length === 2;

  function fresh() {
    if (!stale) return;
    stale = false;
    nodes = collect(store.sides[0], compared(), { time: byTime, withModules: modules, passes: store.matches(0) });
  }

  function draw() {
    if (place.hidden || !store.sides.length) return;
    fresh();
    const made = make("div", null, null, "worst"), top = make("div", made, null, "worst-head");
    word(make("p", top, null, "soft"), compared() ? "graph.worst_what" : "graph.worst_what_alone");
    const number = make("p", top, null, "soft small");
    const tools = make("div", top, null, "tools");
    if (compared()) {
      const order = make("select", tools);
      Graph.panel.label(order, "graph.order");
      order.append(new Option(Kit.t("graph.order_worst"), "worst"), new Option(Kit.t("graph.order_time"), "time"));
      order.value = byTime ? "time" : "worst";
      order.addEventListener("change", () => { byTime = order.value === "time"; stale = true; draw(); place.querySelector("select")?.focus(); });
    }
    const tick = make("label", tools, null, "tick"), box = make("input", tick);
    box.type = "checkbox";
    box.checked = modules;
    word(make("span", tick), "graph.with_modules");
    box.addEventListener("change", () => { modules = box.checked; stale = true; draw(); place.querySelector("input")?.focus(); });
    const save = button(tools, "graph.csv", () => {
      const text = csv(store.sides[0], nodes, store.pair, store.sides[1]);
      Kit.save(`worst_step${store.pair.step}_rank${store.pair.rank}.csv`, "\ufeff" + text, "text/csv");
    });
    save.disabled = !nodes.length;
    save.title = Kit.t("graph.export");
    save.classList.add("end");
    if (!nodes.length) {
      const what = store.manifest.task === "structure" ? "worst_structure" : store.matchCount ? "worst_none_filter" : compared() ? "worst_none" : "worst_none_alone";
      word(make("p", made, null, "empty-title"), "graph." + what);
      list = null;
    } else {
      number.textContent = Kit.t("graph.list_of", Kit.count(nodes.length));
      list = make("div", made, null, "worst-list");
      list.tabIndex = 0;
      list.setAttribute("role", "listbox");
      Graph.panel.label(list, compared() ? "graph.tab_worst" : "graph.tab_worst_alone");
      list.addEventListener("scroll", rows);
      list.addEventListener("keydown", keys);
    }
    place.replaceChildren(made);
    rows();
  }

  // Only the rows in view exist.
  function rows() {
    if (!list) return;
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), last = Math.min(nodes.length, first + Math.ceil((list.clientHeight || 600) / ROW) + 8);
    const inner = make("div", null, null, "inner"), columns = store.sides[0], chosen = current();
    inner.style.height = nodes.length * ROW + "px";
    for (let k = first; k < last; k++) row(inner, k, columns, k === chosen);
    list.replaceChildren(inner);
    if (chosen >= first && chosen < last) list.setAttribute("aria-activedescendant", "worst-" + chosen);
    else list.removeAttribute("aria-activedescendant");
  }

  function row(parent, k, columns, chosen) {
    const node = nodes[k], line = make("div", parent, null, "worst-row" + (chosen ? " current" : ""));
    line.id = "worst-" + k;
    line.setAttribute("role", "option");
    line.setAttribute("aria-selected", String(chosen));
    line.setAttribute("aria-posinset", k + 1);
    line.setAttribute("aria-setsize", nodes.length);
    line.style.top = k * ROW + "px";
    line.title = Kit.name(columns.name(node), 500);
    make("span", line, Kit.count(k + 1), "rank");
    Graph.panel.swatch(line, columns, node);
    const texts = make("span", line, null, "texts");
    make("bdi", texts, Graph.panel.title(columns, node), "label");
    make("bdi", texts, Graph.panel.around(columns, node), "around");
    const units = columns.units[node];
    if (compared()) make("span", line, Graph.panel.short(units), "figure");
    else if (!(columns.flags[node] & FLAG.NONFINITE_IN)) make("span", line, Kit.t("graph.born"), "figure bad");
    line.addEventListener("click", () => store.select(0, node));
  }

  const current = () => (store.selection && store.selection.side === 0 ? nodes.indexOf(store.selection.node) : -1);

  function mark() {
    if (!place.hidden && list) rows();
  }

  function keys(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    go(Math.max(0, Math.min(nodes.length - 1, current() + by)));
  }

  function go(k) {
    fresh();
    if (!nodes.length) return;
    const at = (k + nodes.length) % nodes.length;
    if (list && !place.hidden) {
      const top = at * ROW;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    }
    store.select(0, nodes[at]);
  }

  const step = (by) => go(current() < 0 ? (by > 0 ? 0 : -1) : current() + by);

  return { collect, csv, mount, draw, step };
})();
