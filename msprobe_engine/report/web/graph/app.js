'use strict';
// The application: its places in the page, its panels, and what is shown first.
Graph.start = async () => {
  const app = document.getElementById('graph');
  for (const [id, tag] of [['graph-bar', 'div'], ['graph-tree', 'div'], ['graph-canvas', 'div'], ['graph-details', 'aside'], ['graph-status', 'div']]) {
    Kit.make(tag, app).id = id;
  }
  const store = Graph.store;
  store.on('busy', (busy) => app.setAttribute('aria-busy', String(busy)));
  await store.start();
  for (const panel of Graph.panels) panel(store);
  const wanted = Graph.address ? Graph.address(store) : null; // {index, side, name} of a link into this page
  const { first, pairs } = store.manifest;
  if (!pairs.length) throw new Error('no graph in this page');
  const begins = first ? store.pairOf(first.step, first.rank) : pairs.findIndex((pair) => pair.suspect >= 0);
  await store.open(wanted ? wanted.index : Math.max(0, begins), wanted || {});
  app.classList.add('ready');
};
Graph.start();
