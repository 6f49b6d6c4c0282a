'use strict';
// A small map of a side: all that is open, pressed into a strip, the worst on top, with a frame around what is in view. Painted anew when
// something opens or closes; each frame only copies it.
Graph.Minimap = class {
  constructor(store, painter) {
    this.store = store;
    this.painter = painter;
    this.MAP = { w: 66, h: 170, gap: 12 };
  }

  place(view) {
    const { w, h, gap } = this.MAP;
    return { x: view.left + view.width - w - gap, y: view.height - h - gap, w, h: Math.min(h, view.height - 2 * gap) };
  }

  make(view, side) {
    const { store, painter, MAP } = this;
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
      const colour = painter.fill(i, true).colour;
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
    view.map = map;
  }

  draw(view, pen) {
    const { painter } = this;
    const at = this.place(view);
    const { layout } = view;
    const sx = at.w / layout.w[0];
    const sy = at.h / layout.h[0];
    const clamp = (value, most) => Math.max(0, Math.min(most, value));
    const left = clamp((-view.dx / view.scale) * sx, at.w);
    const right = clamp(((view.width - view.dx) / view.scale) * sx, at.w);
    const top = clamp((-view.dy / view.scale) * sy, at.h);
    const bottom = clamp(((view.height - view.dy) / view.scale) * sy, at.h);
    const small = view.width < 280 || view.height < 300; // it would hide what it is to help with
    view.mapped = !small && (right - left < at.w - 1 || bottom - top < at.h - 1); // of what is in view as a whole no map is needed
    if (!view.mapped) return;
    pen.globalAlpha = 0.92;
    pen.drawImage(view.map, at.x, at.y, at.w, at.h);
    pen.globalAlpha = 1;
    pen.strokeStyle = painter.colour.strong;
    pen.lineWidth = 1;
    pen.strokeRect(at.x - 0.5, at.y - 0.5, at.w + 1, at.h + 1);
    pen.strokeStyle = painter.colour.accent;
    pen.lineWidth = 2;
    const high = Math.max(4, bottom - top);
    pen.strokeRect(at.x + left, at.y + Math.min(top, at.h - high), Math.max(4, right - left), high);
  }

  // Its place, when something of it is at (x, y).
  at(view, x, y) {
    const at = this.place(view);
    return view.mapped && x >= at.x && x <= at.x + at.w && y >= at.y && y <= at.y + at.h ? at : null;
  }

  // Where a view has to be moved to show what is at (x, y) of the map.
  target(view, x, y) {
    const at = this.place(view);
    const { w, h } = view.layout;
    return {
      dx: view.width / 2 - ((x - at.x) / at.w) * w[0] * view.scale,
      dy: view.height / 2 - ((y - at.y) / at.h) * h[0] * view.scale,
    };
  }
};
