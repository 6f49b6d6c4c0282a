"use strict";
// Draws the page from the JSON in #data. Names from the run are only ever set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps, colors = ["#1f77b4", "#e4862d", "#2ca02c", "#d62728", "#9467bd", "#8c6d31", "#e377c2", "#17a2b8"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tip = document.getElementById("tip");

function make(tag, parent, text, cls) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = String(text);
  if (cls) node.className = cls;
  if (parent) parent.appendChild(node);
  return node;
}
const show = (v) => v === null || v === undefined ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(5));
function say(event, text) {
  tip.textContent = text; tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
const hush = () => { tip.style.display = "none"; };

function canvas(parent, height) {
  const node = make("canvas", parent), width = Math.max(300, parent.clientWidth - 22), scale = devicePixelRatio || 1;
  node.width = width * scale; node.height = height * scale; node.style.height = height + "px";
  const pen = node.getContext("2d"); pen.scale(scale, scale); pen.font = "11px system-ui, sans-serif";
  return { node, pen, width, height };
}

// A curve of every line over the steps; logarithmic when all values are positive and span more than a factor of 50.
function chart(parent, lines, bad) {
  const names = Object.keys(lines), all = names.flatMap((n) => lines[n]).filter((v) => v !== null);
  if (!all.length) { make("p", parent, "no finite value"); return; }
  let low = Math.min(...all), high = Math.max(...all);
  const log = low > 0 && high / low > 50, f = log ? Math.log10 : (v) => v;
  low = f(low); high = f(high);
  if (high === low) { high += Math.abs(high) * 0.05 || 1; low -= Math.abs(low) * 0.05 || 1; }
  const { node, pen, width, height } = canvas(parent, 170), left = 58, right = 8, top = 8, bottom = 20;
  const x = (i) => left + (width - left - right) * (steps.length > 1 ? i / (steps.length - 1) : 0.5);
  const y = (v) => top + (height - top - bottom) * (1 - (f(v) - low) / (high - low));
  pen.strokeStyle = css("--line"); pen.fillStyle = css("--soft"); pen.lineWidth = 1; pen.textAlign = "right";
  for (let k = 0; k <= 4; k++) {
    const at = low + (high - low) * k / 4, py = top + (height - top - bottom) * (1 - k / 4);
    pen.beginPath(); pen.moveTo(left, py); pen.lineTo(width - right, py); pen.stroke();
    pen.fillText(show(log ? 10 ** at : at), left - 6, py + 4);
  }
  pen.textAlign = "left"; pen.fillText("step " + steps[0], left, height - 5);
  pen.textAlign = "right"; pen.fillText(String(data.last), width - right, height - 5);
  pen.fillStyle = css("--bad");
  for (const i of bad || []) pen.fillRect(x(i) - 1, top, 2, height - top - bottom);
  names.forEach((name, k) => {
    pen.strokeStyle = colors[k % colors.length]; pen.lineWidth = 1.6; pen.beginPath();
    let on = false;
    lines[name].forEach((v, i) => {
      if (v === null || (log && v <= 0)) { on = false; return; }
      if (on) pen.lineTo(x(i), y(v)); else { pen.moveTo(x(i), y(v)); pen.lineTo(x(i) + 0.5, y(v)); }
      on = true;
    });
    pen.stroke();
  });
  if (names.length > 1) {
    const legend = make("div", parent, null, "legend");
    names.forEach((name, k) => { const item = make("span", legend); make("i", item).style.background = colors[k % colors.length]; item.append(name); });
  }
  node.onmousemove = (e) => {
    const i = Math.round((e.offsetX - left) / (width - left - right) * (steps.length - 1));
    if (i < 0 || i >= steps.length) return hush();
    say(e, "step " + steps[i] + (bad && bad.includes(i) ? "  NaN or Inf" : "") + "\n" + names.map((n) => n + ": " + show(lines[n][i])).join("\n"));
  };
  node.onmouseleave = hush;
}

function shade(t) { // dark blue - teal - yellow, t in 0..1
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], at = Math.min(3.999, Math.max(0, t) * 4), i = Math.floor(at), w = at - i;
  return "rgb(" + stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * w)).join(",") + ")";
}

// Rows of cells; bad[r] lists the columns that are not finite. scale: log or linear.
function heat(parent, rows, names, bad, label, where) {
  const all = rows.flat().filter((v) => v !== null);
  const log = all.length && Math.max(...all) / Math.min(...all.filter((v) => v > 0)) > 20, f = (v) => log ? Math.log10(Math.max(v, 1e-300)) : v;
  const good = all.filter((v) => !log || v > 0).map(f), low = good.length ? Math.min(...good) : 0, high = good.length ? Math.max(...good) : 1;
  const tall = Math.max(3, Math.min(16, 420 / names.length)), left = 150;
  const { node, pen, width } = canvas(parent, tall * names.length + 18), wide = (width - left - 8) / Math.max(1, rows[0].length);
  names.forEach((name, r) => {
    rows[r].forEach((v, c) => {
      const wrong = bad && bad[r].includes(c);
      if (v === null && !wrong) return;
      pen.fillStyle = wrong ? css("--bad") : shade(high > low ? (f(v) - low) / (high - low) : 0.5);
      pen.fillRect(left + c * wide, r * tall, Math.ceil(wide), Math.ceil(tall));
    });
    if (tall >= 9 || r % Math.ceil(9 / tall) === 0) {
      pen.fillStyle = css("--soft"); pen.textAlign = "right";
      pen.fillText(name.length > 24 ? "…" + name.slice(-23) : name, left - 6, r * tall + Math.min(tall, 11));
    }
  });
  pen.fillStyle = css("--soft"); pen.textAlign = "left";
  const note = label + (good.length ? ", " + show(log ? 10 ** low : low) + " to " + show(log ? 10 ** high : high) + "; red: NaN, Inf" : "");
  pen.fillText(note, Math.max(0, Math.min(left, width - 4 - pen.measureText(note).width)), tall * names.length + 13);
  node.onmousemove = (e) => {
    const r = Math.floor(e.offsetY / tall), c = Math.floor((e.offsetX - left) / wide);
    if (r < 0 || r >= names.length || c < 0 || c >= rows[r].length) return hush();
    say(e, names[r] + "\n" + where(c) + "\n" + (bad && bad[r].includes(c) ? "NaN or Inf" : show(rows[r][c])));
  };
  node.onmouseleave = hush;
}

function table(parent, head, rows) {
  const node = make("table", parent), top = make("tr", make("thead", node)), body = make("tbody", node);
  head.forEach((text) => make("th", top, text));
  rows.forEach((row) => { const line = make("tr", body); row.forEach((cell) => Array.isArray(cell) ? make("td", line, cell[0], cell[1]) : make("td", line, cell)); });
}

function timeline(parent) {
  const rows = data.timeline;
  if (!rows.length) { make("p", parent, "No alert was raised."); return; }
  const left = 190, { node, pen, width } = canvas(parent, rows.length * 20 + 20), x = (i) => left + (width - left - 10) * (steps.length > 1 ? i / (steps.length - 1) : 0.5);
  rows.forEach((row, r) => {
    pen.strokeStyle = css("--line"); pen.beginPath(); pen.moveTo(left, r * 20 + 10); pen.lineTo(width - 10, r * 20 + 10); pen.stroke();
    pen.fillStyle = css("--soft"); pen.textAlign = "right"; pen.fillText(row.rule, left - 10, r * 20 + 14);
    pen.fillStyle = css(row.severity === "critical" ? "--bad" : "--warn");
    for (const [i, n] of row.marks) { pen.beginPath(); pen.arc(x(i), r * 20 + 10, Math.min(8, 3 + Math.log2(n)), 0, 7); pen.fill(); }
  });
  pen.fillStyle = css("--soft"); pen.textAlign = "left"; pen.fillText("step " + data.first, left, rows.length * 20 + 14);
  pen.textAlign = "right"; pen.fillText(String(data.last), width - 10, rows.length * 20 + 14);
  node.onmousemove = (e) => {
    const row = rows[Math.floor(e.offsetY / 20)];
    if (!row) return hush();
    const near = row.marks.reduce((a, m) => Math.abs(x(m[0]) - e.offsetX) < Math.abs(x(a[0]) - e.offsetX) ? m : a, row.marks[0]);
    say(e, row.rule + " (" + row.severity + ")\nstep " + steps[near[0]] + ": " + near[1] + " alert(s)");
  };
  node.onmouseleave = hush;
}

function family(parent, name) {
  const pictures = data.pictures.filter((p) => p.family === name), card = make("div", parent, null, "card wide"), head = make("h3", card, name + "  ");
  const choice = make("select", head), place = make("div", card, null, "grid");
  pictures.forEach((p, i) => { make("option", choice, p.statistic).value = i; });
  const draw = () => {
    const p = pictures[choice.value];
    place.replaceChildren();
    const a = make("div", place, null, "card"), b = make("div", place, null, "card");
    make("p", a, "all layers together, per rank"); chart(a, p.lines);
    make("p", b, "layers over steps, largest rank"); heat(b, p.top, p.layers, p.bad, p.statistic, (c) => "step " + steps[c]);
    if (p.apart.length) {
      const c = make("div", place, null, "card");
      make("p", c, "layers over ranks: largest distance from the other ranks, as a power of ten");
      heat(c, p.apart, p.layers, p.apart.map((row) => row.flatMap((v, i) => v === null ? [i] : [])), "distance", (k) => "rank " + p.ranks[k]);
    }
  };
  choice.onchange = draw; draw();
}

const page = document.getElementById("page"), tiles = make("div", page, null, "tiles");
const alerts = Object.values(data.rules).reduce((a, b) => a + b, 0);
for (const [name, value] of [["steps", data.first + " to " + data.last + " (" + data.count + ")"], ["ranks", data.ranks.length], ["alerts", alerts], ["families", new Set(data.pictures.map((p) => p.family)).size]]) {
  const tile = make("div", tiles, null, "tile"); make("b", tile, value); make("span", tile, name, "soft");
}
make("h2", page, "Alerts"); timeline(make("div", page, null, "card"));
if (data.alerts.length) {
  const card = make("div", page, null, "card scroll");
  table(card, ["step", "rank", "rule", "what", "message"], data.alerts.map((a) => [[a.step, "short"], [a.rank, "short"], [a.rule, "short " + a.severity], a.kind + " " + a.name, a.message]));
  if (data.alerts_left_out) make("p", card, data.alerts_left_out + " more alerts are in alerts.jsonl");
  const known = data.meanings.filter((m) => m.meaning || m.next);
  if (known.length) table(make("div", page, null, "card"), ["rule", "alerts", "what it usually means", "what to do next"], known.map((m) => [[m.rule, "short"], data.rules[m.rule], m.meaning, m.next]));
}
if (data.scalars.length) {
  make("h2", page, "Numbers of the step"); const grid = make("div", page, null, "grid");
  data.scalars.forEach((s) => { const card = make("div", grid, null, "card"); make("h3", card, s.name); chart(card, s.lines, s.bad); });
}
if (data.worst.length) {
  make("h2", page, "Layers that stand out"); const card = make("div", page, null, "card scroll");
  make("p", card, "First those with NaN or Inf, then by the largest factor over their own median, or between one rank and the median of all. 1/5 is a fall to a fifth.");
  table(card, ["layer", "family", "first NaN or Inf", "largest jump", "at step", "rank apart", "by a factor", "alerts"], data.worst.map((w) =>
    [w.layer, w.family, w.first_bad === null ? "" : ["step " + w.first_bad, "critical"], (w.below ? "1/" : "") + show(w.jump), w.jump_step, w.rank, w.rank === null ? "" : w.rank_factor === null ? "not finite" : show(w.rank_factor), w.alerts]));
}
make("h2", page, "Families"); const families = make("div", page, null, "grid");
[...new Set(data.pictures.map((p) => p.family))].forEach((name) => family(families, name));
if (!data.pictures.length) make("p", families, "no tensors were written, only numbers of steps");
const problems = Object.entries(data.problems);
if (problems.length) { make("h2", page, "What could not be read"); table(make("div", page, null, "card"), ["what", "how often"], problems); }
document.body.dataset.done = "yes";
