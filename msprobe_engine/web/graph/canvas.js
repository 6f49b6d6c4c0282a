'use strict';
// The canvas: one part for each side, moved with mouse, wheel, fingers and keys. Moving one part moves the other, so that partners stay
// beside each other.
//
// Graph.view (for panels): zoom(factor), fit(), pan(dx, dy) in pixels, toWidth(), both(bool), linked(bool), redraw(), scale()
Kit.texts('canvas', {
  label: ['Graph. Arrow keys move, + and - zoom, Enter opens what is chosen', '图。方向键移动，+ 和 - 缩放，回车展开所选节点'],
  target: ['Target', '目标'],
  golden: ['Golden', '标杆'],
  alone: ['Model', '模型'],
  suspect: ['First suspect', '首个可疑节点'],
  born: ['First NaN or Inf', '首个 NaN/Inf'],
  zoom_in: ['Zoom in', '放大'],
  zoom_out: ['Zoom out', '缩小'],
  fit: ['Show all', '显示全部'],
  to_suspect: ['To the first suspect', '跳到首个可疑节点'],
  path: ['Show the way of the fault', '显示问题传播路径'],
  both: ['Show both models', '同时显示两个模型'],
  linked: ['Move both together', '联动移动'],
  close_all: ['Close all modules', '全部折叠'],
  no_partner: ['no partner', '无对应节点'],
  linked_to: ['Together with rank {0}. Click: to rank {1}', '与卡 {0} 通信。点击跳到卡 {1}'],
  linked_away: ['Communicates with ranks that are not in this page', '通信对端的卡不在本页面中'],
});

Graph.view = {};
Graph.panels.push((store) => {
  const whole = document.getElementById('graph-canvas');
  const strip = Kit.make('div', whole, null, 'parts');
  const place = Kit.make('div', whole, null, 'plane');
  const node = Kit.make('canvas', place);
  node.tabIndex = 0;
  node.setAttribute('role', 'application');
  node.dataset.tLabel = 'canvas.label';
  const pen = node.getContext('2d', { alpha: false });
  const painter = new Graph.Painter(pen);
  const still = matchMedia('(prefers-reduced-motion: reduce)');
  let views = [];
  let maps = [];
  let both = true;
  let together = true;
  let due = 0;
  let way = null; // an animation on its way
  let width = 0;
  let height = 0;
  let anchor = null; // {side, node}: what stays where it is when something opens

  // ---- Parts ----
  const heads = [0, 1].map(() => Kit.make('div', strip, null, 'part-head'));
  const divider = Kit.make('div', place, null, 'divider');

  function arrange() {
    const sharp = devicePixelRatio || 1;
    width = Math.max(50, place.clientWidth);
    height = Math.max(50, place.clientHeight);
    node.width = Math.round(width * sharp);
    node.height = Math.round(height * sharp);
    node.style.width = `${width}px`;
    node.style.height = `${height}px`;
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    const two = views.length === 2 && both;
    views.forEach((view, side) => {
      view.left = two && side ? Math.ceil(width / 2) : 0;
      view.top = 0;
      view.width = two ? Math.floor(width / 2) : side ? 0 : width;
      view.height = height;
    });
    divider.hidden = !two;
    divider.style.left = `${Math.ceil(width / 2) - 1}px`;
    heads.forEach((head, side) => {
      head.hidden = !(views.length > side && (side === 0 || two));
      head.replaceChildren();
      if (head.hidden) return;
      views[side].said = -2;
      Kit.word(Kit.make('b', head), views.length === 1 ? 'canvas.alone' : side ? 'canvas.golden' : 'canvas.target');
      Kit.make('span', head, Kit.name(String(side ? store.manifest.golden : store.manifest.target), 200)).title = Kit.name(String(side ? store.manifest.golden : store.manifest.target));
      views[side].where = Kit.make('span', head, '', 'where');
    });
  }

  // ---- Drawing ----
  function redraw() {
    if (!due) due = requestAnimationFrame(draw);
  }

  function marksOf(side) {
    const { selection, hovered, pair, path } = store;
    const chosen = selection && selection.side === side ? selection.node : -1;
    const partner = selection && selection.side !== side ? store.partner(selection.side, selection.node) : -1;
    const seen = (one) => (one >= 0 ? views[side].layout.visible(one) : -1);
    return {
      comparison: store.sides.length === 2,
      suspect: side === 0 ? seen(pair.suspect) : -1,
      selected: seen(chosen),
      partner: seen(partner),
      hovered: hovered && hovered.side === side ? hovered.node : hovered ? store.partner(hovered.side, hovered.node) : -1,
      kept: store.kept(side),
      path: path && path.side === side ? path : null,
      way: path && path.side === side ? (views[side].way ||= wayOf(views[side], path)) : null,
    };
  }

  // The nodes of a path as far as they are visible, each once.
  function wayOf({ layout }, path) {
    const found = [];
    for (const i of path.nodes) {
      const there = layout.visible(i);
      if (there !== found[found.length - 1]) found.push(there);
    }
    return found;
  }

  function draw(now) {
    due = 0;
    if (!views.length) return;
    if (way) {
      const t = Math.min(1, (now - way.since) / way.lasts);
      const ease = 1 - (1 - t) ** 3;
      for (const { view, from, to } of way.views) for (const key of ['dx', 'dy', 'scale']) view[key] = from[key] + (to[key] - from[key]) * ease;
      if (t < 1) redraw();
      else way = null;
    }
    pen.fillStyle = painter.colour.sunk;
    pen.fillRect(0, 0, width, height);
    views.forEach((view, side) => {
      if (!view.width) return;
      painter.paint(view, marksOf(side));
      view.spots = painter.spots;
    });
    if (views.length === 2 && both) bridge();
    views.forEach(say);
    views.forEach((view, side) => view.width && maps[side] && drawMap(view, side));
  }

  // Where one is: the modules around the middle of the view, in the strip above.
  function say(view, side) {
    if (!view.width || !view.where) return;
    const { layout } = view;
    let i = layout.hit(Math.max(0, Math.min(layout.w[0], (view.width / 2 - view.dx) / view.scale)), Math.max(0, (height / 2 - view.dy) / view.scale));
    if (i >= 0 && !layout.placed.has(i)) i = layout.columns.parent[i];
    if (i === view.said) return;
    view.said = i;
    const outer = i > 0 ? [...layout.columns.ancestors(i), i].slice(1) : [];
    const near = outer.slice(-3).map((one) => layout.text(one).label);
    view.where.textContent = (outer.length > 3 ? ['…', ...near] : near).join(' › ');
  }

  // A line from the chosen node to its partner.
  function bridge() {
    const chosen = store.hovered || store.selection;
    if (!chosen) return;
    const partner = store.partner(chosen.side, chosen.node);
    if (partner < 0) return;
    const boxes = [painter.place(views[chosen.side], chosen.node), painter.place(views[1 - chosen.side], partner)];
    if (chosen.side) boxes.reverse();
    const inView = (box) => box.y + box.h > 0 && box.y < height;
    if (!inView(boxes[0]) || !inView(boxes[1])) return;
    const middle = (box) => box.y + Math.min(box.h, 40 * views[0].scale) / 2;
    const x0 = Math.min(boxes[0].x + boxes[0].w + 3, views[0].width - 4);
    const x1 = Math.max(boxes[1].x - 3, views[1].left + 4);
    pen.strokeStyle = painter.colour.accent;
    pen.lineWidth = 1.5;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(x0, middle(boxes[0]));
    pen.bezierCurveTo((x0 + x1) / 2, middle(boxes[0]), (x0 + x1) / 2, middle(boxes[1]), x1, middle(boxes[1]));
    pen.stroke();
    pen.setLineDash([]);
  }

  // ---- Small maps: the whole side, pressed into a strip ----
  const MAP = { w: 66, h: 170, gap: 12 };

  function mapPlace(view) {
    return { x: view.left + view.width - MAP.w - MAP.gap, y: height - MAP.h - MAP.gap, w: MAP.w, h: Math.min(MAP.h, height - 2 * MAP.gap) };
  }

  function makeMap(view, side) {
    const sharp = devicePixelRatio || 1;
    const map = document.createElement('canvas');
    map.width = MAP.w * sharp;
    map.height = MAP.h * sharp;
    const ink = map.getContext('2d');
    ink.scale(sharp, sharp);
    const { layout } = view;
    const sx = MAP.w / layout.w[0];
    const sy = MAP.h / layout.h[0];
    ink.fillStyle = painter.colour.card;
    ink.fillRect(0, 0, MAP.w, MAP.h);
    painter.columns = layout.columns;
    painter.marks = { comparison: store.sides.length === 2 };
    const loud = [];
    const paint = (i, x, y) => {
      const rows = layout.placed.get(i);
      const h = layout.h[i] * sy;
      if (rows && h > 2 && layout.columns.depth[i] < Graph.SIZES.deepest) {
        ink.strokeStyle = painter.colour.line;
        ink.strokeRect(x + 0.5, y + 0.5, layout.w[i] * sx - 1, h - 1);
        let drawn = -1;
        for (const c of rows.children) {
          const top = y + layout.y[c] * sy;
          if (top - drawn < 0.4 && painter._badness(c) < 32) continue; // on the same pixel already
          drawn = top;
          paint(c, x + layout.x[c] * sx, top);
        }
        return;
      }
      const colour = painter._worst(i);
      if (painter._badness(i) > 4) loud.push([colour, x, y, layout.w[i] * sx, h]);
      ink.fillStyle = colour;
      ink.fillRect(x, y, Math.max(1, layout.w[i] * sx), Math.max(0.8, h));
    };
    paint(0, 0, 0);
    for (const [colour, x, y, w, h] of loud) {
      ink.fillStyle = colour;
      ink.fillRect(x, y, Math.max(3, w), Math.max(1.6, h));
    }
    if (side === 0 && store.pair.suspect >= 0) {
      const box = layout.box(layout.visible(store.pair.suspect));
      ink.fillStyle = painter.colour.bad;
      ink.beginPath();
      ink.arc(Math.min(MAP.w - 4, (box.x + box.w / 2) * sx), Math.min(MAP.h - 4, Math.max(4, (box.y + box.h / 2) * sy)), 3.5, 0, 7);
      ink.fill();
    }
    maps[side] = map;
  }

  function drawMap(view, side) {
    const at = mapPlace(view);
    const { layout } = view;
    const sx = at.w / layout.w[0];
    const sy = at.h / layout.h[0];
    const clamp = (value, most) => Math.max(0, Math.min(most, value));
    const left = clamp((-view.dx / view.scale) * sx, at.w);
    const right = clamp(((view.width - view.dx) / view.scale) * sx, at.w);
    const top = clamp((-view.dy / view.scale) * sy, at.h);
    const bottom = clamp(((view.height - view.dy) / view.scale) * sy, at.h);
    view.mapped = right - left < at.w - 1 || bottom - top < at.h - 1; // of what is in view as a whole no map is needed
    if (!view.mapped) return;
    pen.globalAlpha = 0.92;
    pen.drawImage(maps[side], at.x, at.y, at.w, at.h);
    pen.globalAlpha = 1;
    pen.strokeStyle = painter.colour.strong;
    pen.lineWidth = 1;
    pen.strokeRect(at.x - 0.5, at.y - 0.5, at.w + 1, at.h + 1);
    pen.strokeStyle = painter.colour.accent;
    pen.lineWidth = 2;
    const high = Math.max(4, bottom - top);
    pen.strokeRect(at.x + left, at.y + Math.min(top, at.h - high), Math.max(4, right - left), high);
  }

  // ---- Moving ----
  const LEAST = 0.004;
  const MOST = 2.5;
  const placeOf = ({ dx, dy, scale }) => ({ dx, dy, scale });

  function bounded(view) {
    const { layout } = view;
    const w = layout.w[0] * view.scale;
    const h = layout.h[0] * view.scale;
    view.dx = Math.max(Math.min(view.dx, view.width - 60), 60 - w);
    view.dy = Math.max(Math.min(view.dy, view.height - 60), 60 - h);
  }

  // The other part follows: what stands in the middle here has its partner at the same height there.
  function follow(side) {
    if (views.length < 2 || !together || !both) return;
    const view = views[side];
    const other = views[1 - side];
    other.scale = view.scale;
    const px = (view.width / 2 - view.dx) / view.scale;
    const py = (view.height / 2 - view.dy) / view.scale;
    const middle = Math.max(0, Math.min(view.layout.w[0], px));
    let i = view.layout.hit(middle, Math.max(0, Math.min(view.layout.h[0], py)));
    let partner = -1;
    for (; i >= 0; i = view.layout.columns.parent[i]) {
      partner = store.partner(side, i);
      if (partner >= 0 && other.layout.visible(partner) === partner) break;
    }
    if (i < 0) return;
    const box = view.layout.box(i);
    const twin = other.layout.box(partner);
    const part = (py - box.y) / box.h;
    other.dx = view.width / 2 - (twin.x + twin.w / 2 + (px - box.x - box.w / 2)) * other.scale;
    other.dy = view.height / 2 - (twin.y + part * twin.h) * other.scale;
  }

  function moved(side) {
    bounded(views[side]);
    follow(side);
    redraw();
  }

  function go(side, to, animated = true) {
    const before = views.map(placeOf);
    Object.assign(views[side], to);
    bounded(views[side]);
    follow(side);
    const after = views.map(placeOf);
    const near = Math.abs(after[side].dy - before[side].dy) < 6000 && Math.abs(Math.log(after[side].scale / before[side].scale)) < 3;
    way = null;
    if (animated && near && !still.matches) {
      views.forEach((view, s) => Object.assign(view, before[s]));
      way = { since: performance.now(), lasts: 240, views: views.map((view, s) => ({ view, from: before[s], to: after[s] })) };
    }
    redraw();
  }

  function centre(side, i, animated = true) {
    if (side === 1 && !both) setBoth(true);
    const view = views[side];
    const { layout } = view;
    const box = layout.box(layout.visible(i));
    const scale = Math.min(MOST, Math.max(view.scale, 0.85));
    // A high module is shown from its head on.
    const y = Math.min(box.h / 2, (view.height / 2 - 70) / scale);
    const x = box.w * scale > view.width ? (view.width / 2 - 30) / scale : box.w / 2;
    go(side, { scale, dx: view.width / 2 - (box.x + x) * scale, dy: view.height / 2 - 10 - (box.y + y) * scale }, animated);
  }

  function zoomAt(side, x, y, factor) {
    way = null;
    const view = views[side];
    const scale = Math.max(LEAST, Math.min(MOST, view.scale * factor));
    const real = scale / view.scale;
    view.dx = x - view.left - (x - view.left - view.dx) * real;
    view.dy = y - (y - view.dy) * real;
    view.scale = scale;
    moved(side);
  }

  // All of it; of a model that is far higher than wide, as much as leaves its boxes to be seen, around what is chosen.
  function fit(side = 0) {
    const view = views[side];
    const { layout } = view;
    const [wide, high] = [(view.width - 48) / layout.w[0], (view.height - 90) / layout.h[0]];
    const scale = Math.max(LEAST, Math.min(1.1, wide, Math.max(high, 0.14 * Math.min(1, wide))));
    const whole = layout.h[0] * scale <= view.height - 60;
    const chosen = store.selection && store.selection.side === side ? layout.box(layout.visible(store.selection.node)) : null;
    const dy = whole ? Math.max(45, (view.height - layout.h[0] * scale) / 2) : chosen ? view.height / 2 - (chosen.y + chosen.h / 2) * scale : 45;
    go(side, { scale, dx: (view.width - layout.w[0] * scale) / 2, dy });
    if (views[1] && !together) go(1 - side, placeOf(views[side]));
  }

  function setBoth(value) {
    both = value;
    arrange();
    if (store.selection) centre(both ? store.selection.side : 0, both || store.selection.side === 0 ? store.selection.node : Math.max(0, store.partner(1, store.selection.node)), false);
    else moved(0);
    buttons();
  }

  // ---- Mouse and fingers ----
  const sideAt = (x) => (views.length === 2 && both && x >= views[1].left ? 1 : 0);
  const local = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const hit = (side, x, y) => {
    const view = views[side];
    return view.layout.hit((x - view.left - view.dx) / view.scale, (y - view.dy) / view.scale);
  };
  const spotAt = (side, x, y) => (views[side].spots || []).find((spot) => Math.abs(spot.x - x) < 13 && Math.abs(spot.y - y) < 10);
  // Is it on the sign that opens and closes a module?
  const onArrow = (side, i, x, y) => {
    const { layout, scale } = views[side];
    if (i <= 0 || layout.columns.isLeaf(i) || scale < 0.45) return false;
    const box = painter.place(views[side], i);
    const high = (layout.placed.has(i) ? Graph.SIZES.head : Graph.SIZES.closed) * scale;
    return x - box.x < (Graph.SIZES.pad + Graph.SIZES.arrow - 2) * scale && y - box.y < high;
  };
  const onMap = (side, x, y) => {
    const at = mapPlace(views[side]);
    return views[side].mapped && x >= at.x && x <= at.x + at.w && y >= at.y && y <= at.y + at.h ? at : null;
  };

  function toMap(side, x, y) {
    const view = views[side];
    const at = mapPlace(view);
    way = null;
    view.dx = view.width / 2 - ((x - at.x) / at.w) * view.layout.w[0] * view.scale;
    view.dy = view.height / 2 - ((y - at.y) / at.h) * view.layout.h[0] * view.scale;
    moved(side);
  }

  const fingers = new Map();
  let drag = null;
  node.addEventListener('pointerdown', (event) => {
    if (event.button > 1 || !views.length) return;
    const [x, y] = local(event);
    const side = sideAt(x);
    clearTimeout(explained);
    Kit.hush();
    node.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, [x, y]);
    drag = { side, x, y, moved: false, map: onMap(side, x, y) !== null };
    if (drag.map) toMap(side, x, y);
  });
  node.addEventListener('pointermove', (event) => {
    if (!views.length) return;
    const [x, y] = local(event);
    if (!drag) {
      const side = sideAt(x);
      const mapped = onMap(side, x, y);
      const spot = mapped ? null : spotAt(side, x, y);
      const i = mapped ? -1 : spot ? spot.i : hit(side, x, y);
      store.hover(side, i > 0 ? i : -1);
      node.style.cursor = i > 0 ? 'pointer' : 'grab';
      explain(event, side, i, spot);
      return;
    }
    const before = fingers.get(event.pointerId);
    if (!before) return;
    if (fingers.size === 2) {
      const [one, two] = [...fingers.entries()].map(([id, at]) => (id === event.pointerId ? [at, [x, y]] : [at, at]));
      const apart = (k) => Math.hypot(one[k][0] - two[k][0], one[k][1] - two[k][1]);
      zoomAt(drag.side, (one[1][0] + two[1][0]) / 2, (one[1][1] + two[1][1]) / 2, apart(1) / Math.max(1, apart(0)));
      drag.moved = true;
    } else if (drag.map) {
      toMap(drag.side, x, y);
    } else {
      if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
      drag.moved = true;
      way = null;
      node.style.cursor = 'grabbing';
      views[drag.side].dx += x - before[0];
      views[drag.side].dy += y - before[1];
      moved(drag.side);
    }
    fingers.set(event.pointerId, [x, y]);
  });
  const lift = (event) => {
    fingers.delete(event.pointerId);
    const done = drag;
    if (fingers.size) return;
    drag = null;
    if (!done || done.moved || done.map || event.type === 'pointercancel') return;
    const spot = spotAt(done.side, done.x, done.y);
    if (spot) {
      const ranks = others(done.side, spot.i);
      if (ranks.length) store.follow(done.side, spot.i, ranks[0]);
      return;
    }
    const i = hit(done.side, done.x, done.y);
    if (i <= 0) return store.select(0, -1);
    if (onArrow(done.side, i, done.x, done.y)) return toggle(done.side, i);
    store.select(done.side, i, { reveal: false, centre: false });
    if (together && views.length === 2) align(done.side, i);
  };
  node.addEventListener('pointerup', lift);
  node.addEventListener('pointercancel', lift);
  node.addEventListener('pointerleave', () => {
    clearTimeout(explained);
    Kit.hush();
    if (!drag) store.hover(0, -1);
  });
  node.addEventListener('dblclick', (event) => {
    const [x, y] = local(event);
    const side = sideAt(x);
    const i = onMap(side, x, y) ? -1 : hit(side, x, y);
    if (i > 0) toggle(side, i);
  });
  node.addEventListener(
    'wheel',
    (event) => {
      if (!views.length) return;
      event.preventDefault();
      const [x, y] = local(event);
      const side = sideAt(x);
      const step = event.deltaMode === 1 ? 30 : event.deltaMode === 2 ? height : 1;
      if (event.ctrlKey || event.metaKey) {
        zoomAt(side, x, y, Math.exp(-Math.max(-60, Math.min(60, event.deltaY * step)) * 0.0045));
        return;
      }
      way = null;
      views[side].dx -= (event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX) * step;
      views[side].dy -= (event.shiftKey && !event.deltaX ? 0 : event.deltaY) * step;
      moved(side);
    },
    { passive: false },
  );
  node.addEventListener('keydown', (event) => {
    const far = event.shiftKey ? 400 : 80;
    const moves = { ArrowUp: [0, far], ArrowDown: [0, -far], ArrowLeft: [far, 0], ArrowRight: [-far, 0], PageUp: [0, height * 0.8], PageDown: [0, -height * 0.8] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) Graph.view.pan(...moves[event.key]);
    else if (event.key === '+' || event.key === '=') Graph.view.zoom(1.25);
    else if (event.key === '-') Graph.view.zoom(0.8);
    else if (event.key === 'Enter' && store.selection) toggle(store.selection.side, store.selection.node);
    else return;
    event.preventDefault();
  });

  // Ranks of a link that are in this page, the next one first.
  function others(side, i) {
    const link = store.link(side, i);
    const { step, rank } = store.pair;
    const there = [...new Set(link ? link.nodes.map((one) => one.rank) : [])].filter((one) => one !== rank && store.pairOf(step, one) >= 0).sort((a, b) => a - b);
    return [...there.filter((one) => one > rank), ...there.filter((one) => one < rank)];
  }

  let explained = 0;
  function explain(event, side, i, spot) {
    clearTimeout(explained);
    Kit.hush();
    if (i <= 0) return;
    const at = { clientX: event.clientX, clientY: event.clientY };
    explained = setTimeout(() => {
      const { columns } = views[side].layout;
      const lines = [Kit.name(columns.name(i), 300)];
      if (spot) {
        const ranks = others(side, i);
        lines.push(ranks.length ? Kit.t('canvas.linked_to', ranks.slice(0, 16).join(', '), ranks[0]) : Kit.t('canvas.linked_away'));
      } else if (store.sides.length === 2) {
        lines.push(columns.flags[i] & Graph.FLAG.UNMATCHED ? Kit.t('canvas.no_partner') : Kit.scale(columns.units[i]).label);
      }
      Kit.tip(at, lines.join('\n'));
    }, 350);
  }

  function toggle(side, i) {
    anchor = { side, node: i };
    store.toggle(side, i);
  }

  // The partner of a node that was chosen where it stands comes to its height, and nothing moves on this side.
  function align(side, i) {
    const partner = store.partner(side, i);
    if (partner < 0 || !both) return;
    const here = painter.place(views[side], i);
    const other = views[1 - side];
    const there = painter.place(other, partner);
    const before = placeOf(other);
    const after = { ...before, dy: before.dy + here.y - there.y, dx: before.dx + (here.x - views[side].left) - (there.x - other.left) };
    if (still.matches) Object.assign(other, after);
    else way = { since: performance.now(), lasts: 200, views: [{ view: other, from: before, to: after }] };
    redraw();
  }

  // ---- Buttons ----
  const tools = Kit.make('div', place, null, 'canvas-tools');
  tools.setAttribute('role', 'toolbar');
  tools.dataset.tLabel = 'graph.tools';
  const pressed = new Map();
  const ICONS = {
    zoom_in: 'M8 3v10M3 8h10',
    zoom_out: 'M3 8h10',
    fit: 'M3 6V3h3M10 3h3v3M13 10v3h-3M6 13H3v-3',
    close_all: 'M4 6l4 4 4-4M4 2.5h8',
    to_suspect: 'M8 1.5v3M8 11.5v3M1.5 8h3M11.5 8h3M8 5.2a2.8 2.8 0 1 0 0 5.6a2.8 2.8 0 1 0 0-5.6',
    path: 'M3.5 3.5h.01M3.5 3.5c0 6 9 3 9 9M12.5 12.5h.01M2 3.5a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0M11 12.5a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0',
    both: 'M2.5 3h11v10h-11zM8 3v10',
    linked: 'M6.5 9.5l3-3M7 4.8l1.3-1.3a2.7 2.7 0 0 1 3.9 3.9L11 8.7M9 11.2l-1.3 1.3a2.7 2.7 0 0 1-3.9-3.9L5 7.3',
  };
  function button(name, act, state = null) {
    const one = Kit.make('button', tools);
    one.type = 'button';
    const icon = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    icon.setAttribute('viewBox', '0 0 16 16');
    icon.setAttribute('aria-hidden', 'true');
    line.setAttribute('d', ICONS[name]);
    icon.append(line);
    one.append(icon);
    one.id = `canvas-${name}`;
    one.dataset.tLabel = `canvas.${name}`;
    one.setAttribute('aria-label', Kit.t(`canvas.${name}`));
    one.addEventListener('click', act);
    one.addEventListener('pointerenter', (event) => Kit.tip(event, Kit.t(`canvas.${name}`)));
    one.addEventListener('pointerleave', Kit.hush);
    if (state) pressed.set(one, state);
    return one;
  }
  button('zoom_in', () => Graph.view.zoom(1.3));
  button('zoom_out', () => Graph.view.zoom(1 / 1.3));
  button('fit', () => fit());
  button('close_all', () => {
    store.closeBelow(0, 0);
    fit();
  });
  const toSuspect = button('to_suspect', () => store.select(0, store.pair.suspect));
  const showPath = button('path', () => store.showPath(!store.path), () => store.path !== null);
  const showBoth = button('both', () => setBoth(!both), () => both);
  const showLinked = button('linked', () => Graph.view.linked(!together), () => together);

  function buttons() {
    toSuspect.hidden = showPath.hidden = store.pair.suspect < 0;
    showBoth.hidden = showLinked.hidden = store.sides.length < 2;
    for (const [one, state] of pressed) one.setAttribute('aria-pressed', String(state()));
  }

  // ---- What changes ----
  Object.assign(Graph.view, {
    redraw,
    fit,
    scale: () => (views[0] ? views[0].scale : 1),
    zoom: (factor) => zoomAt(0, views[0].left + views[0].width / 2, height / 2, factor),
    pan: (dx, dy) => {
      views[0].dx += dx;
      views[0].dy += dy;
      moved(0);
    },
    toWidth: () => centre(0, store.selection && store.selection.side === 0 ? store.selection.node : 0),
    both: setBoth,
    linked: (value) => {
      together = value;
      if (views.length) moved(0);
      buttons();
    },
    place: (side, i) => painter.place(views[side], i), // pixels within the canvas
  });

  store.on('open', () => {
    views = store.sides.map((_, side) => ({ layout: new Graph.Layout(store, side), scale: 0.9, dx: 40, dy: 60 }));
    maps = [];
    arrange();
    views.forEach(makeMap);
    buttons();
    fitNow();
  });

  function fitNow() {
    views.forEach((view) => {
      view.scale = Math.min(1, Math.max(0.5, (view.width - 60) / view.layout.w[0]));
      view.dx = (view.width - view.layout.w[0] * view.scale) / 2;
      view.dy = 60;
    });
    redraw();
  }

  store.on('rows', () => {
    if (!views.length) return;
    const fixed = anchor || (store.selection ? { ...store.selection } : { side: 0, node: 0 });
    anchor = null;
    if (way) {
      for (const { view, to } of way.views) Object.assign(view, to);
      way = null;
    }
    const before = painter.place(views[fixed.side], fixed.node);
    for (const view of views) {
      view.layout.update();
      view.way = null;
    }
    const after = painter.place(views[fixed.side], fixed.node);
    views[fixed.side].dx += before.x + before.w / 2 - after.x - after.w / 2;
    views[fixed.side].dy += before.y - after.y;
    views.forEach(makeMap);
    moved(fixed.side);
  });
  store.on('centre', ({ side, node: i }) => (i === 0 ? fit(side) : centre(side, i)));
  for (const event of ['select', 'hover', 'filter']) store.on(event, redraw);
  store.on('path', () => {
    for (const view of views) view.way = null;
    buttons();
    redraw();
  });
  Kit.on('language', () => {
    arrange();
    redraw();
  });
  Kit.on('theme', () => {
    painter.theme();
    views.forEach(makeMap);
    redraw();
  });
  new ResizeObserver(() => {
    if (!views.length || (place.clientWidth === width && place.clientHeight === height)) return;
    const [w, h] = [views[0].width, height];
    arrange();
    for (const view of views) {
      view.dx += (views[0].width - w) / 2;
      view.dy += (height - h) / 2;
    }
    moved(0);
    draw(performance.now()); // in the same frame, else it blinks
  }).observe(place);
});
