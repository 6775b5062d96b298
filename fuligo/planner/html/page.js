// The page from top to bottom.

function verdict() {
  const errors = plan.findings.filter((finding) => finding.severity === "error").length;
  const warnings = plan.findings.length - errors;
  const words = [errors ? count(errors, "error") : "valid", warnings ? count(warnings, "warning") : null].filter(Boolean).join(", ");
  const kind = errors ? "error" : warnings ? "warning" : "good";
  return element("a", { class: `verdict ${kind}`, href: plan.findings.length ? "#findings" : "#cluster" }, words);
}

function headline() {
  const { model } = plan;
  const tightest = plan.memory
    .filter(isGpuBar)
    .reduce((worst, bar) => (worst && worst.used_bytes / worst.capacity_bytes >= bar.used_bytes / bar.capacity_bytes ? worst : bar), null);
  const facts = [
    [
      "Model",
      magnitude(model.num_parameters),
      (model.num_active_parameters === model.num_parameters
        ? `${model.model_type}, dense`
        : `${model.model_type}, ${magnitude(model.num_active_parameters)} active`) +
        (model.num_adapter_parameters ? `, adapter of ${magnitude(model.num_adapter_parameters)}` : ""),
    ],
    layout && [
      "GPUs",
      usedGpus.length.toLocaleString("en"),
      `${usedGpus.length < gpus.length ? `of ${gpus.length} ` : ""}${plan.gpu}, ${count(layout.num_nodes, "node")}`,
    ],
    layout && [
      "Trainer",
      trainerShape(),
      gpus.some((gpu) => gpu.trainer && gpu.engine)
        ? "shares its GPUs with the engines"
        : `${count(gpus.filter((gpu) => gpu.trainer).length, "GPU")}`,
    ],
    tightest && [
      "Tightest GPU",
      `${((100 * tightest.used_bytes) / tightest.capacity_bytes).toFixed(0)}%`,
      `${tightest.owner}, ${roomText(tightest)}`,
    ],
    plan.step.phases.length > 0 && ["One step", `≈ ${seconds(plan.step.duration_s)}`, longestPhase()],
  ];
  return element(
    "section",
    { class: "headline", "aria-label": "Summary" },
    div("title", element("h1", {}, plan.name), verdict()),
    cards(facts),
  );
}

function trainerShape() {
  const shown = ["tp", "cp", "pp", "dp"].filter((key) => layout[key] > 1).map((key) => `${key.toUpperCase()}${layout[key]}`);
  return shown.length ? shown.join(" × ") : gpus.some((gpu) => gpu.trainer) ? "one process" : "none";
}

function longestPhase() {
  const longest = plan.step.phases.reduce((a, b) => (b.duration_s > a.duration_s ? b : a));
  return `${((100 * longest.duration_s) / plan.step.duration_s).toFixed(0)}% in ${spoken(longest.name)}`;
}

themeButton();
const findingsAtTop = plan.findings.some((finding) => finding.severity === "error");
const anyFindings = plan.findings.length + plan.notes.length > 0;
refill(
  document.getElementById("main"),
  headline(),
  findingsAtTop && findingsSection(),
  plan.suggestions.length > 0 && suggestionsSection(),
  layout && clusterSection(),
  layout && layout.stages.length > 0 && stagesSection(),
  plan.memory.length > 0 && memorySection(),
  plan.step.phases.length > 0 && stepSection(),
  !findingsAtTop && anyFindings && findingsSection(),
  plan.assumptions.length > 0 && assumptionsSection(),
  settingsSection(),
);
