'use strict';
// Draws one side into its part of the canvas: only what lies in view, and of that only what is large enough to be seen. A box that is too
// small for what is in it is one rectangle in the colour of the worst inside, so a fault is never lost by zooming out.
Graph.Painter = class {
  constructor(pen) {
    this.pen = pen;
    this.theme();
  }

  theme() {
    const names = ['bg', 'card', 'sunk', 'line', 'strong', 'fg', 'soft', 'accent', 'on-accent', 'bad', 'bad-bg', 'ubad', 'ubad-ink', 'unone', 'unone-ink', 'font', 's4', 's2'];
    this.colour = Object.fromEntries(names.map((name) => [name, Kit.colour(name)]));
    this.widths = new Map();
    this.scales = new Map();
  }

  // Colours of a difference; asked for a few hundred times a frame.
  _scale(units) {
    const key = units > 4 && units < Infinity ? 2 ** Math.floor(Math.log2(units)) * 1.01 : units; // Kit.scale's steps are powers of two and 1e6
    if (units > 5e5 && units < Infinity) return Kit.scale(units);
    let found = this.scales.get(key);
    if (!found) {
      found = Kit.scale(key);
      this.scales.set(key, found);
      if (this.scales.size > 4000) this.scales.clear();
    }
    return found;
  }

  // view: {layout, scale, dx, dy, left, top, width, height} of the part; marks: what stands out.
  paint(view, marks) {
    const { pen } = this;
    this.view = view;
    this.marks = marks;
    this.columns = view.layout.columns;
    this.late = [];
    this.links = [];
    this.spots = []; // signs of links that can be clicked
    pen.save();
    pen.beginPath();
    pen.rect(view.left, view.top, view.width, view.height);
    pen.clip();
    this._node(0, view.left + view.dx, view.top + view.dy);
    this._flowOfSelection();
    this._path();
    this._tooSmall('suspect', marks.suspect);
    this._tooSmall('selected', marks.selected);
    this._tooSmall('partner', marks.partner);
    for (const one of this.late) this._standsOut(one);
    for (const one of this.links) this._standsOut(one);
    pen.restore();
  }

  // Of what is not shown, only the worst counts.
  _worst(i) {
    const { flags, below } = this.columns;
    if (flags[i] & (Graph.FLAG.NONFINITE_OUT | Graph.FLAG.NONFINITE_BELOW)) return this.colour.ubad;
    return this.marks.comparison ? this._scale(below[i]).colour : this.colour.unone;
  }

  _fill(i) {
    const { flags, units, type } = this.columns;
    if (flags[i] & Graph.FLAG.NONFINITE_OUT) return { colour: this.colour.ubad, ink: this.colour['ubad-ink'] };
    if (!this.marks.comparison) return type[i] === Graph.API ? { colour: this.colour.sunk, ink: this.colour.fg } : { colour: this.colour.card, ink: this.colour.fg };
    return this._scale(units[i]);
  }

  _node(i, x, y) {
    const { view, pen, columns } = this;
    const { layout, scale } = view;
    const w = layout.w[i] * scale;
    const h = layout.h[i] * scale;
    if (x > view.left + view.width || y > view.top + view.height || x + w < view.left || y + h < view.top) return;
    const dim = this.marks.kept && !this.marks.kept[i];
    if (dim) pen.globalAlpha = 0.28;
    const rows = layout.placed.get(i);
    const inside = rows && w > 5 && h > 14 && columns.depth[i] < Graph.SIZES.deepest;
    if (inside) this._frame(i, x, y, w, h, scale);
    else this._box(i, x, y, w, h, scale, !!rows);
    if (dim) pen.globalAlpha = 1;
    this._mark(i, x, y, w, h);
    if (!inside) return;
    const [first, last] = layout.linesIn(i, (view.top - y) / scale, (view.top + view.height - y) / scale);
    if (scale > 0.22) this._edges(i, rows, x, y, scale, first, last);
    const { starts, children, tops } = rows;
    const lineOfPixels = 1.5 / scale;
    for (let line = first; line <= last; line++) {
      const end = starts[line + 1] ?? children.length;
      if ((tops[line + 1] ?? Infinity) - tops[line] > lineOfPixels) {
        for (let k = starts[line]; k < end; k++) this._node(children[k], x + layout.x[children[k]] * scale, y + layout.y[children[k]] * scale);
        continue;
      }
      // Several lines share a pixel: the worst of them is drawn.
      let worst = children[starts[line]];
      const top = tops[line];
      while (line <= last && tops[line] - top < lineOfPixels) {
        for (let k = starts[line], stop = starts[line + 1] ?? children.length; k < stop; k++) {
          if (this._badness(children[k]) > this._badness(worst)) worst = children[k];
        }
        line++;
      }
      line--;
      pen.fillStyle = this._worst(worst);
      pen.fillRect(x + layout.x[worst] * scale, y + top * scale, Math.max(1, layout.w[worst] * scale), 1.5);
    }
  }

  _badness(i) {
    return this.columns.flags[i] & (Graph.FLAG.NONFINITE_OUT | Graph.FLAG.NONFINITE_BELOW) ? Infinity : this.columns.below[i];
  }

  // A closed module or a call.
  _box(i, x, y, w, h, scale, opened) {
    const { pen, columns, colour } = this;
    const unmatched = (columns.flags[i] & Graph.FLAG.UNMATCHED) !== 0;
    if (h < 5) {
      pen.fillStyle = unmatched ? colour.strong : this._worst(i);
      pen.fillRect(x, y, Math.max(1, w), Math.max(1, h));
      return;
    }
    const leaf = columns.isLeaf(i);
    const { colour: fill, ink } = opened || (!leaf && h < 10) ? { colour: this._worst(i), ink: colour.fg } : this._fill(i);
    this._round(x, y, w, h, Math.min(leaf ? h / 2 : 7 * scale, 13));
    pen.fillStyle = unmatched ? colour.card : fill;
    pen.fill();
    pen.lineWidth = 1;
    pen.strokeStyle = unmatched ? colour.soft : leaf ? colour.line : colour.strong;
    if (unmatched) pen.setLineDash([4, 3]);
    pen.stroke();
    pen.setLineDash([]);
    if (h < 9) return;
    const pad = Graph.SIZES.pad * scale;
    let room = w - 2 * pad;
    let left = x + pad;
    if (!leaf) {
      this._arrow(left - 2 * scale, y + h / 2, scale, false, unmatched ? colour.soft : ink);
      left += Graph.SIZES.arrow * scale;
      room -= Graph.SIZES.arrow * scale;
      // What is inside may be worse than what comes out: a chip at the end of a closed module says so.
      const worst = this._worst(i);
      const chip = 9 * scale;
      if (worst !== fill) {
        pen.fillStyle = worst;
        this._round(x + w - pad - chip + 2 * scale, y + (h - chip) / 2, chip, chip, 2.5 * scale);
        pen.fill();
        pen.strokeStyle = colour.soft;
        pen.lineWidth = 0.75;
        pen.stroke();
      }
      room -= chip + 6 * scale;
    }
    this._label(i, left, y + h / 2, room, scale, unmatched ? colour.soft : ink, leaf ? 500 : 600);
  }

  // An open module.
  _frame(i, x, y, w, h, scale) {
    const { pen, columns, colour } = this;
    const radius = Math.min(9 * scale, 10);
    this._round(x, y, w, h, radius);
    pen.fillStyle = columns.depth[i] % 2 ? colour.card : colour.bg;
    pen.fill();
    pen.lineWidth = 1;
    pen.strokeStyle = columns.flags[i] & Graph.FLAG.UNMATCHED ? colour.soft : colour.strong;
    if (columns.flags[i] & Graph.FLAG.UNMATCHED) pen.setLineDash([4, 3]);
    pen.stroke();
    pen.setLineDash([]);
    const head = Graph.SIZES.head * scale;
    if (head < 8) return;
    const pad = Graph.SIZES.pad * scale;
    let left = x + pad;
    if (i > 0) {
      this._arrow(left - 2 * scale, y + head / 2, scale, true, colour.soft);
      left += Graph.SIZES.arrow * scale;
    }
    if (i > 0 && this.marks.comparison) {
      pen.fillStyle = this._fill(i).colour;
      this._round(left, y + head / 2 - 4.5 * scale, 9 * scale, 9 * scale, 2.5 * scale);
      pen.fill();
      pen.strokeStyle = colour.strong;
      pen.lineWidth = 0.75;
      pen.stroke();
      left += 15 * scale;
    }
    this._label(i, left, y + head / 2, x + w - pad - left, scale, colour.fg, 600);
  }

  // Says that a module can be opened or closed here.
  _arrow(x, y, scale, open, ink) {
    if (scale < 0.45) return;
    const { pen } = this;
    const size = 3.6 * Math.min(scale, 1.3);
    pen.beginPath();
    if (open) {
      pen.moveTo(x - size * 0.2, y - size * 0.5);
      pen.lineTo(x + size * 0.8, y + size * 0.55);
      pen.lineTo(x + size * 1.8, y - size * 0.5);
    } else {
      pen.moveTo(x + size * 0.3, y - size);
      pen.lineTo(x + size * 1.3, y);
      pen.lineTo(x + size * 0.3, y + size);
    }
    pen.lineWidth = 1.3 * Math.min(scale, 1.3);
    pen.strokeStyle = ink;
    pen.stroke();
  }

  _label(i, x, middle, room, scale, ink, weight) {
    const { pen, colour } = this;
    const size = Math.min(12 * scale, 15);
    if (size < 6.5 || room < 10) return;
    const { label, second } = this.view.layout.text(i);
    pen.textBaseline = 'middle';
    pen.fillStyle = ink;
    pen.font = `${weight} ${size}px ${colour.font}`;
    const used = this._text(label, x, middle, room, size, weight);
    if (!second || room - used < 16 * scale) return;
    pen.globalAlpha *= 0.72;
    pen.font = `400 ${size * 0.92}px ${colour.font}`;
    this._text(second, x + used + 6 * scale, middle, room - used - 6 * scale, size * 0.92, 400);
    pen.globalAlpha = this.marks.kept && !this.marks.kept[i] ? 0.28 : 1;
  }

  // Text that ends in a mark where there is no room; the width of a text is known per pixel of its size.
  _text(text, x, y, room, size, weight) {
    const { pen } = this;
    const key = weight + text;
    let one = this.widths.get(key);
    if (one === undefined) {
      if (this.widths.size > 20000) this.widths.clear();
      this.widths.set(key, (one = pen.measureText(text).width / size));
    }
    const width = one * size;
    if (width <= room) {
      pen.fillText(text, x, y);
      return width;
    }
    const letters = Math.floor((text.length * (room - size)) / width);
    if (letters >= 2) pen.fillText(`${text.slice(0, letters)}…`, x, y);
    return room;
  }

  _round(x, y, w, h, r) {
    const { pen } = this;
    const radius = Math.min(r, w / 2, h / 2);
    pen.beginPath();
    pen.moveTo(x + radius, y);
    pen.arcTo(x + w, y, x + w, y + h, radius);
    pen.arcTo(x + w, y + h, x, y + h, radius);
    pen.arcTo(x, y + h, x, y, radius);
    pen.arcTo(x, y, x + w, y, radius);
    pen.closePath();
  }

  // Edges between the children of a node: straight to the next line, in an arc at the right side past others.
  _edges(i, rows, x, y, scale, first, last) {
    const { pen, colour, view } = this;
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
      this._edge(x, y, scale, children[a], children[b], line(b) - line(a), arrows);
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
    this._arrows(arrows, scale);
  }

  _edge(x, y, scale, a, b, lines, arrows) {
    const { pen, view } = this;
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
  _arrows(arrows, scale) {
    const { pen } = this;
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

  // What stands out is shown where it is, also when it is too small to be drawn itself.
  _tooSmall(what, i) {
    if (i < 0 || this.late.some((one) => one.what === what)) return;
    const { x, y, w, h } = this.place(this.view, i);
    const [wide, high] = [Math.max(w, 8), Math.max(h, 5)];
    this.late.push({ what, i, x: x + (w - wide) / 2, y: y + (h - high) / 2, w: wide, h: high });
  }

  // What stands out is drawn after all else.
  _mark(i, x, y, w, h) {
    const { marks } = this;
    if (i === marks.suspect) this.late.push({ what: 'suspect', i, x, y, w, h });
    if (i === marks.partner) this.late.push({ what: 'partner', i, x, y, w, h });
    if (i === marks.hovered && i > 0) this.late.push({ what: 'hovered', i, x, y, w, h });
    if (i === marks.selected) this.late.push({ what: 'selected', i, x, y, w, h });
    if (this.columns.flags[i] & Graph.FLAG.LINKED && h > 9) this.links.push({ what: 'linked', i, x, y, w, h });
  }

  _standsOut({ what, i, x, y, w, h }) {
    const { pen, colour } = this;
    const radius = this.columns.isLeaf(i) ? h / 2 : Math.min(9, h / 3);
    if (what === 'linked') {
      this.spots.push({ i, x: x + w - 5, y: y - 1 });
      this._pill('⇄', x + w + 8, y - 1, colour.card, colour.accent, colour.strong);
      return;
    }
    const gap = what === 'suspect' ? 4.5 : 2;
    this._round(x - gap, y - gap, w + 2 * gap, h + 2 * gap, radius + gap);
    pen.lineWidth = what === 'hovered' ? 1.5 : 2.5;
    pen.strokeStyle = what === 'suspect' ? colour.bad : what === 'hovered' ? colour.soft : colour.accent;
    if (what === 'partner') pen.setLineDash([6, 4]);
    pen.stroke();
    pen.setLineDash([]);
    if (what === 'suspect') {
      // Beside the box: above and below it are its neighbours.
      this._pill(Kit.t(this.marks.comparison ? 'canvas.suspect' : 'canvas.born'), x - 12, y + Math.min(h / 2, 20), colour.bad, colour.card, null);
    }
  }

  // A small sign whose right end stands at x, unless the view ends before.
  _pill(text, x, y, fill, ink, edge) {
    const { pen, colour, view } = this;
    pen.font = `600 11px ${colour.font}`;
    const wide = pen.measureText(text).width + 14;
    const left = Math.max(view.left + 4, x - wide);
    this._round(left, y - 9, wide, 18, 9);
    pen.fillStyle = fill;
    pen.fill();
    if (edge) {
      pen.lineWidth = 1;
      pen.strokeStyle = edge;
      pen.stroke();
    }
    pen.fillStyle = ink;
    pen.textBaseline = 'middle';
    pen.fillText(text, left + 7, y + 0.5);
  }

  // Box of what is visible of a node, in pixels.
  place(view, node) {
    const box = view.layout.box(view.layout.visible(node));
    return { x: view.left + view.dx + box.x * view.scale, y: view.top + view.dy + box.y * view.scale, w: box.w * view.scale, h: box.h * view.scale };
  }

  // What the chosen node takes and gives, to wherever that stands.
  _flowOfSelection() {
    const { marks, columns, pen, colour, view } = this;
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
      if (out) this._link(here, there, 1.8);
      else this._link(there, here, 1.8);
    };
    for (const other of columns.producers(i).subarray(0, 60)) one(other, 0);
    for (const other of columns.consumers(i).subarray(0, 60)) one(other, 1);
  }

  _link(a, b, width) {
    const { pen, view } = this;
    const from = this.place(view, a);
    const to = this.place(view, b);
    const [ax, ay, bx, by] = [from.x + from.w / 2, from.y + from.h, to.x + to.w / 2, to.y];
    if (Math.max(ay, by) < view.top - 2000 || Math.min(ay, by) > view.top + view.height + 2000) return;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(ax, ay);
    const bend = Math.max(8, Math.min(60, Math.abs(by - ay) / 2)) * Math.min(1, view.scale + 0.3);
    pen.bezierCurveTo(ax, ay + bend, bx, by - bend, bx, by);
    pen.stroke();
    this._arrows([bx, by, 0], Math.max(0.8, view.scale));
  }

  // The way of a fault, over everything else.
  _path() {
    const { marks, pen, colour, view } = this;
    if (!marks.path) return;
    const ink = marks.path.kind === 'nonfinite' ? colour.ubad : colour.bad;
    pen.strokeStyle = ink;
    pen.fillStyle = ink;
    let before = -1;
    for (const there of marks.way) {
      if (before >= 0) {
        pen.strokeStyle = colour.card; // a seam of the page's colour keeps it apart from what it crosses
        this._link(before, there, 6);
        pen.strokeStyle = ink;
        this._link(before, there, 3);
      }
      const { x, y, w, h } = this.place(view, there);
      before = there;
      if (y + h < view.top || y > view.top + view.height || h < 3) continue;
      this._round(x - 1.5, y - 1.5, w + 3, h + 3, view.layout.columns.isLeaf(there) ? h / 2 + 1.5 : 8);
      pen.lineWidth = 3;
      pen.stroke();
    }
  }
};
