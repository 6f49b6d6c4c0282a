"use strict";
// Search over names, types and source lines of both runs. `Graph.search.find` is a function of plain columns; the rest is the field in the bar.
Graph.search = (() => {
  const { make, word } = Kit;
  const { button, label } = Graph.panel;
  const ROW = 44, SHOWN = 8, MOST_QUERY = 2000;
  const REGULAR = 2000; // characters of a name that a regular expression looks at: of 100 kB it could hold the page for minutes
  const lowered = new WeakMap();

  // ---- Finding ----

  // Small letters, with every character where it was.
  function lower(columns) {
    let found = lowered.get(columns);
    if (found === undefined) {
      found = columns.names.toLowerCase();
      if (found.length !== columns.names.length) found = columns.names.replace(/[A-Z]+/g, (part) => part.toLowerCase());
      lowered.set(columns, found);
    }
    return found;
  }

  // `words "as it stands" type:x line:x /pattern/` -> [{what: name|kind|line|pattern, text}]. Throws where a pattern is none.
  function parse(query) {
    const terms = [];
    for (const [, key, quoted, pattern, plain] of query.slice(0, MOST_QUERY).matchAll(/(?:(type|line):)?(?:"([^"]*)"?|\/((?:[^/\\]|\\.)+)\/|(\S+))/g)) {
      if (pattern !== undefined && !key) { terms.push({ what: "pattern", text: pattern, test: new RegExp(pattern, "i") }); continue; }
      const text = (quoted ?? (pattern !== undefined ? "/" + pattern + "/" : plain)).toLowerCase();
      if (text) terms.push({ what: key === "type" ? "kind" : key === "line" ? "line" : "name", text });
    }
    return terms;
  }

  // Nodes of one side that all terms fit, in order of execution. `stacks`: {lines, stacks} where a term asks for a line, else null.
  function find(columns, terms, stacks = null) {
    let mask = null;
    for (const term of terms) {
      const found = term.what === "name" ? byName(columns, term.text, mask) : term.what === "line" ? byLine(columns, term.text, stacks) : byTest(columns, term, mask);
      if (mask) for (let i = 0; i < found.length; i++) found[i] &= mask[i];
      mask = found;
    }
    const nodes = [];
    if (mask) for (let i = 1; i < mask.length; i++) if (mask[i]) nodes.push(i);
    return nodes;
  }

  function byName(columns, text, among) {
    const found = new Uint8Array(columns.count), all = lower(columns);
    for (let place = all.indexOf(text); place >= 0; ) {
      const node = columns.nodeAt(place);
      if (place + text.length <= columns.end(node)) {
        if (!among || among[node]) found[node] = 1;
        place = all.indexOf(text, columns.end(node));
      } else place = all.indexOf(text, place + 1);
    }
    return found;
  }

  function byTest(columns, term, among) {
    const found = new Uint8Array(columns.count);
    const test = term.what === "kind" ? (i) => columns.kind(i).toLowerCase().includes(term.text) : (i) => term.test.test(columns.name(i).slice(0, REGULAR))
    for (let i = 1; i < columns.count; i++) if ((!among || among[i]) && test(i)) found[i] = 1;
    return found;
  }

  function byLine(columns, text, stacks) {
    const found = new Uint8Array(columns.count);
    if (!stacks) return found;
    const line = stacks.lines.map((one) => one.toLowerCase().includes(text));
    const stack = stacks.stacks.map((numbers) => numbers.some((number) => line[number]));
    for (let i = 1; i < columns.count; i++) if (columns.stack[i] >= 0 && stack[columns.stack[i]]) found[i] = 1;
    return found;
  }

  // ---- The field ----

  let store = null, field = null, list = null, box = null, where = null, only = null, hits = [], at = -1, ticket = 0, due = 0, fault = "", reading = false;

  function mount(parent, given) {
    store = given;
    box = make("div", parent, null, "search");
    box.setAttribute("role", "search");
    Graph.panel.icon(box, "search");
    field = make("input", box);
    field.type = "text";
    field.id = "graph-search";
    field.autocomplete = "off";
    field.spellcheck = false;
    field.maxLength = MOST_QUERY;
    field.dataset.tLabel = field.dataset.tHint = "graph.search";
    field.setAttribute("role", "combobox");
    field.setAttribute("aria-controls", "graph-hits");
    field.setAttribute("aria-autocomplete", "list");
    field.setAttribute("aria-expanded", "false");
    where = make("span", box, null, "where");
    where.setAttribute("role", "status");
    button(box, "graph.previous", () => step(-1), { cls: "icon", sign: "up" });
    button(box, "graph.next", () => step(1), { cls: "icon", sign: "down" });
    make("kbd", box, "/").setAttribute("aria-hidden", "true");
    menu();
    field.addEventListener("input", () => { clearTimeout(due); due = setTimeout(run, 120); open(true); });
    field.addEventListener("focus", () => open(true));
    field.addEventListener("keydown", keys);
    document.addEventListener("pointerdown", (event) => { if (!box.contains(event.target)) open(false); });
    box.addEventListener("focusout", (event) => { if (event.relatedTarget && !box.contains(event.relatedTarget)) open(false); });
    store.on("open", () => run(true));
    Kit.on("language", () => { Kit.apply(box); drawAll(); });
    Kit.apply(box);
    drawAll();
  }

  function menu() {
    const menu_ = make("div", box, null, "hits-menu");
    menu_.hidden = true;
    box.menu = menu_;
    const tick = make("label", menu_, null, "tick only");
    only = make("input", tick);
    only.type = "checkbox";
    word(make("span", tick), "graph.search_only");
    only.addEventListener("change", share);
    box.tick = tick;
    list = make("div", menu_, null, "hits");
    list.id = "graph-hits";
    list.setAttribute("role", "listbox");
    label(list, "graph.search");
    list.addEventListener("scroll", draw);
    box.help = make("div", menu_, null, "search-help");
  }

  function help() {
    box.help.replaceChildren();
    if (fault) { make("p", box.help, Kit.t("graph.search_bad", Kit.name(fault, 200)), "bad"); return; }
    if (reading) { make("p", box.help, Kit.t("graph.search_reading"), "soft"); return; }
    if (hits.length) return;
    if (field.value.trim()) { make("p", box.help, Kit.t("graph.search_none"), "soft"); return; }
    word(make("p", box.help, null, "soft"), "graph.search_hint");
    const dl = make("dl", box.help);
    for (const [example, key] of [["type:linear", "kind"], ["line:attention.py", "line"], ["/layers\\.[02]\\./", "pattern"], ['"mlp.act"', "quote"]]) {
      const line = make("div", dl), term = make("dt", line), put = make("button", term, example, "name");
      put.type = "button";
      put.addEventListener("click", () => { field.value = example; field.focus(); run(); });
      word(make("dd", line), "graph.search_" + key);
    }
  }

  function open(shown) {
    box.menu.hidden = !shown;
    field.setAttribute("aria-expanded", String(shown));
    if (shown) { draw(); help(); }
  }

  // Find anew; where a term asks for lines of source, what holds them is read first.
  async function run(keep = false) {
    const mine = ++ticket, query = field.value.trim();
    fault = "";
    let terms = [];
    try { terms = parse(query); } catch (error) { fault = error.message; }
    const found = [];
    if (terms.length && store.sides.length) {
      const lines = terms.some((term) => term.what === "line");
      reading = lines;
      if (lines) drawAll();
      for (const [side, columns] of store.sides.entries()) {
        const stacks = lines ? await store.stacks(side) : null;
        if (mine !== ticket) return;
        for (const node of find(columns, terms, stacks)) if (side === 0 || columns.partner[node] < 0) found.push({ side, node });
      }
      reading = false;
    }
    hits = found;
    at = -1;
    const chosen = store.selection;
    if (keep === true && chosen) at = hits.findIndex((hit) => hit.side === chosen.side && hit.node === chosen.node);
    list.scrollTop = 0;
    share();
    drawAll();
  }

  // What the search found is a filter among others when the reader wants that.
  function share() {
    let masks = null;
    if (only.checked && hits.length) {
      masks = store.sides.map((columns) => new Uint8Array(columns.count));
      for (const { side, node } of hits) {
        masks[side][node] = 1;
        const other = store.partner(side, node);
        if (other >= 0) masks[1 - side][other] = 1;
      }
    }
    Graph.filters.among(masks);
  }

  function drawAll() {
    box.classList.toggle("some", field.value !== "");
    where.textContent = !field.value.trim() || fault ? "" : at >= 0 ? Kit.t("graph.search_at", Kit.count(at + 1), Kit.count(hits.length)) : Kit.t("graph.search_count", Kit.count(hits.length));
    box.tick.hidden = !hits.length;
    help();
    draw();
  }

  // Only the rows in view exist: there may be many thousands.
  function draw() {
    list.hidden = !hits.length;
    if (!hits.length || box.menu.hidden) { list.replaceChildren(); field.removeAttribute("aria-activedescendant"); return; }
    list.style.height = Math.min(hits.length, SHOWN) * ROW + "px";
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 2), last = Math.min(hits.length, first + SHOWN + 5);
    const inner = make("div", null, null, "inner");
    inner.style.height = hits.length * ROW + "px";
    for (let i = first; i < last; i++) hit(inner, i);
    list.replaceChildren(inner);
    if (at >= first && at < last) field.setAttribute("aria-activedescendant", "graph-hit-" + at);
    else field.removeAttribute("aria-activedescendant");
  }

  function hit(parent, i) {
    const { side, node } = hits[i], columns = store.sides[side], row = make("div", parent, null, "hit" + (i === at ? " current" : ""));
    row.id = "graph-hit-" + i;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(i === at));
    row.setAttribute("aria-posinset", i + 1);
    row.setAttribute("aria-setsize", hits.length);
    row.style.top = i * ROW + "px";
    Graph.panel.swatch(row, columns, node);
    const texts = make("span", row, null, "texts");
    make("bdi", texts, Graph.panel.title(columns, node), "label");
    make("bdi", texts, Graph.panel.around(columns, node), "around");
    if (side) make("span", row, Kit.t("graph.search_of_golden"), "badge");
    if (columns.units[node] > 1) make("span", row, Graph.panel.short(columns.units[node]), "figure");
    row.addEventListener("click", () => { go(i); open(false); });
  }

  function go(i) {
    if (!hits.length) return;
    at = (i + hits.length) % hits.length;
    const top = at * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + SHOWN * ROW) list.scrollTop = top + ROW - SHOWN * ROW;
    store.select(hits[at].side, hits[at].node);
    drawAll();
  }

  // The next hit after the one shown; before any was, the first after what is chosen.
  function step(by) {
    if (at >= 0 || !store.selection) return go(at < 0 && by < 0 ? -1 : at + by);
    const { side, node } = store.selection;
    const next = hits.findIndex((hit) => hit.side > side || (hit.side === side && hit.node >= node));
    go(by > 0 ? Math.max(0, next) : (next < 0 ? hits.length : next) - 1);
  }

  function keys(event) {
    const entered = field.dataset.entered === field.value && at >= 0;
    if (event.key === "Enter") { field.dataset.entered = field.value; clearTimeout(due); event.preventDefault(); Promise.resolve(field.dataset.ran === field.value ? null : run()).then(() => { field.dataset.ran = field.value; step(event.shiftKey ? -1 : 1); }); }
    else if (event.key === "ArrowDown") { event.preventDefault(); delete field.dataset.entered; open(true); step(1); }
    else if (event.key === "ArrowUp") { event.preventDefault(); delete field.dataset.entered; open(true); step(-1); }
    else if (event.key === "Escape") {
      event.stopPropagation();
      const listed = !box.menu.hidden;
      if (listed) open(false);
      else if (field.value) { field.value = ""; run(); return; }
      // After Enter has gone to a hit back to the page, where n and N go on through the hits.
      if (!listed || entered) { field.blur(); /** @type {HTMLElement | null} */ (document.querySelector("#graph-tree [tabindex='0']"))?.focus(); }
    }
  }

  function focus() {
    field.focus();
    field.select();
  }

  return { find, parse, mount, step, focus, get hits() { return hits; } };
})();
