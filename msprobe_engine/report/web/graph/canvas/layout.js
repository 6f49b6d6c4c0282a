'use strict';
// Where the boxes of one side stand. Calls are read like text: from top to bottom in order of execution, and beside each other, from left to
// right, what does not need each other's results. Only what is open has a place; after a change only what encloses it is placed anew.
//
// Graph.Layout(store, side): x, y (of a box in its parent), w, h: Float32Array, by node; update(); box(node) -> {x, y, w, h} on the whole
// plane; visible(node) -> the node itself or what is closed around it; rows(node) -> {tops, first, nodes}; flow(node) -> edges between
// the children of a node; hit(x, y) -> node at a place, -1.
Graph.SIZES = { leaf: 26, closed: 30, head: 26, pad: 12, gap: 16, beside: 14, arrow: 13, most: 900, widest: 280, narrowest: 92, letter: 6.5, deepest: 300 };

Graph.Layout = class {
  constructor(store, side) {
    this.store = store;
    this.side = side;
    this.columns = store.sides[side];
    const n = this.columns.count;
    this.x = new Float32Array(n);
    this.y = new Float64Array(n); // a long model is higher than 24 bits can tell apart
    this.w = new Float32Array(n);
    this.h = new Float64Array(n);
    this.open = new Uint8Array(n);
    this.fresh = new Uint8Array(n);
    this.placed = new Map(); // open node -> rows
    this.flows = new Map(); // node -> edges between its children; they do not change
    this.labels = new Map();
    this.update();
  }

  update() {
    const { columns, store, side, open, fresh } = this;
    for (let i = 0; i < columns.count; i++) {
      const now = store.isOpen(side, i) ? 1 : 0;
      if (now === open[i]) continue;
      open[i] = now;
      for (let p = i; p >= 0 && (fresh[p] || p === i); p = columns.parent[p]) fresh[p] = 0;
    }
    // What has to be placed, the enclosing first; placed from the last, as a box needs the sizes of what is in it.
    const stale = [];
    for (let i = 0; i < columns.count; i += open[i] && !fresh[i] ? 1 : columns.size[i]) if (!fresh[i]) stale.push(i);
    for (let k = stale.length - 1; k >= 0; k--) this._place(stale[k], stale.length > 5000);
  }

  text(i) {
    let found = this.labels.get(i);
    if (!found) {
      const { columns } = this;
      found = { label: Kit.name(columns.label(i), 80), second: Kit.name(columns.second(i), 60) };
      this.labels.set(i, found);
    }
    return found;
  }

  // many: so many boxes are placed that heads of open modules are not measured.
  _place(i, many) {
    this.fresh[i] = 1;
    const S = Graph.SIZES;
    const { columns } = this;
    const opened = this.open[i] && !columns.isLeaf(i);
    const own = opened && many ? S.narrowest * 1.6 : Math.max(S.narrowest, Math.min(S.widest, this._wide(i)));
    if (!opened) {
      this.placed.delete(i);
      this.w[i] = own;
      this.h[i] = columns.isLeaf(i) ? S.leaf : S.closed;
      return;
    }
    const children = columns.children(i);
    const starts = this._lines(i, children);
    let width = own;
    let top = S.head + S.gap;
    const tops = new Array(starts.length); // plain arrays: of tens of thousands of small ones the typed cost far more
    for (let r = 0; r < starts.length; r++) width = Math.max(width, this._total(children, starts, r) + 2 * S.pad);
    for (let r = 0; r < starts.length; r++) {
      const end = starts[r + 1] ?? children.length;
      let high = 0;
      tops[r] = top;
      for (let k = starts[r], left = (width - this._total(children, starts, r)) / 2; k < end; k++) {
        high = Math.max(high, this.h[children[k]]);
        this.x[children[k]] = left;
        this.y[children[k]] = top;
        left += this.w[children[k]] + S.beside;
      }
      top += high + S.gap;
    }
    this.w[i] = width;
    this.h[i] = top - S.gap + S.pad;
    this.placed.set(i, { tops, starts, children });
  }

  // How wide a closed box or a call wants to be. Of calls, of which there may be hundreds of thousands, the name is only measured: what is
  // called stands between its first dot and the number.
  _wide(i) {
    const S = Graph.SIZES;
    const { columns } = this;
    if (columns.isLeaf(i) && columns.type[i] === Graph.API) {
      const { names } = columns;
      let left = names.indexOf('.', columns.start(i)) + 1;
      let right = names.lastIndexOf('.', columns.end(i) - 1);
      if (left <= columns.start(i) || right <= left) [left, right] = [columns.start(i), columns.end(i)];
      return Math.min(60, right - left + 2) * S.letter + 2 * S.pad;
    }
    const { label, second } = this.text(i);
    return (label.length * (columns.isLeaf(i) ? 1 : 1.12) + (second ? second.length + 2 : 0)) * S.letter + 2 * S.pad + (columns.isLeaf(i) ? 0 : 36);
  }

  _total(children, starts, r) {
    const end = starts[r + 1] ?? children.length;
    let total = (end - starts[r] - 1) * Graph.SIZES.beside;
    for (let k = starts[r]; k < end; k++) total += this.w[children[k]];
    return total;
  }

  // The children in lines. A call stands beside the one before it when what it takes is known and nothing in the line makes it.
  _lines(i, children) {
    const S = Graph.SIZES;
    const { pairs, takes } = this.flow(i);
    const lineOf = new Array(children.length);
    const starts = [];
    let width = 0;
    let known = false;
    let e = 0;
    for (let k = 0; k < children.length; k++) {
      let needs = false;
      let any = takes[k] === 1;
      for (; e < pairs.length && pairs[e + 1] === k; e += 2) {
        any = true;
        if (pairs[e] < k && lineOf[pairs[e]] === starts.length - 1) needs = true;
      }
      const fits = starts.length > 0 && k - starts[starts.length - 1] < 4 && width + this.w[children[k]] + S.beside <= S.most;
      if (starts.length && any && known && !needs && fits) {
        width += this.w[children[k]] + S.beside;
      } else {
        starts.push(k);
        width = this.w[children[k]];
      }
      known = any;
      lineOf[k] = starts.length - 1;
    }
    return starts;
  }

  // Edges between the children of a node, as positions among them: pairs [from, to, from, to, ...] in the order of `to`; and which child
  // takes from outside of the node.
  flow(i) {
    let found = this.flows.get(i);
    if (found) return found;
    const { columns } = this;
    const children = columns.children(i);
    const end = i + columns.size[i];
    const takes = new Array(children.length).fill(0);
        const at = (node) => {
      let low = 0;
      let high = children.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (children[middle] <= node) low = middle;
        else high = middle - 1;
      }
      return low;
    };
    const pairs = [];
    const last = new Array(children.length).fill(-1); // the child to which the last edge from each went
    for (let k = 0; k < children.length; k++) {
      const stop = children[k] + columns.size[children[k]];
      for (let e = columns.inFirst[children[k]]; e < columns.inFirst[stop]; e++) {
        const source = columns.inNode[e];
        if (source <= i || source >= end) takes[k] = 1;
        else if (source < children[k] || source >= stop) {
          const from = at(source);
          if (last[from] === k) continue;
          last[from] = k;
          pairs.push(from, k);
        }
      }
    }
    found = { pairs, takes };
    this.flows.set(i, found);
    return found;
  }

  visible(i) {
    let found = i;
    for (let p = this.columns.parent[i]; p >= 0; p = this.columns.parent[p]) if (!this.open[p]) found = p;
    return found;
  }

  box(i) {
    let x = 0;
    let y = 0;
    for (let p = i; p >= 0; p = this.columns.parent[p]) {
      x += this.x[p];
      y += this.y[p];
    }
    return { x, y, w: this.w[i], h: this.h[i] };
  }

  // Lines of a node that overlap a stretch of it: [first, last].
  linesIn(i, top, bottom) {
    const { tops } = this.placed.get(i);
    let low = 0;
    let high = tops.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tops[middle] <= top) low = middle;
      else high = middle - 1;
    }
    let last = low;
    while (last + 1 < tops.length && tops[last + 1] < bottom) last++;
    return [low, last];
  }

  hit(x, y) {
    if (x < 0 || y < 0 || x > this.w[0] || y > this.h[0]) return -1;
    let node = 0;
    for (;;) {
      const rows = this.placed.get(node);
      if (!rows) return node;
      const [line] = this.linesIn(node, y, y);
      const end = rows.starts[line + 1] ?? rows.children.length;
      let inner = -1;
      for (let k = rows.starts[line]; k < end; k++) {
        const c = rows.children[k];
        if (x >= this.x[c] && y >= this.y[c] && x <= this.x[c] + this.w[c] && y <= this.y[c] + this.h[c]) inner = c;
      }
      if (inner < 0) return node;
      x -= this.x[inner];
      y -= this.y[inner];
      node = inner;
    }
  }
};
