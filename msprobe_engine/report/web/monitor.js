"use strict";
// The page of a monitored run: island "run" holds what monitor/report_data.py collected. Names from the run are only ever set as text.
(async () => {
  const data = await Kit.json("run"), main = document.getElementById("main"), { make, word, t, number, name, colour } = Kit;
  const steps = data.steps, BOTTOM = 20, TOP = 8;
  const section = (key, ...args) => { const node = make("section", main); word(make("h2", node), key, ...args); return node; };

  // A curve of every line over the steps; logarithmic when all values are positive and span more than a factor of 50.
  function chart(parent, lines, bad, label) {
    const names = Object.keys(lines), all = names.flatMap((n) => lines[n]).filter((v) => v !== null);
    if (!all.length) { word(make("p", parent, null, "soft"), "monitor.no_finite"); return; }
    let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const log = low > 0 && high / low > 50, f = log ? Math.log10 : (v) => v;
    low = f(low); high = f(high);
    const span = high - low || Math.abs(high) || 1, flat = high === low;
    high += span * 0.06; low -= span * (low === 0 && !flat ? 0 : 0.06);
    const left = 58, right = 8;
    const place = (width) => (i) => left + (width - left - right) * (steps.length > 1 ? i / (steps.length - 1) : 0.5);
    let wide = 0;
    Kit.figure(parent, {
      height: 170, label: () => label() + ": " + names.map((n) => name(n, 60)).join(", "),
      draw(pen, width, height) {
        const x = place(width), y = (v) => TOP + (height - TOP - BOTTOM) * (1 - (f(v) - low) / (high - low));
        wide = width;
        pen.strokeStyle = colour("line"); pen.fillStyle = colour("soft"); pen.lineWidth = 1; pen.textAlign = "right";
        const shown = Kit.ticks(low, high, 4, log);
        for (const at of shown.length > 1 ? shown : [low, (low + high) / 2, high]) {
          const py = Math.round(TOP + (height - TOP - BOTTOM) * (1 - (at - low) / (high - low))) + 0.5;
          pen.beginPath(); pen.moveTo(left, py); pen.lineTo(width - right, py); pen.stroke();
          pen.fillText(number(log ? 10 ** at : at), left - 6, py + 4);
        }
        pen.textAlign = "left"; pen.fillText(t("monitor.step_n", steps[0]), left, height - 5);
        pen.textAlign = "right"; pen.fillText(String(data.last), width - right, height - 5);
        pen.fillStyle = colour("ubad"); pen.globalAlpha = 0.22; // a band per step that is not finite, with a line on top that is seen where it is narrow
        const band = Math.max(2, (width - left - right) / steps.length);
        for (const i of bad || []) pen.fillRect(Math.max(left, x(i) - band / 2), TOP, band, height - TOP - BOTTOM);
        pen.globalAlpha = 1;
        for (const i of bad || []) pen.fillRect(Math.max(left, x(i) - band / 2), TOP, band, 3);
        names.forEach((one, k) => {
          pen.strokeStyle = Kit.series(k); pen.lineWidth = 1.7; pen.lineJoin = "round"; pen.beginPath();
          let drawn = false;
          lines[one].forEach((v, i) => {
            if (v === null || (log && v <= 0)) { drawn = false; return; }
            if (drawn) pen.lineTo(x(i), y(v)); else { pen.moveTo(x(i), y(v)); pen.lineTo(x(i) + 0.5, y(v)); }
            drawn = true;
          });
          pen.stroke();
        });
      },
      hover(px) {
        const i = Math.round((px - left) / (wide - left - right) * (steps.length - 1));
        if (i < 0 || i >= steps.length) return null;
        const wrong = bad && bad.includes(i) ? "  " + t("monitor.nan_inf") : "";
        return t("monitor.step_n", steps[i]) + wrong + "\n" + names.map((n) => name(n, 60) + ": " + number(lines[n][i])).join("\n");
      },
    });
    if (names.length > 1) {
      const legend = make("div", parent, null, "legend");
      names.forEach((one, k) => { const item = make("span", legend); make("i", item, null, "s" + (k % 8 + 1)); item.append(name(one, 60)); });
    }
  }

  // Rows of cells; bad[r] lists the columns that are not finite. The scale is logarithmic where values span more than a factor of 20.
  function heat(parent, rows, names, bad, what, where) {
    const all = rows.flat().filter((v) => v !== null), above = all.filter((v) => v > 0);
    const most = all.reduce((a, b) => Math.max(a, b), -Infinity), least = above.reduce((a, b) => Math.min(a, b), Infinity);
    const log = above.length > 0 && most / least > 20, f = (v) => log ? Math.log10(Math.max(v, 1e-300)) : v;
    const good = log ? above : all, low = good.length ? f(good.reduce((a, b) => Math.min(a, b))) : 0, high = good.length ? f(most) : 1;
    const tall = Math.max(3, Math.min(16, 420 / names.length));
    let wide = 1, left = 150;
    Kit.figure(parent, {
      height: tall * names.length + 18, label: () => what() + ": " + t("monitor.n_rows", names.length),
      draw(pen, width, height) {
        left = Math.min(150, width * 0.35); wide = (width - left - 8) / Math.max(1, rows[0].length);
        const room = Math.max(6, Math.floor(left / 6.2));
        names.forEach((one, r) => {
          rows[r].forEach((v, c) => {
            const wrong = bad && bad[r].includes(c);
            if (v === null && !wrong) return;
            pen.fillStyle = wrong ? colour("ubad") : Kit.shade(high > low ? (f(v) - low) / (high - low) : 0.5);
            pen.fillRect(left + c * wide, r * tall, Math.max(1, Math.ceil(wide)), Math.ceil(tall) - (tall > 8 ? 1 : 0));
          });
          if (tall >= 9 || r % Math.ceil(9 / tall) === 0) {
            const shown = name(one);
            pen.fillStyle = colour("soft"); pen.textAlign = "right";
            pen.fillText(shown.length > room ? "…" + shown.slice(1 - room) : shown, left - 6, r * tall + Math.min(tall, 12));
          }
        });
        pen.fillStyle = colour("soft"); pen.textAlign = "left";
        const note = good.length ? t("monitor.scale_note", what(), number(log ? 10 ** low : low), number(log ? 10 ** high : high)) : what();
        pen.fillText(note, Math.max(0, Math.min(left, width - 4 - pen.measureText(note).width)), height - 4);
      },
      hover(px, py) {
        const r = Math.floor(py / tall), c = Math.floor((px - left) / wide);
        if (r < 0 || r >= names.length || c < 0 || c >= rows[r].length) return null;
        return name(names[r], 300) + "\n" + where(c) + "\n" + (bad && bad[r].includes(c) ? t("monitor.nan_inf") : number(rows[r][c]));
      },
    });
  }

  function timeline(parent) {
    const rows = data.timeline;
    let width = 0, left = 190;
    const x = (i) => left + (width - left - 12) * (steps.length > 1 ? i / (steps.length - 1) : 0.5);
    Kit.figure(parent, {
      height: rows.length * 22 + 20, label: () => t("monitor.timeline_label", rows.length),
      draw(pen, given, height) {
        width = given; left = Math.min(190, width * 0.4);
        rows.forEach((row, r) => {
          const y = r * 22 + 11;
          pen.strokeStyle = colour("line"); pen.beginPath(); pen.moveTo(left, y + 0.5); pen.lineTo(width - 10, y + 0.5); pen.stroke();
          pen.fillStyle = colour("fg"); pen.textAlign = "right"; pen.fillText(name(row.rule, 40), left - 10, y + 4);
          const critical = row.severity === "critical";
          pen.fillStyle = colour(critical ? "bad" : "warn");
          for (const [i, n] of row.marks) { // critical: a square, so that the colour is not needed
            const size = Math.min(8, 3 + Math.log2(n));
            pen.beginPath();
            if (critical) pen.rect(x(i) - size, y - size, 2 * size, 2 * size); else pen.arc(x(i), y, size, 0, 7);
            pen.fill();
          }
        });
        pen.fillStyle = colour("soft"); pen.textAlign = "left"; pen.fillText(t("monitor.step_n", data.first), left, height - 4);
        pen.textAlign = "right"; pen.fillText(String(data.last), width - 10, height - 4);
      },
      hover(px, py) {
        const row = rows[Math.floor(py / 22)];
        if (!row) return null;
        const near = row.marks.reduce((a, m) => Math.abs(x(m[0]) - px) < Math.abs(x(a[0]) - px) ? m : a, row.marks[0]);
        return name(row.rule) + " (" + name(row.severity) + ")\n" + t("monitor.alerts_at", steps[near[0]], near[1]);
      },
    });
  }

  function family(parent, title) {
    const pictures = data.pictures.filter((p) => p.family === title), card = make("div", parent, null, "card wide");
    const head = make("div", card, null, "tools");
    make("h3", head, name(title));
    const choice = make("select", head), place = make("div", card, null, "grid close");
    choice.dataset.tLabel = "monitor.statistic";
    pictures.forEach((p, i) => { make("option", choice, name(p.statistic)).value = i; });
    const draw = () => {
      const p = pictures[choice.value];
      place.replaceChildren();
      const a = make("div", place), b = make("div", place);
      word(make("p", a, null, "soft"), "monitor.per_rank"); chart(a, p.lines, [...new Set(p.bad.flat())], () => t("monitor.per_rank"));
      word(make("p", b, null, "soft"), "monitor.over_steps"); heat(b, p.top, p.layers, p.bad, () => name(p.statistic), (c) => t("monitor.step_n", steps[c]));
      if (p.apart.length) {
        const c = make("div", place);
        word(make("p", c, null, "soft"), "monitor.over_ranks");
        heat(c, p.apart, p.layers, p.apart.map((row) => row.flatMap((v, i) => v === null ? [i] : [])), () => t("monitor.distance"), (k) => t("monitor.rank_n", p.ranks[k]));
      }
    };
    choice.onchange = draw; draw();
  }

  const families = [...new Set(data.pictures.map((p) => p.family))];
  const alerts = Object.values(data.rules).reduce((a, b) => a + b, 0), tiles = make("div", main, null, "tiles");
  for (const [key, value] of [["steps", data.first + " – " + data.last], ["steps_seen", data.count], ["ranks", data.ranks.length], ["alerts", alerts], ["families", families.length]]) {
    const tile = make("div", tiles, null, "tile"); make("b", tile, value); word(make("span", tile), "monitor." + key);
  }

  const first = section("monitor.alerts_title");
  if (data.timeline.length) timeline(first); else word(make("p", first, null, "soft"), "monitor.no_alert");
  if (data.alerts.length) {
    const tone = (row) => row[5] === "critical" ? "bad" : "warn";
    const columns = ["step", "rank", "rule", "what", "message"].map((key, i) => ({ key: "monitor." + key, kind: i < 2 ? "number" : i === 3 ? "name" : i === 4 ? "grow" : "text" }));
    Kit.table(first, { columns, tone, page: 100, search: data.alerts.length > 12, choice: Object.keys(data.rules).length > 1 ? 2 : null, rows: data.alerts.map((a) => [a.step, a.rank, a.rule, a.kind + " " + a.name, a.message, a.severity]) });
    if (data.alerts_left_out) word(make("p", first, null, "soft"), "monitor.left_out", data.alerts_left_out);
    const known = data.meanings.filter((m) => m.meaning || m.next);
    if (known.length) {
      const node = section("monitor.meanings");
      Kit.table(node, { columns: [["rule"], ["alerts", "number"], ["meaning"], ["next"]].map(([key, kind]) => ({ key: "monitor." + key, kind })), rows: known.map((m) => [m.rule, data.rules[m.rule], m.meaning, m.next]) });
    }
  }
  if (data.worst.length) {
    const node = section("monitor.worst");
    word(make("p", node, null, "soft"), "monitor.worst_note");
    const step = (v) => v === null || v === undefined ? "" : t("monitor.step_n", v);
    const columns = [
      { key: "monitor.layer", kind: "name" }, { key: "monitor.family" }, { key: "monitor.first_bad", show: step }, { key: "monitor.jump", kind: "number", show: (v, row) => (row[8] ? "1/" : "") + number(v) },
      { key: "monitor.at_step", kind: "number", show: (v) => v ?? "" }, { key: "monitor.rank_apart", kind: "number", show: (v) => v ?? "" },
      { key: "monitor.factor", kind: "number", show: (v, row) => row[5] === null ? "" : v === null ? t("monitor.not_finite") : number(v) }, { key: "monitor.alerts", kind: "number" },
    ];
    Kit.table(node, { columns, tone: (row) => row[2] === null ? "" : "bad", rows: data.worst.map((w) => [w.layer, w.family, w.first_bad, w.jump, w.jump_step, w.rank, w.rank_factor, w.alerts, w.below]) });
  }
  if (data.scalars.length) {
    const grid = make("div", section("monitor.numbers"), null, "grid");
    data.scalars.forEach((s) => { const card = make("div", grid, null, "card"); make("h3", card, name(s.name)); chart(card, s.lines, s.bad, () => name(s.name)); });
  }
  const pictures = section("monitor.families_title"), grid = make("div", pictures, null, "grid");
  word(make("p", pictures, null, "soft"), "monitor.hover");
  pictures.append(grid);
  families.forEach((one) => family(grid, one));
  if (!families.length) word(make("p", grid, null, "soft"), "monitor.only_numbers");
  const problems = [...data.missing.map((what) => [what, 1]), ...Object.entries(data.problems)];
  if (problems.length) Kit.table(section("monitor.unread"), { columns: [{ key: "monitor.what" }, { key: "monitor.how_often", kind: "number" }], rows: problems });
  Kit.apply(main);
  document.body.dataset.done = "yes";
})();
