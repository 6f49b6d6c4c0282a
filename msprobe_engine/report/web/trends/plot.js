"use strict";
/* Lines of extremes: which numbers a line along the steps has, its scale, and how it is drawn. NaN and Inf stand at the upper edge of a chart, where
  they happen; a line is broken there. A line is {run, rank, label, band, plane, high, low, kind}; a band lies between a smallest and a largest. */
const Plot = (() => {
  const S = Trends.state, FEW = 8, DASH = [5, 4];

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
  /* The lines of a row along columns: one per rank; of many ranks the extremes of all, their median, and the chosen one.
    Of two runs that stand in one small chart (`folded`) few ranks are many, too. */
  async function alongSteps(runs, m, s, target, columns, folded = false) {
    const b = Trends.book, f = b.plan.factor, R = Trends.ranks(), few = R <= FEW && !(folded && runs.length > 1 && R > 1), plane = Trends.side(m, s), lines = [];
    for (const run of runs) {
      const all = await Trends.cube(run, m, s);
      if (!all) continue;
      const place = (r) => columns.map((c) => (target * R + r) * all.C + Math.floor(c / f)), own = b.runs[run].ranks;
      const has = (r) => own.some((rank) => rank >= b.plan.ranks[0][r] && rank <= b.plan.ranks[1][r]);
      if (!few || f > 1) { const o = await Trends.overview(run, m, s); lines.push({ run, label: Kit.t("trends.all_ranks"), band: true, ...take(o, columns.map((c) => target * o.C + c)) }); }
      if (!few) lines.push({ run, label: Kit.t("trends.median_rank"), middle: true, ...middle(all, Array.from({ length: R }, (_, r) => place(r)), columns.length, plane) });
      for (let r = 0; r < R; r++) if (has(r) && (few || (r === S.rank && !folded))) lines.push({ run, rank: r, label: R > 1 ? Kit.t("trends.rank_n", Trends.rankText(r)) : "", plane, ...take(all, place(r)) });
    }
    return lines;
  }
  /* The median of the finite numbers of the ranks. */
  function middle(all, places, n, plane) {
    const high = new Float64Array(n).fill(NaN), kind = new Uint8Array(n).fill(Trends.MISSING);
    for (let i = 0; i < n; i++) {
      if (i && places[0][i] === places[0][i - 1]) { high[i] = high[i - 1]; kind[i] = kind[i - 1]; continue; } // columns that the cube has as one
      const line = Float64Array.from(places.map((of) => of[i]).filter((k) => !all.missing[k] && Number.isFinite(all[plane][k])), (k) => all[plane][k]).sort(), at = line.length >> 1;
      if (line.length) { high[i] = line.length % 2 ? line[at] : line[at - 1] / 2 + line[at] / 2; kind[i] = 0; }
    }
    return { high, low: high, kind };
  }
  const colourOf = (line, lines) => {
    const two = lines.some((one) => one.run === 0) && lines.some((one) => one.run === 1);
    if (line.rank === undefined) return Kit.series(line.run === 1 ? 1 : 0);
    return Kit.series(two && Trends.ranks() < 2 ? line.run : line.rank);
  };

  function scale(lines, wish = "auto") {
    let low = Infinity, high = -Infinity, least = Infinity;
    const see = (v) => { if (!Number.isFinite(v)) return; if (v < low) low = v; if (v > high) high = v; if (v > 0 && v < least) least = v; };
    for (const one of lines) for (let i = 0; i < one.high.length; i++) { see(one.high[i]); see(one.low[i]); }
    if (low > high) return null;
    const can = low >= 0 && high > 0, log = can && (wish === "log" || (wish === "auto" && high / least > 50));
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
  function line(pen, one, all, X, Y, dots = true) {
    const colour = colourOf(one, all), n = one.high.length, plane = one.plane || "high", fine = (i) => !one.kind[i];
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
      if (one.dots || alone || (dots && n < 40)) { pen.moveTo(x + 2.5, y); pen.arc(x, y, 2.5, 0, 7); pen.moveTo(x, y); }
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
  return { FEW, take, alongSteps, colourOf, scale, ticks, line, differs, marks };
})();
