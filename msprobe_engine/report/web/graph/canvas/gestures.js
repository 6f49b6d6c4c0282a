'use strict';
// Mouse, wheel, fingers and keys on the canvas.
//
// Graph.gestures(node, store, plane): plane is the canvas' inside: views() (the parts), painter, minimap, stop() (an animation), moved(side)
// (after dx and dy of a part were changed), zoomAt(side, x, y, factor), toggle(side, node), align(side, node).
Graph.gestures = (node, store, plane) => {
  const { views, painter, minimap } = plane;
  const sideAt = (x) => (views().length === 2 && views()[1].width && x >= views()[1].left ? 1 : 0);
  const local = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const hit = (side, x, y) => {
    const view = views()[side];
    return view.layout.hit((x - view.left - view.dx) / view.scale, (y - view.dy) / view.scale);
  };
  const spotAt = (side, x, y) => (views()[side].spots || []).find((spot) => Math.abs(spot.x - x) < 13 && Math.abs(spot.y - y) < 10);
  // Is it on the sign that opens and closes a module?
  const onArrow = (side, i, x, y) => {
    const { layout, scale } = views()[side];
    if (i <= 0 || layout.columns.isLeaf(i) || scale < 0.45) return false;
    const box = painter.place(views()[side], i);
    const high = (layout.placed.has(i) ? Graph.SIZES.head : Graph.SIZES.closed) * scale;
    return x - box.x < (Graph.SIZES.pad + Graph.SIZES.arrow - 2) * scale && y - box.y < high;
  };
  const onMap = (side, x, y) => minimap.at(views()[side], x, y);
  function toMap(side, x, y) {
    plane.stop();
    Object.assign(views()[side], minimap.target(views()[side], x, y));
    plane.moved(side);
  }

  const fingers = new Map();
  let drag = null;
  node.addEventListener('pointerdown', (event) => {
    if (event.button > 1 || !views().length) return;
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
    if (!views().length) return;
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
      plane.zoomAt(drag.side, (one[1][0] + two[1][0]) / 2, (one[1][1] + two[1][1]) / 2, apart(1) / Math.max(1, apart(0)));
      drag.moved = true;
    } else if (drag.map) {
      toMap(drag.side, x, y);
    } else {
      if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
      drag.moved = true;
      plane.stop();
      node.style.cursor = 'grabbing';
      views()[drag.side].dx += x - before[0];
      views()[drag.side].dy += y - before[1];
      plane.moved(drag.side);
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
    if (onArrow(done.side, i, done.x, done.y)) return plane.toggle(done.side, i);
    store.select(done.side, i, { reveal: false, centre: false });
    plane.align(done.side, i);
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
    const i = onMap(side, x, y) || spotAt(side, x, y) ? -1 : hit(side, x, y);
    if (i > 0 && !onArrow(side, i, x, y)) plane.toggle(side, i); // the arrow has had both clicks
  });
  node.addEventListener(
    'wheel',
    (event) => {
      if (!views().length) return;
      event.preventDefault();
      const [x, y] = local(event);
      const side = sideAt(x);
      const step = event.deltaMode === 1 ? 30 : event.deltaMode === 2 ? node.clientHeight : 1;
      if (event.ctrlKey || event.metaKey) {
        plane.zoomAt(side, x, y, Math.exp(-Math.max(-60, Math.min(60, event.deltaY * step)) * 0.0045));
        return;
      }
      plane.stop();
      views()[side].dx -= (event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX) * step;
      views()[side].dy -= (event.shiftKey && !event.deltaX ? 0 : event.deltaY) * step;
      plane.moved(side);
    },
    { passive: false },
  );
  node.addEventListener('keydown', (event) => {
    const far = event.shiftKey ? 400 : 80;
    const page = node.clientHeight * 0.8;
    const moves = { ArrowUp: [0, far], ArrowDown: [0, -far], ArrowLeft: [far, 0], ArrowRight: [-far, 0], PageUp: [0, page], PageDown: [0, -page] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) Graph.view.pan(...moves[event.key]);
    else if (event.key === '+' || event.key === '=') Graph.view.zoom(1.25);
    else if (event.key === '-') Graph.view.zoom(0.8);
    else if (event.key === 'Enter' && store.selection) plane.toggle(store.selection.side, store.selection.node);
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
      const { columns } = views()[side].layout;
      const lines = [Kit.name(columns.name(i), 300)];
      if (spot) {
        const ranks = others(side, i);
        lines.push(ranks.length ? Kit.t('canvas.linked_to', ranks.slice(0, 16).join(', '), ranks[0]) : Kit.t('canvas.linked_away'));
      } else if (store.sides.length === 2) {
        lines.push(columns.flags[i] & Graph.FLAG.NEEDLESS ? Kit.t('graph.needless') : columns.flags[i] & Graph.FLAG.UNMATCHED ? Kit.t('canvas.no_partner') : Kit.scale(columns.units[i]).label);
      }
      Kit.tip(at, lines.join('\n'));
    }, 350);
  }
};
