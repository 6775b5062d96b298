// Facts derived from the plan: groups of GPUs, and the memory bars and names of a GPU.

// Elements with a class and no other attribute.
const div = (kind, ...children) => element("div", { class: kind }, ...children);
const span = (kind, ...children) => element("span", { class: kind }, ...children);
const list = (kind, items) => element("ul", { class: kind }, items);
const lead = (...children) => element("p", { class: "lead" }, ...children);
const bold = (...children) => element("b", {}, ...children);

const plan = embedded;
const layout = plan.layout;
const gpus = layout ? layout.gpus.map((gpu, index) => ({ ...gpu, index })) : [];
const engineGroups = layout ? layout.engine_groups : [];

// GPUs in the same group have the same ranks in the `other` dimensions.
const trainerDimension = (key, name, ...other) => ({
  label: key.toUpperCase(),
  name: `${name} parallel`,
  side: "trainer",
  rank: (gpu) => gpu.trainer?.[key] ?? null,
  peers: (a, b) => Boolean(a.trainer && b.trainer) && other.every((one) => a.trainer[one] === b.trainer[one]),
});

// Parallel dimensions: rank of a GPU (null if it has none), number of ranks, and whether two GPUs are in the same group.
const DIMENSIONS = {
  tp: trainerDimension("tp", "tensor", "cp", "dp", "pp"),
  cp: trainerDimension("cp", "context", "tp", "dp", "pp"),
  pp: trainerDimension("pp", "pipeline", "tp", "cp", "dp"),
  ep: trainerDimension("ep", "expert", "pp", "etp", "expert_dp"),
  dp: trainerDimension("dp", "data", "tp", "cp", "pp"),
  engine: {
    label: "Engine",
    name: "same engine",
    side: "engine",
    rank: (gpu) => gpu.engine?.engine ?? null,
    peers: (a, b) => Boolean(a.engine && b.engine) && a.engine.engine === b.engine.engine,
  },
};
for (const [key, dimension] of Object.entries(DIMENSIONS)) {
  dimension.key = key;
  dimension.size = 1 + Math.max(-1, ...gpus.map((gpu) => dimension.rank(gpu) ?? -1));
}

const shownDimensions = Object.values(DIMENSIONS).filter((dimension) => dimension.size > 1);
const usedGpus = gpus.filter((gpu) => gpu.trainer || gpu.engine);
const workerType = (gpu) => (gpu.engine ? engineGroups[gpu.engine.group].worker_type : null);
// A bar for trainer and engine together (both keys are set) is the only bar of the GPU; otherwise each of them has a bar.
function barsOf(gpu) {
  const fits = (key, value) => key === null || key === value;
  const bars = plan.memory.filter(
    (bar) => isGpuBar(bar) && fits(bar.pipeline_rank, gpu.trainer?.pp) && fits(bar.engine_group, gpu.engine?.group),
  );
  const joint = bars.filter((bar) => bar.pipeline_rank !== null && bar.engine_group !== null);
  return joint.length ? joint : bars;
}
const stagesOf = (pipelineRank) => layout.stages.filter((stage) => stage.pipeline_rank === pipelineRank);
const layersOf = (stage) => Array.from({ length: stage.num_layers }, (_, offset) => stage.first_layer + offset);
const isGpuBar = (bar) => bar.pipeline_rank !== null || bar.engine_group !== null;

// Hues run from blue towards red at equal lightness. Few ranks use a part of the range; many also alternate in lightness (--odd).
function rankColor(rank, size) {
  const range = Math.min(250, 85 * (size - 1));
  const hue = size <= 1 ? 265 : (625 - (range * rank) / (size - 1)) % 360;
  return { "--hue": hue.toFixed(1), "--odd": size > 8 ? rank % 2 : 0 };
}

const gpuTitle = (gpu) => `Node ${gpu.node} · GPU ${gpu.local_index}`;

function gpuFacts(gpu) {
  const facts = [];
  if (gpu.trainer) {
    const ranks = shownDimensions.filter(({ side }) => side === "trainer").map((dimension) => `${dimension.label} ${dimension.rank(gpu)}`);
    facts.push(`trainer rank ${gpu.trainer.rank}${ranks.length ? `: ${ranks.join(", ")}` : ""}`);
  }
  if (gpu.engine) facts.push(`${workerType(gpu)} engine ${gpu.engine.engine}, rank ${gpu.engine.rank}`);
  return facts.length ? facts : ["unused"];
}
