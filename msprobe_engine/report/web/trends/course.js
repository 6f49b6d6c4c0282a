"use strict";
/* The course of a run, above the map: what it says of itself, alerts at their steps with a lane for every rule, and the loss or another number of the
  steps. Its steps stand over those of the map. A mark leads to its alerts in the list. */
const Course = (() => {
  const S = Trends.state, LANE = 16, HIGH = 84, TOP = 12, BOTTOM = 4, RIGHT = 20;
  let choice, facts, laneBox, laneCanvas, box, canvas, chosen = 0, drawn = null, ask = 0, at = -1;

  const numbers = () => Trends.book.metrics.findIndex((one) => !one.layers);
  const runs = () => Trends.runsShown();
  /* Lanes of the runs that are shown: [{run, rule, severity, marks}]. */
  const lanes = () => runs().flatMap((run) => Trends.book.runs[run].lanes.map((lane) => ({ run, ...lane })));

  function mount(parent) {
    const head = Kit.make("div", parent, null, "t-facts-line");
    facts = Kit.make("p", head, null, "t-said");
    const names = numbers() < 0 ? [] : Trends.book.metrics[numbers()].targets;
    chosen = Math.max(0, names.findIndex((name) => /(^|[^a-z])loss$/i.test(name)));
    if (names.length) {
      choice = Kit.make("select", head); choice.dataset.tLabel = "trends.number"; choice.setAttribute("aria-label", Kit.t("trends.number"));
      names.forEach((name, i) => { Kit.make("option", choice, Kit.name(name, 80)).value = String(i); });
      choice.value = String(chosen); choice.onchange = () => { chosen = Number(choice.value); refresh(); };
    }
    laneBox = Kit.make("div", parent, null, "t-lanes scroll"); laneCanvas = Kit.make("canvas", laneBox); laneCanvas.setAttribute("role", "img");
    box = Kit.make("div", parent, null, "t-course"); canvas = Kit.make("canvas", box); canvas.setAttribute("role", "img");
    box.hidden = !names.length; laneBox.hidden = !Trends.book.runs.some((run) => run.lanes.length);
    if (!box.hidden || !laneBox.hidden) new ResizeObserver(draw).observe(parent);
    laneBox.addEventListener("pointermove", (e) => { const mark = near(e); laneBox.style.cursor = mark ? "pointer" : ""; if (mark) Kit.tip(e, said(mark)); else Kit.hush(); });
    laneBox.addEventListener("pointerleave", Kit.hush);
    laneBox.addEventListener("click", (e) => { const mark = near(e); if (mark) { Kit.hush(); Lists.showAlerts(mark.lane.run, mark.lane.rule, mark.column); } });
    box.addEventListener("pointermove", move); box.addEventListener("pointerleave", () => { at = -1; Kit.hush(); draw(); });
    box.addEventListener("click", () => { if (at >= 0) Trends.set({ column: at }, "pick"); });
    Trends.on("change", refresh); Trends.on("pick", draw); Kit.on("theme", () => { words(); draw(); }); Kit.on("language", () => { words(); draw(); });
    words();
  }
  async function refresh() {
    const mine = ++ask, columns = [];
    for (let c = S.from; c <= S.to; c++) columns.push(c);
    const lines = numbers() < 0 ? [] : await Plot.alongSteps(runs(), numbers(), 0, chosen, columns, true);
    if (mine !== ask) return;
    drawn = { lines, columns }; words(); draw();
    box.dataset.ready = String(mine);
  }
  /* Date, hosts, ranks, steps, time of the steps, alerts; what a run does not say is left out. */
  function words() {
    const b = Trends.book;
    facts.replaceChildren();
    for (const run of runs()) {
      const one = b.runs[run], f = one.facts, line = Kit.make("span", facts);
      if (runs().length > 1) Kit.make("i", line, null, run ? "dashed" : "").style.setProperty("--c", Kit.series(run));
      Kit.make("b", line, (b.runs.length > 1 ? Trends.runWord(run) + " · " : "") + Kit.name(one.name, 60));
      const parts = [
        f.started ? Kit.name(f.started.replace("T", " ").replace(/(:\d\d)[+-]\d{4}$/, "$1"), 40) : "",
        f.hosts.length ? Kit.name(f.hosts[0], 40) + (f.hostCount > 1 ? " " + Kit.t("trends.and_hosts", f.hostCount - 1) : "") : "",
        Kit.t(one.ranks.length > 1 ? "trends.n_ranks" : "trends.one_rank", Kit.count(one.ranks.length)), Kit.t("trends.steps_from_to", one.steps[1], one.steps[2]),
        f.seconds ? Kit.t("trends.in_steps", Lists.duration(f.seconds)) : "",
        one.kinds.every((kind) => kind === "dump") ? "" : Kit.t(one.alertCount === 1 ? "trends.one_alert" : one.alertCount ? "trends.n_alerts" : "trends.no_alert", Kit.count(one.alertCount)),
      ];
      Kit.make("span", line, parts.filter(Boolean).map((part) => " · " + part).join(""));
    }
  }

  // ---- drawing ----
  /* Where the steps are: those of the map, where it has steps; else from its left edge to its right one. */
  function place(width) {
    const left = Heat.left(), n = S.to - S.from + 1, wide = width - left - RIGHT;
    return { left, wide, n, X: (i) => left + (i + 0.5) * wide / n, of: (x) => Math.floor((x - left) / wide * n) };
  }
  function cursor(pen, g, height) {
    if (S.column < S.from || S.column > S.to) return;
    pen.strokeStyle = Kit.colour("accent"); pen.globalAlpha = 0.55; pen.setLineDash([3, 3]); pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(g.X(S.column - S.from), 0); pen.lineTo(g.X(S.column - S.from), height); pen.stroke(); pen.setLineDash([]); pen.globalAlpha = 1;
  }
  function draw() {
    drawLanes();
    if (!drawn || box.hidden || !box.clientWidth) return;
    const { pen, width, height } = Kit.canvas(box, HIGH, canvas), g = place(width), lines = drawn.lines, scale = Plot.scale(lines);
    pen.clearRect(0, 0, width, height);
    const inner = { top: TOP, height: height - TOP - BOTTOM }, Y = (v) => inner.top + inner.height - (scale.at(v) - scale.low) / (scale.high - scale.low) * inner.height;
    pen.font = "11px " + Kit.colour("font"); pen.textBaseline = "middle"; pen.textAlign = "right"; pen.lineWidth = 1;
    let last = Infinity;
    if (scale) for (const [v, text] of Plot.ticks(scale)) {
      const y = Math.round(inner.top + inner.height - (v - scale.low) / (scale.high - scale.low) * inner.height);
      if (last - y < 16) continue;
      last = y; pen.strokeStyle = Kit.colour("line"); pen.beginPath(); pen.moveTo(g.left, y + 0.5); pen.lineTo(g.left + g.wide, y + 0.5); pen.stroke();
      pen.fillStyle = Kit.colour("soft"); pen.fillText(text, g.left - 8, y);
    }
    pen.strokeStyle = Kit.colour("strong"); pen.beginPath(); pen.moveTo(g.left, height - BOTTOM + 0.5); pen.lineTo(g.left + g.wide, height - BOTTOM + 0.5); pen.stroke();
    cursor(pen, g, height);
    if (at >= S.from) { pen.strokeStyle = Kit.colour("soft"); pen.beginPath(); pen.moveTo(g.X(at - S.from), 0); pen.lineTo(g.X(at - S.from), height); pen.stroke(); }
    for (const one of lines) if (scale) Plot.line(pen, one, lines, g.X, Y, false);
    for (const one of lines) Plot.marks(pen, one, g.X, inner);
    canvas.setAttribute("aria-label", Kit.t("trends.chart_label", choice.selectedOptions[0].textContent, lines.length));
  }
  function drawLanes() {
    const rows = lanes();
    if (laneBox.hidden || !laneBox.clientWidth) return;
    const { pen, width, height } = Kit.canvas(laneBox, Math.max(1, rows.length) * LANE, laneCanvas), g = place(width), most = Math.floor((g.left - 12) / 6.8);
    pen.clearRect(0, 0, width, height); pen.font = "11px " + Kit.colour("font"); pen.textBaseline = "middle"; pen.textAlign = "right";
    rows.forEach((lane, r) => {
      const y = r * LANE + LANE / 2, critical = lane.severity === "critical", text = (Trends.book.runs.length > 1 ? Trends.runWord(lane.run) + " · " : "") + Kit.name(lane.rule, 80);
      pen.strokeStyle = Kit.colour("line"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(g.left, y + 0.5); pen.lineTo(g.left + g.wide, y + 0.5); pen.stroke();
      pen.fillStyle = Kit.colour("fg"); pen.fillText(text.length > most ? text.slice(0, Math.max(1, most - 1)) + "…" : text, g.left - 8, y);
      pen.fillStyle = Kit.colour(critical ? "bad" : "warn");
      for (const [column, n] of lane.marks) if (column >= S.from && column <= S.to) { // critical: a square, so that the colour is not needed
        const size = Math.min(6, 3 + Math.log2(n) / 2), x = g.X(column - S.from);
        pen.beginPath(); if (critical) pen.rect(x - size, y - size, 2 * size, 2 * size); else pen.arc(x, y, size, 0, 7); pen.fill();
      }
    });
    cursor(pen, g, height);
    Kit.reach(laneBox.parentElement); // more lanes than have room are scrolled
    laneCanvas.setAttribute("aria-label", Kit.t("trends.lanes_label", rows.length));
  }

  // ---- hands ----
  function near(event) {
    const r = laneCanvas.getBoundingClientRect(), lane = lanes()[Math.floor((event.clientY - r.top) / LANE)], g = place(r.width), x = event.clientX - r.left;
    if (!lane) return null;
    let best = null;
    for (const [column, n] of lane.marks) {
      const far = Math.abs(g.X(column - S.from) - x);
      if (column >= S.from && column <= S.to && far <= 9 && (!best || far < best.far)) best = { lane, column, n, far };
    }
    return best;
  }
  const said = (mark) => Kit.name(mark.lane.rule) + " (" + Kit.name(mark.lane.severity) + ")\n" + Kit.t(mark.n === 1 ? "trends.alert_at" : "trends.alerts_at", Trends.stepText(mark.column), Kit.count(mark.n));
  function move(event) {
    const r = canvas.getBoundingClientRect(), g = place(r.width), i = g.of(event.clientX - r.left);
    if (!drawn || i < 0 || i >= g.n) { at = -1; Kit.hush(); return; }
    if (S.from + i !== at) { at = S.from + i; draw(); }
    Kit.tip(event, [Kit.t("trends.step_n", Trends.stepText(at)), ...drawn.lines.map((one) => [runs().length > 1 ? Trends.runWord(one.run) : "", one.label].filter(Boolean).concat(Lines.valueText(one, i)).join(" "))].join("\n"));
  }
  return { mount };
})();
