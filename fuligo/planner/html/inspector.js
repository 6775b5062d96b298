// Details of one GPU: ranks, layers, memory, peers.

function rankChips(gpu, peersOf, highlighted, choose) {
  const chips = Object.values(DIMENSIONS)
    .filter((dimension) => dimension.size > 1 && dimension.rank(gpu) !== null)
    .map((dimension) => {
      const group = peersOf(gpu, dimension);
      return element(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-pressed": String(highlighted === dimension.key),
          title: `Show the ${count(group.length, "GPU")} of its ${dimension.name === "same engine" ? "engine" : `${dimension.name} group`}`,
          onclick: () => choose(dimension.key),
          ...rankColor(dimension.rank(gpu), dimension.size),
        },
        span("chip-label", dimension.label),
        bold(dimension.rank(gpu)),
        span("chip-of", `of ${dimension.size}`),
      );
    });
  return chips.length ? element("div", { class: "chips", role: "group", "aria-label": "Ranks; choose one to see its peers" }, chips) : null;
}

const fact = (name, ...value) => [element("dt", {}, name), element("dd", {}, ...value)];

function stageLine(stage) {
  const ends = [stage.has_embedding && "embedding", stage.has_head && "head"].filter(Boolean);
  return [
    fact(
      stage.virtual_rank || layout.stages.some((other) => other.virtual_rank) ? `Chunk ${stage.virtual_rank}` : "Layers",
      stage.num_layers ? `${ranges(layersOf(stage))} (${stage.num_layers})` : "none",
      ends.length ? ` + ${ends.join(", ")}` : "",
    ),
    stage.index_layers.length ? fact("Own index", ranges(stage.index_layers)) : null,
  ];
}

function engineLines(gpu) {
  const group = engineGroups[gpu.engine.group];
  const ranks = ["tp", "pp", "dp", "ep"].filter((key) => group[key] > 1).map((key) => `${key.toUpperCase()} ${gpu.engine[key]}`);
  const model = group.model === "default" ? "" : ` of ${group.model}`;
  return [
    fact("Engine", `${group.worker_type} ${gpu.engine.engine}${model}, rank ${gpu.engine.rank} of ${group.num_gpus_per_engine}`),
    ranks.length ? fact("Ranks", ranks.join(" · ")) : null,
  ];
}

function memoryBlock(bar, scale) {
  const title = element("h4", {}, bar.owner, span(bar.fits ? "room-text" : "room-text bad", roomText(bar)));
  const items = bar.items
    .filter((item) => item.num_bytes > 0)
    .map(({ name, note, num_bytes: size }) =>
      element("li", { title: note }, swatch(itemColor(name)), element("span", {}, itemLabel(name)), span("number", gibibytes(size))),
    );
  return div("inspector-memory", title, memoryBar(bar, scale), list("items", items));
}

// `choose(dimension)` highlights the GPU's peers in a dimension, `letGo()` unpins the GPU.
function inspect(gpu, peersOf, highlighted, choose, letGo) {
  const bars = barsOf(gpu);
  const scale = barScale(bars);
  return [
    element(
      "h3",
      {},
      gpuTitle(gpu),
      gpu.trainer ? span("rank", `trainer rank ${gpu.trainer.rank}`) : null,
      element("button", { type: "button", class: "let-go", "aria-label": "Close", onclick: letGo }, "×"),
    ),
    rankChips(gpu, peersOf, highlighted, choose),
    element(
      "dl",
      { class: "facts" },
      gpu.trainer ? stagesOf(gpu.trainer.pp).map(stageLine) : fact("Trainer", "not on this GPU"),
      gpu.engine ? engineLines(gpu) : fact("Engines", "not on this GPU"),
    ),
    bars.map((bar) => memoryBlock(bar, scale)),
  ];
}
