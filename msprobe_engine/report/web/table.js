"use strict";
// The page of one comparison table: the rows of island "table", searched, sorted and chosen by verdict; a row that is chosen is shown whole.
(async () => {
  const found = await Kit.json("table"), main = document.getElementById("main"), { make, name } = Kit;
  const OFF = ["error", "No", "Warning", "Different"];
  const tone = found.verdict === null ? () => "" : (row) => OFF.includes(row[1]) ? "bad" : row[1] === "warning" ? "warn" : "";
  // The first columns of ours in both languages; those of the existing tool (--compat) have other names.
  const WORDS = { "Name": "table.name", "golden Name": "table.golden_name", "Result": "table.result", "Err message": "table.why", "Stack Info": "table.stack" };
  const card = make("div", main, null, "card"), whole = make("section", main);
  whole.hidden = true;
  const numeric = (i) => found.rows.some((row) => Kit.value(row[i]) !== null) && found.rows.every((row) => Kit.value(row[i]) !== null || ["", "N/A", "NaN"].includes(row[i]));
  // The verdict and its reason stand beside the name: the table is wide, and they are what the reader looks for.
  const places = found.columns.map((_, i) => i), at = found.verdict, said = found.columns.indexOf("Err_message");
  const first = [at, found.rows.some((row) => row[said] !== "" && row[said] !== "N/A") ? said : -1].filter((i) => i !== null && i > 0);
  places.splice(1, places.length, ...first, ...places.slice(1).filter((i) => !first.includes(i)));
  const columns = places.map((i) => ({ title: found.titles[i], key: WORDS[found.titles[i]], kind: i === at ? "text" : numeric(i) ? "number" : i < 2 ? "name" : "text", show: (cell) => name(Kit.said(cell)), badge: i === at ? (_, row) => tone(row) : null }));
  const all = found.rows.map((row) => places.map((i) => row[i]));
  const rows = [...all.filter((row) => tone(row)), ...all.filter((row) => !tone(row))];  // what differs first, else in the order of the calls
  const pick = (row) => {
    whole.replaceChildren(); whole.hidden = false;
    make("h2", whole, name(row[0]));
    const list = make("dl", whole, null, "facts many");
    columns.forEach(({ title, key }, i) => {
      if (row[i] === "") return;
      const line = make("div", list);
      const term = make("dt", line, name(title));
      if (key) Kit.word(term, key);
      make("dd", line, name(Kit.said(row[i]), 20000));
    });
    whole.scrollIntoView({ block: "nearest" });
  };
  Kit.table(card, { columns, rows, tone, search: true, choice: at === null ? null : 1, lines: true, pick, label: document.title });
  document.body.dataset.done = "yes";
})();
