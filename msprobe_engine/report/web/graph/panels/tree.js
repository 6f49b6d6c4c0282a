'use strict';
// The hierarchy as a tree grid (WAI-ARIA): only the rows in view are elements, whatever the number of nodes.
Kit.texts('tree', {
  label: ['Hierarchy', '层级'],
  name: ['Node', '节点'],
  units: ['Round-off', '舍入误差'],
  units_hint: ['largest difference of the outputs, in multiples of round-off', '输出的最大差异，以舍入误差的倍数表示'],
  sides: ['Tree of', '层级所属'],
  nodes: ['{0} nodes', '{0} 个节点'],
  found: ['{0} of {1} nodes', '{0} / {1} 个节点'],
  none: ['Nothing passes the filter', '没有符合筛选条件的节点'],
  suspect: ['first suspect', '首个可疑点'],
  nonfinite: ['NaN or Inf', 'NaN 或 Inf'],
  unmatched: ['no partner', '未匹配'],
});

Graph.panels.push((store) => {
  const HIGH = 28; // pixels of a row
  const MOST = 15e6; // pixels that every browser can scroll
  const place = document.getElementById('graph-tree');
  const head = Kit.make('div', place, null, 'tree-head');
  const sides = Kit.make('div', head, null, 'tree-sides');
  sides.setAttribute('role', 'group');
  sides.dataset.tLabel = 'tree.sides';
  const count = Kit.make('span', head, null, 'tree-count');
  count.setAttribute('role', 'status');
  const grid = Kit.make('div', place, null, 'tree-grid');
  grid.setAttribute('role', 'treegrid');
  grid.dataset.tLabel = 'tree.label';
  grid.tabIndex = 0;
  const heads = Kit.make('div', grid, null, 'tree-columns');
  heads.setAttribute('role', 'row');
  const column = (key) => {
    const one = Kit.word(Kit.make('span', heads), key);
    one.setAttribute('role', 'columnheader');
    return one;
  };
  column('tree.name');
  const unitsHead = column('tree.units');
  const space = Kit.make('div', grid, null, 'tree-space');
  space.setAttribute('role', 'rowgroup');
  const empty = Kit.word(Kit.make('p', place, null, 'tree-empty soft'), 'tree.none');
  const pool = []; // elements of rows, used again
  let side = 0;
  let due = 0;
  let active = -1; // node that the keys move

  const headHigh = 27;
  const scrolled = () => {
    const total = store.rows(side).length * HIGH;
    if (total <= MOST) return grid.scrollTop;
    const room = grid.clientHeight - headHigh;
    return (grid.scrollTop / (MOST - room)) * (total - room);
  };

  function refresh() {
    if (!due) due = requestAnimationFrame(draw);
  }

  function row(k) {
    if (pool[k]) return pool[k];
    const node = Kit.make('div', space, null, 'tree-row');
    node.setAttribute('role', 'row');
    const cell = Kit.make('span', node, null, 'tree-name');
    cell.setAttribute('role', 'gridcell');
    const parts = {
      node,
      cell,
      arrow: Kit.make('i', cell, null, 'tree-arrow'),
      chip: Kit.make('i', cell),
      label: Kit.make('span', cell, null, 'tree-label'),
      second: Kit.make('span', cell, null, 'tree-second'),
      sign: Kit.make('span', cell, null, 'tree-sign'),
      value: Kit.make('span', node, null, 'tree-value'),
    };
    parts.arrow.setAttribute('aria-hidden', 'true');
    parts.chip.setAttribute('aria-hidden', 'true');
    parts.value.setAttribute('role', 'gridcell');
    return (pool[k] = parts);
  }

  // Of deep hierarchies the last levels move less, so that names keep their room.
  const indent = (depth) => 6 + Math.min(depth, 12) * 14 + Math.min(Math.max(depth - 12, 0), 16) * 3;

  function draw() {
    due = 0;
    if (!store.sides.length) return;
    const rows = store.rows(side);
    const columns = store.sides[side];
    const comparison = store.sides.length === 2;
    const offset = scrolled(); // what has to be measured is measured before anything is changed
    const shift = grid.scrollTop - offset;
    const high = grid.clientHeight;
    const tall = `${Math.min(MOST, rows.length * HIGH)}px`;
    if (space.style.height !== tall) space.style.height = tall;
    const from = Math.max(0, Math.floor(offset / HIGH) - 6);
    const visible = Math.ceil(high / HIGH) + 12;
    const to = Math.min(rows.length, from + visible);
    const chosen = store.selection;
    const hovered = store.hovered;
    const twin = chosen && chosen.side !== side ? store.partner(chosen.side, chosen.node) : -1;
    const matches = store.matches(side);
    let used = 0;
    grid.removeAttribute('aria-activedescendant');
    for (let at = from; at < to; at++, used++) {
      const i = rows[at];
      const parts = row(used);
      const { node } = parts;
      node.hidden = false;
      node.id = `tree-${side}-${i}`;
      node.style.transform = `translateY(${shift + at * HIGH}px)`;
      if (parts.shown !== i || parts.of !== columns) {
        parts.shown = i;
        parts.of = columns;
        parts.label.textContent = Kit.name(columns.label(i), 160);
        parts.second.textContent = Kit.name(columns.second(i), 100);
        parts.second.classList.toggle('number', parts.second.textContent.startsWith('·')); // a number is never cut off
        parts.cell.style.paddingLeft = `${indent(columns.depth[i])}px`;
        node.setAttribute('aria-level', String(columns.depth[i] + 1));
      }
      node.setAttribute('aria-rowindex', String(at + 2));
      const leaf = columns.isLeaf(i);
      const open = !leaf && store.openInTree(side, i);
      if (leaf) node.removeAttribute('aria-expanded');
      else node.setAttribute('aria-expanded', String(open));
      const selected = chosen && chosen.side === side && chosen.node === i;
      node.setAttribute('aria-selected', String(!!selected));
      const classes = ['tree-row'];
      if (!leaf) classes.push('inner');
      if (selected || i === twin) classes.push(selected ? 'chosen' : 'twin');
      if (i === active) {
        classes.push('active');
        grid.setAttribute('aria-activedescendant', node.id);
      }
      if (hovered && hovered.side === side && hovered.node === i) classes.push('hovered');
      if (matches && !matches[i]) classes.push('around');
      const flags = columns.flags[i];
      const { FLAG } = Graph;
      const suspect = side === 0 && i === store.pair.suspect;
      if (suspect) classes.push('suspect');
      node.className = classes.join(' ');
      // A closed module shows the worst inside.
      const closed = !leaf && !open;
      const bad = flags & FLAG.NONFINITE_OUT || (closed && flags & FLAG.NONFINITE_BELOW);
      const units = closed ? columns.below[i] : columns.units[i];
      parts.chip.className = `swatch ${Graph.tone(columns, i, closed)}`;
      parts.value.textContent = !comparison ? (bad ? 'NaN/Inf' : '') : flags & FLAG.UNMATCHED && i ? Kit.t('tree.unmatched') : shownUnits(units, bad);
      parts.value.className = `tree-value${bad || units > 1024 ? ' loud' : units > 4 ? '' : ' quiet'}`;
      parts.sign.textContent = suspect ? '⚑' : '';
      parts.sign.title = suspect ? Kit.t('tree.suspect') : '';
    }
    for (; used < pool.length; used++) pool[used].node.hidden = true;
    grid.setAttribute('aria-rowcount', String(rows.length + 1));
    empty.hidden = !(store.matchCount && !store.matchCount[side]);
    Kit.word(count, store.matchCount ? 'tree.found' : 'tree.nodes', Kit.count(store.matchCount ? store.matchCount[side] : columns.count - 1), Kit.count(columns.count - 1));
  }

  function shownUnits(units, bad) {
    if (bad) return 'NaN/Inf';
    if (units === Infinity) return '∞';
    if (!(units >= 0)) return '';
    return units === 0 ? '=' : units < 0.1 ? '<0.1' : units < 100 ? String(+units.toPrecision(2)) : units < 1e5 ? Kit.count(Math.round(units)) : units.toExponential(1);
  }

  function show(at) {
    const high = grid.clientHeight - headHigh;
    const total = store.rows(side).length * HIGH;
    const offset = scrolled();
    const top = at * HIGH;
    if (top >= offset && top + HIGH <= offset + high) return;
    const wanted = Math.max(0, Math.min(total - high, top - high / 2));
    grid.scrollTop = total <= MOST ? wanted : (wanted / (total - high)) * (MOST - high);
  }

  function choose(i, centre = true) {
    active = i;
    store.select(side, i, { centre });
  }

  // ---- Mouse and keys ----
  const rowOfEvent = (event) => {
    const node = event.target.closest('.tree-row');
    return node ? pool.find((parts) => parts.node === node) : null;
  };
  space.addEventListener('click', (event) => {
    const parts = rowOfEvent(event);
    if (!parts) return;
    if (event.target === parts.arrow) store.setOpenInTree(side, parts.shown, !store.openInTree(side, parts.shown));
    else choose(parts.shown);
  });
  space.addEventListener('dblclick', (event) => {
    const parts = rowOfEvent(event);
    if (parts && event.target !== parts.arrow) store.setOpenInTree(side, parts.shown, !store.openInTree(side, parts.shown));
  });
  space.addEventListener('pointermove', (event) => {
    const parts = rowOfEvent(event);
    if (parts) store.hover(side, parts.shown);
  });
  space.addEventListener('pointerleave', () => store.hover(0, -1));
  grid.addEventListener('scroll', refresh);
  grid.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const rows = store.rows(side);
    const columns = store.sides[side];
    const at = Math.max(0, store.rowOf(side, active >= 0 ? active : 0));
    const i = rows[at];
    const page = Math.max(1, Math.floor((grid.clientHeight - headHigh) / HIGH) - 1);
    const go = (to) => choose(rows[Math.max(0, Math.min(rows.length - 1, to))]);
    const open = store.openInTree(side, i);
    const acts = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      PageDown: () => go(at + page),
      PageUp: () => go(at - page),
      Home: () => go(0),
      End: () => go(rows.length - 1),
      ArrowRight: () => (columns.isLeaf(i) ? null : open ? go(at + 1) : store.setOpenInTree(side, i, true)),
      ArrowLeft: () => (open && !columns.isLeaf(i) && i > 0 ? store.setOpenInTree(side, i, false) : i > 0 ? choose(columns.parent[i]) : null),
      Enter: () => choose(i),
      ' ': () => store.setOpenInTree(side, i, !open),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  });

  // ---- What changes ----
  function switches() {
    sides.replaceChildren();
    sides.hidden = store.sides.length < 2;
    ['canvas.target', 'canvas.golden'].slice(0, store.sides.length).forEach((key, s) => {
      const one = Kit.word(Kit.make('button', sides), key);
      one.type = 'button';
      one.setAttribute('aria-pressed', String(side === s));
      one.addEventListener('click', () => store.showTree(s));
    });
    unitsHead.hidden = store.sides.length < 2;
    unitsHead.title = Kit.t('tree.units_hint');
  }
  function turn() {
    side = store.treeSide;
    active = -1;
    switches();
    const chosen = store.selection;
    const i = chosen ? (chosen.side === side ? chosen.node : store.partner(chosen.side, chosen.node)) : -1;
    space.style.height = `${Math.min(MOST, store.rows(side).length * HIGH)}px`;
    if (i >= 0) show(Math.max(0, store.rowOf(side, i)));
    refresh();
  }
  store.on('open', () => {
    grid.scrollTop = 0;
    turn();
  });
  store.on('side', turn);
  store.on('rows', refresh);
  store.on('hover', refresh);
  store.on('select', () => {
    const chosen = store.selection;
    const i = chosen ? (chosen.side === side ? chosen.node : store.partner(chosen.side, chosen.node)) : -1;
    if (chosen && chosen.side === side) active = i;
    else if (chosen && i < 0) store.showTree(chosen.side);
    if (i >= 0) {
      const at = store.rowOf(side, i);
      space.style.height = `${Math.min(MOST, store.rows(side).length * HIGH)}px`;
      if (at >= 0) show(at);
    }
    refresh();
  });
  Kit.on('language', () => {
    unitsHead.title = Kit.t('tree.units_hint');
    refresh();
  });
  Kit.on('theme', refresh);
  new ResizeObserver(refresh).observe(grid);
});
