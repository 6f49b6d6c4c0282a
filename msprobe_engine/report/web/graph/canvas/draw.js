'use strict';
// Draws one side into its part of the canvas: only what lies in view, and of that only what is large enough to be seen. A box that is too
// small for what is in it is one rectangle in the colour of the worst inside, so a fault is never lost by zooming out.
Graph.Painter = class {
  constructor(pen) {
    this.pen = pen;
    this.theme();
  }

  theme() {
    const names = ['bg', 'card', 'sunk', 'line', 'strong', 'fg', 'soft', 'accent', 'on-accent', 'bad', 'bad-bg', 'ubad', 'unone', 'font', 's4', 's2'];
    this.colour = Object.fromEntries(names.map((name) => [name, Kit.colour(name)]));
    this.widths = new Map();
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
    Graph.edges.drawSelection(this);
    Graph.edges.drawPath(this);
    this._tooSmall('suspect', marks.suspect);
    this._tooSmall('selected', marks.selected);
    this._tooSmall('partner', marks.partner);
    for (const one of this.late) this._standsOut(one);
    for (const one of this.links) this._standsOut(one);
    pen.restore();
  }

  // Of what is not shown, only the worst counts. Boxes of a single run have a colour only where something is not finite.
  fill(i, inside = false) {
    const { colour, columns } = this;
    const [tone, hollow] = Graph.tone(columns, i, inside).split(' ');
    if (tone !== 'ufine' && hollow !== 'hollow') return { colour: Kit.colour(tone), ink: Kit.colour(`${tone}-ink`) };
    return { colour: inside ? colour.unone : columns.type[i] === Graph.API ? colour.sunk : colour.card, ink: colour.fg };
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
    if (scale > 0.22) Graph.edges.drawBetween(this, i, rows, x, y, scale, first, last);
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
      pen.fillStyle = this.fill(worst, true).colour;
      pen.fillRect(x + layout.x[worst] * scale, y + top * scale, Math.max(1, layout.w[worst] * scale), 1.5);
    }
  }

  _badness(i) {
    return this.columns.flags[i] & (Graph.FLAG.NONFINITE_OUT | Graph.FLAG.NONFINITE_BELOW) ? Infinity : this.columns.below[i] >= 0 ? this.columns.below[i] : -1;
  }

  // A closed module or a call.
  _box(i, x, y, w, h, scale, opened) {
    const { pen, columns, colour } = this;
    const unmatched = (columns.flags[i] & Graph.FLAG.UNMATCHED) !== 0;
    if (h < 5) {
      pen.fillStyle = unmatched ? colour.strong : this.fill(i, true).colour;
      pen.fillRect(x, y, Math.max(1, w), Math.max(1, h));
      return;
    }
    const leaf = columns.isLeaf(i);
    const { colour: fill, ink } = this.fill(i, opened || (!leaf && h < 10));
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
      const worst = this.fill(i, true).colour;
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
      pen.fillStyle = this.fill(i).colour;
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
    if (what === 'suspect') {
      // A ring that stands out of any colour of a box.
      this._round(x - gap, y - gap, w + 2 * gap, h + 2 * gap, radius + gap);
      pen.lineWidth = 8.5;
      pen.strokeStyle = colour.fg;
      pen.stroke();
      pen.lineWidth = 5.5;
      pen.strokeStyle = colour.card;
      pen.stroke();
    }
    this._round(x - gap, y - gap, w + 2 * gap, h + 2 * gap, radius + gap);
    pen.lineWidth = what === 'hovered' ? 1.5 : 2.5;
    pen.strokeStyle = what === 'suspect' ? colour.bad : what === 'hovered' ? colour.soft : colour.accent;
    if (what === 'partner') pen.setLineDash([6, 4]);
    pen.stroke();
    pen.setLineDash([]);
    if (what === 'suspect') {
      // Beside the box, as above and below it are its neighbours, and not below the buttons at the left; a flag where words have no room.
      const { view } = this;
      const text = Kit.t(this.marks.comparison ? 'canvas.suspect' : 'canvas.born');
      const wide = this._pillWidth(text);
      const middle = y + Math.min(h / 2, 20);
      const margin = view.left || middle < view.height - 290 ? 4 : 56;
      const right = x + w + (this.columns.flags[i] & Graph.FLAG.LINKED ? 24 : 14);
      const free = (left) => [0.05, 0.5, 0.95].every((part) => this._surrounds(left + part * wide, middle, i));
      if (x - 14 - wide >= view.left + margin && free(x - 14 - wide)) this._pill(text, x - 14, middle, colour.bad, colour.card, null);
      else if (!view.split && right + wide <= view.left + view.width - 4 && free(right)) this._pill(text, right + wide, middle, colour.bad, colour.card, null);
      else this._pill('⚑', x - 10, middle, colour.bad, colour.card, null);
    }
  }

  // Is there nothing at a place but what encloses a node?
  _surrounds(x, y, i) {
    const { layout, left, top, dx, dy, scale } = this.view;
    const there = layout.hit((x - left - dx) / scale, (y - top - dy) / scale);
    return there < 0 || (there < i && i < there + this.columns.size[there]);
  }

  _pillWidth(text) {
    this.pen.font = `600 11px ${this.colour.font}`;
    return this.pen.measureText(text).width + 14;
  }

  // A small sign whose right end stands at x, unless the view ends before.
  _pill(text, x, y, fill, ink, edge) {
    const { pen, view } = this;
    const wide = this._pillWidth(text);
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
};
