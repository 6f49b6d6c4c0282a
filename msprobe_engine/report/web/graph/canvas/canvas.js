'use strict';
// The canvas: one part for each side, moved with mouse, wheel, fingers and keys. Moving one part moves the other, so that partners stay
// beside each other.
//
// Graph.view (for panels): zoom(factor), fit(), pan(dx, dy) in pixels, both(bool), linked(bool), redraw(), scale(),
// isBoth(), isLinked(), isStill()
Kit.texts('canvas', {
  label: ['Graph. Arrow keys move, + and - zoom, Enter opens what is chosen', '图。方向键移动，+ 和 - 缩放，回车展开所选节点'],
  target: ['Target', '目标'],
  golden: ['Golden', '标杆'],
  alone: ['Model', '模型'],
  suspect: ['First suspect', '首个可疑点'],
  born: ['First NaN or Inf', '首个 NaN 或 Inf'],
  zoom_in: ['Zoom in', '放大'],
  zoom_out: ['Zoom out', '缩小'],
  fit: ['Show all', '显示全部'],
  to_suspect: ['To the first suspect', '跳到首个可疑点'],
  path: ['Show the way of the fault', '显示问题传播路径'],
  both: ['Show both models', '同时显示两个模型'],
  linked: ['Move both together', '联动移动'],
  close_all: ['Close all modules', '全部折叠'],
  no_partner: ['no partner', '未匹配'],
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
  const minimap = new Graph.Minimap(store, painter);
  const still = matchMedia('(prefers-reduced-motion: reduce)');
  let views = [];
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
      view.split = two; // lines to partners leave it at its side
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

  // The nodes of a path as far as they are visible, each once, with their places.
  function wayOf({ layout }, path) {
    const found = [];
    let last = -1;
    for (const i of path.nodes) {
      const there = layout.visible(i);
      if (there !== last) found.push({ box: layout.box(there), leaf: layout.columns.isLeaf(there) });
      last = there;
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
    views.forEach((view) => say(view));
    for (const view of views) if (view.width && view.map) minimap.draw(view, pen);
  }

  // Where one is: the modules around the middle of the view, in the strip above.
  function say(view) {
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
    const column = layout.h[0] > 6 * layout.w[0]; // nothing is seen of all of it: as much of it as can be read
    const scale = Math.max(LEAST, Math.min(1.1, wide, Math.max(high, (column ? 0.6 : 0.14) * Math.min(1, wide))));
    const whole = layout.h[0] * scale <= view.height - 60;
    const around = store.selection && store.selection.side === side ? store.selection.node : side === 0 ? store.pair.suspect : -1;
    const chosen = around >= 0 ? layout.box(layout.visible(around)) : null;
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

  // ---- Opening ----
  function toggle(side, i) {
    anchor = { side, node: i };
    store.toggle(side, i);
  }

  // The partner of a node that was chosen where it stands comes to its height, and nothing moves on this side.
  function align(side, i) {
    const partner = store.partner(side, i);
    if (partner < 0 || !both || !together) return;
    const here = painter.place(views[side], i);
    const other = views[1 - side];
    const there = painter.place(other, partner);
    const before = placeOf(other);
    const after = { ...before, dy: before.dy + here.y - there.y, dx: before.dx + (here.x - views[side].left) - (there.x - other.left) };
    if (still.matches) Object.assign(other, after);
    else way = { since: performance.now(), lasts: 200, views: [{ view: other, from: before, to: after }] };
    redraw();
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
    both: setBoth,
    isBoth: () => both,
    isLinked: () => together,
    isStill: () => way === null && due === 0, // nothing moves and all is drawn
    linked: (value) => {
      together = value;
      if (views.length) moved(0);
      buttons();
    },
    place: (side, i) => painter.place(views[side], i), // pixels within the canvas
  });

  const stop = () => {
    way = null;
  };
  Graph.gestures(node, store, { views: () => views, painter, minimap, stop, moved, zoomAt, toggle, align });
  const buttons = Graph.tools(place, store, Graph.view);

  store.on('open', () => {
    if (!views.length) both = whole.clientWidth >= 560; // beside each other in less, neither could be read
    views = store.sides.map((_, side) => ({ layout: new Graph.Layout(store, side), scale: 0.9, dx: 40, dy: 60 }));
    arrange();
    views.forEach((view, side) => minimap.make(view, side));
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
    views.forEach((view, side) => minimap.make(view, side));
    moved(fixed.side);
  });
  store.on('centre', ({ side, node: i }) => (i === 0 ? fit(side) : centre(side, i)));
  for (const event of ['select', 'hover', 'filter']) store.on(event, redraw);
  store.on('select', () => {
    const chosen = store.selection;
    node.setAttribute('aria-description', chosen ? Kit.name(store.sides[chosen.side].name(chosen.node), 200) : '');
  });
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
    views.forEach((view, side) => minimap.make(view, side));
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
