// The timeline of one step.

const PHASE_HUES = {
  rollout: 150,
  prefill: 170,
  score: 235,
  train: 262,
  optimizer: 75,
  sync: 20,
  offload: 320,
  onload: 320,
};
const phaseColor = (name) => ({ "--hue": PHASE_HUES[name] ?? itemColor(name)["--hue"], "--chroma": 0.1 });

function stepSection() {
  const { phases, duration_s: duration } = plan.step;
  const end = Math.max(...phases.map((phase) => phase.start_s + phase.duration_s));
  const lanes = [...new Set(phases.map((phase) => phase.lane))];
  return section(
    "step",
    "One step",
    lead("Estimated at about ", bold(seconds(duration)), "; the assumptions are listed below."),
    div(
      "timeline",
      lanes.map((lane) => {
        const boxes = phases.filter((phase) => phase.lane === lane).map((phase) => phaseBox(phase, end));
        return timelineLane(lane, div("lane-track", boxes));
      }),
      ticksOf(end),
    ),
    scrollable("Phases of a step", phaseTable(phases, end)),
  );
}

const phaseBox = (phase, end) =>
  withTooltip(
    element(
      "div",
      { class: "phase", "--left": percent(phase.start_s / end), "--width": percent(phase.duration_s / end), ...phaseColor(phase.name) },
      phase.duration_s / end > 0.07 ? element("span", {}, spoken(phase.name)) : null,
    ),
    () => [`${spoken(phase.name)}: ${seconds(phase.duration_s)}`, phase.note],
  );

const TICK_STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];

function tickText(tick, step) {
  if (step >= 3600) return `${tick / 3600} h`;
  if (step >= 300) return `${tick / 60} min`;
  return step < 1 ? `${tick.toFixed(2)} s` : `${tick} s`;
}

function ticksOf(end) {
  const step = TICK_STEPS.find((candidate) => candidate >= end / 6) ?? 86400;
  const ticks = Array.from({ length: Math.floor(end / step) + 1 }, (_, index) => index * step);
  return timelineAxis(end, ticks, (tick) => tickText(tick, step));
}

const operations = (flops) => {
  const [size, unit] = flops >= 1e18 ? [1e18, "EFLOP"] : flops >= 1e15 ? [1e15, "PFLOP"] : flops >= 1e12 ? [1e12, "TFLOP"] : [1e9, "GFLOP"];
  return `${(flops / size).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
};

const phaseTable = (phases, end) =>
  table(
    {},
    ["Phase", "On", "Time", "Share", "Work", "Based on"],
    phases.map((phase) => [
      rowTitle(swatch(phaseColor(phase.name)), spoken(phase.name)),
      element("td", {}, phase.lane),
      numberCell(seconds(phase.duration_s)),
      numberCell(`${((100 * phase.duration_s) / end).toFixed(0)}%`),
      numberCell(phase.flops ? operations(phase.flops) : "–"),
      element("td", { class: "note" }, phase.note),
    ]),
  );
