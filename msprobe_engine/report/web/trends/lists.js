"use strict";
/* The lists beside the map: what is not finite, what rules raised, where two runs go apart, what stands out, what was read and kept. A row leads to its cell. */
const Lists = (() => {
  const KEPT = 200; // as `findings.KEPT`: a list that is full may have left some out
  let box, tabs, pane, chosen = "bad", only = null; // only: alerts of one run, rule and column

  const kinds = () => {
    const b = Trends.book, out = [["bad", b.runs.reduce((n, run) => n + run.nonfiniteCount, 0)]];
    const full = (...found) => found.some((one) => one.length >= KEPT) ? "+" : "";
    const alerts = b.runs.reduce((n, run) => n + run.alertCount, 0);
    if (b.runs.some((run) => run.alerts.length)) out.push(["alerts", alerts]);
    if (b.runs.length > 1) out.push(["apart", b.apart.length, full(b.apart)]);
    out.push(["out", b.runs.reduce((n, run) => n + run.standOut.length, 0), full(...b.runs.map((run) => run.standOut))], ["about", b.runs.reduce((n, run) => n + run.problemCount, 0)]);
    return out;
  };
  function mount(parent) {
    box = parent;
    tabs = Kit.make("div", box, null, "t-tabs"); tabs.setAttribute("role", "tablist"); tabs.dataset.tLabel = "trends.lists"; tabs.setAttribute("aria-label", Kit.t("trends.lists"));
    pane = Kit.make("div", box, null, "t-pane"); pane.setAttribute("role", "tabpanel"); pane.id = "t-pane";
    if (!kinds()[0][1]) chosen = Trends.book.runs.length > 1 && Trends.book.apart.length ? "apart" : kinds().find(([, n]) => n)?.[0] || "about";
    draw(); Kit.on("language", draw); Trends.on("pick", mark); Trends.on("change", mark);
  }
  function draw() {
    tabs.replaceChildren(); pane.replaceChildren();
    for (const [kind, n, more] of kinds()) {
      const tab = Kit.make("button", tabs, null, (kind === "bad" || kind === "alerts") && n ? "t-tab bad" : "t-tab");
      tab.setAttribute("role", "tab"); tab.setAttribute("aria-selected", String(kind === chosen)); tab.setAttribute("aria-controls", "t-pane"); tab.tabIndex = kind === chosen ? 0 : -1; tab.id = "t-tab-" + kind;
      Kit.word(Kit.make("span", tab), "trends.list_" + kind); if (kind !== "about" || n) Kit.make("b", tab, Kit.count(n) + (more || ""));
      tab.onclick = () => { chosen = kind; only = null; draw(); document.getElementById("t-tab-" + kind).focus(); };
      tab.onkeydown = (e) => {
        const all = kinds().map(([k]) => k), by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (by) { e.preventDefault(); chosen = all[(all.indexOf(chosen) + by + all.length) % all.length]; draw(); document.getElementById("t-tab-" + chosen).focus(); }
      };
    }
    pane.setAttribute("aria-labelledby", "t-tab-" + chosen);
    ({ bad, alerts, apart, out, about })[chosen]();
    mark();
  }
  const note = (key, ...args) => Kit.make("p", pane, Kit.t(key, ...args), "soft");
  const limit = () => Trends.book.limit < 1e-3 ? Trends.book.limit.toExponential(0) : Trends.book.limit;
  const stepName = (step) => Trends.stepText(Trends.columnOf(step));
  function item(list, sign, tone, target, lines, go, key) {
    const li = Kit.make("li", list), button = Kit.make("button", li, null, "t-item");
    Kit.make("i", button, sign, tone);
    const words = Kit.make("span", button), name = Kit.make("span", words, null, "name");
    const shown = Kit.name(target, 300); name.textContent = shown; name.title = shown;
    for (const line of lines) Kit.make("small", words, line);
    button.onclick = () => go(); button.dataset.key = key;
  }
  const go = (run, metric, statistic, target, step, rank) => {
    const S = Trends.state, change = { rows: "tensor", metric, statistic: Math.max(0, statistic), map: "ts", third: "max", target, column: Trends.columnOf(step) };
    if (rank !== null) change.rank = Trends.groupOf(rank);
    if (run !== null && Trends.book.runs.length > 1 && !(S.run === "both" || S.run === String(run))) change.run = String(run);
    if (run === null && S.run !== "difference" && S.run !== "relative") change.run = "both";
    const name = Trends.book.metrics[metric].targets[target].toLowerCase();
    if (S.filter && !S.filter.toLowerCase().split(/\s+/).every((w) => w[0] === "-" ? !name.includes(w.slice(1)) : name.includes(w))) change.filter = "";
    if (change.column < S.from || change.column > S.to) Object.assign(change, { from: 0, to: Trends.fine() - 1 });
    if (S.badOnly && run === null) change.badOnly = false;
    Object.assign(S, change); Trends.tell("filter"); Trends.tell("change");
  };
  function bad() {
    const b = Trends.book;
    if (!b.runs.some((run) => run.nonfiniteCount)) { note("trends.none_bad"); return; }
    b.runs.forEach((run, r) => {
      if (!run.nonfiniteCount) { if (b.runs.length > 1) { Kit.make("h3", pane, Trends.runWord(r) + " · " + Kit.name(run.name)); note("trends.none_bad"); } return; }
      if (b.runs.length > 1) Kit.make("h3", pane, Trends.runWord(r) + " · " + Kit.name(run.name));
      if (run.nonfiniteCount > run.nonfinite.length) note("trends.first_of", run.nonfinite.length, Kit.count(run.nonfiniteCount));
      const list = Kit.make("ol", pane, null, "t-list");
      for (const [step, rank, ranks, m, target, kind, statistics, last, steps] of run.nonfinite) {
        const metric = b.metrics[m], where = Kit.t("trends.step_n", step) + (b.plan.rankCount > 1 ? " · " + Kit.t("trends.rank_n", ranks.replace(/,/g, ", ").replace(/-/g, "–")) : "");
        item(list, kind === "NaN" ? "×" : "▲", "nan", metric.targets[target], [kind + " · " + where, Trends.named(metric.name) + (steps > 1 ? " · " + Kit.t("trends.n_steps_to", Kit.count(steps), last) : "")],
          () => go(r, m, statistics.length ? statistics[0] : 0, target, step, rank), `${m}/${target}`);
      }
    });
  }
  /* Where the tensor of an alert is: the metric of its family, else any that has it; -1 where the page has no such row. */
  function place(alert) {
    const of = (metric) => metric.name === alert.kind || metric.name.startsWith(alert.kind + ","), all = Trends.book.metrics, has = (metric) => metric.targets.includes(alert.name);
    const own = all.findIndex((metric) => of(metric) && has(metric)), metric = own >= 0 ? own : all.findIndex(has);
    return [metric, metric >= 0 ? all[metric].targets.indexOf(alert.name) : -1];
  }
  /* The alerts of one mark of the course. */
  function showAlerts(run, rule, column) {
    chosen = "alerts"; only = { run, rule, column }; draw();
    const first = pane.querySelector(".t-item");
    Trends.set({ column }, "pick");
    if (first) { first.scrollIntoView({ block: "nearest" }); first.focus(); }
  }
  function alerts() {
    const b = Trends.book, step = (alert, r) => alert.step + (r ? b.shift : 0);
    if (only) {
      if (only.column === null) Kit.make("p", pane, Kit.name(only.rule), "soft"); else note("trends.alerts_of", Kit.name(only.rule), Trends.stepText(only.column));
      Kit.word(Kit.make("button", pane, null, "t-all"), "trends.alerts_all").onclick = () => { only = null; draw(); };
    }
    b.runs.forEach((run, r) => {
      const shown = run.alerts.filter((alert) => !only || (only.run === r && only.rule === alert.rule && (only.column === null || Trends.columnOf(step(alert, r)) === only.column)));
      if (!run.alerts.length || (only && only.run !== r)) return;
      if (b.runs.length > 1) Kit.make("h3", pane, Trends.runWord(r) + " · " + Kit.name(run.name));
      const facts = Kit.make("dl", pane, null, "t-facts named"), list = Kit.make("ol", pane, null, "t-list");
      for (const rule of new Set(run.lanes.map((lane) => lane.rule))) { // a rule leads to its alerts alone
        if (only && only.rule !== rule) continue;
        const n = run.lanes.filter((lane) => lane.rule === rule).flatMap((lane) => lane.marks).reduce((sum, [, more]) => sum + more, 0), one = run.meanings.find((meaning) => meaning.rule === rule);
        Kit.make("button", Kit.make("dt", facts), Kit.name(rule) + " (" + Kit.count(n) + ")", "t-rule").onclick = () => { only = { run: r, rule, column: null }; draw(); };
        Kit.make("dd", facts, Kit.name(one ? [one.meaning, one.next].map(Kit.said).filter(Boolean).map((text) => text.replace(/[.。]$/, "")).join("; ") : "", 500));
      }
      for (const alert of shown) {
        const [metric, target] = place(alert), where = Kit.t("trends.step_n", alert.step) + " · " + Kit.t("trends.rank_n", alert.rank);
        item(list, "!", alert.severity === "critical" ? "nan" : "out", alert.name || alert.rule, [Kit.name(alert.rule) + " · " + where, Kit.name(Kit.said(alert.message), 500)],
          () => { if (target >= 0) go(r, metric, 0, target, step(alert, r), alert.rank); else Trends.set({ column: Trends.columnOf(step(alert, r)) }); }, `${metric}/${target}`);
      }
      if (run.alertsLeftOut) note("trends.alerts_left_out", Kit.count(run.alertsLeftOut));
    });
  }
  function outliers(found, run) {
    const b = Trends.book, list = Kit.make("ol", pane, null, "t-list");
    for (const [what, step, m, s, target, factor, rank] of found) {
      const metric = b.metrics[m], text = what === "runs" ? (factor > 2 ? Kit.t("trends.one_finite") : Kit.t("trends.what_runs", Kit.number(+factor.toPrecision(2)))) : Kit.t("trends.what_" + what, Kit.number(+factor.toPrecision(3)), rank < 0 ? "" : Trends.rankText(Trends.groupOf(rank)));
      item(list, { jump: "↑", fall: "↓", ranks: "↕", rank: "↑", rank_low: "↓", runs: "≠" }[what], what === "runs" ? "apart" : "out", metric.targets[target], [Kit.t("trends.step_n", stepName(step)) + " · " + text, Trends.named(metric.name) + ": " + Trends.named(metric.statistics[s])], () => go(run, m, s, target, step, rank < 0 ? null : rank), `${m}/${target}`);
    }
  }
  function apart() {
    if (!Trends.book.apart.length) { note(Trends.book.compared ? "trends.none_apart" : "trends.none_common", limit()); return; }
    note("trends.about_apart", limit()); outliers(Trends.book.apart, null);
  }
  function out() {
    const b = Trends.book;
    if (!b.runs.some((run) => run.standOut.length)) { note("trends.none_out"); return; }
    note("trends.about_out");
    b.runs.forEach((run, r) => { if (!run.standOut.length) return; if (b.runs.length > 1) Kit.make("h3", pane, Trends.runWord(r) + " · " + Kit.name(run.name)); outliers(run.standOut, r); });
  }
  function about() {
    const b = Trends.book, p = b.plan;
    b.runs.forEach((run, r) => {
      Kit.make("h3", pane, (b.runs.length > 1 ? Trends.runWord(r) + " · " : "") + Kit.name(run.name));
      const list = Kit.make("dl", pane, null, "t-facts"), fact = (key, value) => { Kit.make("dt", list, Kit.t(key)); Kit.make("dd", list, value); };
      fact("trends.fact_path", Kit.name(run.path)); fact("trends.fact_read", run.kinds.join(", ") + ", " + Kit.t("trends.n_rows", Kit.count(run.rows)));
      fact("trends.ranks", Kit.count(run.ranks.length)); fact("trends.steps", Kit.t("trends.steps_range", Kit.count(run.steps[0]), run.steps[1], run.steps[2]));
      if (r && b.shift) fact("trends.fact_shift", b.shift);
      const said = run.facts;
      if (said.started) fact("trends.fact_started", Kit.name(said.started, 60));
      if (said.seconds) fact("trends.fact_seconds", duration(said.seconds));
      if (said.hosts.length) fact("trends.fact_hosts", Kit.name(said.hosts.join(", "), 2000) + (said.hostCount > said.hosts.length ? " " + Kit.t("trends.and_hosts", said.hostCount - said.hosts.length) : ""));
      if (said.world) fact("trends.fact_world", Kit.count(said.world));
      if (said.version) fact("trends.fact_version", Kit.name(said.version, 60));
      if (!said.settings.length) return;
      const more = Kit.make("details", pane); Kit.word(Kit.make("summary", more), "trends.settings");
      const all = Kit.make("dl", more, null, "t-facts named");
      for (const [key, value] of said.settings) { Kit.make("dt", all, Kit.name(key, 100)); Kit.make("dd", all, Kit.name(value)); }
    });
    Kit.make("h3", pane, Kit.t("trends.kept"));
    const every = p.fine[0].length === p.steps && p.ranks[0].length === p.rankCount && p.factor === 1;
    note(every ? "trends.kept_all" : "trends.kept_some", Kit.count(p.steps), Kit.count(p.fine[0].length), Kit.count(Math.ceil(p.fine[0].length / p.factor)), Kit.count(p.rankCount), Kit.count(p.ranks[0].length));
    if (!every) note("trends.kept_how", Kit.count(b.numbers), Kit.count(b.wanted));
    b.runs.forEach((run) => {
      if (!run.problemCount) return;
      Kit.make("h3", pane, Kit.t("trends.not_read", Kit.count(run.problemCount)));
      const list = Kit.make("ul", pane, null, "t-problems");
      for (const [what, n] of run.problems) Kit.make("li", list, Kit.name(Kit.said(what), 1000) + (n > 1 ? " (" + Kit.count(n) + ")" : ""));
    });
  }
  /* In its two largest units. */
  function duration(seconds) {
    const sizes = [86400, 3600, 60, 1], unit = (k) => " " + Kit.t("trends.unit_" + ["d", "h", "min", "s"][k]), i = sizes.findIndex((size) => seconds >= size);
    if (i < 0 || i === 3) return Kit.number(+seconds.toPrecision(3)) + unit(3);
    const whole = Math.floor(seconds / sizes[i]), rest = Math.floor((seconds - whole * sizes[i]) / sizes[i + 1]);
    return whole + unit(i) + (rest ? " " + rest + unit(i + 1) : "");
  }
  function mark() {
    const tensors = Trends.rowsOf(Trends.state.metric) === "tensor", key = Trends.state.metric + "/" + Trends.state.target;
    for (const node of pane.querySelectorAll(".t-item")) if (tensors && node.dataset.key === key) node.setAttribute("aria-current", "true"); else node.removeAttribute("aria-current");
  }
  return { mount, go, showAlerts, duration };
})();
