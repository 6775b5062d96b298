// Stacked bars of memory, with a line at the capacity.

// Hue and chroma: parts of the model are saturated, overheads are not.
const ITEM_COLORS = {
  weights: [262, 0.11],
  adapter: [100, 0.11],
  fp8_weights: [268, 0.09],
  draft_weights: [290, 0.11],
  engine_weights: [275, 0.08],
  reference: [235, 0.09],
  value_model: [350, 0.08],
  teacher: [248, 0.09],
  gradients: [205, 0.1],
  optimizer: [75, 0.11],
  offloaded_optimizer: [90, 0.08],
  activations: [20, 0.11],
  backward: [45, 0.1],
  logits: [330, 0.11],
  kv_cache: [150, 0.11],
  graphs: [118, 0.1],
  gathered: [185, 0.05],
  samples: [130, 0.07],
  batches: [140, 0.05],
  routing_record: [310, 0.06],
  communication: [230, 0.045],
  deepep: [250, 0.045],
  workspace: [300, 0.035],
  standbys: [170, 0.04],
  runtime: [280, 0.035],
  fragmentation: [80, 0.03],
  engine: [160, 0.025],
  trainer: [265, 0.025],
};

function itemColor(name) {
  let hash = 0;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) % 360;
  const [hue, chroma] = Object.hasOwn(ITEM_COLORS, name) ? ITEM_COLORS[name] : [hash, 0.07];
  return { "--hue": hue, "--chroma": chroma };
}

const ITEM_LABELS = {
  kv_cache: "KV cache",
  graphs: "CUDA graphs",
  deepep: "DeepEP buffers",
  engine: "offloaded engine",
  trainer: "kept by the trainer",
};
const itemLabel = (name) => (Object.hasOwn(ITEM_LABELS, name) ? ITEM_LABELS[name] : spoken(name));
const roomText = (bar) => (bar.fits ? `${gibibytes(bar.free_bytes)} free` : `${gibibytes(-bar.free_bytes)} too much`);

// `scale`: the bytes that correspond to the full width.
function memoryBar(bar, scale) {
  const segments = bar.items
    .filter((item) => item.num_bytes > 0)
    .map((item) =>
      withTooltip(element("span", { class: "segment", "--width": percent(item.num_bytes / scale), ...itemColor(item.name) }), () => [
        `${itemLabel(item.name)}: ${gibibytes(item.num_bytes)}`,
        item.note,
      ]),
    );
  return element(
    "div",
    {
      class: `bar ${bar.fits ? "" : "over"}`,
      role: "img",
      "aria-label": `${bar.owner}: ${gibibytes(bar.used_bytes)} of ${gibibytes(bar.capacity_bytes)}, ${roomText(bar)}`,
    },
    element("div", { class: "room", "--width": percent(bar.capacity_bytes / scale) }),
    div("segments", segments),
    bar.fits
      ? null
      : element("div", { class: "excess", "--left": percent(bar.capacity_bytes / scale), "--width": percent(-bar.free_bytes / scale) }),
    element("div", { class: "capacity", "--left": percent(bar.capacity_bytes / scale) }),
  );
}

const barScale = (bars) => Math.max(1, ...bars.map((bar) => Math.max(bar.capacity_bytes, bar.used_bytes)));

const legend = (entries) => list("legend", entries.map(([label, color]) => element("li", {}, swatch(color), label)));
