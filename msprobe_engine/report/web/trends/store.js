"use strict";
/* The numbers of a trends page and what of them is shown. Views listen with Trends.on("change" | "pick" | "range"); nothing here draws.

  A cube is [targets, groups of ranks, coarse columns], an overview [targets, fine columns]; both have a largest and a smallest plane. What is
  missing, NaN or infinite is told by `kind`: 0 a number, 1 missing, 2 NaN, 3 Inf, 4 -Inf. */
const Trends = (() => {
  const heard = {}, held = new Map();
  const MISSING = 1, NAN = 2, INF = 3, MINUS_INF = 4;
  const on = (event, f) => { (heard[event] ||= []).push(f); };
  const tell = (event) => { for (const f of heard[event] || []) f(); };

  const state = {
    metric: 0, statistic: 0, map: "ts", third: "max", run: "0", colour: "auto", filter: "", badOnly: false,
    from: 0, to: 0, target: 0, rank: 0, column: 0, along: "step", rows: "tensor",
  };
  let book = null; // the manifest

  async function open() {
    book = await Kit.json("manifest");
    state.to = fine() - 1;
    return book;
  }
  const fine = () => book.plan.fine[0].length;
  const coarse = () => Math.ceil(fine() / book.plan.factor);
  const ranks = () => book.plan.ranks[0].length;
  const metric = () => ({ ...book.metrics[state.metric], targets: targetsOf(state.metric) });
  const statistic = () => metric().statistics[state.statistic];

  // ---- blocks ----
  function decode(bytes, cells, planes) {
    const size = bytes[0], total = cells * planes, plain = new Uint8Array(total * size);
    for (let b = 0, at = 1; b < size; b++) for (let i = b; i < plain.length; i += size) plain[i] = bytes[at++];
    const values = size === 4 ? new Float32Array(plain.buffer) : new Float64Array(plain.buffer), words = new Uint32Array(plain.buffer);
    const step = size / 4, gone = (i) => words[i * step + step - 1] >>> 0 === (size === 4 ? 0xffc00000 : 0xfff80000);
    const plane = (p) => values.subarray(p * cells, (p + 1) * cells);
    return { high: plane(0), low: planes > 1 ? plane(1) : plane(0), gone };
  }
  const kindOf = (value, gone) => gone ? MISSING : value !== value ? NAN : value === Infinity ? INF : value === -Infinity ? MINUS_INF : 0;

  // ---- rows: tensors, layers, or all in one ----
  const rowsOf = (m) => book.metrics[m].layers ? state.rows : "tensor"; // the numbers of the steps have no layers
  /* Names of the rows of a metric. */
  const targetsOf = (m, rows = rowsOf(m)) => ({ tensor: book.metrics[m].targets, layer: book.metrics[m].layers, all: [Kit.t("trends.all_layers")] })[rows];
  const rowOf = (m, t, rows = rowsOf(m)) => rows === "tensor" ? t : rows === "layer" ? book.metrics[m].layerOf[t] : 0;
  /* Other rows; the chosen one stays, as far as there is one. */
  function setRows(rows) {
    const m = state.metric, t = { tensor: () => state.target, layer: () => book.metrics[m].layerOf.indexOf(state.target), all: () => 0 }[rowsOf(m)]();
    state.rows = rows;
    set({ target: rowOf(m, t), third: state.map === "rs" && typeof state.third === "number" ? "max" : state.third });
  }
  /* Another map; a third that it has not becomes the largest. */
  const setMap = (map) => set({ map, third: typeof state.third === "number" || state.third === "distance" ? "max" : state.third });
  /* How tensors of a row are put together: norms in quadrature, counts as sums, others as their extremes. */
  const folding = (m, s) => ({ norm: "norm", nans: "sum", infs: "sum" })[book.metrics[m].statistics[s]] || "extremes";
  /* Where numbers are extremes of several steps, ranks or micro batches, a sum of them is a bound alone. */
  const bound = () => rowsOf(state.metric) !== "tensor" && folding(state.metric, state.statistic) !== "extremes" && (book.plan.overview || book.plan.spread);
  const norm = (a, b) => a < 1e150 && b < 1e150 ? Math.sqrt(a * a + b * b) : a !== a || b !== b ? NaN : Math.hypot(a, b);
  /* Planes [targets, size] as planes [rows, size]. */
  function fold(from, size, m, s, rows) {
    const T = targetsOf(m, rows).length, how = folding(m, s), one = from.high === from.low && how !== "extremes", join = how === "norm" ? norm : (a, b) => a + b, out = { ...from, T, ...blank(Float64Array, T, size) };
    if (one) out.low = out.high;
    for (let t = 0; t < from.T; t++) for (let i = 0, at = rowOf(m, t, rows) * size, k = t * size; i < size; i++, at++, k++) {
      if (how === "extremes" || out.missing[at]) put(out, at, from, k);
      else if (!from.missing[k]) { out.high[at] = join(out.high[at], from.high[k]); if (!one) out.low[at] = join(out.low[at], from.low[k]); }
    }
    return out;
  }

  /* One statistic of a metric of a run as {high, low, missing}, [rows, groups of ranks, coarse columns]. */
  function cube(run, m = state.metric, s = state.statistic, rows = rowsOf(m)) {
    if (rows === "tensor") return whole(run, m, s);
    return kept(`${rows} c${run}.${m}.${s}`, async () => { const all = await whole(run, m, s); return all && fold(all, all.R * all.C, m, s, rows); });
  }
  /* The cube of the tensors, all blocks together. */
  async function whole(run, m, s) {
    return kept(`c${run}.${m}.${s}`, async () => {
      const T = book.metrics[m].targets.length, R = ranks(), C = coarse(), planes = book.plan.spread ? 2 : 1;
      if (!book.runs[run].there[m][s]) return null;
      const out = { T, R, C, high: null, low: null, missing: new Uint8Array(T * R * C) };
      for (let begin = 0, b = 0; begin < T; begin += book.block, b++) {
        const id = `c.${run}.${m}.${s}.${b}`, n = Math.min(book.block, T - begin) * R * C, part = decode(await Kit.data(id), n, planes), at = begin * R * C;
        Kit.drop(id);
        if (!out.high || (out.high instanceof Float32Array && part.high instanceof Float64Array)) {
          const Kind = part.high instanceof Float64Array ? Float64Array : Float32Array, wider = (old) => { const all = new Kind(T * R * C); if (old) all.set(old); return all; };
          const one = out.high && out.high === out.low; out.high = wider(out.high); out.low = planes > 1 && !one ? wider(out.low) : planes > 1 ? wider(null) : out.high;
        }
        out.high.set(part.high, at); if (planes > 1) out.low.set(part.low, at);
        for (let i = 0; i < n; i++) if (part.gone(i)) out.missing[at + i] = 1;
      }
      return out;
    });
  }
  /* Extremes over the ranks, [rows, fine columns]. */
  function overview(run, m = state.metric, s = state.statistic, rows = rowsOf(m)) {
    return kept(`${rows} o${run}.${m}.${s}`, async () => {
      if (!book.runs[run].there[m][s]) return null;
      const F = fine();
      if (book.plan.overview) {
        const T = book.metrics[m].targets.length, id = `o.${run}.${m}.${s}`, part = decode(await Kit.data(id), T * F, 2), missing = new Uint8Array(T * F);
        Kit.drop(id);
        for (let i = 0; i < T * F; i++) if (part.gone(i)) missing[i] = 1;
        const out = { T, C: F, high: part.high, low: part.low, missing };
        return rows === "tensor" ? out : fold(out, F, m, s, rows);
      }
      const all = await cube(run, m, s, rows), out = blank(all.high.constructor, all.T, F);
      for (let t = 0; t < all.T; t++) for (let r = 0; r < all.R; r++) for (let c = 0; c < F; c++) put(out, t * F + c, all, (t * all.R + r) * F + c);
      return { T: all.T, C: F, ...out };
    });
  }
  async function kept(key, make) {
    if (!held.has(key)) {
      if (held.size > 12) held.delete(held.keys().next().value);
      held.set(key, make());
    }
    return held.get(key);
  }
  const blank = (Kind, a, b) => ({ high: new Kind(a * b), low: new Kind(a * b), missing: new Uint8Array(a * b).fill(1) });
  /* Extremes: NaN wins, then infinities. */
  function put(out, i, from, j) {
    if (from.missing[j]) return;
    const h = from.high[j], l = from.low[j];
    if (out.missing[i]) { out.high[i] = h; out.low[i] = l; out.missing[i] = 0; return; }
    if (h !== h || h > out.high[i]) { if (out.high[i] === out.high[i]) out.high[i] = h; }
    if (l !== l || l < out.low[i]) { if (out.low[i] === out.low[i]) out.low[i] = l; }
  }

  // ---- rows that are shown ----
  let rowsKey = "", rowsShown = null;
  /* Targets that the filter lets through. */
  async function shownTargets() {
    const m = metric(), key = [state.metric, state.statistic, state.rows, state.filter, state.badOnly, state.run].join("\n");
    if (key === rowsKey) return rowsShown;
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean), bad = await badTargets();
    const rows = [];
    let hidden = 0;
    for (let t = 0; t < m.targets.length; t++) {
      const name = m.targets[t].toLowerCase();
      if (words.every((w) => w[0] === "-" && w.length > 1 ? !name.includes(w.slice(1)) : name.includes(w)) && (!state.badOnly || bad[t])) rows.push(t);
      else if (bad[t]) hidden++;
    }
    rowsKey = key; rowsShown = { rows: Int32Array.from(rows), hidden, bad };
    return rowsShown;
  }
  async function badTargets() {
    const T = targetsOf(state.metric).length, out = new Uint8Array(T);
    for (const run of runsShown()) {
      const o = await overview(run);
      if (!o) continue;
      for (let t = 0, i = 0; t < T; t++) for (let c = 0; c < o.C; c++, i++) if (!o.missing[i] && !(Number.isFinite(o.high[i]) && Number.isFinite(o.low[i]))) out[t] = 1;
    }
    return out;
  }
  const runsShown = () => book.runs.length < 2 || state.run === "0" ? [0] : state.run === "1" ? [1] : [0, 1];

  // ---- the map ----
  /* Which plane a single number is taken from: the extreme that matters of this statistic. */
  const side = (m = state.metric, s = state.statistic) => state.third === "min" || (state.third !== "max" && book.metrics[m].statistics[s] === "min") ? "low" : "high";
  const spread = (h, l) => h === l ? 0 : (h - l) / Math.max(Math.abs(h), Math.abs(l));
  /* Number and kind of a cell of extremes; third "spread": how far the extremes are apart. */
  function cell(from, i, out, at) {
    if (from.missing[i]) { out.kind[at] = MISSING; out.value[at] = NaN; return; }
    const h = from.high[i], l = from.low[i];
    let v = side() === "low" ? l : h;
    if (v === v && Number.isFinite(v)) { if (h !== h || !Number.isFinite(h)) v = h; else if (!Number.isFinite(l)) v = l; } // the other extreme is not finite: that is what is shown
    const kind = kindOf(v, false);
    out.kind[at] = kind; out.value[at] = kind ? v : state.third === "spread" ? spread(h, l) : v;
  }
  const rankAt = () => typeof state.third === "number" ? state.third : null;

  /* One run as a picture {rows, cols, value, kind, rowIds}; rows are targets or groups of ranks, columns steps or groups of ranks. */
  async function picture(run) {
    const { rows } = await shownTargets(), first = state.from, last = state.to, f = book.plan.factor;
    const empty = (n, cols) => ({ n, cols, value: new Float64Array(n * cols), kind: new Uint8Array(n * cols).fill(MISSING) });
    if (state.map === "ts") {
      const at = rankAt();
      if (at === null) {
        const o = await overview(run), cols = last - first + 1, out = empty(rows.length, cols);
        if (o) for (let i = 0; i < rows.length; i++) for (let c = 0; c < cols; c++) cell(o, rows[i] * o.C + first + c, out, i * cols + c);
        return out;
      }
      const all = await cube(run), a = Math.floor(first / f), cols = Math.floor(last / f) - a + 1, out = empty(rows.length, cols);
      if (all) for (let i = 0; i < rows.length; i++) for (let c = 0; c < cols; c++) cell(all, (rows[i] * all.R + at) * all.C + a + c, out, i * cols + c);
      return out;
    }
    const all = await cube(run), R = ranks(), a = Math.floor(first / f), b = Math.floor(last / f);
    if (state.map === "rs") {
      const cols = b - a + 1, out = empty(R, cols);
      if (!all) return out;
      const only = typeof state.third === "number" ? Int32Array.of(state.third) : rows, sum = blank(all.high.constructor, R, cols);
      for (const t of only) for (let r = 0; r < R; r++) for (let c = 0; c < cols; c++) put(sum, r * cols + c, all, (t * R + r) * all.C + a + c);
      for (let i = 0; i < R * cols; i++) cell(sum, i, out, i);
      return out;
    }
    const out = empty(rows.length, R);
    if (!all) return out;
    if (state.third === "distance") { distances(all, rows, a, b, out); return out; }
    const only = typeof state.third === "number" ? [Math.floor(state.third / f)] : Array.from({ length: b - a + 1 }, (_, i) => a + i), sum = blank(all.high.constructor, rows.length, R);
    for (let i = 0; i < rows.length; i++) for (let r = 0; r < R; r++) for (const c of only) put(sum, i * R + r, all, (rows[i] * R + r) * all.C + c);
    for (let i = 0; i < rows.length * R; i++) cell(sum, i, out, i);
    return out;
  }
  /* Of each row and rank the largest factor, over the columns, between it and the median of the ranks; what is not finite on any column is shown. */
  function distances(all, rows, a, b, out) {
    const R = all.R;
    for (let i = 0; i < rows.length; i++) for (let c = a; c <= b; c++) {
      const line = [];
      for (let r = 0; r < R; r++) {
        const k = (rows[i] * R + r) * all.C + c, at = i * R + r, kind = all.missing[k] ? MISSING : kindOf(all.high[k], false) || kindOf(all.low[k], false);
        if (kind > MISSING) { out.kind[at] = kind; out.value[at] = NaN; } else if (!kind && all.high[k] > 0) line.push(all.high[k]);
      }
      const middle = median(line);
      for (let r = 0; r < R; r++) {
        const k = (rows[i] * R + r) * all.C + c, at = i * R + r;
        if (all.missing[k] || out.kind[at] > MISSING || !(all.high[k] > 0)) continue;
        const far = Math.max(all.high[k] / middle, middle / all.high[k]);
        if (out.kind[at] === MISSING || far > out.value[at]) { out.kind[at] = 0; out.value[at] = far; }
      }
    }
  }
  /* In the middle of two the geometric mean. */
  function median(values) {
    const line = Float64Array.from(values).sort(), n = line.length;
    return n % 2 ? line[n >> 1] : Math.sqrt(line[n / 2 - 1]) * Math.sqrt(line[n / 2]);
  }
  /* What is drawn: pictures beside each other, [{title, n, cols, value, kind}]. */
  async function pictures() {
    const one = async (run) => ({ run, ...(await picture(run)) });
    if (runsShown().length < 2) return [await one(runsShown()[0])];
    const a = await one(0), b = await one(1);
    if (state.run === "both") return [a, b];
    const out = { run: state.run, n: a.n, cols: a.cols, value: new Float64Array(a.value.length), kind: new Uint8Array(a.value.length) };
    for (let i = 0; i < a.value.length; i++) {
      const p = a.kind[i], q = b.kind[i], x = a.value[i], y = b.value[i];
      if (p === MISSING || q === MISSING) { out.kind[i] = p > MISSING ? p : q > MISSING ? q : MISSING; out.value[i] = NaN; } // not finite in the only run that has it: shown
      else if (p || q) { out.kind[i] = q || p; out.value[i] = NaN; }
      else out.value[i] = state.run === "difference" ? x - y : x === y ? 0 : (x - y) / Math.max(Math.abs(x), Math.abs(y));
    }
    return [out];
  }

  // ---- words for places ----
  const span = (pair, i, j = i) => pair[0][i] === pair[1][j] ? String(pair[0][i]) : pair[0][i] + "–" + pair[1][j];
  const stepText = (c) => span(book.plan.fine, c);
  const coarseText = (k) => span(book.plan.fine, k * book.plan.factor, Math.min(fine(), (k + 1) * book.plan.factor) - 1);
  /* Names of a metric or statistic that are words of ours and not of a file. */
  const word = (name) => ({ "numbers of the steps": "trends.scalars", "largest absolute value": "trends.absmax" })[name] ?? null;
  const named = (name) => word(name) ? Kit.t(word(name)) : Kit.name(name);
  const rankText = (r) => span(book.plan.ranks, r);
  const runWord = (run) => Kit.t(run ? "trends.golden" : "trends.the_run"); // which of two
  const columnOf = (step) => { const first = book.plan.fine[0]; let a = 0, b = first.length - 1; while (a < b) { const m = (a + b + 1) >> 1; if (first[m] <= step) a = m; else b = m - 1; } return a; };
  const groupOf = (rank) => { const first = book.plan.ranks[0]; let i = first.length - 1; while (i > 0 && first[i] > rank) i--; return i; };
  /* Columns of the map are steps one by one (true) or the coarser ones of the cube. */
  const fineColumns = () => state.map === "ts" && rankAt() === null;

  function set(changes, event = "change") { Object.assign(state, changes); tell(event); }
  return {
    MISSING, NAN, INF, MINUS_INF, state, on, tell, set, setRows, setMap, targetsOf, rowsOf, rowOf, bound, open, cube, overview, pictures, shownTargets, metric, statistic, fine, coarse, ranks, runsShown, rankAt,
    word, named, stepText, coarseText, rankText, runWord, columnOf, groupOf, fineColumns, side, kindOf, get book() { return book; },
  };
})();
