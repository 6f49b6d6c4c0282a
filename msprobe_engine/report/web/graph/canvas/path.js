'use strict';
// The way of a fault: from the node where it was born, along tensors that carry it, to the end of the forward pass (the loss). A fault is NaN
// or Inf, else a difference that is more than round-off. Found by breadth, so it is the shortest way.
Graph.path = (store) => {
  const born = store.pair.suspect;
  if (born < 0) return null;
  const columns = store.sides[0];
  const { flags, units, count } = columns;
  const nonfinite = (flags[born] & Graph.FLAG.NONFINITE_OUT) !== 0;
  const carries = nonfinite ? (i) => (flags[i] & (Graph.FLAG.NONFINITE_OUT | Graph.FLAG.NONFINITE_IN)) !== 0 : (i) => units[i] > 4;
  const from = new Int32Array(count).fill(-1);
  const way = [];
  for (let i = born; i < born + columns.size[born]; i++) {
    if (i > born && !carries(i)) continue; // where a module is to blame, all that is inside of it
    from[i] = i;
    way.push(i);
  }
  // What is born in the forward pass is followed to its end, which is where the backward pass begins.
  const { BACKWARD } = Graph.FLAG;
  const direction = flags[born] & BACKWARD;
  let end = born + 1;
  while (end < count && (!columns.isLeaf(end) || (flags[end] & BACKWARD) === direction)) end++;
  let last = born;
  for (let k = 0; k < way.length; k++) {
    for (const next of columns.consumers(way[k])) {
      if (next >= end || from[next] >= 0 || !columns.isLeaf(next) || !carries(next)) continue;
      from[next] = way[k];
      way.push(next);
      if (next > last) last = next;
    }
  }
  const nodes = [last];
  for (let i = last; from[i] !== i; i = from[i]) nodes.push(from[i]);
  if (nodes[nodes.length - 1] !== born) nodes.push(born);
  nodes.reverse();
  const edges = [];
  for (let k = 1; k < nodes.length; k++) edges.push(nodes[k - 1], nodes[k]);
  return { side: 0, kind: nonfinite ? 'nonfinite' : 'difference', nodes: Int32Array.from(nodes), edges: Int32Array.from(edges), reached: way.length };
};
