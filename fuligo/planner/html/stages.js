// The trainer's pipeline stages, layer by layer.

function stagesSection() {
  const sparse = layout.stages.some((stage) => stage.index_layers.length);
  const ranks = [...new Set(layout.stages.map((stage) => stage.pipeline_rank))].sort((a, b) => a - b);
  const total = layout.stages.reduce((sum, stage) => sum + stage.num_layers, 0);
  const text = `${count(total, "layer")} in ${count(ranks.length, "stage")}, counted from 0 as in the checkpoint.`;
  return section(
    "stages",
    "Pipeline stages",
    lead(text, sparse ? " Filled layers compute their own sparse index; each stage has to begin with one." : ""),
    div("stages", ranks.map((rank) => stageRow(rank, ranks.length))),
    list("legend", [
      sparse ? element("li", {}, element("span", { class: "layer computing", "--hue": 265 }), "computes its index") : null,
      sparse ? element("li", {}, element("span", { class: "layer", "--hue": 265 }), "reuses the index of a layer below") : null,
      element("li", {}, span("layer end", "E"), "embedding"),
      element("li", {}, span("layer end", "H"), "head"),
    ]),
  );
}

function stageRow(rank, numStages) {
  const chunks = stagesOf(rank).sort((a, b) => a.virtual_rank - b.virtual_rank);
  const numGpus = gpus.filter((gpu) => gpu.trainer?.pp === rank).length;
  const numLayers = chunks.reduce((sum, chunk) => sum + chunk.num_layers, 0);
  return element(
    "div",
    { class: "stage", ...rankColor(rank, numStages) },
    div("stage-label", bold(`Stage ${rank}`), element("span", {}, `${count(numLayers, "layer")} · ${count(numGpus, "GPU")}`)),
    div("chunks", chunks.map(chunkOfLayers)),
  );
}

function chunkOfLayers(stage) {
  const computing = new Set(stage.index_layers);
  const words = `layers ${ranges(layersOf(stage))}${computing.size ? `; ${ranges(stage.index_layers)} compute their index` : ""}`;
  return element(
    "div",
    { class: "chunk", role: "img", "aria-label": words },
    stage.has_embedding ? element("span", { class: "layer end", title: "embedding" }, "E") : null,
    layersOf(stage).map((layer) =>
      withTooltip(span(computing.has(layer) ? "layer computing" : "layer", layer), () => [
        `Layer ${layer}`,
        computing.has(layer) && "computes its own sparse index",
      ]),
    ),
    stage.has_head ? element("span", { class: "layer end", title: "head" }, "H") : null,
  );
}
