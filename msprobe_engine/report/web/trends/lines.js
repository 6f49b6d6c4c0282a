"use strict";
/* The lines through the chosen cell: along the steps (a line per rank, of many ranks their extremes), along the ranks, along the layers.
  NaN and Inf stand at the upper edge of the chart, where they happen; a line is broken there. */
const Lines = (() => {
  const S = Trends.state, FEW = 8, DASH = [5, 4];
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
  const runName = (run) => Trends.book.runs.length > 1 ? "AB"[run] : "";

  /* A line of extremes at given places. */
  function take(from, places) {
    const n = places.length, high = new Float64Array(n).fill(NaN), low = new Float64Array(n).fill(NaN), kind = new Uint8Array(n).fill(Trends.MISSING);
    if (from) for (let i = 0; i < n; i++) {
      const k = places[i]; if (k < 0 || from.missing[k]) continue;
      high[i] = from.high[k]; low[i] = from.low[k];
      kind[i] = Trends.kindOf(high[i], false) || Trends.kindOf(low[i], false);
    }
    return { high, low, kind };
  }
  async function refresh() {
    const mine = ++ask, b = Trends.book, f = b.plan.factor, R = Trends.ranks(), runs = S.run === "0" || S.run === "1" || b.runs.length < 2 ? [S.run === "1" ? 1 : 0] : [0, 1];
    const lines = [];
    const columns = [];
    let x, ids = [];
    try {
      const kC = Math.floor(S.column / f), target = Kit.name(Trends.metric().targets[S.target] ?? "", 300);
      if (S.along === "step") {
        const coarseOnly = f > 1, first = S.from, last = S.to;
        for (let c = first; c <= last; c++) columns.push(c);
        for (const run of runs) {
          const all = await Trends.cube(run);
          if (!all) continue;
          const place = (r) => columns.map((c) => (S.target * R + r) * all.C + Math.floor(c / f)), own = b.runs[run].ranks;
          const has = (r) => own.some((rank) => rank >= b.plan.ranks[0][r] && rank <= b.plan.ranks[1][r]);
          if (R > FEW || coarseOnly) { const o = await Trends.overview(run); lines.push({ run, label: Kit.t("trends.all_ranks"), band: true, ...take(o, columns.map((c) => S.target * o.C + c)) }); }
          for (let r = 0; r < R; r++) if (has(r) && (R <= FEW || r === S.rank)) lines.push({ run, rank: r, label: R > 1 ? Kit.t("trends.rank_n", Trends.rankText(r)) : "", ...take(all, place(r)) });
        }
        x = columns.map((c) => Trends.stepText(c));
      } else if (S.along === "rank") {
        for (const run of runs) { const all = await Trends.cube(run); if (all) lines.push({ run, label: "", dots: true, ...take(all, Array.from({ length: R }, (_, r) => (S.target * R + r) * all.C + kC)) }); }
        x = Array.from({ length: R }, (_, r) => Trends.rankText(r));
      } else {
        ids = [...(await Trends.shownTargets()).rows];
        const at = Trends.rankAt();
        for (const run of runs) {
          const from = at === null ? await Trends.overview(run) : await Trends.cube(run);
          if (from) lines.push({ run, label: "", dots: ids.length < 120, ...take(from, ids.map((t) => at === null ? t * from.C + S.column : (t * R + at) * from.C + kC)) });
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
        if (!line.kind[i]) line.high[i] = S.run === "difference" ? q - p : p === q ? 0 : (q - p) / Math.max(Math.abs(p), Math.abs(q));
      }
      line.low = line.high; out.push(line);
    }
    return out;
  }
  const colourOf = (line, lines) => {
    const two = lines.some((one) => one.run === 0) && lines.some((one) => one.run === 1);
    if (line.rank === undefined) return Kit.series(line.run === 1 ? 1 : 0);
    return Kit.series(two && Trends.ranks() < 2 ? line.run : line.rank);
  };

  // ---- drawing ----
  function scales(lines) {
    let low = Infinity, high = -Infinity, least = Infinity;
    const see = (v) => { if (!Number.isFinite(v)) return; if (v < low) low = v; if (v > high) high = v; if (v > 0 && v < least) least = v; };
    for (const one of lines) for (let i = 0; i < one.high.length; i++) { see(one.high[i]); see(one.low[i]); }
    if (low > high) return null;
    const can = low >= 0 && high > 0, log = can && (scaleKind === "log" || (scaleKind === "auto" && high / least > 50));
    if (log) { const a = Math.log10(least), b = Math.max(Math.log10(high), a + 0.2), pad = (b - a) * 0.04; return { log, low: a - pad, high: b + pad, at: (v) => v > 0 ? Math.log10(v) : a - pad, zero: low === 0 }; }
    const k = Number.isFinite((high - low) * 2) ? 1 : 0.125, width = k * high - k * low || Math.abs(high) || 1; // k: the whole range of float64 is wider than float64
    return { log: false, low: k * low - width * 0.06, high: k * high + width * 0.06, at: (v) => k * v, k };
  }
  function ticks(scale) {
    const out = [];
    if (scale.log) {
      const a = Math.ceil(scale.low), b = Math.floor(scale.high), each = Math.max(1, Math.ceil((b - a) / 5));
      for (let e = a; e <= b; e += each) out.push([e, e >= -3 && e <= 4 ? Kit.number(10 ** e) : "1e" + e]);
      if (out.length > 1) return out;
      out.length = 0;
      for (let k = 0; k <= 3; k++) { const e = scale.low + (scale.high - scale.low) * (k + 0.5) / 4; out.push([e, Kit.number(+(10 ** e).toPrecision(3))]); }
      return out;
    }
    const width = scale.high - scale.low, raw = width / 4, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= raw);
    for (let v = Math.ceil(scale.low / step) * step; v <= scale.high && out.length < 12; v += step) out.push([v, Kit.number(Math.abs(v) < step * 1e-9 ? 0 : +(v / scale.k).toPrecision(6))]);
    return out;
  }
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
    const lines = drawn.lines, scale = scales(lines), X = (i) => g.left + (g.n > 1 ? i / (g.n - 1) : 0.5) * g.width, Y = (v) => g.top + g.height - (scale.at(v) - scale.low) / (scale.high - scale.low) * g.height;
    g.X = X;
    pen.font = "11px " + Kit.colour("font"); pen.textBaseline = "middle"; pen.lineWidth = 1;
    if (scale) for (const [v, text] of ticks(scale)) {
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
    for (const one of [...lines].sort((p, q) => Number(p.rank === S.rank) - Number(q.rank === S.rank))) { if (scale) line(pen, one, lines, X, Y); }
    for (const one of lines) marks(pen, one, X, g);
    pen.restore();
    label();
  }
  function line(pen, one, all, X, Y) {
    const colour = colourOf(one, all), n = one.high.length, plane = one.band ? "high" : Trends.side(), fine = (i) => !one.kind[i];
    if (one.band || differs(one)) { // between the smallest and the largest
      pen.fillStyle = colour; pen.globalAlpha = one.band ? 0.2 : 0.12;
      for (let i = 0; i < n;) {
        if (!fine(i)) { i++; continue; }
        let j = i; while (j < n && fine(j)) j++;
        pen.beginPath(); pen.moveTo(X(i), Y(one.high[i]));
        for (let k = i; k < j; k++) pen.lineTo(X(k), Y(one.high[k]));
        for (let k = j - 1; k >= i; k--) pen.lineTo(X(k), Y(one.low[k]));
        pen.closePath(); pen.fill(); i = j;
      }
      pen.globalAlpha = 1;
    }
    const chosen = one.rank === S.rank || one.rank === undefined || Trends.ranks() < 2;
    pen.strokeStyle = pen.fillStyle = colour; pen.lineWidth = one.band ? 1 : chosen ? 2 : 1.25; pen.globalAlpha = one.band ? 0.6 : chosen ? 1 : 0.8;
    pen.setLineDash(one.run === 1 ? DASH : []); pen.beginPath();
    let down = false;
    for (let i = 0; i < n; i++) {
      if (!fine(i)) { if (one.kind[i] > 1) down = false; continue; } // what was not written is bridged, what is not finite is not
      const x = X(i), y = Y(one[plane][i]);
      if (down) pen.lineTo(x, y); else pen.moveTo(x, y);
      down = true;
      const alone = (i === 0 || !fine(i - 1)) && (i === n - 1 || !fine(i + 1));
      if (one.dots || alone || n < 40) { pen.moveTo(x + 2.5, y); pen.arc(x, y, 2.5, 0, 7); pen.moveTo(x, y); }
    }
    pen.stroke(); pen.setLineDash([]); pen.globalAlpha = 1;
  }
  const differs = (one) => { for (let i = 0; i < one.high.length; i++) if (!one.kind[i] && one.high[i] !== one.low[i]) return true; return false; };
  function marks(pen, one, X, g) {
    pen.font = "700 11px " + Kit.colour("font"); pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillStyle = pen.strokeStyle = Kit.colour("t-bad-text");
    let last = -9;
    for (let i = 0; i < one.kind.length; i++) {
      if (one.kind[i] < 2) continue;
      const x = X(i), low = one.kind[i] === Trends.MINUS_INF;
      if (x - last < 5 && last > 0) { pen.fillRect(x - 1, low ? g.top + g.height - 5 : 4, 2, 4); continue; }
      pen.fillText(one.kind[i] === Trends.NAN ? "×" : low ? "▼" : "▲", x, low ? g.top + g.height - 6 : 7); last = x;
    }
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
      mark.style.setProperty("--c", colourOf(one, drawn.lines)); chip.append(text);
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
    const first = { step: "trends.step", rank: "trends.rank", layer: "trends.layer" }[S.along], same = drawn.lines.every((one) => !differs(one));
    const columns = [{ key: first, kind: S.along === "layer" ? "name" : "number", show: (v) => String(v) }, { key: "trends.line", kind: "text" }, ...(same ? [] : [{ key: "trends.smallest", kind: "number" }]), { key: same ? "trends.value" : "trends.largest", kind: "number" }];
    Kit.table(tableBox, { columns, rows: cells().map(([x, name, l, h]) => same ? [x, name, h] : [x, name, l, h]), label: heading.textContent, tone: (row) => Number.isFinite(row[row.length - 1]) ? "" : "bad", page: 100 });
  }
  function save() {
    const quote = (v) => { const text = String(v); return typeof v === "number" ? text : '"' + (/^[=+\-@\t\r\n'＝＋－＠]/.test(text) ? "'" : "") + text.replace(/"/g, '""') + '"'; };
    const head = [S.along, "line", "smallest", "largest"].join(","), body = cells().map((row) => row.map(quote).join(","));
    Kit.save("trends.csv", [head, ...body].join("\r\n") + "\r\n", "text/csv");
  }
  return { mount, refresh };
})();
