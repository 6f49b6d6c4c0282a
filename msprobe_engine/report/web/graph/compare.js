"use strict";
// What two rows differ in, and how a difference is put into words. Functions of plain data: no element, no store.
Graph.compare = (() => {
  const STATISTICS = ["max", "min", "mean", "norm"];
  const number = (v) => (typeof v === "number" ? v : typeof v === "boolean" ? Number(v) : v === "nan" ? NaN : v === "inf" ? Infinity : v === "-inf" ? -Infinity : null);
  const finite = (v) => { const n = number(v); return n === null || Number.isFinite(n); };
  const same = (a, b) => a === b || JSON.stringify(a) === JSON.stringify(b);

  // Is the row a tensor? Arguments that are none have a value.
  const isTensor = (row) => row.value === undefined && row.dtype !== null;
  const isBad = (row) => row.nans > 0 || row.infs > 0 || (isTensor(row) && STATISTICS.some((s) => !finite(row[s])));

  // Rows of a node beside those of its partner: [{target, golden, apart}], one of them null where the other side has no such row; apart: they
  // stand at the same place and cannot be compared.
  function pairs(target, golden) {
    const left = new Map(golden.map((row) => [row.place, row])), take = (place) => { const row = left.get(place) || null; left.delete(place); return row; };
    const known = target.map((row) => (row.partner === null ? null : take(row.partner ?? row.place)));
    const found = target.map((row, i) => {
      // What has no partner stands beside what is at its place and has none either: two things that cannot be compared.
      const apart = known[i] === null && left.get(row.place)?.partner === null;
      return { target: row, golden: apart ? take(row.place) : known[i], apart };
    });
    return found.concat([...left.values()].map((row) => ({ target: null, golden: row, apart: false })));
  }

  // {state, statistics: {max: {difference, relative}, ...}}; state is "same", "differs", or a word for what cannot be subtracted.
  function difference({ target, golden, apart }) {
    if (!golden) return { state: "only_target", statistics: {} };
    if (!target) return { state: "only_golden", statistics: {} };
    if (!isTensor(target) || !isTensor(golden)) {
      const equal = same(target.value, golden.value) && same(target.shape, golden.shape);
      return { state: equal ? "same" : "other_value", statistics: {} };
    }
    if (apart && same(target.shape, golden.shape) && plain(target.dtype) === plain(golden.dtype)) return { state: "not_compared", statistics: {} };
    const statistics = {};
    let equal = true;
    for (const s of STATISTICS) {
      const a = number(target[s]), b = number(golden[s]);
      if (a === null || b === null) continue;
      if (Object.is(a, b) || a === b) { statistics[s] = { difference: 0, relative: 0 }; continue; }
      equal = false;
      const d = a - b;
      statistics[s] = { difference: d, relative: b !== 0 && Number.isFinite(d / b) ? Math.abs(d / b) : NaN };
    }
    if (!same(target.shape, golden.shape)) return { state: "other_shape", statistics };
    if (plain(target.dtype) !== plain(golden.dtype)) return { state: "other_dtype", statistics };
    const a = checksum(target), b = checksum(golden);
    // Of a piece that was taken out, as a term without its sum, not even the shape is left.
    if (!(target.shape || a || b || Object.keys(statistics).length)) return { state: "not_compared", statistics };
    if (a && b && a !== b) return { state: equal ? "other_checksum" : "differs", statistics };
    if (equal && !(a && b) && (bounds(target) || bounds(golden))) return { state: "not_compared", statistics };
    return { state: equal ? "same" : "differs", statistics };
  }

  // Max and Min alone, as of truth values, say nothing of what lies between them.
  const bounds = (row) => number(row.mean) === null && number(row.norm) === null && number(row.max) !== number(row.min);

  // What stands for the bytes of a tensor, where a dump has it.
  const checksum = (row) => row.md5 ?? row.facts?.digest ?? null;

  const plain = (dtype) => String(dtype ?? "").replace(/^(torch|mindspore|numpy)\./i, "").toLowerCase();
  const shape = (value) => (Array.isArray(value) ? "[" + value.join(", ") + "]" : value === null || value === undefined ? "" : String(value));

  const short = (value) => value.toExponential(1).replace("e+", "e").replace(".0e", "e");

  // 3 figures, or the exponent: "12.4", "3,120", "2.1e+8".
  function multiple(units) {
    if (units >= 1e5) return short(units);
    return units >= 100 ? Kit.count(Math.round(units)) : String(+units.toPrecision(units < 1 ? 1 : 2));
  }

  // "12.4 × round-off", in the reader's language.
  function units(value) {
    if (Number.isNaN(value) || value === null || value === undefined) return Kit.t("graph.units_none");
    if (value === Infinity) return Kit.t("graph.units_bad");
    return value === 0 ? Kit.t("graph.units_equal") : Kit.t("graph.units", multiple(value));
  }

  // Figures of a relative difference: "0.31 %", "1.2e-5 %".
  function percent(relative) {
    if (Number.isNaN(relative)) return "";
    const value = 100 * relative;
    return (value >= 1e4 || value < 1e-3 ? short(value) : String(+value.toPrecision(2))) + " %";
  }

  return { STATISTICS, number, checksum, isTensor, isBad, pairs, difference, plain, shape, multiple, units, percent };
})();
