// The cluster section: colors by a switch, peers on hover, focus or tap.

const ROLE_NAMES = {
  trainer: "trainer",
  regular: "engine",
  prefill: "prefill engine",
  decode: "decode engine",
  none: "unused",
};

// State of the selection; `pinned` is kept when the pointer leaves.
const state = { color: "role", peers: null, current: 0, hovered: null, pinned: null, band: null };
const drawn = { shape: null, cells: [], path: null, inspected: null };

const colorDimension = () => DIMENSIONS[state.color] ?? null;
const peersOf = (gpu, dimension) => gpus.filter((other) => other === gpu || dimension.peers(gpu, other));

// With colors by role, highlight a GPU's engine, or its tensor-parallel group if it has no engine.
function peerDimension(gpu) {
  if (state.peers && DIMENSIONS[state.peers].rank(gpu) !== null) return DIMENSIONS[state.peers];
  const byColor = colorDimension();
  if (byColor) return byColor.rank(gpu) === null ? null : byColor;
  return gpu.engine ? DIMENSIONS.engine : gpu.trainer ? DIMENSIONS.tp : null;
}

function facesOf(gpu) {
  const dimension = colorDimension();
  if (dimension) {
    const rank = dimension.rank(gpu);
    if (rank === null) return [{ kind: "role-none", color: {}, label: "" }];
    const label = drawn.shape.cell > 50 ? `${dimension.label} ${rank}` : `${rank}`;
    return [{ kind: "rank", color: rankColor(rank, dimension.size), label }];
  }
  const roles = [gpu.trainer && "trainer", workerType(gpu)].filter(Boolean);
  const wide = drawn.shape.cell > 62;
  return (roles.length ? roles : ["none"]).map((role) => ({
    kind: `role-${role}`,
    color: {},
    label: wide ? (ROLE_NAMES[role] ?? role).split(" ")[0] : "",
  }));
}

function clusterSection() {
  const picture = element("div", { id: "cluster-picture" });
  const inspector = element("aside", { id: "inspector", "aria-live": "polite", "aria-label": "Selected GPU" });
  const key = element("div", { id: "cluster-key" });
  const refresh = () => mark(inspector);

  const redraw = () => {
    if (picture.clientWidth === 0) return; // not laid out yet: the observer calls again
    drawn.shape = arrangement(picture.clientWidth, layout.num_nodes, layout.num_gpus_per_node);
    drawCluster(picture, refresh);
    key.replaceChildren(...clusterKey(refresh));
    refresh();
  };
  new ResizeObserver(redraw).observe(picture);
  const text = `${count(gpus.length, "GPU")} on ${count(layout.num_nodes, "node")}`;
  return section(
    "cluster",
    "Cluster",
    lead(`${text}. Hover over a GPU, tap it, or use the arrow keys; Enter pins the GPU, Escape unpins it.`),
    colorSwitch(() => redraw()),
    div("cluster", div("cluster-left", key, picture), inspector),
  );
}

function colorSwitch(changed) {
  const dimensions = shownDimensions.map((dimension) => [dimension.key, dimension.label, dimension.name]);
  const options = [["role", "Role", "trainer or engine"], ...dimensions];
  const choose = (color) => {
    Object.assign(state, { color, peers: null, band: null });
    changed();
  };
  return choice("Color by", "color", options, state.color, choose, "switch");
}

// Legend of the colors; hovering over a rank highlights its GPUs.
function clusterKey(refresh) {
  const dimension = colorDimension();
  if (!dimension) {
    const rolesOf = (gpu) => [gpu.trainer && "trainer", workerType(gpu), !gpu.trainer && !gpu.engine && "none"].filter(Boolean);
    const roles = [...new Set(gpus.flatMap(rolesOf))];
    return [list("legend", roles.map((role) => element("li", {}, span(`swatch role-${role}`), ROLE_NAMES[role] ?? role)))];
  }
  const show = (band) => () => {
    state.band = band;
    refresh();
  };
  const bands = Array.from({ length: dimension.size }, (_, rank) => {
    const handlers = { onpointerenter: show(rank), onpointerleave: show(null) };
    const attributes = { class: "band", title: `${dimension.label} ${rank}`, ...handlers, ...rankColor(rank, dimension.size) };
    return element("span", attributes, dimension.size <= 16 ? rank : "");
  });
  const text = `${dimension.name === "same engine" ? "engines" : `${dimension.name} ranks`} 0 to ${dimension.size - 1}`;
  return [element("div", { class: "bands", "aria-hidden": "true" }, bands), element("p", { class: "key-text" }, text)];
}

function drawCluster(picture, refresh) {
  const { shape } = drawn;
  const hover = (index) => {
    state.hovered = index;
    refresh();
  };
  const pin = (index) => {
    state.current = index;
    state.pinned = state.pinned === index ? null : index;
    refresh();
    if (state.pinned !== null) drawn.cells[index].scrollIntoView({ block: "nearest" });
  };
  drawn.cells = gpus.map((gpu) =>
    withTooltip(
      drawCell(gpu, shape, facesOf(gpu), {
        "aria-label": `${gpuTitle(gpu)}, ${gpuFacts(gpu).join(", ")}`,
        onpointerenter: (event) => event.pointerType === "mouse" && hover(gpu.index),
        onpointerleave: (event) => event.pointerType === "mouse" && hover(null),
        onclick: () => pin(gpu.index),
        onfocus: (event) => event.target.matches(":focus-visible") && (state.current = gpu.index) + 1 && hover(gpu.index),
        onblur: () => hover(null),
      }),
      () => [gpuTitle(gpu), ...gpuFacts(gpu)],
    ),
  );
  const nodes = Array.from({ length: layout.num_nodes }, (_, node) => drawNode(node, shape));
  const width = picture.clientWidth;
  const root = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${shape.height}`,
      width,
      height: shape.height,
      role: "group",
      "aria-label": "GPUs; the arrow keys move between them",
      onkeydown: (event) => moveByKey(event, pin),
    },
    nodes,
    drawn.cells,
  );
  picture.replaceChildren(root);
}

function moveByKey(event, pin) {
  const last = gpus.length - 1;
  const vertical = (direction) => verticalNeighbor(gpus[state.current], direction, drawn.shape).index;
  const targets = {
    ArrowLeft: () => Math.max(0, state.current - 1),
    ArrowRight: () => Math.min(last, state.current + 1),
    ArrowUp: () => vertical(-1),
    ArrowDown: () => vertical(1),
    Home: () => 0,
    End: () => last,
  };
  if (event.key === "Enter" || event.key === " ") pin(state.current);
  else if (event.key === "Escape") state.pinned !== null && pin(state.pinned);
  else if (Object.hasOwn(targets, event.key)) {
    state.current = targets[event.key]();
    drawn.cells[state.current].focus();
  } else return;
  event.preventDefault();
}

// Highlight GPUs and update the inspector.
function mark(inspector) {
  const active = state.hovered ?? state.pinned;
  const gpu = gpus[active ?? state.current];
  const dimension = peerDimension(gpu);
  let group = null;
  if (state.band !== null) group = new Set(gpus.filter((other) => colorDimension().rank(other) === state.band));
  else if (active !== null && dimension) group = new Set(peersOf(gpu, dimension));
  drawn.cells.forEach((cell, index) => {
    cell.classList.toggle("dim", group !== null && !group.has(gpus[index]));
    cell.classList.toggle("peer", group !== null && group.has(gpus[index]));
    cell.classList.toggle("chosen", gpus[index] === gpu && state.band === null);
    cell.setAttribute("tabindex", index === state.current ? 0 : -1);
    cell.setAttribute("aria-pressed", String(index === state.pinned));
  });
  drawn.path?.remove();
  if (group && state.band === null && dimension.key === "pp") {
    drawn.path = drawPath([...group].sort((a, b) => a.trainer.pp - b.trainer.pp), drawn.shape);
    drawn.cells[0].parentNode.append(drawn.path);
  }
  inspector.classList.toggle("kept", state.pinned !== null);
  // Not redrawn if nothing changed: a button that is replaced between press and release gets no click.
  const inspected = `${gpu.index} ${dimension?.key}`;
  if (inspected === drawn.inspected) return;
  drawn.inspected = inspected;
  const change = (changes) => {
    Object.assign(state, changes);
    mark(inspector);
  };
  const choose = (key) => change({ peers: key, pinned: gpu.index, current: gpu.index });
  refill(inspector, inspect(gpu, peersOf, dimension?.key, choose, () => change({ pinned: null })));
}
