// Stacked bars of memory, with a line at the capacity.

const ITEM_HUES = { weights: 262, gradients: 205, optimizer: 75, activations: 20, logits: 320, communication: 235, kv_cache: 150, graphs: 110, runtime: 290 };

function itemColour(name) {
  const known = ITEM_HUES[name];
  if (known !== undefined) return { "--hue": known, "--chroma": name === "runtime" || name === "communication" ? 0.045 : 0.11 };
  let hash = 0;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) % 360;
  return { "--hue": hash, "--chroma": 0.075 };
}

const swatch = (colour) => element("span", { class: "swatch", ...colour });
const roomText = (bar) => (bar.fits ? `${gibibytes(bar.free_bytes)} free` : `${gibibytes(-bar.free_bytes)} too much`);

// `scale`: the bytes that the full width stands for.
function memoryBar(bar, scale) {
  const segments = bar.items.filter((item) => item.num_bytes > 0).map((item) =>
    withTooltip(
      element("span", { class: "segment", "--width": percent(item.num_bytes / scale), ...itemColour(item.name) }),
      () => [`${spoken(item.name)}: ${gibibytes(item.num_bytes)}`, item.note],
    ),
  );
  return element(
    "div",
    { class: `bar ${bar.fits ? "" : "over"}`, role: "img", "aria-label": `${bar.owner}: ${gibibytes(bar.used_bytes)} of ${gibibytes(bar.capacity_bytes)}, ${roomText(bar)}` },
    element("div", { class: "room", "--width": percent(bar.capacity_bytes / scale) }),
    element("div", { class: "segments" }, segments),
    bar.fits ? null : element("div", { class: "excess", "--left": percent(bar.capacity_bytes / scale), "--width": percent(-bar.free_bytes / scale) }),
    element("div", { class: "capacity", "--left": percent(bar.capacity_bytes / scale) }),
  );
}

const barScale = (bars) => Math.max(1, ...bars.map((bar) => Math.max(bar.capacity_bytes, bar.used_bytes)));

function legend(entries) {
  return element("ul", { class: "legend" }, entries.map(([label, colour]) => element("li", {}, swatch(colour), label)));
}
