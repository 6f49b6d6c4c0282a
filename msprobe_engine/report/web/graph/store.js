'use strict';
// The store: what is shown of the graphs, what is open, what is chosen. Every panel reads from here and changes only through here; whoever
// changes something fires an event, and every panel draws itself again from the store. No panel calls another panel.
//
// ---- The page ------------------------------------------------------------------------------------------------------------------------
//   #graph           the whole application (grid); inside it
//   Graph.panels.push((store) => ...)   a panel: called once, when the places below are there and the manifest is read
//   Graph.address(store) -> {index, side, name} or null, when a panel defines it: what a link into the page wants to see first
//   #graph-bar       above everything: pairs of step and rank, search, filters                                      (panels)
//   #graph-tree      left: the hierarchy as a tree grid                                                              (tree.js)
//   #graph-canvas    centre: nested boxes                                                                            (canvas.js)
//   #graph-details   right: what is known of the chosen node                                                         (panels)
//   #graph-status    below everything: breadcrumbs, counts, legend                                                   (panels)
//
// ---- The face ------------------------------------------------------------------------------------------------------------------------
//   Graph.store.manifest      {comparison: bool, task, title, target, golden (paths as text), worst (texts ...), pairs: [Pair],
//                              map: where all ranks stand, null where each has a graph: {axes: [name], ranks: [number], places: per axis,
//                              of each rank}}
//     Pair                    {step, rank, nodes: [target, golden], microSteps, suspect (node of the target or -1), suspectText,
//                              suspectName, worst (largest units), unmatched: [target, golden], nonfinite (nodes), problems: [text],
//                              same: ranks that hold the same and have no graph of their own}
//   Graph.store.pairIndex     index of the pair that is shown; .pair that Pair
//   await store.open(i, {side, name | node, keep})   show another pair; selects a node (else the suspect; keep: the one of the same name)
//   store.pairOf(step, rank)  its index, or that of the rank that holds the same; -1
//   store.sides               [target] or [target, golden]: Columns, below
//
//   store.selection           {side, node} or null;  store.select(side, node, {reveal = true, centre = true})   select(0, -1) clears it
//   store.back(), store.forward()   the way through selections
//   store.hovered             {side, node} or null;  store.hover(side, node)
//   store.partner(side, node) node on the other side, -1
//   store.reveal(side, node)  open all that encloses it
//   store.isOpen(side, node), store.setOpen(side, node, open), store.toggle(side, node)      the partner opens and closes with it
//   store.openBelow(side, node, levels = 1), store.closeBelow(side, node)
//   store.openInTree(side, node), store.setOpenInTree(side, node, open)   the same for a row of the tree, which a filter opens
//   store.rows(side)          Int32Array: nodes of the tree from top to bottom, the closed left out (and the filtered)
//   store.rowOf(side, node)   its place in rows(side), -1 when it is not there
//   store.treeSide            the side whose tree is shown; store.showTree(side)
//   store.filter(test)        test(columns, node, side) -> bool, or null: all;  store.matches(side): Uint8Array or null,
//   store.matchCount          [number on each side] while a filter stands, else null
//   store.path                null or {side, nodes: Int32Array, edges: Int32Array of pairs, kind: 'nonfinite'|'difference'}  (path.js)
//   store.showPath(bool, {open = true})   open: with all that encloses its nodes, when they are few
//   await store.details(side, node)   {inputs: [Row], outputs: [Row], metrics: {place: {column: value}}, notes: [text]}
//                                     metrics: only of saved tensors (task 'all'); of statistics and md5 both sides' rows say it all
//     Row                     {place: 'input.0', dtype, shape: [..]|text|null, max, min, mean, norm (number or 'nan', 'inf', '-inf', null),
//                              partner: place on the other side or null, and where known md5, value, requires_grad, nans, infs, ...}
//   await store.stack(side, node)     lines, innermost first
//   await store.stacks(side)          {lines: [text], stacks: [[line number]]}; columns.stack[node] is a position in stacks
//   store.link(side, node)            null or {kind: 'send'|'receive'|'send_receive', nodes: [{rank, name, level, kind}]}
//   store.follow(side, node, rank)    open the pair of that rank (same step) at the linked node
//   store.find(side, name)            node of that name, -1
//   store.on(event, f) -> off()       'open' another pair is shown; 'rows' something opened, closed or was filtered; 'select', 'hover',
//                                     'centre' ({side, node}: bring it into view), 'filter', 'side', 'path', 'busy' (true|false)
//
//   Columns: see columns.js
// --------------------------------------------------------------------------------------------------------------------------------------
Graph.store = (() => {
  const listeners = new Map();
  const cache = new Map(); // island -> promise of what it holds; the columns of two pairs, and some tens of blocks of details
  const indices = new Map(); // '{step} {rank}' -> index of the pair
  let opened = []; // per side, Uint8Array: is the node open?
  let shown = []; // per side, rows of the tree, or null when they have to be found again
  let matched = null; // per side, what a filter left
  let kept = null; // and what encloses it
  let shut = new Set(); // of those, what was closed in the tree while the filter stands: '{side} {node}'
  let trail = [];
  let at = -1;
  let opening = 0;

  const store = {
    manifest: null,
    pairIndex: -1,
    pair: null,
    sides: [],
    selection: null,
    hovered: null,
    treeSide: 0,
    matchCount: null,
    path: null,
    on,
    start,
    open,
    pairOf: (step, rank) => indices.get(`${step} ${rank}`) ?? -1,
    select,
    back: () => walk(-1),
    forward: () => walk(1),
    hover,
    partner,
    reveal,
    isOpen: (side, node) => opened[side][node] === 1,
    setOpen,
    toggle: (side, node) => setOpen(side, node, !opened[side][node]),
    openBelow,
    closeBelow,
    openInTree,
    setOpenInTree,
    rows,
    rowOf,
    showTree,
    filter,
    matches: (side) => (matched ? matched[side] : null),
    kept: (side) => (kept ? kept[side] : null),
    showPath,
    details,
    stacks,
    stack,
    link,
    follow,
    find,
  };

  function on(event, f) {
    if (!listeners.has(event)) listeners.set(event, new Set());
    listeners.get(event).add(f);
    return () => listeners.get(event).delete(f);
  }

  function fire(event, detail) {
    for (const f of listeners.get(event) || []) f(detail);
  }

  async function start() {
    store.manifest = JSON.parse(new TextDecoder().decode(await Kit.data('graph-manifest')));
    for (const [index, pair] of store.manifest.pairs.entries()) {
      pair.same = numbers(pair.same);
      for (const rank of [pair.rank, ...pair.same]) indices.set(`${pair.step} ${rank}`, index);
    }
  }

  // ["0-2", "8"] as [0, 1, 2, 8].
  function numbers(ranges) {
    return ranges.flatMap((one) => {
      const [first, last = first] = one.split('-').map(Number);
      return Array.from({ length: last - first + 1 }, (_, i) => first + i);
    });
  }

  // ---- Islands ----

  function island(id, read, most) {
    let found = cache.get(id);
    if (found) cache.delete(id);
    else {
      found = Kit.data(id).then(read);
      found.finally(() => Kit.drop(id)); // kept here, read; not there too, inflated
    }
    cache.set(id, found); // last in order: used last
    const kind = id.slice(id.lastIndexOf('-') + 1).replace(/\d+$/, '');
    const alike = [...cache.keys()].filter((key) => key.slice(key.lastIndexOf('-') + 1).replace(/\d+$/, '') === kind);
    for (const old of alike.slice(0, Math.max(0, alike.length - most))) cache.delete(old);
    return found;
  }

  const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
  const prefix = (side) => `graph-${store.pairIndex}-${side}`;

  async function details(side, node) {
    const size = store.manifest.block;
    const block = await island(`${prefix(side)}-details${Math.floor(node / size)}`, json, 40);
    const [inputs, outputs, metrics, notes] = block.nodes[node % size] || [[], [], {}, []];
    const row = ([place, dtype, shape, max, min, mean, norm, other]) => ({
      place: block.texts[place],
      dtype: dtype < 0 ? null : block.texts[dtype],
      shape: shape < 0 ? null : block.shapes[shape],
      max,
      min,
      mean,
      norm,
      partner: block.texts[place], // the same place, unless the row says another
      ...other,
    });
    return { inputs: inputs.map(row), outputs: outputs.map(row), metrics, notes };
  }

  function stacks(side) {
    return island(`${prefix(side)}-stacks`, json, 4);
  }

  async function stack(side, node) {
    const number = store.sides[side].stack[node];
    if (number < 0) return [];
    const { lines, stacks: all } = await stacks(side);
    return all[number].map((line) => lines[line]);
  }

  // ---- Pairs ----

  async function open(index, { side = 0, name = null, node = -1, keep = false } = {}) {
    const ticket = ++opening; // of two openings on the way, the later one counts
    const before = keep && store.selection ? { side: store.selection.side, name: store.sides[store.selection.side].name(store.selection.node) } : null;
    fire('busy', true);
    try {
      const read = (bytes) => new Graph.Columns(bytes);
      const pair = store.manifest.pairs[index];
      const sides = await Promise.all(pair.nodes.map((_, s) => island(`graph-${index}-${s}-columns`, read, 4)));
      if (ticket !== opening) return;
      store.pairIndex = index;
      store.pair = pair;
      store.sides = sides;
      store.selection = store.hovered = store.path = null;
      store.treeSide = 0;
      matched = kept = store.matchCount = null;
      trail = [];
      at = -1;
      opened = sides.map((columns) => new Uint8Array(columns.count));
      shown = sides.map(() => null);
      for (const [s, columns] of sides.entries()) {
        opened[s][0] = 1;
        for (let i = 0; i >= 0; i = only(columns, i)) opened[s][i] = 1;
      }
      if (pair.suspect >= 0) {
        for (let i = pair.suspect; i >= 0; i = sides[0].parent[i]) sides[0].flags[i] |= Graph.FLAG.SUSPECT_BELOW;
      }
      fire('open');
      let wanted = node >= 0 ? { side, node } : null;
      if (!wanted && (name !== null || before)) {
        const place = name !== null ? { side, name } : before;
        wanted = { side: place.side, node: place.side < sides.length ? find(place.side, place.name) : -1 };
      }
      if (!wanted || wanted.node < 0) wanted = { side: 0, node: pair.suspect };
      if (wanted.node >= 0) select(wanted.side, wanted.node);
      else fire('centre', { side: 0, node: 0 });
      // NaN and Inf are followed at once, on what is open; a difference, which goes everywhere, when it is asked for.
      if (pair.suspect >= 0 && sides[0].flags[pair.suspect] & Graph.FLAG.NONFINITE_OUT) showPath(true, { open: false });
    } finally {
      if (ticket === opening) fire('busy', false);
    }
  }

  // The only child of a node: as long as there is only one, opening it shows what one wants to see.
  function only(columns, i) {
    const first = i + 1;
    return columns.size[i] > 1 && columns.size[first] === columns.size[i] - 1 && columns.size[first] > 1 ? first : -1;
  }

  function link(side, node) {
    const found = store.sides[side].links[node];
    if (!found) return null;
    const kinds = new Set(found.map((one) => one[3]));
    const nodes = found.flatMap(([ranges, name, level, kind]) => numbers(ranges).map((rank) => ({ rank, name, level, kind })));
    return { kind: kinds.size === 1 ? found[0][3] : 'send_receive', nodes };
  }

  async function follow(side, node, rank) {
    const other = link(side, node)?.nodes.find((one) => one.rank === rank);
    const index = other ? store.pairOf(store.pair.step, rank) : -1;
    if (index >= 0) await open(index, { side, name: other.name });
    return index >= 0;
  }

  function find(side, name) {
    const columns = store.sides[side];
    for (let place = columns.names.indexOf(name); place >= 0; place = columns.names.indexOf(name, place + 1)) {
      const node = columns.nodeAt(place);
      if (columns.start(node) === place && columns.end(node) === place + name.length) return node;
    }
    return -1;
  }

  // ---- Selection ----

  function partner(side, node) {
    return store.sides.length === 2 && node >= 0 ? store.sides[side].partner[node] : -1;
  }

  function select(side, node, { reveal: show = true, centre = true, keepTrail = false } = {}) {
    if (node < 0) {
      store.selection = null;
      fire('select');
      return;
    }
    if (show) reveal(side, node);
    const known = store.selection && store.selection.side === side && store.selection.node === node;
    if (!known) {
      store.selection = { side, node };
      if (!keepTrail) {
        trail = trail.slice(Math.max(0, at - 200), at + 1).concat({ side, node });
        at = trail.length - 1;
      }
      fire('select');
    }
    if (centre) fire('centre', { side, node });
  }

  function walk(by) {
    if (!trail[at + by]) return;
    at += by;
    select(trail[at].side, trail[at].node, { keepTrail: true });
  }

  function hover(side, node) {
    const before = store.hovered;
    if (before ? before.side === side && before.node === node : node < 0) return;
    store.hovered = node < 0 ? null : { side, node };
    fire('hover');
  }

  // ---- Open and closed ----

  function changed() {
    shown = shown.map(() => null);
    fire('rows');
  }

  function mark(side, node, open) {
    if (store.sides[side].size[node] === 1) return;
    opened[side][node] = open ? 1 : 0;
    const other = partner(side, node);
    if (other >= 0 && store.sides[1 - side].size[other] > 1) opened[1 - side][other] = open ? 1 : 0;
  }

  function setOpen(side, node, open) {
    if (node === 0 && !open) return;
    if (!!opened[side][node] === !!open) return;
    mark(side, node, open);
    if (open) for (let i = only(store.sides[side], node); i >= 0; i = only(store.sides[side], i)) mark(side, i, true);
    changed();
  }

  function openBelow(side, node, levels = 1) {
    const columns = store.sides[side];
    const deepest = columns.depth[node] + levels;
    for (let i = node, end = node + columns.size[node]; i < end; i++) if (columns.depth[i] < deepest) mark(side, i, true);
    changed();
  }

  function closeBelow(side, node) {
    const columns = store.sides[side];
    for (let i = node, end = node + columns.size[node]; i < end; i++) if (i > 0) mark(side, i, false);
    changed();
  }

  // While a filter stands the tree shows all that it left, whatever is open elsewhere, until it is closed there.
  function openInTree(side, node) {
    return kept ? kept[side][node] === 1 && !shut.has(`${side} ${node}`) : opened[side][node] === 1;
  }

  function setOpenInTree(side, node, open) {
    if (!kept) return setOpen(side, node, open);
    if (open) shut.delete(`${side} ${node}`);
    else if (node > 0) shut.add(`${side} ${node}`);
    changed();
  }

  function reveal(side, node) {
    let closed = false;
    const one = (s, n) => {
      for (let i = store.sides[s].parent[n]; i >= 0; i = store.sides[s].parent[i]) {
        if (opened[s][i]) continue;
        closed = true;
        mark(s, i, true);
      }
    };
    one(side, node);
    const other = partner(side, node);
    if (other >= 0) one(1 - side, other);
    if (closed) changed();
  }

  // ---- The tree's rows ----

  function rows(side) {
    if (shown[side]) return shown[side];
    const columns = store.sides[side];
    const keep = kept && kept[side];
    const found = new Int32Array(columns.count);
    let count = 0;
    for (let i = 0; i < columns.count; ) {
      if (keep && !keep[i] && i > 0) {
        i += columns.size[i];
        continue;
      }
      found[count++] = i;
      i += openInTree(side, i) ? 1 : columns.size[i];
    }
    return (shown[side] = found.slice(0, count));
  }

  function rowOf(side, node) {
    const all = rows(side); // nodes are in rising order, so it is found by halving
    let low = 0;
    let high = all.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (all[middle] === node) return middle;
      if (all[middle] < node) low = middle + 1;
      else high = middle - 1;
    }
    return -1;
  }

  function showTree(side) {
    if (side === store.treeSide || side >= store.sides.length) return;
    store.treeSide = side;
    fire('side');
  }

  // Only what passes is shown in the tree, with all that encloses it; on the canvas the others step back.
  function filter(test) {
    matched = kept = store.matchCount = null;
    shut = new Set();
    if (test) {
      matched = store.sides.map((columns, side) => {
        const found = new Uint8Array(columns.count);
        for (let i = 1; i < columns.count; i++) if (test(columns, i, side)) found[i] = 1;
        return found;
      });
      kept = matched.map((found, side) => {
        const { parent, count } = store.sides[side];
        const all = found.slice();
        for (let i = count - 1; i > 0; i--) if (all[i]) all[parent[i]] = 1;
        return all;
      });
      store.matchCount = matched.map((found) => found.reduce((sum, one) => sum + one, 0));
    }
    shown = shown.map(() => null);
    fire('filter');
    fire('rows');
  }

  function showPath(visible, { open = true } = {}) {
    const found = visible ? Graph.path(store) : null;
    if (!found && !store.path) return;
    store.path = found;
    if (open && found && found.nodes.length <= 60) for (const node of found.nodes) reveal(found.side, node); // a longer way shows on what is open
    fire('path');
  }

  return store;
})();
