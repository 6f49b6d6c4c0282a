"use strict";
/* The heat map: one picture, or two beside each other with the same rows and the same colours. A pixel that stands for several cells shows the
  most extreme of them; NaN and Inf are drawn last, at least three pixels large, and marked along the right edge for all rows. */
const Heat = (() => {
  const S = Trends.state, EDGE = 16, AXIS = 24, HEAD = 20, MARK = 3, ROW = 14, TALL = 48;
  const BLUE_ORANGE = {
    light: [[16, 72, 150], [70, 140, 200], [160, 200, 228], [241, 242, 244], [248, 203, 142], [224, 136, 46], [150, 72, 8]],
    dark: [[140, 205, 255], [76, 150, 214], [42, 92, 146], [34, 41, 54], [126, 82, 34], [206, 134, 58], [255, 204, 138]],
  };
  let box, canvas, shown = null, scale = null, rows = null, scroll = 0, rowHeight = 0, geometry = null, image = null, ask = 0, drag = null, busy = null, live, legend, sentence, empty;

  // ---- colours ----
  function ramp(stops) {
    const out = new Uint32Array(256);
    for (let k = 0; k < 256; k++) {
      const place = k / 255 * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(place)), w = place - i;
      const [r, g, b] = stops[i].map((c, j) => Math.round(c + (stops[i + 1][j] - c) * w));
      out[k] = (255 << 24 | b << 16 | g << 8 | r) >>> 0;
    }
    return out;
  }
  const sequential = () => ramp(Array.from({ length: 11 }, (_, i) => Kit.shade(i / 10).match(/\d+/g).map(Number)));
  const packed = (name) => { // a colour of the theme as a pixel
    const pen = document.createElement("canvas").getContext("2d"); pen.fillStyle = Kit.colour(name); pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = pen.getImageData(0, 0, 1, 1).data; return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  };
  /* How numbers become colours: place(v) in 0..1, pale or dark is low; ticks for the legend. */
  function makeScale(pictures) {
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const p of pictures) for (let i = 0; i < p.value.length; i++) if (!p.kind[i]) {
      const v = p.value[i]; if (v < low) low = v; if (v > high) high = v;
      const a = Math.abs(v); if (a && a < least) least = a;
    }
    if (low > high) return { none: true, place: () => 0, ticks: [], diverging: false };
    const compared = S.run === "difference" || S.run === "relative", wish = S.colour;
    if (wish === "median") {
      let far = 0;
      for (const p of pictures) { p.own = own(p); for (const v of p.own) if (Number.isFinite(v)) far = Math.max(far, Math.abs(v)); }
      far = Math.max(far, 0.1);
      const bend = (x) => Math.sign(x) * Math.sqrt(Math.abs(x) / far), place = (x) => 0.5 + bend(x) / 2, ends = [-far, -far / 4, 0, far / 4, far];
      return { diverging: true, own: true, place, ticks: ends.map((x) => [place(x), x < 0 ? "1/" + times(-x) : x === 0 ? "1×" : times(x) + "×"]), note: "trends.scale_median" };
    }
    if (low < 0 || compared) {
      const most = Math.max(Math.abs(low), Math.abs(high)) || 1, bottom = Math.max(least, most * 1e-6), log = wish === "log" || (wish === "auto" && most / bottom > 100);
      const size = log ? (a) => a <= bottom ? 0.04 * a / bottom : 0.04 + 0.96 * Math.log(a / bottom) / Math.log(most / bottom) : (a) => a / most;
      const place = (v) => 0.5 + Math.sign(v) * size(Math.abs(v)) / 2, half = log ? Math.sqrt(most) * Math.sqrt(bottom) : most / 2;
      return { diverging: true, place, ticks: [-most, -half, 0, half, most].map((v) => [place(v), short(v)]), note: log ? "trends.scale_log" : "trends.scale_linear" };
    }
    const bottom = least === Infinity ? 1 : least, log = wish === "log" || (wish === "auto" && high / bottom > 20);
    if (log && high > bottom) {
      const range = Math.log(high / bottom), place = (v) => v <= 0 ? 0 : 0.02 + 0.98 * Math.log(v / bottom) / range;
      const ticks = [0, 1, 2, 3, 4].map((k) => bottom * Math.exp(range * k / 4)).map((v) => [place(v), short(v)]);
      return { diverging: false, place, ticks, note: "trends.scale_log" };
    }
    const width = high - low || 1, place = (v) => (v - low) / width;
    return { diverging: false, place, ticks: (high > low ? [0, 1, 2, 3, 4] : [0]).map((k) => [k / 4, short(low + width * k / 4, 4)]), note: "trends.scale_linear" };
  }
  /* A number that leaves room for others beside it. */
  const short = (v, digits = 3) => { const text = Kit.number(+v.toPrecision(digits)); return text.length < 8 ? text : v.toExponential(digits - 1).replace(/\.?0*e\+?/, "e"); };
  const times = (x) => Kit.number(+(2 ** Math.abs(x)).toPrecision(3));
  /* Every number against the median of its own row, as a power of 2. */
  function own(p) {
    const out = new Float64Array(p.value.length).fill(NaN);
    for (let i = 0; i < p.n; i++) {
      const line = [];
      for (let c = 0; c < p.cols; c++) { const k = i * p.cols + c; if (!p.kind[k] && p.value[k]) line.push(Math.abs(p.value[k])); }
      if (!line.length) continue;
      const middle = line.sort((a, b) => a - b)[line.length >> 1];
      for (let c = 0; c < p.cols; c++) { const k = i * p.cols + c; if (!p.kind[k]) out[k] = p.value[k] ? Math.log2(Math.abs(p.value[k]) / middle) : NaN; }
    }
    return out;
  }

  // ---- layout ----
  function mount(parent, headline) {
    sentence = headline;
    box = Kit.make("div", parent, null, "t-heat"); box.tabIndex = 0; box.setAttribute("role", "application"); box.dataset.tLabel = "trends.heat_label"; box.setAttribute("aria-label", Kit.t("trends.heat_label"));
    canvas = Kit.make("canvas", box); canvas.setAttribute("aria-hidden", "true");
    empty = Kit.make("p", box, "", "t-empty"); empty.hidden = true;
    live = Kit.make("p", parent, "", "t-live"); live.setAttribute("role", "status");
    legend = Kit.make("div", parent, null, "t-legend");
    new ResizeObserver(() => paint()).observe(box);
    box.addEventListener("pointerdown", press); box.addEventListener("pointermove", move); box.addEventListener("pointerup", release);
    box.addEventListener("pointerleave", () => Kit.hush()); box.addEventListener("dblclick", () => Trends.set({ from: 0, to: Trends.fine() - 1 }));
    box.addEventListener("wheel", wheel, { passive: false }); box.addEventListener("keydown", keys);
    Trends.on("change", refresh); Trends.on("pick", () => { reveal(); paint(); say(); });
    Kit.on("theme", () => { image = null; paint(); }); Kit.on("language", () => { words(); paint(); });
  }
  async function refresh() {
    const mine = ++ask;
    clearTimeout(busy); busy = setTimeout(() => box.classList.add("busy"), 150);
    let got, found;
    try { got = await Trends.pictures(); found = await Trends.shownTargets(); }
    catch (error) { if (mine === ask) Kit.fault(Kit.t("trends.failed", error.message)); return; }
    finally { if (mine === ask) { clearTimeout(busy); box.classList.remove("busy"); } }
    if (mine !== ask) return; // something else was asked for meanwhile
    shown = got; rows = found; scale = makeScale(shown); image = null;
    box.dataset.ready = String(mine);
    words(); reveal(); paint();
  }
  const count = () => shown[0].n;
  function place() {
    const width = box.clientWidth, height = box.clientHeight, two = shown.length > 1, labels = gutter();
    const top = two ? HEAD : 4, high = Math.max(20, height - top - AXIS), gap = 14, wide = (width - labels - EDGE - 4 - (two ? gap : 0)) / shown.length;
    const n = count(), fit = Math.min(TALL, high / Math.max(1, n)), row = rowHeight ? Math.max(rowHeight, fit) : fit;
    scroll = Math.max(0, Math.min(scroll, n * row - high));
    return { width, height, labels, top, high: Math.min(high, n * row), view: high, wide, gap, row, cols: shown[0].cols, n, column: wide / Math.max(1, shown[0].cols) };
  }
  /* The width of the names at the left. */
  const gutter = () => S.map === "rs" ? 84 : Math.round(Math.min(300, Math.max(90, box.clientWidth * 0.26)));
  const left = (g, k) => g.labels + k * (g.wide + g.gap);

  // ---- painting ----
  function paint() {
    if (!shown || !box.clientWidth) return;
    const g = geometry = place(), made = Kit.canvas(box, g.height, canvas), pen = made.pen;
    const nothing = !g.n || scale.none && !hasKind();
    empty.hidden = !nothing; canvas.hidden = nothing;
    if (nothing) { empty.textContent = Kit.t(rows.rows.length ? "trends.no_numbers" : "trends.no_rows"); return; }
    const key = [g.width, g.height, g.row, scroll, Kit.theme, Kit.colour("bg")].join();
    if (!image || image.key !== key) image = { key, parts: shown.map((p) => pixels(p, g)) };
    pen.clearRect(0, 0, g.width, g.height); pen.imageSmoothingEnabled = false;
    shown.forEach((p, k) => {
      pen.drawImage(image.parts[k].canvas, left(g, k), g.top, g.wide, g.high);
      glyphs(pen, p, g, left(g, k));
      if (shown.length > 1) { pen.fillStyle = Kit.colour("fg"); pen.font = "600 12px " + Kit.colour("font"); pen.textAlign = "left"; pen.textBaseline = "middle"; pen.fillText(clip(Kit.name(runName(p.run)), g.wide / 7), left(g, k), HEAD / 2); }
      axis(pen, g, left(g, k));
      pen.strokeStyle = Kit.colour("line"); pen.lineWidth = 1; pen.strokeRect(left(g, k) - 0.5, g.top - 0.5, g.wide + 1, g.high + 1);
    });
    labels(pen, g); edge(pen, g); cursor(pen, g);
    if (drag && drag.range) { pen.fillStyle = "rgba(120,150,220,.28)"; pen.fillRect(Math.min(drag.x, drag.now), g.top, Math.abs(drag.now - drag.x), g.high); }
  }
  const hasKind = () => shown.some((p) => p.kind.some((k) => k > 1));
  const runName = (run) => (Trends.book.runs.length > 1 ? Trends.runWord(run) + " · " : "") + Trends.book.runs[run].name;
  const clip = (text, most) => text.length <= most ? text : "…" + text.slice(text.length - Math.max(1, Math.floor(most) - 1));

  function pixels(p, g) {
    const W = Math.max(1, Math.round(g.wide)), H = Math.max(1, Math.round(g.high)), part = document.createElement("canvas");
    part.width = W; part.height = H;
    const pen = part.getContext("2d"), data = pen.createImageData(W, H), out = new Uint32Array(data.data.buffer);
    const colours = scale.diverging ? ramp(BLUE_ORANGE[Kit.theme]) : sequential(), none = packed("sunk"), hatch = packed("strong"), bad = packed("t-bad");
    const source = scale.own ? p.own : p.value, hits = [];
    const from = (x) => Math.min(p.cols - 1, Math.floor(x * p.cols / W)), to = (x) => Math.max(from(x) + 1, Math.floor((x + 1) * p.cols / W));
    const firsts = new Int32Array(W), lasts = new Int32Array(W);
    for (let x = 0; x < W; x++) { firsts[x] = from(x); lasts[x] = Math.min(p.cols, to(x)); }
    let before = -1, line = 0, gaps = false;
    for (let y = 0; y < H; y++) {
      const a = Math.min(p.n - 1, Math.floor((y + scroll) / g.row)), b = Math.min(p.n, Math.max(a + 1, Math.floor((y + 1 + scroll) / g.row)));
      if (a === before && b === a + 1 && !gaps) { out.copyWithin(y * W, line * W, line * W + W); continue; } // the same cells as the pixels above
      before = b === a + 1 ? a : -1; line = y; gaps = false;
      for (let x = 0; x < W; x++) {
        let best = -1, far = -1, any = false;
        for (let i = a; i < b; i++) for (let c = firsts[x]; c < lasts[x]; c++) {
          const k = i * p.cols + c, kind = p.kind[k];
          if (kind > 1) { any = true; continue; }
          if (kind) continue;
          const v = source[k]; if (v !== v) continue;
          const t = scale.place(v), d = scale.diverging ? Math.abs(t - 0.5) : t;
          if (d > far) { far = d; best = t; }
        }
        if (best < 0 && !any) { gaps = true; out[y * W + x] = (x + y) % 7 ? none : hatch; continue; } // not written: hatched, unlike any number
        out[y * W + x] = any ? bad : colours[Math.max(0, Math.min(255, Math.round(best * 255)))];
        if (any) hits.push(y * W + x);
      }
    }
    if (g.column < MARK || g.row < MARK) for (const at of hits) { // small cells: what is not finite is made large enough to be seen
      const y = Math.floor(at / W), x = at % W, half = MARK >> 1;
      for (let j = Math.max(0, y - (g.row < MARK ? half : 0)); j <= Math.min(H - 1, y + (g.row < MARK ? half : 0)); j++) for (let i = Math.max(0, x - (g.column < MARK ? half : 0)); i <= Math.min(W - 1, x + (g.column < MARK ? half : 0)); i++) out[j * W + i] = bad;
    }
    pen.putImageData(data, 0, 0);
    return { canvas: part };
  }
  function glyphs(pen, p, g, x0) {
    if (g.row < 9 || g.column < 7) return;
    pen.fillStyle = Kit.colour("t-bad-ink"); pen.font = "700 " + Math.min(11, g.row - 1) + "px " + Kit.colour("font"); pen.textAlign = "center"; pen.textBaseline = "middle";
    const a = Math.floor(scroll / g.row), b = Math.min(p.n, Math.ceil((scroll + g.high) / g.row));
    for (let i = a; i < b; i++) for (let c = 0; c < p.cols; c++) {
      const kind = p.kind[i * p.cols + c];
      if (kind > 1) pen.fillText(kind === Trends.NAN ? "×" : kind === Trends.INF ? "▲" : "▼", x0 + (c + 0.5) * g.column, g.top + (i + 0.5) * g.row - scroll);
    }
  }
  const rowName = (i) => S.map === "rs" ? Kit.t("trends.rank_n", Trends.rankText(i)) : Kit.name(Trends.metric().targets[rows.rows[i]], 400);
  function labels(pen, g) {
    pen.font = "11px " + Kit.colour("mono"); pen.textAlign = "right"; pen.textBaseline = "middle";
    const each = Math.max(1, Math.ceil(ROW / g.row)), a = Math.floor(scroll / g.row), b = Math.min(g.n, Math.ceil((scroll + g.high) / g.row)), most = (g.labels - 14) / 6.7, mine = selectedRow();
    for (let i = Math.ceil(a / each) * each; i < b; i += each) {
      const y = g.top + (i + (each > 1 ? each / 2 : 0.5)) * g.row - scroll;
      if (y < g.top + 4 || y > g.top + g.high - 3) continue;
      if (each > 1 && mine >= i - each && mine < i + 2 * each && mine >= 0) continue; // the chosen row has its own label
      pen.fillStyle = S.map !== "rs" && rows.bad[rows.rows[i]] ? Kit.colour("t-bad-text") : Kit.colour("soft");
      pen.fillText(clip(rowName(i), most), g.labels - 8, y);
    }
    if (mine >= 0 && mine >= a && mine < b) {
      const y = Math.max(g.top + 7, Math.min(g.top + g.high - 7, g.top + (mine + 0.5) * g.row - scroll));
      pen.fillStyle = Kit.colour("accent"); pen.font = "600 11px " + Kit.colour("mono"); pen.fillText(clip(rowName(mine), most), g.labels - 8, y);
    }
  }
  function axis(pen, g, x0) {
    pen.font = "11px " + Kit.colour("font"); pen.fillStyle = Kit.colour("soft"); pen.textBaseline = "top"; pen.textAlign = "center";
    let next = x0 - 1;
    const each = nice(Math.max(1, Math.ceil(g.cols * 64 / g.wide)));
    for (let c = 0; c < g.cols; c += each) {
      const text = columnText(c, true), x = x0 + (c + 0.5) * g.column, half = pen.measureText(text).width / 2, middle = Math.max(x, x0 + half);
      if (middle - half < next || middle + half > x0 + g.wide + 12) continue;
      pen.fillText(text, middle, g.top + g.high + 7); pen.fillRect(Math.round(x), g.top + g.high + 1, 1, 4); next = x + half + 10;
    }
  }
  const nice = (n) => [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000].find((v) => v >= n) || n;
  const columnText = (c, first = false) => {
    if (S.map === "tr") return Trends.rankText(c);
    const f = Trends.book.plan.factor, text = Trends.fineColumns() ? Trends.stepText(S.from + c) : Trends.coarseText(Math.floor(S.from / f) + c);
    return first ? text.split("–")[0] : text;
  };
  /* All rows, also those that are not scrolled to: where something is not finite; and where the window is. */
  function edge(pen, g) {
    const x = g.width - EDGE, marks = new Uint8Array(Math.ceil(g.high));
    pen.fillStyle = Kit.colour("sunk"); pen.fillRect(x, g.top, EDGE - 4, g.high);
    for (const p of shown) for (let i = 0; i < p.n; i++) {
      let bad = false;
      for (let c = 0; c < p.cols && !bad; c++) bad = p.kind[i * p.cols + c] > 1;
      if (bad) marks[Math.min(marks.length - 1, Math.floor((i + 0.5) / p.n * g.high))] = 1;
    }
    pen.fillStyle = Kit.colour("t-bad");
    marks.forEach((m, y) => { if (m) pen.fillRect(x + 1, g.top + y - 1, EDGE - 6, 3); });
    if (g.n * g.row > g.high + 1) { pen.strokeStyle = Kit.colour("accent"); pen.lineWidth = 1.5; pen.strokeRect(x + 0.75, g.top + scroll / (g.n * g.row) * g.high + 0.75, EDGE - 5.5, Math.max(8, g.high * g.high / (g.n * g.row)) - 1.5); }
  }
  const selectedRow = () => S.map === "rs" ? S.rank : rows.rows.indexOf(S.target);
  const selectedColumn = () => S.map === "tr" ? S.rank : Trends.fineColumns() ? S.column - S.from : Math.floor(S.column / Trends.book.plan.factor) - Math.floor(S.from / Trends.book.plan.factor);
  function cursor(pen, g) {
    const i = selectedRow(), c = selectedColumn();
    if (i < 0) return;
    const y = g.top + (i + 0.5) * g.row - scroll, h = Math.max(9, g.row);
    if (y < g.top || y > g.top + g.high) return;
    shown.forEach((_, k) => {
      const x0 = left(g, k);
      pen.strokeStyle = pen.fillStyle = Kit.colour("accent"); pen.lineWidth = 1;
      if (g.row >= 6) { pen.globalAlpha = 0.75; pen.strokeRect(x0 + 0.5, y - g.row / 2 + 0.5, g.wide - 1, g.row - 1); pen.globalAlpha = 1; }
      else for (const [x, to] of [[x0, -6], [x0 + g.wide, 6]]) { pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x + to, y - 4); pen.lineTo(x + to, y + 4); pen.fill(); } // a band would hide the row
      if (c < 0 || c >= g.cols) return;
      const w = Math.max(9, g.column), x = x0 + (c + 0.5) * g.column - w / 2;
      pen.strokeStyle = Kit.colour("fg"); pen.lineWidth = 2; pen.strokeRect(x - 1, y - h / 2 - 1, w + 2, h + 2);
      pen.strokeStyle = Kit.colour("card"); pen.lineWidth = 1; pen.strokeRect(x - 2.5, y - h / 2 - 2.5, w + 5, h + 5);
    });
  }

  // ---- words ----
  function words() {
    if (!shown) return;
    const b = Trends.book, third = S.third, parts = [];
    const over = S.map === "ts" ? "ranks" : S.map === "rs" ? "layers" : "steps";
    if (typeof third === "number") parts.push(S.map === "ts" ? Kit.t("trends.at_rank", Trends.rankText(third)) : S.map === "rs" ? Kit.name(Trends.metric().targets[third], 200) : Kit.t("trends.at_step", Trends.book.plan.factor > 1 ? Trends.coarseText(Math.floor(third / Trends.book.plan.factor)) : Trends.stepText(third)));
    else if (!(S.map === "ts" && b.plan.rankCount < 2)) parts.push(Kit.t("trends." + third + "_over", Kit.t("trends." + over)));
    const run = S.run === "difference" ? Kit.t("trends.run_difference") : S.run === "relative" ? Kit.t("trends.run_relative") : S.run === "both" ? "" : b.runs.length > 1 ? runName(Number(S.run)) : "";
    sentence.replaceChildren();
    Kit.make("b", sentence, Trends.named(Trends.metric().name) + ", " + Trends.named(Trends.statistic()));
    Kit.make("span", sentence, [run, ...parts].filter(Boolean).map((one) => " · " + one).join(""));
    if (Trends.rowsOf(S.metric) !== "tensor") Kit.make("span", sentence, " · " + Kit.t("trends.put_together_" + S.rows) + (Trends.bound() ? " " + Kit.t("trends.bound") : ""));
    if (rows.hidden) {
      const note = Kit.make("button", sentence, Kit.t("trends.hidden_bad", rows.hidden), "t-hidden");
      note.onclick = () => Trends.set({ filter: "", badOnly: false }, "filter");
    }
    let nan = 0, inf = 0, missing = 0;
    for (const p of shown) for (const kind of p.kind) { if (kind === Trends.NAN) nan++; else if (kind > 2) inf++; else if (kind) missing++; }
    legend.replaceChildren();
    if (!scale.none) {
      const bar = Kit.make("span", legend, null, "t-ramp"), strip = Kit.make("canvas", bar); strip.width = 256; strip.height = 1; strip.setAttribute("aria-hidden", "true");
      const pen = strip.getContext("2d"), data = pen.createImageData(256, 1); new Uint32Array(data.data.buffer).set(scale.diverging ? ramp(BLUE_ORANGE[Kit.theme]) : sequential()); pen.putImageData(data, 0, 0);
      const ticks = Kit.make("span", bar, null, "t-ticks");
      let last = -1;
      for (const [at, text] of scale.ticks) { if (at - last < 0.17 && last >= 0) continue; last = at; const tick = Kit.make("span", ticks, text); tick.style.left = at * 100 + "%"; }
      Kit.make("span", legend, Kit.t(scale.note), "soft");
    }
    const chip = (cls, text, sign, any = true) => { const node = Kit.make("span", legend, null, any ? "t-chip" : "t-chip zero"); Kit.make("i", node, sign, cls); node.append(text); };
    chip("nan", Kit.t("trends.n_nan", Kit.count(nan)), "×", nan > 0); chip("nan", Kit.t("trends.n_inf", Kit.count(inf)), "▲", inf > 0);
    if (missing) chip("none", Kit.t("trends.n_missing", Kit.count(missing)), "");
  }
  const numberText = (p, k) => p.kind[k] === Trends.MISSING ? Kit.t("trends.missing") : p.kind[k] === Trends.NAN ? "NaN" : p.kind[k] === Trends.INF ? "Inf" : p.kind[k] ? "-Inf" : Kit.number(p.value[k]);
  function textOf(k, i, c) {
    const p = shown[k], at = i * p.cols + c, lines = [rowName(i), S.map === "tr" ? Kit.t("trends.rank_n", columnText(c)) : Kit.t("trends.step_n", columnText(c))];
    shown.forEach((q) => lines.push((shown.length > 1 ? runName(q.run) + ": " : "") + numberText(q, at)));
    if (scale.own && Number.isFinite(p.own[at])) lines.push(Kit.t("trends.against_median", (p.own[at] < 0 ? "1/" : "") + times(p.own[at])));
    return lines.join("\n");
  }
  function say() {
    if (!shown) return;
    const i = selectedRow(), c = selectedColumn();
    if (i >= 0 && c >= 0 && c < shown[0].cols) live.textContent = textOf(0, i, c);
  }

  // ---- hands ----
  function hit(event) {
    if (!geometry || !shown) return null;
    const g = geometry, r = box.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top;
    const i = Math.floor((y - g.top + scroll) / g.row);
    for (let k = 0; k < shown.length; k++) {
      const c = Math.floor((x - left(g, k)) / g.column);
      if (x >= left(g, k) && c >= 0 && c < g.cols && y >= g.top && y < g.top + g.high && i >= 0 && i < g.n) return { k, i, c, x, y };
    }
    return { k: -1, i, c: -1, x, y, edge: x > g.width - EDGE, label: x < g.labels && y >= g.top && i >= 0 && i < g.n };
  }
  function choose(i, c) {
    const change = {}, f = Trends.book.plan.factor;
    if (S.map === "rs") change.rank = i; else change.target = rows.rows[i];
    if (c >= 0) { if (S.map === "tr") change.rank = c; else change.column = Trends.fineColumns() ? S.from + c : Math.min(Trends.fine() - 1, (Math.floor(S.from / f) + c) * f); }
    Trends.set(change, "pick");
  }
  function press(event) {
    const h = hit(event); if (!h || event.button) return;
    if (h.edge) { drag = { edge: true }; slide(event); } else if (h.k >= 0) drag = { x: h.x, now: h.x, from: h, range: false };
    else if (h.label) choose(h.i, -1);
    if (drag) box.setPointerCapture(event.pointerId);
  }
  function slide(event) { const g = geometry, y = event.clientY - box.getBoundingClientRect().top - g.top; scroll = y / g.high * g.n * g.row - g.high / 2; image = null; paint(); }
  function move(event) {
    const h = hit(event); if (!h) return;
    if (drag && drag.edge) return slide(event);
    if (drag) {
      const g = geometry, x0 = left(g, drag.from.k);
      drag.now = Math.max(x0, Math.min(x0 + g.wide, h.x)); drag.range ||= S.map !== "tr" && Math.abs(drag.now - drag.x) > 6;
      if (drag.range) { Kit.hush(); paint(); }
      return;
    }
    box.style.cursor = h.k >= 0 ? "crosshair" : h.edge ? "ns-resize" : h.label ? "pointer" : "";
    if (h.k >= 0) Kit.tip(event, textOf(h.k, h.i, h.c)); else if (h.label) Kit.tip(event, rowName(h.i)); else Kit.hush();
  }
  function release() {
    const was = drag; drag = null;
    if (!was || was.edge) return;
    const g = geometry;
    if (!was.range) { choose(was.from.i, was.from.c); return; }
    const x0 = left(g, was.from.k), a = Math.floor((Math.min(was.x, was.now) - x0) / g.column), b = Math.min(g.cols - 1, Math.floor((Math.max(was.x, was.now) - x0) / g.column)), f = Trends.book.plan.factor;
    if (Trends.fineColumns()) Trends.set({ from: S.from + a, to: S.from + b });
    else { const first = Math.floor(S.from / f); Trends.set({ from: (first + a) * f, to: Math.min(Trends.fine() - 1, (first + b + 1) * f - 1) }); }
  }
  function wheel(event) {
    if (!geometry || !shown) return;
    const g = geometry;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const y = event.clientY - box.getBoundingClientRect().top - g.top, at = (y + scroll) / g.row;
      zoom(g.row * (event.deltaY < 0 ? 1.25 : 0.8), at, y);
    } else if (g.n * g.row > g.high + 1) {
      const before = scroll;
      scroll += event.deltaY; geometry = place();
      if (scroll !== before) { event.preventDefault(); image = null; paint(); }
    }
  }
  function zoom(height, at, y) {
    const g = geometry, fit = Math.min(TALL, g.view / Math.max(1, g.n));
    rowHeight = height <= fit ? 0 : Math.min(TALL, height); image = null;
    const row = rowHeight || fit; scroll = at * row - y; paint();
  }
  function zoomBy(factor) {
    if (!geometry) return;
    const g = geometry, i = selectedRow(), at = i >= 0 ? i + 0.5 : (scroll + g.high / 2) / g.row;
    zoom(g.row * factor, at, g.high / 2);
  }
  /* Scrolls to the chosen row. */
  function reveal() {
    if (!shown || !box.clientWidth) return;
    const g = geometry = place(), i = selectedRow();
    if (i < 0) return;
    const y = i * g.row, before = scroll;
    if (y < scroll) scroll = y - g.row; else if (y + g.row > scroll + g.high) scroll = y + 2 * g.row - g.high;
    scroll = Math.max(0, scroll); if (scroll !== before) image = null;
  }
  function keys(event) {
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const g = geometry || place(), i = selectedRow(), c = selectedColumn(), page = Math.max(1, Math.floor(g.high / g.row) - 1);
    const go = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0] }[event.key];
    let to = null;
    if (go) to = [i < 0 ? 0 : i + go[0] * (event.shiftKey ? 10 : 1), c < 0 ? 0 : c + go[1] * (event.shiftKey ? 10 : 1)];
    else if (event.key === "Home") to = [i, 0]; else if (event.key === "End") to = [i, g.cols - 1];
    else if (event.key === "n" || event.key === "N") { event.preventDefault(); event.stopPropagation(); next(event.key === "n" ? 1 : -1); return; }
    if (!to) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(g.n - 1, to[0])), Math.max(0, Math.min(g.cols - 1, to[1])));
  }
  /* The next cell with NaN or Inf, column by column: in the order of the steps. */
  function next(direction) {
    if (!shown) return false;
    const p = shown[0], n = p.n, total = n * p.cols, i = Math.max(0, selectedRow()), c = Math.max(0, selectedColumn());
    for (let k = 1; k <= total; k++) {
      const at = ((c * n + i + direction * k) % total + total) % total, row = at % n, column = Math.floor(at / n);
      if (shown.some((q) => q.kind[row * q.cols + column] > 1)) { choose(row, column); return true; }
    }
    return false;
  }
  return { mount, refresh, next, left: gutter, zoomBy, nice, focus: () => box.focus(), get scale() { return scale; } };
})();
