"use strict";
// What is known of the chosen node: its rows beside those of its partner, where its inputs come from, who called it, which ranks belong to it.
Graph.details = (() => {
  const { make, word } = Kit;
  const { button, nodeLink, swatch } = Graph.panel;
  const FLAG = Graph.FLAG, MOST_ROWS = 40, MOST_LINKS = 12, MOST_RANKS = 64;
  let place = null, ticket = 0, onlyDiffering = false;

  function mount(parent) {
    place = parent;
    Graph.store.on("select", draw);
    Graph.store.on("open", draw);
    Kit.on("language", draw);
    draw();
  }

  // Both sides where a node has a partner: {target, golden}, nodes or -1.
  function both({ side, node }) {
    const other = Graph.store.partner(side, node);
    return side === 0 ? { target: node, golden: other } : { target: other, golden: node };
  }

  async function draw() {
    const mine = ++ticket, chosen = Graph.store.selection;
    if (!chosen || !Graph.store.sides.length) return empty();
    const made = make("div", null, null, "details");
    head(made, chosen);
    const rows = make("div", made, null, "rows");
    further(made, chosen);
    const lines = section(made, "stack");
    place.replaceChildren(made);
    place.scrollTop = 0;
    try {
      const nodes = both(chosen), store = Graph.store;
      const [target, golden, stack] = await Promise.all([
        nodes.target >= 0 ? store.details(0, nodes.target) : null,
        nodes.golden >= 0 ? store.details(1, nodes.golden) : null,
        store.stack(chosen.side, chosen.node),
      ]);
      if (mine !== ticket) return;
      statistics(rows, target, golden, chosen.side);
      notes(made, (chosen.side ? golden : target)?.notes || []);
      stackLines(lines, stack);
    } catch (error) {
      if (mine === ticket) make("p", rows, Kit.t("graph.detail_fault", error.message), "fault");
    }
  }

  function empty() {
    const node = make("div", null, null, "empty"), { pair, manifest } = Graph.store, worst = pair ? Graph.overview.worst(pair) : null;
    if (pair && pair.suspect < 0 && !pair.nonfinite && !(worst > 1) && manifest.task !== "structure") {
      make("span", node, "✓", "sign").setAttribute("aria-hidden", "true");
      word(make("p", node, null, "empty-title good"), manifest.comparison ? "graph.clean" : "graph.clean_alone");
      make("p", node, Kit.t("graph.clean_more", Kit.count(pair.nodes[0] - 1), pair.step, pair.rank), "soft");
      make("hr", node);
    }
    word(make("p", node, null, "empty-title"), "graph.nothing_chosen");
    word(make("p", node, null, "soft"), "graph.nothing_chosen_more");
    const keys = make("p", node, null, "empty-keys");
    for (const [key, text] of [["/", "key_search"], ["w", "key_worst"], ["?", "help_title"]]) {
      const one = make("span", keys);
      make("kbd", one, key);
      word(make("span", one, null, "soft"), "graph." + text);
    }
    place.replaceChildren(node);
  }

  function section(parent, key, count = null) {
    const node = make("div", parent, null, "part"), line = make("h3", node);
    word(make("span", line), "graph." + key);
    if (count !== null) make("span", line, Kit.count(count), "count");
    return node;
  }

  // ---- What it is ----

  function head(parent, { side, node }) {
    const store = Graph.store, columns = store.sides[side], name = columns.name(node), node_ = make("div", parent, null, "node-head");
    const line = make("div", node_, null, "title-line");
    swatch(line, columns, node);
    make("h2", line).append(make("bdi", null, node === 0 ? Kit.t("graph.one_root") : Graph.panel.title(columns, node, 160)));
    const badges = make("div", node_, null, "badges");
    const badge = (text, cls = "") => make("span", badges, text, "badge " + cls);
    if (store.sides.length === 2) badge(Kit.t(side ? "graph.golden" : "graph.target"));
    badge(Kit.t("graph." + Graph.panel.sort(columns, node)));
    const kind = columns.kind(node);
    if (node > 0 && columns.type[node] === Graph.MODULE && kind !== "parameters_grad") make("bdi", badge(""), Kit.name(kind, 60));
    if (node > 0) badge(Kit.t(Graph.panel.isBackward(columns, node) ? "graph.backward" : "graph.forward"));
    badge(Kit.t("graph.step_rank", store.pair.step, store.pair.rank));
    if (node > 0 && store.pair.microSteps > 1) badge(Kit.t("graph.micro_step_n", columns.micro[node]));
    const flags = columns.flags[node];
    if (flags & FLAG.RECOMPUTE) badge(Kit.t("graph.recompute"));
    const level = ["", "medium", "high", "critical"][(flags & FLAG.OVERFLOW) >> 6];
    if (level) badge(Kit.t("graph.overflow_n", Kit.t("graph." + level)), level === "medium" ? "warn" : "bad");
    const named = make("div", node_, null, "full-name");
    make("bdi", named, Kit.name(name, 1000), "name");
    button(named, "graph.copy", () => Graph.panel.copy(name), { cls: "icon", sign: "copy" });
    verdict(node_, side, node);
    partner(node_, side, node);
  }

  function verdict(parent, side, node) {
    const store = Graph.store, columns = store.sides[side], flags = columns.flags[node];
    if (side === 0 && store.pair.suspect === node) {
      const box = make("div", parent, null, "callout bad");
      word(make("b", box), "graph.is_suspect");
      if (store.pair.suspectText) make("p", box, Kit.name(Kit.said(store.pair.suspectText), 1000));
    } else if (side === 0 && store.pair.suspect >= 0 && flags & FLAG.SUSPECT_BELOW) {
      const box = make("div", parent, null, "callout");
      word(make("b", box), "graph.leads_to_suspect");
      nodeLink(box, 0, store.pair.suspect);
    }
    if (flags & (FLAG.NONFINITE_IN | FLAG.NONFINITE_OUT)) {
      const key = !(flags & FLAG.NONFINITE_OUT) ? "swallowed" : flags & FLAG.NONFINITE_IN ? "passed_on" : "born_here";
      word(make("p", parent, null, "state" + (key === "born_here" ? " bad" : "")), "graph." + key);
    }
    if (store.sides.length === 2 && side === 0 && !(flags & (FLAG.UNMATCHED | FLAG.NEEDLESS))) {
      const line = make("p", parent, null, "measure"), units = columns.units[node];
      const figure = make("span", line, Graph.compare.units(units), "pill " + Graph.tone(columns, node));
      figure.title = Kit.scale(units).label;
      if (!Number.isNaN(columns.index[node])) {
        const of = { 0: "pass", 0.5: "warning", 1: "error" }[columns.index[node]];
        const index = make("span", line, Kit.t("graph.index", of ? Kit.t("graph.index_" + of) : String(+columns.index[node].toFixed(3))), "soft index");
        index.title = Kit.t("graph.index_tip");
      }
    }
    if (columns.isLeaf(node)) return;
    const worst = worstInside(columns, node);
    if (worst >= 0) {
      const line = make("div", parent, null, "inside");
      word(make("span", line, null, "soft"), store.sides.length === 2 ? "graph.worst_inside" : "graph.bad_inside");
      nodeLink(line, side, worst);
    }
  }

  // Below a module: the innermost node of the largest difference, or the first with NaN or Inf where nothing is compared; -1.
  function worstInside(columns, node) {
    const end = node + columns.size[node], compared = Graph.store.sides.length === 2;
    let found = -1;
    for (let i = node + 1; i < end; i++) {
      if (compared) {
        const units = columns.units[i];
        if (units > 1 && (found < 0 || units > columns.units[found] || (units === columns.units[found] && columns.parent[i] === found))) found = i;
      } else if (columns.flags[i] & FLAG.NONFINITE_OUT && (found < 0 || columns.parent[i] === found)) found = i;
    }
    return found;
  }

  function partner(parent, side, node) {
    const store = Graph.store;
    if (store.sides.length < 2 || node === 0) return;
    const other = store.partner(side, node), line = make("div", parent, null, "partner");
    word(make("span", line, null, "soft"), side ? "graph.in_target" : "graph.in_golden");
    if (other < 0) { word(make("span", line), store.sides[side].flags[node] & FLAG.NEEDLESS ? "graph.no_counterpart" : "graph.no_partner"); return; }
    const columns = store.sides[1 - side], link = nodeLink(line, 1 - side, other, { place: false, figure: false });
    link.title = Kit.name(columns.name(other), 500);
    if (columns.flags[other] & FLAG.BY_STRUCTURE || store.sides[side].flags[node] & FLAG.BY_STRUCTURE) {
      make("bdi", line, Kit.name(columns.name(other), 300), "name soft");
      word(make("small", line), "graph.placed");
    }
  }

  // ---- Its rows ----

  function statistics(parent, target, golden, side) {
    const own = side ? golden : target, compared = target !== null && golden !== null;
    const metrics = target?.metrics || {};
    if (![target, golden].some((one) => one && (one.inputs.length || one.outputs.length))) { word(make("p", parent, null, "soft none"), "graph.no_rows"); return; }
    const blocks = [["outputs", "outputs"], ["inputs", "inputs"]].map(([key, which]) => {
      const pairs = compared
        ? Graph.compare.pairs(target[which], golden[which])
        : own[which].map((row) => (side ? { target: null, golden: row } : { target: row, golden: null }));
      return [key, pairs.map((pair) => ({ ...pair, found: compared ? Graph.compare.difference(pair) : { state: "alone", statistics: {} } }))];
    });
    if (compared) {
      const tick = make("label", parent, null, "tick"), box = make("input", tick);
      box.type = "checkbox";
      box.checked = onlyDiffering;
      word(make("span", tick), "graph.only_differing");
      box.addEventListener("change", () => { onlyDiffering = box.checked; fill(); });
    }
    const lists = make("div", parent);
    const fill = () => {
      lists.replaceChildren();
      for (const [key, pairs] of blocks) if (pairs.length) block(lists, key, pairs, metrics);
    };
    fill();
  }

  function block(parent, key, pairs, metrics) {
    const node = section(parent, key, pairs.length);
    const wanted = onlyDiffering ? pairs.filter((pair) => pair.found.state !== "same") : pairs;
    const add = (some) => { for (const pair of some) row(node, pair, metrics); };
    add(wanted.slice(0, MOST_ROWS));
    if (wanted.length > MOST_ROWS) {
      const all = make("button", node, Kit.t("graph.show_all", Kit.count(wanted.length)), "more");
      all.addEventListener("click", () => { all.remove(); add(wanted.slice(MOST_ROWS)); });
    }
    if (wanted.length < pairs.length) {
      make("p", node, Kit.t(wanted.length ? "graph.rows_equal" : "graph.all_equal", Kit.count(pairs.length - wanted.length)), "soft none");
    }
  }

  function row(parent, { target, golden, found }, metrics) {
    const one = target || golden, node = make("div", parent, null, "row " + found.state), top = make("div", node, null, "row-head");
    make("bdi", top, Kit.name(one.place, 200), "name place");
    if (one.dtype !== null || one.value === undefined) make("span", top, form(one), "form");
    mark(top, target, golden, found);
    if (target && golden && (found.state === "other_shape" || found.state === "other_dtype")) {
      make("p", node, form(target) + "  ≠  " + form(golden), "differs-line");
    }
    if (!Graph.compare.isTensor(one)) plainValue(node, target, golden, found);
    else if (Graph.compare.STATISTICS.some((s) => (target || golden)[s] !== null)) numbers(node, target, golden, found);
    const checks = [target, golden].map((one_) => one_ && Graph.compare.checksum(one_)).filter(Boolean);
    if (checks.length) make("p", node, Kit.t("graph.checksum") + "  " + [...new Set(checks)].map((c) => Kit.name(c, 80)).join("  ≠  "), "soft small");
    const measured = Object.entries(metrics[one.place] || {}).filter(([, value]) => value !== null && value !== "");
    if (measured.length) {
      const more = make("details", node, null, "metrics");
      word(make("summary", more), "graph.all_metrics");
      const list = make("dl", more);
      for (const [column, value] of measured) {
        const pair = make("div", list);
        make("dt", pair, Kit.name(column, 80));
        make("dd", pair, Kit.number(value));
      }
    }
  }

  // "float32 [2, 12]"; of an argument that is no tensor its type alone.
  function form(one) {
    const kind = Kit.name(one.dtype ?? "", 60).replace(/^torch\.(?=[a-z])/, "").replace(/^<class '(.+)'>$/, "$1"), shape = Kit.name(Graph.compare.shape(one.shape), 200);
    return one.value !== undefined && shape === "[]" ? kind : [kind, shape].filter(Boolean).join(" ");
  }

  function mark(parent, target, golden, found) {
    const bad = [target, golden].some((one) => one && Graph.compare.isBad(one));
    if (found.state !== "alone" && !(found.state === "differs")) {
      word(make("span", parent, null, "mark " + (found.state === "same" ? "good" : "warn")), "graph." + found.state);
    }
    const one = target || golden;
    if (bad && one.nans) make("span", parent, Kit.t("graph.nans", Kit.count(one.nans)), "mark bad");
    if (bad && one.infs) make("span", parent, Kit.t("graph.infs", Kit.count(one.infs)), "mark bad");
  }

  function plainValue(parent, target, golden, found) {
    const line = make("p", parent, null, "value");
    const text = (one) => (one.dtype === null && one.value === undefined ? Kit.t("graph.none") : Kit.name(one.value ?? "", 600));
    make("bdi", line, text(target || golden), "name");
    if (target && golden && found.state === "other_value") { make("span", line, "  ≠  "); make("bdi", line, text(golden), "name"); }
  }

  // Max, Min, Mean, Norm side by side; of both runs one below the other, so that figures that differ stand below each other.
  function numbers(parent, target, golden, found) {
    const table = make("table", parent, null, "stats"), top = make("tr", make("thead", table)), body = make("tbody", table);
    const named = target && golden;
    if (named) make("td", top);
    for (const s of Graph.compare.STATISTICS) word(make("th", top), "graph." + s).scope = "col";
    const line = (key, one) => {
      const tr = make("tr", body);
      if (key) word(make("th", tr), "graph." + key).scope = "row";
      for (const s of Graph.compare.STATISTICS) {
        const value = Graph.compare.number(one[s]), td = make("td", tr, value === null ? "–" : precise(value));
        if (value !== null) td.title = String(value);
        if (value !== null && !Number.isFinite(value)) td.className = "bad";
      }
    };
    if (!named) { line("", target || golden); return; }
    if (found.state === "same") return line("both_sides", target);
    line("target", target);
    line("golden", golden);
    const tr = make("tr", body, null, "delta");
    word(make("th", tr), "graph.difference").scope = "row";
    for (const s of Graph.compare.STATISTICS) {
      const d = found.statistics[s], td = make("td", tr, !d ? "–" : d.difference === 0 ? "0" : figure(d.difference));
      if (d && d.difference !== 0) { td.className = "changed"; td.title = String(d.difference); }
      const share = d && d.difference !== 0 ? Graph.compare.percent(d.relative) : "";
      if (share) make("small", td, share);
    }
  }

  // Three figures are enough of a difference.
  const figure = (v) => (Number.isFinite(v) && Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? String(+v.toPrecision(3)) : Kit.number(v).replace("e+", "e"));

  const precise = (v) => {
    if (!Number.isFinite(v)) return Kit.number(v);
    const size = Math.abs(v);
    return size !== 0 && (size >= 1e6 || size < 1e-3) ? v.toExponential(3).replace("e+", "e") : String(+v.toPrecision(5));
  };

  // ---- What it is connected to ----

  function further(parent, { side, node }) {
    const columns = Graph.store.sides[side];
    links(parent, side, node);
    neighbours(parent, "comes_from", side, [...columns.producers(node)]);
    neighbours(parent, "goes_to", side, [...columns.consumers(node)]);
  }

  function neighbours(parent, key, side, nodes) {
    if (!nodes.length) return;
    const part = section(parent, key, nodes.length), list = make("div", part, null, "links");
    const add = (some) => { for (const one of some) nodeLink(list, side, one); };
    add(nodes.slice(0, MOST_LINKS));
    if (nodes.length > MOST_LINKS) {
      const all = make("button", part, Kit.t("graph.more", Kit.count(nodes.length - MOST_LINKS)), "more");
      all.addEventListener("click", () => { all.remove(); add(nodes.slice(MOST_LINKS, 500)); });
    }
  }

  function links(parent, side, node) {
    const store = Graph.store, link = store.link(side, node);
    if (!link) return;
    const part = section(parent, "communication", link.nodes.length);
    word(make("p", part, null, "soft small"), "graph.link_" + link.kind);
    const list = make("div", part, null, "links");
    const add = (one) => {
      const there = store.pairOf(store.pair.step, one.rank) >= 0, node_ = make("button", list, null, "node-link rank-link");
      node_.type = "button";
      make("span", node_, Kit.t("graph.rank_n", one.rank), "badge");
      make("bdi", node_, Kit.name(one.name, 80), "name");
      make("span", node_, there ? "→" : "", "figure").setAttribute("aria-hidden", "true");
      node_.disabled = !there;
      if (!there) node_.title = Kit.t("graph.link_missing");
      node_.addEventListener("click", () => store.follow(side, node, one.rank));
    };
    link.nodes.slice(0, MOST_RANKS).forEach(add);
    if (link.nodes.length > MOST_RANKS) {
      const all = make("button", part, Kit.t("graph.more", Kit.count(link.nodes.length - MOST_RANKS)), "more");
      all.addEventListener("click", () => { all.remove(); link.nodes.slice(MOST_RANKS).forEach(add); });
    }
  }

  function notes(parent, texts) {
    if (!texts.length) return;
    const part = section(parent, "notes", texts.length), list = make("ul", part);
    const add = (some) => { for (const one of some) make("li", list, Kit.name(Kit.said(one), 500)); };
    add(texts.slice(0, MOST_LINKS));
    if (texts.length > MOST_LINKS) {
      const all = make("button", part, Kit.t("graph.more", Kit.count(texts.length - MOST_LINKS)), "more");
      all.addEventListener("click", () => { all.remove(); add(texts.slice(MOST_LINKS)); });
    }
  }

  function stackLines(part, lines) {
    if (!lines.length) { word(make("p", part, null, "soft none"), "graph.stack_none"); return; }
    button(part.querySelector("h3"), "graph.stack_copy", () => Graph.panel.copy(lines.join("\n")), { cls: "icon", sign: "copy" });
    const list = make("ol", part, null, "stack");
    lines.slice(0, 200).forEach((text, i) => {
      const { file, line, of, code } = frame(text), item = make("li", list, null, i ? "" : "innermost");
      const top = make("div", item, null, "where");
      make("bdi", top, Kit.name(file, 300), "name");
      if (line) make("span", top, ":" + line, "name line-number");
      if (of) make("bdi", top, Kit.name(of, 100), "soft");
      if (code) make("code", item, Kit.name(code, 400));
    });
  }

  // A line as dumps have them: "File /a/b.py, line 12, in f, \n code". What is no such line stays whole.
  function frame(text) {
    const found = /^\s*File "?(.+?)"?, line (\d+), in ([^,\n]+)[,\s]*([\s\S]*)$/.exec(text);
    if (!found) return { file: text.trim(), line: "", of: "", code: "" };
    return { file: found[1].split(/[\\/]/).slice(-3).join("/"), line: found[2], of: found[3].trim(), code: found[4].trim() };
  }

  return { mount, worstInside, frame };
})();
