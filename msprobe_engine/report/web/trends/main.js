"use strict";
/* The controls of a trends page, its keyboard, and its address: #metric=..&map=.. keeps what is shown. */
(() => {
  const S = Trends.state;
  const controls = {};
  let help = null;

  function select(parent, key, change) {
    const label = Kit.make("label", parent, null, "t-control");
    Kit.word(Kit.make("span", label), key);
    const node = Kit.make("select", label);
    node.onchange = () => change(node.value);
    return node;
  }
  function options(node, choices, now) { // [value, words of the page or null, text]
    node.replaceChildren();
    for (const [value, key, text] of choices) { const o = key ? Kit.word(Kit.make("option", node), key) : Kit.make("option", node, text); o.value = value; }
    node.value = now; node.title = node.selectedOptions[0]?.textContent || ""; // a long name is cut off in the box
  }
  function build(root) {
    const bar = Kit.make("div", root, null, "t-controls");
    controls.metric = select(bar, "trends.metric", (v) => {
      const was = Trends.statistic(), metric = Number(v), same = Trends.book.metrics[metric].statistics.indexOf(was);
      Trends.set({ metric, statistic: Math.max(0, same), target: 0, third: S.map === "rs" && typeof S.third === "number" ? 0 : S.third });
    });
    controls.statistic = select(bar, "trends.statistic", (v) => Trends.set({ statistic: Number(v) }));
    const set = Kit.make("div", bar, null, "t-control"); Kit.word(Kit.make("span", set), "trends.map");
    const group = Kit.make("div", set, null, "t-set"); group.setAttribute("role", "group"); group.dataset.tLabel = "trends.map"; group.setAttribute("aria-label", Kit.t("trends.map"));
    controls.maps = [["ts", "trends.map_ts"], ["rs", "trends.map_rs"], ["tr", "trends.map_tr"]].map(([map, key]) => {
      const b = Kit.word(Kit.make("button", group), key);
      b.onclick = () => Trends.setMap(map); b.dataset.map = map;
      return b;
    });
    controls.third = select(bar, "trends.third_ranks", (v) => Trends.set({ third: /^\d+$/.test(v) ? Number(v) : v === "at" ? { ts: S.rank, rs: S.target, tr: S.column }[S.map] : v }));
    controls.run = select(bar, "trends.run", (v) => Trends.set({ run: v }));
    controls.colour = select(bar, "trends.colour", (v) => Trends.set({ colour: v }));
    const find = Kit.make("label", bar, null, "t-control t-grow"); Kit.word(Kit.make("span", find), "trends.filter");
    controls.filter = Kit.make("input", find); controls.filter.type = "search"; controls.filter.dataset.tHint = "trends.filter_hint"; controls.filter.placeholder = Kit.t("trends.filter_hint"); controls.filter.spellcheck = false;
    let wait = 0;
    controls.filter.oninput = () => { clearTimeout(wait); wait = setTimeout(() => Trends.set({ filter: controls.filter.value }), 120); };
    controls.filter.onkeydown = (e) => { if (e.key === "Escape" || e.key === "Enter") { e.preventDefault(); if (e.key === "Escape" && controls.filter.value) { controls.filter.value = ""; Trends.set({ filter: "" }); } Heat.focus(); } };
    const body = Kit.make("div", root, null, "t-body"), side = Kit.make("aside", body, null, "t-side"), centre = Kit.make("div", body, null, "t-centre");
    Course.mount(Kit.make("div", centre, null, "t-top"));
    const map = Kit.make("div", centre, null, "t-map"), head = Kit.make("div", map, null, "t-head"), sentence = Kit.make("p", head, "", "t-sentence"), tools = Kit.make("div", head, null, "t-tools");
    controls.rows = Kit.make("select", tools); controls.rows.dataset.tLabel = "trends.rows"; controls.rows.setAttribute("aria-label", Kit.t("trends.rows")); controls.rows.onchange = () => Trends.setRows(controls.rows.value);
    controls.bad = Kit.word(Kit.make("button", tools), "trends.only_bad"); controls.bad.onclick = () => Trends.set({ badOnly: !S.badOnly });
    const icon = (text, key, f) => { const b = Kit.make("button", tools, text, "t-icon"); b.dataset.tLabel = key; b.setAttribute("aria-label", Kit.t(key)); b.onclick = f; b.onmouseenter = (e) => Kit.tip(e, Kit.t(key)); b.onmouseleave = Kit.hush; return b; };
    icon("−", "trends.rows_smaller", () => Heat.zoomBy(0.7)); icon("+", "trends.rows_larger", () => Heat.zoomBy(1.4));
    controls.all = Kit.word(Kit.make("button", tools), "trends.all_steps"); controls.all.onclick = () => Trends.set({ from: 0, to: Trends.fine() - 1 });
    icon("?", "trends.help", showHelp);
    side.dataset.tLabel = "trends.lists"; side.setAttribute("aria-label", Kit.t("trends.lists"));
    const grip = Kit.make("div", centre, null, "t-grip"), lines = Kit.make("div", centre, null, "t-lines");
    grip.setAttribute("role", "separator"); grip.setAttribute("aria-orientation", "horizontal"); grip.tabIndex = 0; grip.dataset.tLabel = "trends.grip"; grip.setAttribute("aria-label", Kit.t("trends.grip"));
    const size = (h) => { const now = Math.round(Math.max(110, Math.min(centre.clientHeight - 160, h))); lines.style.flexBasis = now + "px"; grip.setAttribute("aria-valuenow", String(now)); };
    grip.setAttribute("aria-valuenow", "210");
    grip.onpointerdown = (e) => { grip.setPointerCapture(e.pointerId); grip.onpointermove = (m) => size(centre.getBoundingClientRect().bottom - m.clientY); };
    grip.onpointerup = () => { grip.onpointermove = null; };
    grip.onkeydown = (e) => { const by = { ArrowUp: 24, ArrowDown: -24 }[e.key]; if (by) { e.preventDefault(); size(lines.clientHeight + by); } };
    Heat.mount(map, sentence); Lines.mount(lines); Lists.mount(side);
  }
  function sync() {
    const b = Trends.book, m = Trends.metric();
    options(controls.metric, b.metrics.map((one, i) => [String(i), Trends.word(one.name), Kit.name(one.name)]), String(S.metric));
    options(controls.statistic, m.statistics.map((one, i) => [String(i), Trends.word(one), Kit.name(one)]), String(S.statistic));
    for (const button of controls.maps) button.setAttribute("aria-pressed", String(button.dataset.map === S.map));
    const many = b.plan.rankCount > 1;
    controls.maps[1].hidden = controls.maps[2].hidden = !many;
    const over = { ts: "ranks", rs: "layers", tr: "steps" }[S.map];
    Kit.word(controls.third.parentElement.firstChild, "trends.third_" + over);
    controls.third.parentElement.hidden = !many && S.map === "ts" && b.plan.fine[0].length === b.plan.steps;
    const choices = [["max", "trends.third_max"], ["min", "trends.third_min"], ["spread", "trends.third_spread"]];
    if (S.map === "ts") { if (many) for (let r = 0; r < Math.min(2048, Trends.ranks()); r++) choices.push([String(r), null, Kit.t("trends.rank_n", Trends.rankText(r))]); }
    else if (typeof S.third === "number") choices.push([String(S.third), null, S.map === "rs" ? Kit.name(m.targets[S.third], 120) : Kit.t("trends.step_n", Trends.stepText(S.third))]);
    if (S.map === "tr") choices.push(["distance", "trends.third_distance"]);
    if (S.map !== "ts") choices.push(["at", S.map === "rs" ? "trends.third_chosen_layer" : "trends.third_chosen_step"]);
    options(controls.third, choices, String(S.third));
    options(controls.rows, [["tensor", "trends.rows_tensor"], ["layer", "trends.rows_layer"], ["all", "trends.rows_all"]], S.rows);
    controls.rows.hidden = !b.metrics[S.metric].layers;
    controls.run.parentElement.hidden = b.runs.length < 2;
    options(controls.run, [["0", null, (b.runs.length > 1 ? Trends.runWord(0) + " · " : "") + Kit.name(b.runs[0].name, 60)], ...(b.runs.length > 1 ? [["1", null, Trends.runWord(1) + " · " + Kit.name(b.runs[1].name, 60)], ["both", "trends.run_both"], ["difference", "trends.run_difference"], ["relative", "trends.run_relative"]] : [])], S.run);
    options(controls.colour, [["auto", "trends.colour_auto"], ["log", "trends.colour_log"], ["linear", "trends.colour_linear"], ["median", "trends.colour_median"]], S.colour);
    if (document.activeElement !== controls.filter) controls.filter.value = S.filter;
    controls.bad.setAttribute("aria-pressed", String(S.badOnly)); controls.all.hidden = S.from === 0 && S.to === Trends.fine() - 1;
    remember();
  }

  // ---- address ----
  const WORDS = { map: ["ts", "rs", "tr"], run: ["0", "1", "both", "difference", "relative"], colour: ["auto", "log", "linear", "median"], along: ["step", "rank", "layer"], rows: ["tensor", "layer", "all"] };
  let saved = 0;
  function remember() {
    clearTimeout(saved);
    saved = setTimeout(() => {
      const p = new URLSearchParams({ metric: Trends.metric().name, statistic: Trends.statistic(), map: S.map, third: String(S.third), run: S.run, colour: S.colour, target: Trends.metric().targets[S.target] ?? "", rank: String(Trends.book.plan.ranks[0][S.rank]), step: String(Trends.book.plan.fine[0][S.column]), along: S.along, rows: S.rows });
      if (S.filter) p.set("filter", S.filter);
      if (S.from || S.to !== Trends.fine() - 1) p.set("steps", Trends.book.plan.fine[0][S.from] + "-" + Trends.book.plan.fine[1][S.to]);
      try { history.replaceState(null, "", "#" + p); } catch { /* not allowed here: the page works without */ }
    }, 200);
  }
  function recall() {
    const b = Trends.book, p = new URLSearchParams(location.hash.slice(1)), change = {};
    const m = b.metrics.findIndex((one) => one.name === p.get("metric"));
    if (m < 0) return false;
    change.metric = m;
    if (WORDS.rows.includes(p.get("rows"))) S.rows = p.get("rows"); // the names of the rows go by it
    const s = b.metrics[m].statistics.indexOf(p.get("statistic")), t = Trends.targetsOf(m).indexOf(p.get("target"));
    if (s >= 0) change.statistic = s;
    if (t >= 0) change.target = t;
    for (const [key, allowed] of Object.entries(WORDS)) if (allowed.includes(p.get(key)) && (key !== "run" || b.runs.length > 1 || p.get(key) === "0")) change[key] = p.get(key);
    if (b.plan.rankCount < 2) change.map = "ts";
    const third = p.get("third") || "max", most = { ts: Trends.ranks(), rs: Trends.targetsOf(m).length, tr: Trends.fine() }[change.map || "ts"];
    change.third = /^\d+$/.test(third) && Number(third) < most ? Number(third) : ["max", "min", "spread", ...(change.map === "tr" ? ["distance"] : [])].includes(third) ? third : "max";
    if (/^\d+$/.test(p.get("rank") || "")) change.rank = Trends.groupOf(Number(p.get("rank")));
    if (/^-?\d+$/.test(p.get("step") || "")) change.column = Trends.columnOf(Number(p.get("step")));
    const range = /^(-?\d+)-(-?\d+)$/.exec(p.get("steps") || "");
    if (range) { change.from = Trends.columnOf(Number(range[1])); change.to = Math.max(change.from, Trends.columnOf(Number(range[2]))); }
    change.filter = p.get("filter") || "";
    Object.assign(S, change);
    return true;
  }
  /* Where a page opens: at the first number that is not finite, else where two runs go apart, else at the first metric with several targets. */
  function begin() {
    const b = Trends.book, two = b.runs.length > 1;
    S.metric = Math.max(0, b.metrics.findIndex((one) => one.name !== "numbers of the steps"));
    if (two) S.run = "both";
    const firsts = b.runs.map((run, r) => run.nonfinite.length ? [run.nonfinite[0], r] : null).filter(Boolean).sort((x, y) => x[0][0] - y[0][0]);
    const apart = b.apart[0];
    if (firsts.length && !(apart && apart[1] < firsts[0][0][0])) {
      const [[step, rank, , m, target, , statistics]] = firsts[0];
      Object.assign(S, { metric: m, statistic: statistics.length ? statistics[0] : 0, target, rank: Trends.groupOf(rank), column: Trends.columnOf(step) });
    } else if (apart) Object.assign(S, { metric: apart[2], statistic: apart[3], target: apart[4], column: Trends.columnOf(apart[1]), run: "relative" });
    else { const run = b.runs.find((one) => one.standOut.length); if (run) { const [, step, m, s, target] = run.standOut[0]; Object.assign(S, { metric: m, statistic: s, target, column: Trends.columnOf(step) }); } else S.column = Trends.fine() - 1; }
  }

  // ---- keyboard ----
  function showHelp() {
    if (help) { closeHelp(); return; }
    help = Kit.make("dialog", document.body, null, "t-help");
    Kit.make("h2", help, Kit.t("trends.help"));
    const list = Kit.make("dl", help);
    for (const key of ["arrows", "page", "n", "slash", "m", "b", "plus", "drag", "esc", "q"]) { Kit.make("dt", list, Kit.t("trends.key_" + key).split("|")[0]); Kit.make("dd", list, Kit.t("trends.key_" + key).split("|")[1]); }
    const close = Kit.make("button", help, Kit.t("trends.close"), "main"); close.onclick = closeHelp;
    help.onclose = () => { help?.remove(); help = null; };
    help.showModal();
  }
  function closeHelp() { help?.close(); }
  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || help || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const cycle = (list, now) => list[(list.indexOf(now) + 1) % list.length], b = Trends.book;
    if (event.key === "/") { event.preventDefault(); controls.filter.focus(); controls.filter.select(); }
    else if (event.key === "?") showHelp();
    else if (event.key === "n" || event.key === "N") Heat.next(event.key === "n" ? 1 : -1);
    else if (event.key === "m" && b.plan.rankCount > 1) Trends.setMap(cycle(["ts", "rs", "tr"], S.map));
    else if (event.key === "b" && b.runs.length > 1) Trends.set({ run: cycle(["0", "1", "both", "difference", "relative"], S.run) });
    else if (event.key === "+" || event.key === "=") Heat.zoomBy(1.4); else if (event.key === "-") Heat.zoomBy(0.7);
    else if (event.key === "Escape") Trends.set({ from: 0, to: Trends.fine() - 1 });
  }

  async function start() {
    const root = document.getElementById("trends");
    try { await Trends.open(); } catch (error) { Kit.fault(Kit.t("trends.failed", error.message)); return; }
    if (!recall()) begin();
    build(root);
    for (const event of ["change", "filter", "pick"]) Trends.on(event, sync);
    Trends.on("filter", () => { controls.filter.value = S.filter; Heat.refresh(); });
    Kit.on("language", sync); document.addEventListener("keydown", keys);
    addEventListener("hashchange", () => { if (recall()) Trends.tell("change"); });
    Trends.tell("change");
  }
  start();
})();
