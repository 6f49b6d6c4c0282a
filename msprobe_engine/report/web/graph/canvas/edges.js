'use strict';
// Edges of a side: between the children of a module, of the chosen node to wherever its tensors come from and go, and the way of a fault.
Graph.edges = (() => {
  // Edges between the children of a node: straight to the next line, in an arc at the right side past others.
  function drawBetween(painter, i, rows, x, y, scale, first, last) {
    const { pen, colour, view } = painter;
    const { layout } = view;
    const { pairs, takes } = layout.flow(i);
    const { starts, children } = rows;
    const line = (k) => {
      let low = 0;
      let high = starts.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (starts[middle] <= k) low = middle;
        else high = middle - 1;
      }
      return low;
    };
    pen.strokeStyle = colour.strong;
    pen.fillStyle = colour.strong;
    pen.lineWidth = Math.max(0.8, Math.min(1.4, 1.2 * scale));
    const from = starts[first];
    const to = (starts[last + 1] ?? children.length) - 1;
    const arrows = [];
    pen.beginPath();
    for (let e = 0; e < pairs.length; e += 2) {
      const a = pairs[e];
      const b = pairs[e + 1];
      if (b < from || a > to || a > b) continue;
      addEdge(painter, x, y, scale, children[a], children[b], line(b) - line(a), arrows);
    }
    // What comes from outside enters at the top of the first line, or at a corner.
    for (let k = from; k <= to; k++) {
      if (!takes[k] || i === 0) continue;
      const c = children[k];
      const left = x + layout.x[c] * scale;
      const top = y + layout.y[c] * scale;
      if (k < (starts[1] ?? children.length)) {
        const middle = left + (layout.w[c] * scale) / 2;
        pen.moveTo(middle, y + Graph.SIZES.head * scale);
        pen.lineTo(middle, top);
        arrows.push(middle, top, 0);
      } else {
        const corner = left + Math.min(16, layout.w[c] / 4) * scale;
        pen.moveTo(corner - 5 * scale, top - 11 * scale);
        pen.quadraticCurveTo(corner, top - 9 * scale, corner, top);
        arrows.push(corner, top, 0);
      }
    }
    pen.stroke();
    fillArrows(painter, arrows, scale);
  }

  function addEdge(painter, x, y, scale, a, b, lines, arrows) {
    const { pen, view } = painter;
    const { layout } = view;
    const ax = x + (layout.x[a] + layout.w[a] / 2) * scale;
    const ay = y + (layout.y[a] + layout.h[a]) * scale;
    const bx = x + (layout.x[b] + layout.w[b] / 2) * scale;
    const by = y + layout.y[b] * scale;
    if (lines <= 1) {
      pen.moveTo(ax, ay);
      if (Math.abs(ax - bx) < 1) pen.lineTo(bx, by);
      else pen.bezierCurveTo(ax, ay + 9 * scale, bx, by - 9 * scale, bx, by);
      arrows.push(bx, by, 0);
      return;
    }
    const sx = x + (layout.x[a] + layout.w[a]) * scale;
    const sy = y + (layout.y[a] + Math.min(layout.h[a], 1e9) - Graph.SIZES.leaf / 2) * scale;
    const ex = x + (layout.x[b] + layout.w[b]) * scale;
    const ey = by + (Graph.SIZES.leaf / 2) * scale;
    const out = Math.max(sx, ex) + (14 + Math.min(46, 5 * lines)) * scale;
    pen.moveTo(sx, sy);
    pen.bezierCurveTo(out, sy, out, ey, ex, ey);
    arrows.push(ex, ey, -1);
  }

  // Heads of arrows: 0 downwards, 1 to the right, -1 to the left.
  function fillArrows(painter, arrows, scale) {
    const { pen } = painter;
    const size = Math.max(2.5, Math.min(5, 4.2 * scale));
    pen.beginPath();
    for (let k = 0; k < arrows.length; k += 3) {
      const [x, y, way] = [arrows[k], arrows[k + 1], arrows[k + 2]];
      pen.moveTo(x, y);
      if (way === 0) {
        pen.lineTo(x - size * 0.75, y - size * 1.3);
        pen.lineTo(x + size * 0.75, y - size * 1.3);
      } else {
        pen.lineTo(x - way * size * 1.3, y - size * 0.75);
        pen.lineTo(x - way * size * 1.3, y + size * 0.75);
      }
    }
    pen.fill();
  }

  // What the chosen node takes and gives, to wherever that stands.
  function drawSelection(painter) {
    const { marks, columns, pen, colour, view } = painter;
    const i = marks.selected;
    if (i < 0 || i === undefined) return;
    const here = view.layout.visible(i);
    const drawn = new Set([here]);
    pen.strokeStyle = colour.accent;
    pen.fillStyle = colour.accent;
    const one = (other, out) => {
      const there = view.layout.visible(other);
      if (drawn.has(there * 2 + out) || there === here) return;
      drawn.add(there * 2 + out);
      const [a, b] = [painter.place(view, here), painter.place(view, there)];
      if (out) drawLink(painter, a, b, 1.8);
      else drawLink(painter, b, a, 1.8);
    };
    for (const other of columns.producers(i).subarray(0, 60)) one(other, 0);
    for (const other of columns.consumers(i).subarray(0, 60)) one(other, 1);
  }

  // From a box to a box, both in pixels.
  function drawLink(painter, from, to, width) {
    const { pen, view } = painter;
    const [ax, ay, bx, by] = [from.x + from.w / 2, from.y + from.h, to.x + to.w / 2, to.y];
    if (Math.max(ay, by) < view.top - 2000 || Math.min(ay, by) > view.top + view.height + 2000) return;
    pen.lineWidth = width * Math.min(1, view.scale + 0.25);
    pen.beginPath();
    // Past what stands between them it goes around at the right.
    if (by - ay > 34 * view.scale && Math.abs(ax - bx) < (from.w + to.w) / 3) {
      const [sx, sy, ex, ey] = [from.x + from.w, from.y + from.h - 9 * view.scale, to.x + to.w, to.y + 9 * view.scale];
      const out = Math.max(sx, ex) + Math.min(70, 18 + (ey - sy) / 8) * Math.min(1.2, view.scale + 0.2);
      pen.moveTo(sx, sy);
      pen.bezierCurveTo(out, sy, out, ey, ex, ey);
      pen.stroke();
      fillArrows(painter, [ex, ey, -1], Math.max(0.5, view.scale));
      return;
    }
    pen.moveTo(ax, ay);
    const bend = Math.max(8, Math.min(60, Math.abs(by - ay) / 2)) * Math.min(1, view.scale + 0.3);
    pen.bezierCurveTo(ax, ay + bend, bx, by - bend, bx, by);
    pen.stroke();
    fillArrows(painter, [bx, by, 0], Math.max(0.5, view.scale));
  }

  // The way of a fault, over everything else.
  function drawPath(painter) {
    const { marks, pen, colour, view } = painter;
    if (!marks.path) return;
    const ink = marks.path.kind === 'nonfinite' ? colour.ubad : colour.bad;
    pen.strokeStyle = ink;
    pen.fillStyle = ink;
    const { scale } = view;
    let before = null;
    let drawn = -Infinity; // where the last one was drawn: of thousands on one pixel, one is enough
    for (const { box, leaf } of marks.way) {
      const there = { x: view.left + view.dx + box.x * scale, y: view.top + view.dy + box.y * scale, w: box.w * scale, h: box.h * scale };
      const last = before;
      before = there;
      if (Math.abs(there.y - drawn) < 1.5) continue;
      const away = (one) => one.y + one.h < view.top - 40 || one.y > view.top + view.height + 40;
      if (away(there) && (!last || away(last)) && (!last || there.y < view.top === last.y < view.top)) continue;
      drawn = there.y;
      const inside = last && there.y >= last.y && there.y + there.h <= last.y + last.h; // a module that is to blame, and a call in it
      if (last && !inside) {
        pen.strokeStyle = colour.card; // a seam of the page's colour keeps it apart from what it crosses
        drawLink(painter, last, there, 6);
        pen.strokeStyle = ink;
        drawLink(painter, last, there, 3);
      }
      if (away(there) || there.h < 3) continue;
      painter._round(there.x - 1.5, there.y - 1.5, there.w + 3, there.h + 3, leaf ? there.h / 2 + 1.5 : 8);
      pen.lineWidth = Math.min(3, 1 + 3 * scale);
      pen.stroke();
    }
  }

  return { drawBetween, drawSelection, drawPath };
})();
