"use strict";
/* The lines through the chosen cell: along the steps (a line per rank, of many ranks their extremes), along the ranks, along the layers.
  How they are drawn is in plot.js. */
const Lines = (() => {
  const S = Trends.state;
  let box, canvas, heading, legend, buttons, tableBox, drawn = null, ask = 0, geometry = null, at = -1, scaleKind = "auto", asTable = false, scaleButton, tableButton;

  function mount(parent) {
    const bar = Kit.make("div", parent, null, "t-linebar");
    heading = Kit.make("h2", bar, "");
    const set = Kit.make("span", bar, null, "t-set"); set.setAttribute("role", "group"); set.dataset.tLabel = "trends.along"; set.setAttribute("aria-label", Kit.t("trends.along"));
    buttons = ["step", "rank", "layer"].map((along) => {
      const b = Kit.word(Kit.make("button", set), "trends.along_" + along);
      b.onclick = () => Trends.set({ along }, "pick"); b.dataset.along = along;
      return b;
    });
    scaleButton = Kit.make("button", bar); scaleButton.onclick = () => { scaleKind = { auto: "log", log: "linear", linear: "auto" }[scaleKind]; draw(); };
    tableButton = Kit.word(Kit.make("button", bar), "trends.table"); tableButton.onclick = () => { asTable = !asTable; draw(); };
    const csv = Kit.word(Kit.make("button", bar), "trends.csv"); csv.onclick = save;
    legend = Kit.make("div", parent, null, "legend t-lines-legend");
    box = Kit.make("div", parent, null, "t-chart"); canvas = Kit.make("canvas", box); canvas.setAttribute("role", "img");
    tableBox = Kit.make("div", parent, null, "t-table"); tableBox.hidden = true;
    new ResizeObserver(() => draw()).observe(box);
    box.addEventListener("pointermove", move); box.addEventListener("pointerleave", () => { at = -1; Kit.hush(); draw(); });
    box.addEventListener("click", () => { if (drawn && at >= 0) choose(at); });
    Trends.on("pick", refresh); Trends.on("change", refresh); Kit.on("theme", draw); Kit.on("language", refresh);
  }
  function choose(i) {
    if (S.along === "step") Trends.set({ column: drawn.columns[i] }, "pick"); else if (S.along === "rank") Trends.set({ rank: i }, "pick"); else Trends.set({ target: drawn.ids[i] }, "pick");
  }
  const runName = (run) => Trends.book.runs.length > 1 ? Trends.runWord(run) : "";

  async function refresh() {
    const mine = ++ask, b = Trends.book, f = b.plan.factor, R = Trends.ranks(), runs = S.run === "0" || S.run === "1" || b.runs.length < 2 ? [S.run === "1" ? 1 : 0] : [0, 1];
    const lines = [];
    const columns = [];
    let x, ids = [];
    try {
      const kC = Math.floor(S.column / f), target = Kit.name(Trends.metric().targets[S.target] ?? "", 300);
      if (S.along === "step") {
        for (let c = S.from; c <= S.to; c++) columns.push(c);
        lines.push(...await Plot.alongSteps(runs, S.metric, S.statistic, S.target, columns));
        x = columns.map((c) => Trends.stepText(c));
      } else if (S.along === "rank") {
        for (const run of runs) { const all = await Trends.cube(run); if (all) lines.push({ run, label: "", dots: true, plane: Trends.side(), ...Plot.take(all, Array.from({ length: R }, (_, r) => (S.target * R + r) * all.C + kC)) }); }
        x = Array.from({ length: R }, (_, r) => Trends.rankText(r));
      } else {
        ids = [...(await Trends.shownTargets()).rows];
        const at = Trends.rankAt();
        for (const run of runs) {
          const from = at === null ? await Trends.overview(run) : await Trends.cube(run);
          if (from) lines.push({ run, label: "", dots: ids.length < 120, plane: Trends.side(), ...Plot.take(from, ids.map((t) => at === null ? t * from.C + S.column : (t * R + at) * from.C + kC)) });
        }
        x = ids.map((t) => Kit.name(Trends.metric().targets[t], 300));
      }
      if (mine !== ask) return;
      const rank = R > 1 ? Kit.t("trends.rank_n", Trends.rankText(S.rank)) : "", step = Kit.t("trends.step_n", f > 1 && S.along !== "step" && !(S.along === "layer" && Trends.rankAt() === null) ? Trends.coarseText(kC) : Trends.stepText(S.column));
      heading.textContent = S.along === "step" ? target : S.along === "rank" ? target + " · " + step : step + (Trends.rankAt() === null ? "" : " · " + rank);
      heading.title = heading.textContent;
    } catch (error) { Kit.fault(Kit.t("trends.failed", error.message)); return; }
    drawn = { lines: compared(lines), x, columns, ids };
    box.dataset.ready = String(mine);
    draw();
  }
  /* Lines of both runs as lines of their difference. */
  function compared(lines) {
    if (S.run !== "difference" && S.run !== "relative") return lines;
    const out = [];
    for (const a of lines.filter((one) => one.run === 0)) {
      const b = lines.find((one) => one.run === 1 && one.rank === a.rank && one.label === a.label && Boolean(one.band) === Boolean(a.band));
      if (!b) continue;
      const n = a.high.length, line = { ...a, run: -1, band: false, high: new Float64Array(n).fill(NaN), kind: new Uint8Array(n) }, plane = Trends.side();
      for (let i = 0; i < n; i++) {
        line.kind[i] = Math.max(a.kind[i], b.kind[i]) > Trends.MISSING ? Math.max(a.kind[i], b.kind[i]) : a.kind[i] || b.kind[i];
        const p = a[plane][i], q = b[plane][i];
        if (!line.kind[i]) line.high[i] = S.run === "difference" ? p - q : p === q ? 0 : (p - q) / Math.max(Math.abs(p), Math.abs(q));
      }
      line.low = line.high; out.push(line);
    }
    return out;
  }
  // ---- drawing ----
  function draw() {
    if (!drawn) return;
    for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.along === S.along));
    Kit.word(scaleButton, "trends.axis_" + scaleKind); tableButton.setAttribute("aria-pressed", String(asTable));
    box.hidden = asTable; tableBox.hidden = !asTable;
    legends();
    if (asTable) { fill(); return; }
    if (!box.clientWidth || !box.clientHeight) return;
    const made = Kit.canvas(box, box.clientHeight, canvas), pen = made.pen, g = geometry = { left: 64, top: 16, width: made.width - 64 - 14, height: made.height - 16 - 24, n: drawn.x.length, X: null };
    pen.clearRect(0, 0, made.width, made.height);
    const lines = drawn.lines, scale = Plot.scale(lines, scaleKind), X = (i) => g.left + (g.n > 1 ? i / (g.n - 1) : 0.5) * g.width, Y = (v) => g.top + g.height - (scale.at(v) - scale.low) / (scale.high - scale.low) * g.height;
    g.X = X;
    pen.font = "11px " + Kit.colour("font"); pen.textBaseline = "middle"; pen.lineWidth = 1;
    if (scale) for (const [v, text] of Plot.ticks(scale)) {
      const y = g.top + g.height - (v - scale.low) / (scale.high - scale.low) * g.height;
      pen.strokeStyle = Kit.colour("line"); pen.beginPath(); pen.moveTo(g.left, Math.round(y) + 0.5); pen.lineTo(g.left + g.width, Math.round(y) + 0.5); pen.stroke();
      pen.fillStyle = Kit.colour("soft"); pen.textAlign = "right"; pen.fillText(text, g.left - 8, y);
    }
    pen.strokeStyle = Kit.colour("strong"); pen.beginPath(); pen.moveTo(g.left, g.top + g.height + 0.5); pen.lineTo(g.left + g.width, g.top + g.height + 0.5); pen.stroke();
    pen.fillStyle = Kit.colour("soft"); pen.textBaseline = "top"; pen.textAlign = "center";
    let next = 0;
    const many = S.along === "layer" ? 4 : Math.max(2, Math.floor(g.width / 80)), each = (S.along === "layer" ? (n) => n : Heat.nice)(Math.max(1, Math.ceil(g.n / many)));
    for (let i = 0; i < g.n; i += each) {
      const whole = S.along === "layer" ? (drawn.x[i].length > 28 ? "…" + drawn.x[i].slice(-27) : drawn.x[i]) : drawn.x[i].split("–")[0], half = pen.measureText(whole).width / 2, x = Math.max(g.left + half - 40, Math.min(X(i), g.left + g.width - half + 10));
      if (x - half < next) continue;
      pen.fillText(whole, x, g.top + g.height + 7); next = x + half + 12;
    }
    if (!lines.length || (!scale && !lines.some((one) => one.kind.some((k) => k > 1)))) { pen.textAlign = "center"; pen.fillText(Kit.t("trends.no_numbers"), g.left + g.width / 2, g.top + g.height / 2); label(); return; }
    const now = selected();
    if (now >= 0) { pen.strokeStyle = Kit.colour("accent"); pen.globalAlpha = 0.55; pen.setLineDash([3, 3]); pen.beginPath(); pen.moveTo(X(now), g.top - 6); pen.lineTo(X(now), g.top + g.height); pen.stroke(); pen.setLineDash([]); pen.globalAlpha = 1; }
    if (at >= 0) { pen.strokeStyle = Kit.colour("soft"); pen.beginPath(); pen.moveTo(X(at), g.top); pen.lineTo(X(at), g.top + g.height); pen.stroke(); }
    pen.save(); pen.beginPath(); pen.rect(g.left - 4, 0, g.width + 8, made.height); pen.clip();
    for (const one of [...lines].sort((p, q) => Number(p.rank === S.rank) - Number(q.rank === S.rank))) { if (scale) Plot.line(pen, one, lines, X, Y); }
    for (const one of lines) Plot.marks(pen, one, X, g);
    pen.restore();
    label();
  }
  const selected = () => !drawn ? -1 : S.along === "step" ? (S.column >= S.from && S.column <= S.to ? S.column - S.from : -1) : S.along === "rank" ? S.rank : drawn.ids.indexOf(S.target);
  function label() { canvas.setAttribute("aria-label", Kit.t("trends.chart_label", heading.textContent, drawn.lines.length)); }
  function legends() {
    legend.replaceChildren();
    if (drawn.lines.length < 2 && !(drawn.lines[0] || {}).band) return;
    const seen = new Set();
    for (const one of drawn.lines) {
      const text = [one.run >= 0 && Trends.book.runs.length > 1 ? runName(one.run) : "", one.label].filter(Boolean).join(" · ");
      if (seen.has(text)) continue; seen.add(text);
      const chip = Kit.make(one.rank === undefined ? "span" : "button", legend, null, "t-line"), mark = Kit.make("i", chip, null, one.run === 1 ? "dashed" : one.band ? "band" : "");
      mark.style.setProperty("--c", Plot.colourOf(one, drawn.lines)); chip.append(text);
      if (one.rank !== undefined) { chip.onclick = () => Trends.set({ rank: one.rank }, "pick"); chip.setAttribute("aria-pressed", String(one.rank === S.rank)); }
    }
  }
  function move(event) {
    if (!geometry || !drawn || !drawn.x.length) return;
    const r = box.getBoundingClientRect(), x = event.clientX - r.left, g = geometry;
    const i = g.n > 1 ? Math.round((x - g.left) / g.width * (g.n - 1)) : 0;
    if (x < g.left - 8 || i < 0 || i >= g.n) { Kit.hush(); return; }
    if (i !== at) { at = i; draw(); }
    Kit.tip(event, [S.along === "step" ? Kit.t("trends.step_n", drawn.x[i]) : S.along === "rank" ? Kit.t("trends.rank_n", drawn.x[i]) : drawn.x[i], ...drawn.lines.map((one) => ([one.run >= 0 ? runName(one.run) : "", one.label].filter(Boolean).join(" ") + " ").trimStart() + valueText(one, i))].join("\n"));
  }
  function valueText(one, i) {
    if (one.kind[i] === Trends.MISSING) return Kit.t("trends.missing");
    const h = one.high[i], l = one.low[i];
    return Object.is(h, l) || h === l ? Kit.number(h) : Kit.number(l) + " … " + Kit.number(h);
  }
  function cells() {
    const rows = [];
    drawn.x.forEach((x, i) => { for (const one of drawn.lines) if (one.kind[i] !== Trends.MISSING) rows.push([/^\d+$/.test(x) ? Number(x) : x, [one.run >= 0 && Trends.book.runs.length > 1 ? runName(one.run) : "", one.label].filter(Boolean).join(" · "), one.low[i], one.high[i]]); });
    return rows;
  }
  function fill() {
    tableBox.replaceChildren();
    const first = { step: "trends.step", rank: "trends.rank", layer: "trends.layer" }[S.along], same = drawn.lines.every((one) => !Plot.differs(one));
    const columns = [{ key: first, kind: S.along === "layer" ? "name" : "number", show: (v) => String(v) }, { key: "trends.line", kind: "text" }, ...(same ? [] : [{ key: "trends.smallest", kind: "number" }]), { key: same ? "trends.value" : "trends.largest", kind: "number" }];
    Kit.table(tableBox, { columns, rows: cells().map(([x, name, l, h]) => same ? [x, name, h] : [x, name, l, h]), label: heading.textContent, tone: (row) => Number.isFinite(row[row.length - 1]) ? "" : "bad", page: 100 });
  }
  function save() {
    const quote = (v) => { const text = String(v); return typeof v === "number" ? text : '"' + (/^[=+\-@\t\r\n'＝＋－＠]/.test(text) ? "'" : "") + text.replace(/"/g, '""') + '"'; };
    const head = [S.along, "line", "smallest", "largest"].join(","), body = cells().map((row) => row.map(quote).join(","));
    Kit.save("trends.csv", [head, ...body].join("\r\n") + "\r\n", "text/csv");
  }
  return { mount, refresh, valueText };
})();
