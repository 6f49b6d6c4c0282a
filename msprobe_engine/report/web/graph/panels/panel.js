"use strict";
// Small pieces that all panels are made of. Names are only ever set as text, after `Kit.name`.
Graph.panel = (() => {
  const { make, word } = Kit;
  const FLAG = Graph.FLAG;

  // Drawn on a field of 16 by 16, so that no font has to have them.
  const ICONS = {
    copy: "M6 6h7v7h-7zM10 6V3H3v7h3",
    search: "M7 3a4 4 0 1 0 0 8a4 4 0 0 0 0-8M10 10l3.5 3.5",
    up: "M8 12.5v-9M4.5 7L8 3.5L11.5 7",
    down: "M8 3.5v9M4.5 9L8 12.5L11.5 9",
    left: "M12.5 8h-9M7 4.5L3.5 8L7 11.5",
    right: "M3.5 8h9M9 4.5L12.5 8L9 11.5",
    help: "M6 6a2 2 0 1 1 2.8 1.85c-.6.3-.8.7-.8 1.4M8 11.9v.1M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8",
    save: "M8 2.5v7M5 7L8 10L11 7M3 12.5h10",
    side: "M2.5 3.5h11v9h-11zM9.5 3.5v9",
  };
  const SVG = "http://www.w3.org/2000/svg";

  function icon(parent, name) {
    const node = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "path");
    node.setAttribute("viewBox", "0 0 16 16");
    node.setAttribute("class", "drawn");
    node.setAttribute("aria-hidden", "true");
    line.setAttribute("d", ICONS[name]);
    node.append(line);
    parent.append(node);
    return node;
  }

  // A button with fixed words, or with one of the icons and fixed words as its name and tip.
  function button(parent, key, press, { cls = "", sign = null } = {}) {
    const node = make("button", parent, null, cls);
    node.type = "button";
    if (sign === null) word(node, key);
    else { icon(node, sign); label(node, key); }
    node.addEventListener("click", press);
    return node;
  }

  // The name of an element for those who cannot see its sign, and for those who wait over it.
  const labelArguments = new WeakMap();
  function label(node, key, ...args) {
    node.dataset.label = key;
    labelArguments.set(node, args);
    node.setAttribute("aria-label", Kit.t(key, ...args));
    if (node.tagName === "BUTTON" || node.getAttribute("role") === "separator") node.title = Kit.t(key, ...args);
    return node;
  }
  Kit.on("language", () => {
    const named = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-label]"));
    for (const node of named) label(node, node.dataset.label, ...(labelArguments.get(node) || []));
  });

  // A coloured square for a node.
  function swatch(parent, columns, node) {
    const found = make("i", parent, null, "swatch " + Graph.tone(columns, node));
    found.setAttribute("aria-hidden", "true");
    return found;
  }

  // The path of modules around a node, for a second line under its label; long ones lose their beginning.
  function around(columns, node, most = 4) {
    const names = columns.ancestors(node).slice(1).map((one) => columns.label(one));
    return Kit.name((names.length > most ? "… › " : "") + names.slice(-most).join(" › "), 200);
  }

  // A node as something to press; it is chosen then.
  function nodeLink(parent, side, node, { place = true, figure = true } = {}) {
    const columns = Graph.store.sides[side], found = make("button", parent, null, "node-link");
    found.type = "button";
    found.title = Kit.name(columns.name(node), 500);
    swatch(found, columns, node);
    const texts = make("span", found, null, "texts");
    make("bdi", texts, title(columns, node), "label");
    if (place && columns.parent[node] > 0) make("bdi", texts, around(columns, node), "around");
    if (figure && columns.units[node] >= 0) make("span", found, short(columns.units[node]), "figure");
    found.addEventListener("click", () => Graph.store.select(side, node));
    return found;
  }

  // "down_proj", "matmul ·12 ↩": what stands in lists. A call is told from others of its kind by its number; ↩ is backward.
  function title(columns, node, most = 80) {
    const label = columns.label(node), call = columns.type[node] === Graph.API ? columns.call(node) : "";
    return Kit.name((call ? label + " ·" + call : label) + (isBackward(columns, node) ? " ↩" : ""), most);
  }

  const short = (units) => (units === Infinity ? "∞" : units === 0 ? "0" : Graph.compare.multiple(units) + " ×");

  const isBackward = (columns, node) => (columns.flags[node] & FLAG.BACKWARD) !== 0;
  const isCollection = (columns, node) => columns.type[node] === Graph.API_COLLECTION || columns.type[node] === Graph.MULTI_COLLECTION;

  // Which words say what a node is.
  function sort(columns, node) {
    if (node === 0) return "one_root";
    if (isCollection(columns, node)) return "one_collection";
    if (columns.kind(node) === "parameters_grad") return "one_gradients";
    return columns.type[node] === Graph.API ? "one_api" : "one_module";
  }

  // "Rank 0 and 255 alike": a rank that has a graph in a step, and how many it stands for.
  function ranks(step, rank) {
    const pair = Graph.store.manifest.pairs[Graph.store.pairOf(step, rank)], count = pair?.rank === rank ? pair.same.length : 0;
    return count ? Kit.t("graph.rank_alike", rank, Kit.count(count)) : Kit.t("graph.rank_n", rank);
  }

  // The pair with the first suspect of all, -1 without one.
  function firstSuspect() {
    const { first, pairs } = Graph.store.manifest;
    const index = first ? Graph.store.pairOf(first.step, first.rank) : -1;
    return index >= 0 && pairs[index].suspect >= 0 ? index : pairs.findIndex((pair) => pair.suspect >= 0);
  }

  // A short message that goes away by itself; read out.
  let toast = null, due = 0;
  function say(text) {
    toast ||= make("div", document.getElementById("graph") || document.body, null, "toast");
    toast.setAttribute("role", "status");
    toast.textContent = text;
    toast.classList.add("shown");
    clearTimeout(due);
    due = setTimeout(() => toast.classList.remove("shown"), 2600);
  }

  async function copy(text) {
    say(Kit.t((await Kit.copy(text)) ? "graph.copied" : "graph.not_copied"));
  }

  // Something below a button that opens and closes: Escape and a press elsewhere close it, and the focus returns.
  function popover(opener, content, opening = () => {}) {
    content.hidden = true;
    opener.setAttribute("aria-expanded", "false");
    opener.setAttribute("aria-haspopup", "dialog");
    const set = (open) => {
      if (open === !content.hidden) return;
      content.hidden = !open;
      opener.setAttribute("aria-expanded", String(open));
      if (open) { opening(); content.querySelector("button, select, input")?.focus(); }
      else if (content.contains(document.activeElement)) opener.focus();
    };
    opener.addEventListener("click", () => set(content.hidden));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !content.hidden) { set(false); event.stopPropagation(); } }, true);
    document.addEventListener("pointerdown", (event) => { if (!content.contains(event.target) && !opener.contains(event.target)) set(false); });
    return { set, get open() { return !content.hidden; } };
  }

  return { button, icon, label, swatch, around, nodeLink, title, short, isBackward, isCollection, sort, ranks, firstSuspect, say, copy, popover };
})();
