"use strict";
/* The front-end kit: what every page shares. No framework; names of a run are only ever set as text.

  Kit.t(key, ...args)          fixed words in the reader's language; keys are "section.name"
  Kit.said(text)               a sentence about the run, text or [English, Chinese], in the reader's language
  Kit.texts(section, words)    adds words: {name: [English, Chinese]}
  Kit.language, Kit.theme      "en" | "zh", "light" | "dark" (what is shown now)
  Kit.on(event, f)             "language", "theme", "resize"
  Kit.make(tag, parent, text, class)
  Kit.word(node, key, ...args) sets fixed words that follow the language
  Kit.name(text), Kit.number(value), Kit.count(value), Kit.value(cell)
  Kit.data(id), Kit.json(id), Kit.drop(id)    islands: Uint8Array, parsed JSON; inflated when asked for
  Kit.scale(units)             {level, colour, ink, label} of a difference in multiples of round-off; Kit.scale.legend()
  Kit.shade(t), Kit.series(i), Kit.colour(name)   colours for canvases, of the theme shown
  Kit.canvas(parent, height)   {node, pen, width, height} in CSS pixels, sharp on every screen
  Kit.table(parent, options)   sorted, searched, paged table
  Kit.tip(event, text), Kit.hush()
  Kit.save(name, text, type), Kit.copy(text), Kit.fault(text)
*/
const Kit = (() => {
  const root = document.documentElement, heard = {}, words = {};
  const keep = (name, value) => { try { value === null ? localStorage.removeItem(name) : localStorage.setItem(name, value); } catch { /* not allowed: the choice lasts as long as the page */ } };
  const kept = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const on = (event, f) => { (heard[event] ||= []).push(f); };
  const tell = (event) => { for (const f of heard[event] || []) f(); };

  // ---- language ----
  const loaded = document.getElementById("kit-texts");
  if (loaded) Object.assign(words, JSON.parse(loaded.textContent));
  const own = () => (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
  let language = kept("msprobe-language") || own();
  if (language !== "zh") language = "en";
  const texts = (section, more) => { words[section] = { ...words[section], ...more }; };
  function t(key, ...args) {
    const at = key.indexOf("."), found = (words[key.slice(0, at)] || {})[key.slice(at + 1)];
    const text = found === undefined ? key : found[language === "zh" ? 1 : 0];
    return args.length ? text.replace(/\{(\d)\}/g, (_, i) => String(args[i] ?? "")) : text;
  }
  const said = (text) => Array.isArray(text) ? text[language === "zh" ? 1 : 0] : String(text ?? "");
  /** @param {ParentNode} below @param {string} selector @returns {NodeListOf<HTMLElement>} of this page, which has only html */
  const within = (below, selector) => below.querySelectorAll(selector);
  /** @param {ParentNode} below */
  function apply(below = document) {
    for (const node of within(below, "[data-t]")) {
      const args = [];
      while (node.hasAttribute("data-t" + args.length)) args.push(node.getAttribute("data-t" + args.length));
      node.textContent = t(node.dataset.t, ...args);
    }
    for (const node of within(below, "[data-zh]")) {
      node.dataset.en ??= node.textContent;
      node.textContent = language === "zh" ? node.dataset.zh : node.dataset.en;
    }
    for (const node of within(below, "[data-t-label]")) node.setAttribute("aria-label", t(node.dataset.tLabel));
    for (const node of within(below, "[data-t-hint]")) node.setAttribute("placeholder", t(node.dataset.tHint));
  }
  function word(node, key, ...args) {
    node.dataset.t = key;
    args.forEach((one, i) => node.setAttribute("data-t" + i, String(one)));
    node.textContent = t(key, ...args);
    return node;
  }
  /* Names of columns for rows that stand as lists in narrow windows. */
  const narrow = matchMedia("(max-width: 40rem)");
  function label(below = document) {
    if (!narrow.matches) return;
    for (const grid of /** @type {NodeListOf<HTMLTableElement>} */ (below.querySelectorAll("table.stack"))) {
      const names = [...grid.querySelectorAll("thead tr > *")].map((one) => one.textContent);
      for (const row of grid.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.label = names[i] || ""; });
    }
  }
  narrow.addEventListener("change", () => label());
  function setLanguage(value) {
    language = value; root.lang = value === "zh" ? "zh-Hans" : "en";
    apply(); label(); reach(); tell("language");
  }

  // ---- theme ----
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = kept("msprobe-theme");
  if (chosen !== "light" && chosen !== "dark") chosen = null;
  const paper = matchMedia("print");
  paper.addEventListener("change", () => { colours = {}; tell("theme"); }); // pictures are printed in light colours
  const theme = () => paper.matches ? "light" : chosen || (dark.matches ? "dark" : "light");
  let colours = {};
  function setTheme(value) {
    chosen = value; colours = {};
    if (value) root.dataset.theme = value; else delete root.dataset.theme;
    tell("theme");
  }
  dark.addEventListener("change", () => { if (!chosen) setTheme(null); });
  if (chosen) root.dataset.theme = chosen;
  root.classList.add("scripted");

  // ---- colours ----
  const colour = (name) => colours[name] ||= getComputedStyle(root).getPropertyValue("--" + name).trim();
  const mix = (stops, at) => {
    const place = Math.min(0.9999, Math.max(0, at)) * (stops.length - 1), i = Math.floor(place), w = place - i;
    return "rgb(" + stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * w)).join(",") + ")";
  };
  // Lightness alone tells the order, so the scales read in any kind of colour vision: pale is low on paper, dark is low on a dark page.
  const LIGHT = [[238, 243, 248], [190, 218, 232], [118, 182, 202], [54, 132, 168], [33, 84, 136], [30, 38, 92]];
  const DARK = [[30, 37, 52], [38, 66, 108], [36, 108, 146], [66, 154, 166], [148, 202, 176], [250, 244, 190]];
  const shade = (at) => mix(theme() === "dark" ? DARK : LIGHT, at);
  const series = (i) => colour("s" + (i % 8 + 1));

  // Differences in multiples of round-off. 1 is what rounding alone explains, so all up to there is one level.
  const LEVELS = [[0, "equal"], [1, "round_off"], [4, "up_to_4"], [32, "up_to_32"], [1024, "up_to_1024"], [1e6, "up_to_1e6"], [Infinity, "beyond"]];
  function scale(units) {
    /** @type {string | number} */ let level = "none";
    let label = "kit.units_none";
    if (units === null || units === undefined || Number.isNaN(units)) { /* nothing to compare */ }
    else if (units === Infinity) { level = "bad"; label = "kit.units_bad"; }
    else { level = LEVELS.findIndex(([most]) => units <= most); label = "kit.units_" + LEVELS[level][1]; }
    return { level, colour: colour("u" + level), ink: colour("u" + level + "-ink"), get label() { return t(label); } };
  }
  scale.bounds = LEVELS.map(([most]) => most); // how many times round-off a level holds at most
  scale.legend = () => [0, 0.5, 3, 10, 100, 1e5, 1e9, Infinity, NaN].map(scale);

  // ---- texts ----
  function make(tag, parent, text, cls) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = String(text);
    if (cls) node.className = cls;
    if (parent) parent.append(node);
    return node;
  }
  const escaped = (c) => "\\u" + (c.codePointAt(0) > 0xffff ? "{" + c.codePointAt(0).toString(16) + "}" : c.codePointAt(0).toString(16).padStart(4, "0"));
  /* A name as it can be read: control characters, and those that turn the direction of writing, are shown as escapes. */
  const name = (text, most = 2000) => {
    const whole = String(text), shown = whole.length > most ? whole.slice(0, most) + "…" : whole;
    return shown.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, escaped);
  };
  function number(v) {
    if (v === null || v === undefined || v === "") return "–";
    if (typeof v !== "number") return name(v);
    if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : v > 0 ? "Inf" : "-Inf";
    const size = Math.abs(v);
    return size >= 1e6 && size < 1e15 && Number.isInteger(v) ? v.toLocaleString("en") : size >= 1e5 || (size !== 0 && size < 1e-3) ? v.toExponential(2).replace(/\.?0*e\+?/, "e") : String(+v.toPrecision(5));
  }
  const count = (v) => Number(v).toLocaleString("en");

  // ---- islands ----
  const opened = new Map();
  function island(id) { // the element, once the parser is past its end: a page of many megabytes is still coming in when scripts start
    return new Promise((done, fail) => {
      const look = () => {
        const node = document.getElementById(id), over = document.readyState !== "loading";
        if (node && (over || node.nextSibling)) { done(node); return true; }
        if (over) { fail(new Error("no data " + id + " in this page")); return true; }
        return false;
      };
      if (look()) return;
      const watch = new MutationObserver(() => { if (look()) watch.disconnect(); });
      watch.observe(document.body, { childList: true });
      document.addEventListener("DOMContentLoaded", () => { watch.disconnect(); look(); }, { once: true });
    });
  }
  async function inflate(id) {
    const node = await island(id), text = atob(node.textContent), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const data = (id) => { if (!opened.has(id)) opened.set(id, inflate(id)); return opened.get(id); };
  const json = async (id) => JSON.parse(new TextDecoder().decode(await data(id)));
  const drop = (id) => { opened.delete(id); };

  // ---- canvas ----
  function canvas(parent, height, node = make("canvas", parent)) {
    const box = getComputedStyle(parent), width = Math.max(120, parent.clientWidth - parseFloat(box.paddingLeft) - parseFloat(box.paddingRight));
    const sharp = devicePixelRatio || 1;
    node.width = Math.round(width * sharp); node.height = Math.round(height * sharp);
    node.style.width = width + "px"; node.style.height = height + "px";
    const pen = node.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0); pen.font = "11px " + colour("font");
    return { node, pen, width, height };
  }

  // ---- tip ----
  let balloon = null;
  function tip(event, text) {
    balloon ||= make("div", document.body, null, "tip");
    balloon.textContent = text; balloon.style.display = "block";
    const box = event.target && event.clientX === undefined ? event.target.getBoundingClientRect() : null;
    const x = box ? box.left : event.clientX, y = box ? box.bottom : event.clientY;
    balloon.style.left = Math.max(4, Math.min(x + 14, innerWidth - balloon.offsetWidth - 8)) + "px";
    balloon.style.top = Math.max(4, Math.min(y + 14, innerHeight - balloon.offsetHeight - 8)) + "px";
  }
  const hush = () => { if (balloon) balloon.style.display = "none"; };

  // ---- table ----
  /* The number that a cell stands for ("0.5", "12%", 3), or null. */
  const value = (cell) => {
    if (typeof cell === "number") return cell;
    const text = String(cell ?? "").trim().replace(/%$/, "");
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : null;
  };
  const order = (a, b) => {
    const x = value(a), y = value(b);
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x !== null ? -1 : 1;
    return String(a).localeCompare(String(b));
  };
  /* options: columns [{title, key (a text), kind: "text"|"number"|"name"|"grow" (takes the room that is left), show(cell, row), badge(cell, row): "bad"|"warn"|"good"|""}], rows [[cell]], tone(row) "bad"|"warn"|"good"|"",
     label, search, lines (one line a row, for many columns), page (rows at once), choice (column that is chosen from a list), pick(row): a row can be chosen with mouse and Enter.
     Returns {node, set(rows), rows()}: rows as shown now. */
  function table(parent, options) {
    const { columns, tone = () => "", page = 200, choice = null, pick = null } = options;
    let all = options.rows || [], shown = all, at = 0, by = null, down = false, find = null, wanted = null;
    const node = make("div", parent, null, options.lines ? "kit-table lines" : "kit-table");
    const tools = make("div", node, null, "tools"), place = make("div", node, null, "scroll"), grid = make("table", place, null, options.lines ? "" : "stack");
    if (options.label) { grid.setAttribute("aria-label", options.label); }
    if (options.search) {
      find = make("input", tools); find.type = "search";
      find.dataset.tLabel = find.dataset.tHint = "kit.search"; find.oninput = () => refresh();
    }
    if (choice !== null) {
      wanted = make("select", tools); wanted.dataset.tLabel = "kit.choose"; wanted.onchange = () => refresh();
    }
    const back = word(make("button", tools), "kit.earlier"), forth = word(make("button", tools), "kit.later"), where = make("span", tools, null, "where");
    where.setAttribute("role", "status");
    back.onclick = () => { at = Math.max(0, at - page); draw(); };
    forth.onclick = () => { if (at + page < shown.length) at += page; draw(); };
    const line = make("tr", make("thead", grid)), body = make("tbody", grid);
    const heads = columns.map((column, i) => {
      const th = make("th", line, null, column.kind); th.scope = "col";
      const button = make("button", th, null, "sort");
      if (column.key) word(button, column.key); else button.textContent = name(column.title || "");
      button.onclick = () => { down = by === i && !down; by = i; refresh(); };
      return th;
    });
    function options_() {
      const values = [...new Set(all.map((row) => row[choice]))].sort(order), before = wanted.value;
      wanted.replaceChildren();
      word(make("option", wanted), "kit.all").value = "";
      for (const value of values) { const o = value === "" ? word(make("option", wanted), "kit.blank") : make("option", wanted, name(value)); o.value = "=" + value; }
      wanted.value = before || "";
    }
    const known = new WeakMap(); // of a row, what it is searched by
    const words = (row) => { let text = known.get(row); if (text === undefined) known.set(row, text = row.join("\n").toLowerCase()); return text; };
    function refresh() {
      const text = find ? find.value.toLowerCase() : "", value = wanted ? wanted.value : "";
      shown = all.filter((row) => (!value || "=" + row[choice] === value) && (!text || words(row).includes(text)));
      if (by !== null) { shown = [...shown].sort((a, b) => order(a[by], b[by])); if (down) shown.reverse(); }
      heads.forEach((th, i) => { if (i === by) th.setAttribute("aria-sort", down ? "descending" : "ascending"); else th.removeAttribute("aria-sort"); });
      at = 0; draw();
    }
    function draw() {
      body.replaceChildren(...shown.slice(at, at + page).map((row) => {
        const tr = make("tr", null, null, tone(row) || "");
        columns.forEach((column, i) => {
          const cell = row[i], text = column.show ? column.show(cell, row) : column.kind === "number" ? number(cell) : name(cell ?? "");
          const td = make("td", tr, null, String(text).length <= (column.kind === "name" ? 40 : 24) ? "short " + (column.kind || "") : column.kind);
          const mark = column.badge ? column.badge(cell, row) : "";
          if (mark) make("span", td, text, "badge " + mark); else td.textContent = text;
          if (String(text).length > 60) td.title = name(said(cell), 4000);
        });
        if (pick) {
          tr.tabIndex = 0; tr.classList.add("pick");
          const chosen = () => { for (const one of body.rows) one.setAttribute("aria-selected", String(one === tr)); pick(row); };
          tr.onclick = chosen; tr.onkeydown = (e) => { if (e.key === "Enter") chosen(); };
        }
        return tr;
      }));
      tools.hidden = !find && !wanted && all.length <= page;
      back.hidden = forth.hidden = shown.length <= page;
      back.disabled = at === 0; forth.disabled = at + page >= shown.length;
      if (shown.length) word(where, "kit.rows_shown", count(at + 1), count(Math.min(at + page, shown.length)), count(shown.length)); else word(where, "kit.no_row");
      label(node); reach(node);
    }
    const set = (rows) => { all = rows; if (wanted) options_(); refresh(); };
    set(all); apply(node);
    on("language", draw);
    return { node, set, rows: () => shown };
  }

  // ---- files ----
  function save(file, content, type = "text/plain") {
    const link = make("a"), address = URL.createObjectURL(new Blob([content], { type: type + ";charset=utf-8" }));
    link.href = address; link.download = file; link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }
  async function copy(text) {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* file:// in some browsers: the older way */ }
    const area = make("textarea", document.body, text, "off"); area.select();
    const done = document.execCommand("copy"); area.remove();
    return done;
  }

  /* Says on the page that something does not work; for what a reader has to know, not for a console. */
  function fault(text) {
    const node = make("div", document.getElementById("main") || document.body, text, "fault"); node.setAttribute("role", "alert");
    return node;
  }

  // ---- frame ----
  /* What scrolls inside itself can be reached by keyboard, and only that. */
  function reach(below = document) {
    for (const node of within(below, ".scroll")) {
      if (node.scrollWidth > node.clientWidth || node.scrollHeight > node.clientHeight) {
        node.tabIndex = 0; node.setAttribute("role", "region"); node.dataset.tLabel ||= "kit.scrolls"; node.setAttribute("aria-label", t(node.dataset.tLabel));
      } else { node.removeAttribute("tabindex"); node.removeAttribute("role"); node.removeAttribute("aria-label"); }
    }
  }
  function chooser(parent, key, choices, now, change) {
    const node = make("select", parent); node.autocomplete = "off"; node.dataset.tLabel = key; node.setAttribute("aria-label", t(key));
    for (const [value, text, fixed] of choices) { const option = fixed ? make("option", node, text) : word(make("option", node), text); option.value = value; }
    node.value = now; node.onchange = () => change(node.value);
    return node;
  }
  function start() {
    const place = document.getElementById("kit-switches");
    if (place) {
      chooser(place, "kit.language", [["en", "English", true], ["zh", "中文", true]], language, (value) => { keep("msprobe-language", value); setLanguage(value); });
      chooser(place, "kit.theme", [["", "kit.theme_auto"], ["light", "kit.theme_light"], ["dark", "kit.theme_dark"]], chosen || "", (value) => { keep("msprobe-theme", value || null); setTheme(value || null); });
    }
    setLanguage(language);
    document.addEventListener("DOMContentLoaded", () => { apply(); label(); reach(); });
    let due = 0;
    addEventListener("resize", () => { clearTimeout(due); due = setTimeout(() => { reach(); tell("resize"); }, 120); });
    addEventListener("keydown", (e) => { if (e.key === "Escape") hush(); });
    addEventListener("unhandledrejection", (e) => fault(t("kit.broken", String((e.reason && e.reason.message) || e.reason))));
  }

  return {
    t, said, texts, apply, word, on, make, name, number, count, value, data, json, drop, scale, shade, series, colour, canvas, tip, hush, table, save, copy, fault, reach, start,
    get language() { return language; }, get theme() { return theme(); },
  };
})();
