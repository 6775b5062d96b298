// The cluster as one SVG: nodes as boxes, GPUs as cells in them. Geometry only; cluster.js chooses colors and labels.

const NODE_GAP = 12;
const LINE_GAP = 4;
const NODE_PADDING = 8;
const NODE_TITLE = 18;
const MIN_CELL = 17;
const MAX_CELL = 112;
const COMFORTABLE_HEIGHT = 640;
const MAX_PER_ROW = 8; // GPUs side by side in a node
const SPACIOUS_HEIGHT = 180; // maximum total height of one or two lines of GPUs

// Return the arrangement with the fewest columns of nodes that is not too high; a cell stays large enough to be clicked.
function arrangement(width, numNodes, perNode) {
  const perRow = Math.min(perNode, MAX_PER_ROW);
  const lines = Math.ceil(perNode / perRow);
  let chosen = null;
  for (let columns = 1; columns <= numNodes; columns += 1) {
    const cell = Math.min((width - NODE_GAP * (columns - 1)) / columns - 2 * NODE_PADDING, perRow * MAX_CELL) / perRow;
    if (chosen && cell < MIN_CELL) break;
    const rows = Math.ceil(numNodes / columns);
    const cellHeight = Math.max(24, Math.min(cell * (rows * lines <= 2 ? 1.7 : 1.1), Math.max(64, SPACIOUS_HEIGHT / rows / lines)));
    const nodeHeight = NODE_TITLE + lines * (cellHeight + LINE_GAP) - LINE_GAP + 2 * NODE_PADDING;
    const nodeWidth = cell * perRow + 2 * NODE_PADDING;
    chosen = { columns, perRow, cell, cellHeight, nodeHeight, nodeWidth, height: rows * (nodeHeight + NODE_GAP) - NODE_GAP };
    if (chosen.height <= COMFORTABLE_HEIGHT) break;
  }
  return chosen;
}

function cellBox(gpu, shape) {
  const column = gpu.node % shape.columns;
  const row = Math.floor(gpu.node / shape.columns);
  const inset = shape.cell > 30 ? 2 : 1.2;
  const line = Math.floor(gpu.local_index / shape.perRow);
  return {
    x: column * (shape.nodeWidth + NODE_GAP) + NODE_PADDING + (gpu.local_index % shape.perRow) * shape.cell + inset,
    y: row * (shape.nodeHeight + NODE_GAP) + NODE_TITLE + NODE_PADDING + line * (shape.cellHeight + LINE_GAP),
    width: shape.cell - 2 * inset,
    height: shape.cellHeight,
  };
}

function drawNode(node, shape) {
  const x = (node % shape.columns) * (shape.nodeWidth + NODE_GAP);
  const y = Math.floor(node / shape.columns) * (shape.nodeHeight + NODE_GAP);
  return svg(
    "g",
    { class: "node", "aria-hidden": "true" },
    svg("rect", { x: x + 0.5, y: y + 0.5, width: shape.nodeWidth - 1, height: shape.nodeHeight - 1, rx: 9 }),
    svg("text", { x: x + NODE_PADDING + 2, y: y + 18 }, `node ${node}`),
  );
}

// `faces`: one or two {kind, color, label} from top to bottom; a GPU that both sides use has two.
function drawCell(gpu, shape, faces, handlers) {
  const { x, y, width, height } = cellBox(gpu, shape);
  const radius = Math.min(5, width / 4);
  const part = height / faces.length;
  const clip = `cell-${gpu.index}`;
  const size = `${Math.max(8.5, Math.min(13, width / 2.6, part * 0.7))}px`;
  return svg(
    "g",
    { class: "cell", role: "button", tabindex: -1, "data-index": gpu.index, ...handlers },
    svg("clipPath", { id: clip }, svg("rect", { x, y, width, height, rx: radius })),
    svg(
      "g",
      { "clip-path": `url(#${clip})` },
      faces.map((face, index) => svg("rect", { class: `face ${face.kind}`, x, y: y + index * part, width, height: part, ...face.color })),
    ),
    faces.map((face, index) => {
      const at = { class: "label", x: x + width / 2, y: y + (index + 0.5) * part, "--size": size };
      return face.label && width >= 14 && svg("text", at, face.label);
    }),
    svg("rect", { class: "outline", x, y, width, height, rx: radius }),
  );
}

// Draw a line through the cells of a pipeline, stage by stage.
function drawPath(members, shape) {
  const points = members.map((gpu) => {
    const { x, y, width, height } = cellBox(gpu, shape);
    return `${(x + width / 2).toFixed(1)},${(y + height / 2).toFixed(1)}`;
  });
  return svg("polyline", { class: "path", points: points.join(" "), "aria-hidden": "true" });
}

// Return the nearest cell above (-1) or below (1) in the same column of cells, or the cell itself if there is none.
function verticalNeighbor(gpu, direction, shape) {
  const from = cellBox(gpu, shape);
  let nearest = gpu;
  let distance = Infinity;
  for (const other of gpus) {
    const to = cellBox(other, shape);
    const away = (to.y - from.y) * direction;
    if (away > 1 && away < distance && Math.abs(to.x - from.x) < from.width / 2) [nearest, distance] = [other, away];
  }
  return nearest;
}
