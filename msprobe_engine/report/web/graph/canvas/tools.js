'use strict';
// The buttons over the canvas. Graph.tools(place, store, view) puts them there and returns what brings them up to date; `view` is Graph.view.
Graph.tools = (place, store, view) => {
  const tools = Kit.make('div', place, null, 'canvas-tools');
  tools.setAttribute('role', 'toolbar');
  tools.dataset.tLabel = 'graph.tools';
  const pressed = new Map();
  const ICONS = {
    zoom_in: 'M8 3v10M3 8h10',
    zoom_out: 'M3 8h10',
    fit: 'M3 6V3h3M10 3h3v3M13 10v3h-3M6 13H3v-3',
    close_all: 'M4 6l4 4 4-4M4 2.5h8',
    to_suspect: 'M8 1.5v3M8 11.5v3M1.5 8h3M11.5 8h3M8 5.2a2.8 2.8 0 1 0 0 5.6a2.8 2.8 0 1 0 0-5.6',
    path: 'M3.5 3.5h.01M3.5 3.5c0 6 9 3 9 9M12.5 12.5h.01M2 3.5a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0M11 12.5a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0',
    both: 'M2.5 3h11v10h-11zM8 3v10',
    linked: 'M6.5 9.5l3-3M7 4.8l1.3-1.3a2.7 2.7 0 0 1 3.9 3.9L11 8.7M9 11.2l-1.3 1.3a2.7 2.7 0 0 1-3.9-3.9L5 7.3',
  };
  function button(name, act, state = null) {
    const one = Kit.make('button', tools);
    one.type = 'button';
    const icon = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    icon.setAttribute('viewBox', '0 0 16 16');
    icon.setAttribute('aria-hidden', 'true');
    line.setAttribute('d', ICONS[name]);
    icon.append(line);
    one.append(icon);
    one.id = `canvas-${name}`;
    one.dataset.tLabel = `canvas.${name}`;
    one.setAttribute('aria-label', Kit.t(`canvas.${name}`));
    one.addEventListener('click', act);
    one.addEventListener('pointerenter', (event) => Kit.tip(event, Kit.t(`canvas.${name}`)));
    one.addEventListener('pointerleave', Kit.hush);
    if (state) pressed.set(one, state);
    return one;
  }
  button('zoom_in', () => view.zoom(1.3));
  button('zoom_out', () => view.zoom(1 / 1.3));
  button('fit', () => view.fit());
  button('close_all', () => {
    store.closeBelow(0, 0);
    view.fit();
  });
  const toSuspect = button('to_suspect', () => store.select(0, store.pair.suspect));
  const showPath = button('path', () => store.showPath(!store.path), () => store.path !== null);
  const showBoth = button('both', () => view.both(!view.isBoth()), () => view.isBoth());
  const showLinked = button('linked', () => view.linked(!view.isLinked()), () => view.isLinked());

  return () => {
    toSuspect.hidden = showPath.hidden = store.pair.suspect < 0;
    showBoth.hidden = showLinked.hidden = store.sides.length < 2;
    for (const [one, state] of pressed) one.setAttribute('aria-pressed', String(state()));
  };
};
