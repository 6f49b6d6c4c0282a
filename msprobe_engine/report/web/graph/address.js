"use strict";
// What is shown stands in the address (#step=0&rank=1&node=…), so that a link shows it again.
Graph.address = (() => {
  const LONGEST = 1000; // characters of a name in an address; of longer ones only step and rank stand there
  let own = "", asked = null;

  // {step, rank, side, name}; numbers are null and the name "" where the address does not say.
  function parse(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const number = (key) => (/^\d{1,9}$/.test(given.get(key) ?? "") ? Number(given.get(key)) : null);
    return { step: number("step"), rank: number("rank"), side: given.get("side") === "golden" ? 1 : 0, name: given.get("node") ?? "" };
  }

  function text(pair, side, name) {
    const given = new URLSearchParams({ step: pair.step, rank: pair.rank });
    if (side) given.set("side", "golden");
    if (name && name.length <= LONGEST) given.set("node", name);
    return "#" + given.toString();
  }

  // What the address asks for, or null: {index, side, name}. Says when it asks for what is not there.
  function wanted(store) {
    const { step, rank, side, name } = parse(location.hash);
    if (step === null && rank === null && !name) return null;
    const index = store.manifest.pairs.findIndex((pair) => (step === null || pair.step === step) && (rank === null || pair.rank === rank || pair.same.includes(rank)));
    if (index < 0) { Graph.panel.say(Kit.t("graph.address_pair", step ?? "–", rank ?? "–")); return null; }
    asked = { side: store.manifest.comparison ? side : 0, ...(name ? { name } : {}) };
    return { index, ...asked };
  }

  function mount(store) {
    let due = 0;
    const put = () => { clearTimeout(due); due = setTimeout(write, 80); }; // once for all that one step changes
    const write = () => {
      const chosen = store.selection;
      if (!store.pair) return;
      const hash = text(store.pair, chosen ? chosen.side : 0, chosen ? store.sides[chosen.side].name(chosen.node) : "");
      if (hash === location.hash) return;
      own = hash;
      try { history.replaceState(null, "", hash); } catch { /* some browsers count them: the address stays behind for a while */ }
    };
    store.on("open", () => {
      if (asked?.name && store.find(asked.side, asked.name) < 0) Graph.panel.say(Kit.t("graph.address_unknown", Kit.name(asked.name, 120)));
      asked = null;
    });
    store.on("select", put);
    store.on("open", put);
    addEventListener("hashchange", () => {
      const there = location.hash === own ? null : wanted(store);
      if (there) store.open(there.index, there);
    });
  }

  return Object.assign(wanted, { parse, text, mount });
})();
