'use strict';
// One side of one pair of step and rank, as columns with one item per node. First of the scripts of the page: it makes `Graph`.
//
//   Columns (one side of one pair; nodes are numbered in order of execution, an enclosing node before what it encloses; 0 is the root):
//     count; parent Int32Array; size Int32Array (nodes of its subtree, itself included: the next sibling of i is i + size[i]);
//     depth Uint16Array; type Uint8Array (Graph.MODULE, API, MULTI_COLLECTION, API_COLLECTION); flags Uint16Array (Graph.FLAG);
//     units Float32Array (multiples of round-off; NaN nothing to compare, Infinity non-finite on one side); below Float32Array (largest units
//     in its subtree); index Float32Array (precision index of the existing tool, NaN none); partner Int32Array (-1 none); micro Int16Array;
//     stack Int32Array (-1 none); children(i) -> array of nodes; isLeaf(i); ancestors(i) -> root first
//     name(i) the record's name; label(i) the short one for a box or a row; kind(i) 'Linear', 'softmax', ...; call(i) its number as text
//     second(i) what stands behind the label: class, number, ↩ of a backward call among forward ones
//     names: one text, all names one after the other; start(i), end(i) places in it; nodeAt(place)   (for a search over all names)
//     producers(i), consumers(i) -> Int32Array of nodes, by equal tensors
const Graph = {
  panels: [], // f(store), called once each before the first pair is shown
  MODULE: 0,
  API: 1,
  MULTI_COLLECTION: 8,
  API_COLLECTION: 9,
  FLAG: {
    BACKWARD: 1,
    NONFINITE_IN: 2,
    NONFINITE_OUT: 4,
    UNMATCHED: 8,
    RECOMPUTE: 16,
    LINKED: 32,
    OVERFLOW: 192, // two bits: 64 medium, 128 high, 192 critical
    BY_STRUCTURE: 256,
    COLLECTIVE: 512,
    NONFINITE_BELOW: 1024,
    SUSPECT_BELOW: 2048,
    NEEDLESS: 4096, // no partner, and none needed: of two frameworks
  },
};

// The classes that colour a node, for every script of the page: its difference where two runs are compared, else whether it is finite.
// `inside`: the worst of what it encloses counts too, of a closed module and of a box too small for what is in it.
Graph.tone = (columns, i, inside = false) => {
  const { FLAG } = Graph;
  const flags = columns.flags[i];
  if (flags & FLAG.NONFINITE_OUT || (inside && flags & FLAG.NONFINITE_BELOW)) return 'ubad';
  if (Graph.store.sides.length < 2) return flags & (FLAG.NONFINITE_BELOW | FLAG.NONFINITE_IN) ? 'ubad hollow' : 'ufine';
  const units = inside ? columns.below[i] : columns.units[i];
  return flags & FLAG.UNMATCHED && Number.isNaN(units) ? 'unone lonely' : 'u' + Kit.scale(units).level;
};

// The legend of a single run: each class that `tone` gives there, and its words. Of two runs the legend is the scale of the kit.
Graph.TONES_OF_ONE = [['ufine', 'graph.legend_finite'], ['ubad', 'graph.legend_bad'], ['ubad hollow', 'graph.legend_bad_inside']];

// One side of one pair, as columns.
Graph.Columns = class {
  constructor(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const headerEnd = 8 + view.getUint32(4, true);
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, headerEnd)));
    const types = { u1: Uint8Array, u2: Uint16Array, i2: Int16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array };
    const data = Math.ceil(headerEnd / 8) * 8;
    const column = (name) => {
      const [kind, offset, length] = this.header.columns[name];
      const type = types[kind];
      return new type(bytes.slice(data + offset, data + offset + length * type.BYTES_PER_ELEMENT).buffer, 0, length);
    };
    this.size = column('size');
    this.count = this.size.length;
    this.type = column('type');
    this.flags = column('flags');
    this.units = column('units');
    this.index = column('index');
    this.partner = column('partner');
    this.micro = column('micro');
    this.stack = column('stack');
    this.nameEnds = column('name_end');
    this.names = new TextDecoder().decode(column('names'));
    this.links = this.header.links;
    this._hierarchy();
    this._edges(column('edge_count'), column('edge_back'));
  }

  // The size of a subtree says all of the hierarchy, as an enclosing node comes before what it encloses.
  _hierarchy() {
    const n = this.count;
    this.parent = new Int32Array(n).fill(-1);
    this.depth = new Uint16Array(n);
    this.below = new Float32Array(n).fill(NaN); // of nothing that can be compared
    const { size, parent, depth, below, units, flags } = this;
    const open = [0];
    for (let i = 1; i < n; i++) {
      while (open[open.length - 1] + size[open[open.length - 1]] <= i) open.pop();
      parent[i] = open[open.length - 1];
      depth[i] = Math.min(open.length, 65535);
      if (size[i] > 1) open.push(i);
    }
    const bad = Graph.FLAG.NONFINITE_OUT | Graph.FLAG.NONFINITE_BELOW;
    for (let i = n - 1; i >= 0; i--) {
      const worst = below[i] >= units[i] || Number.isNaN(units[i]) ? below[i] : units[i];
      below[i] = worst;
      const p = parent[i];
      if (p < 0) continue;
      if (!(below[p] >= worst)) below[p] = Number.isNaN(worst) ? below[p] : worst;
      if (flags[i] & bad) flags[p] |= Graph.FLAG.NONFINITE_BELOW;
    }
  }

  // Edges come as, per node, the number of its producers and how far before it each stands.
  _edges(counts, back) {
    const n = this.count;
    this.inFirst = new Int32Array(n + 1);
    this.inNode = new Int32Array(back.length);
    const outFirst = new Int32Array(n + 1);
    for (let i = 0, e = 0; i < n; i++) {
      for (let k = counts[i]; k > 0; k--, e++) {
        this.inNode[e] = i - back[e];
        outFirst[this.inNode[e] + 1]++;
      }
      this.inFirst[i + 1] = e;
    }
    for (let i = 0; i < n; i++) outFirst[i + 1] += outFirst[i];
    this.outFirst = outFirst;
    this.outNode = new Int32Array(back.length);
    const at = outFirst.slice(0, n);
    for (let i = 0; i < n; i++) for (let e = this.inFirst[i]; e < this.inFirst[i + 1]; e++) this.outNode[at[this.inNode[e]]++] = i;
  }

  producers(i) {
    return this.inNode.subarray(this.inFirst[i], this.inFirst[i + 1]);
  }

  consumers(i) {
    return this.outNode.subarray(this.outFirst[i], this.outFirst[i + 1]);
  }

  isLeaf(i) {
    return this.size[i] === 1;
  }

  children(i) {
    const found = [];
    for (let c = i + 1, end = i + this.size[i]; c < end; c += this.size[c]) found.push(c);
    return found;
  }

  ancestors(i) {
    const found = [];
    for (let p = this.parent[i]; p >= 0; p = this.parent[p]) found.push(p);
    return found.reverse();
  }

  start(i) {
    return i ? this.nameEnds[i - 1] : 0;
  }

  end(i) {
    return this.nameEnds[i];
  }

  name(i) {
    return this.names.slice(this.start(i), this.end(i));
  }

  // The node whose name covers a place in `names`.
  nodeAt(place) {
    let low = 0;
    let high = this.count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.nameEnds[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Names are {prefix}.{what}.{number}.{direction}; of a module, {Module}.{path}.{class}.{direction}.{number}.
  parts(i) {
    const words = this.name(i).split('.');
    const last = words.length - 1;
    if (last > 0 && this.type[i] >= Graph.MULTI_COLLECTION) return { path: [], kind: words.slice(0, last).join('.'), call: words[last], prefix: '' };
    if (words[last] === 'parameters_grad') return { path: words.slice(1, -2), kind: 'parameters_grad', call: '', prefix: words[0] };
    if (words[last - 1] === 'parameters_grad') return { path: words.slice(1, -3), kind: 'parameters_grad', call: words[last], prefix: words[0] };
    if ((words[last - 1] === 'forward' || words[last - 1] === 'backward') && last >= 3) {
      return { path: words.slice(1, last - 2), kind: words[last - 2], call: words[last], prefix: words[0] };
    }
    if ((words[last] === 'forward' || words[last] === 'backward') && last >= 2) {
      return { path: [], kind: words.slice(1, last - 1).join('.') || words[0], call: words[last - 1], prefix: words[0] };
    }
    return { path: [], kind: words.join('.'), call: '', prefix: '' };
  }

  // Calls inside of a backward module are known to be backward; of others it has to be said.
  turnsBack(i) {
    const { BACKWARD } = Graph.FLAG;
    return (this.flags[i] & BACKWARD) !== 0 && this.parent[i] >= 0 && (this.flags[this.parent[i]] & BACKWARD) === 0;
  }

  // What stands behind the label: of a module its class, and the number of a call that is not the first.
  second(i) {
    const { path, kind, call } = this.parts(i);
    const number = call && (call !== '0' || !path.length) ? `·${call}` : '';
    const back = this.turnsBack(i) && kind !== 'parameters_grad' ? '↩' : '';
    return [path.length ? kind : '', number, back].filter(Boolean).join(' ');
  }

  kind(i) {
    return this.parts(i).kind;
  }

  call(i) {
    return this.parts(i).call;
  }

  // What a box or a row shows: of a module its path below the module that encloses it, of a call what is called.
  label(i) {
    const { path, kind } = this.parts(i);
    if (!path.length) return kind;
    for (let p = this.parent[i]; p > 0; p = this.parent[p]) {
      const outer = this.parts(p).path;
      if (!outer.length) continue;
      if (kind === 'parameters_grad' && outer.length === path.length) return kind; // of the module whose backward call encloses it
      const inside = outer.length < path.length && outer.every((word, at) => word === path[at]);
      return inside ? path.slice(outer.length).join('.') : path.join('.');
    }
    return path.join('.');
  }
};
