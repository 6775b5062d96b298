// Timeline of one step, and bars with the seconds of many steps.

const CAUSE_HUES = {
  sampling: 155,
  "last samples": 80,
  reward: 110,
  rollout: 155,
  train: 265,
  score: 225,
  sync: 20,
  save: 320,
  eval: 190,
  record: 300,
  start: 60,
  "forward, backward": 265,
  optimizer: 285,
  send: 20,
};
const CAUSE_TEXTS = {
  sampling: "engines are generating",
  "last samples": "few samples are left; everything else waits for them",
  reward: "rewards are being computed, nothing is generated",
  rollout: "the rollout runs, but no sample is in progress",
  train: "forward, backward, optimizer",
  score: "log-probabilities before the first optimizer step",
  sync: "weights are sent to the engines",
  save: "a checkpoint is being saved",
  eval: "evaluation on held-out prompts",
  record: "samples and metrics are written",
  "between phases": "no phase in progress: the driver itself",
};
function causeColor(name) {
  if (name === "between phases") return { "--hue": 260, "--chroma": 0.005 };
  const known = CAUSE_HUES[name];
  return {
    "--hue": known ?? [...name].reduce((sum, letter) => sum + 37 * letter.charCodeAt(0), 0) % 360,
    "--chroma": name === "rollout" ? 0.05 : 0.1,
  };
}

const BARS = { height: 190, left: 46, right: 10, top: 8, bottom: 20 };

// Stacked bars, one per step, or per several steps if there is not enough room; arrow keys move the selection.
class StepBars {
  constructor(choose) {
    this.choose = choose;
    this.plot = svg("svg", {
      class: "plot bars",
      height: BARS.height,
      tabindex: 0,
      role: "img",
      "aria-label": "Seconds of each step by cause; arrow keys select a step",
    });
    this.plot.addEventListener("click", (event) => this.data && this.choose(this.data.steps[this.index(event)]));
    this.plot.addEventListener("pointermove", (event) => this.data && this.tell(this.index(event), event.clientX, event.clientY));
    this.plot.addEventListener("pointerleave", hideTooltip);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw());
    this.resized.observe(this.plot);
  }

  show(data, chosen, asShare) {
    Object.assign(this, { data, chosen, asShare });
    this.names = Object.keys(data.causes).sort((a, b) => sum(data.causes[b]) - sum(data.causes[a]));
    this.draw();
  }

  index(event) {
    const box = this.plot.getBoundingClientRect();
    const at = (event.clientX - box.left - BARS.left) / (this.width - BARS.left - BARS.right);
    return Math.max(0, Math.min(this.data.steps.length - 1, Math.floor(at * this.data.steps.length)));
  }

  total(at) {
    return sum(this.names.map((name) => this.data.causes[name][at]));
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width || !this.data?.steps.length) return;
    const { left, right, top, bottom, height } = BARS;
    const [wide, high, number] = [this.width - left - right, height - top - bottom, this.data.steps.length];
    const size = Math.max(1, Math.ceil(number / (wide / 3)));
    const bins = Array.from({ length: Math.ceil(number / size) }, (_, bin) =>
      this.names.map((name) => sum(this.data.causes[name].slice(bin * size, (bin + 1) * size)) / Math.min(size, number - bin * size)),
    );
    // A first step that takes minutes to load would flatten all others.
    const totals = bins.map(sum).sort((a, b) => a - b);
    const most = this.asShare ? 1 : Math.max(Math.min(totals.at(-1), 3 * totals[totals.length >> 1]), 1e-9);
    const barWidth = (wide / number) * size;
    const parts = [];
    bins.forEach((seconds, bin) => {
      let y = height - bottom;
      const scale = high / (this.asShare ? sum(seconds) || 1 : most);
      seconds.forEach((value, at) => {
        const tall = Math.min(value * scale, y - top);
        y -= tall;
        if (tall > 0.2)
          parts.push(
            svg("rect", {
              class: "cause",
              ...causeColor(this.names[at]),
              x: left + bin * barWidth,
              y,
              width: Math.max(0.6, barWidth - (barWidth > 4 ? 1 : 0)),
              height: tall,
            }),
          );
      });
    });
    const ticks = roundTicks(0, most, 4);
    const at = this.data.steps.indexOf(this.chosen);
    const x = (index) => left + ((index + 0.5) / number) * wide;
    this.plot.replaceChildren(
      ...ticks.flatMap((tick) => {
        const y = height - bottom - (tick / most) * high;
        return [
          svg("line", { class: "grid", x1: left, x2: this.width - right, y1: y, y2: y }),
          svg("text", { class: "tick-y", x: left - 6, y }, this.asShare ? share(tick) : fine(tick)),
        ];
      }),
      ...parts,
      ...roundTicks(0, number - 1, Math.max(2, Math.floor(this.width / 110)))
        .filter(Number.isInteger)
        .map((index) => svg("text", { class: "tick-x", x: x(index), y: height - bottom + 14 }, this.data.steps[index])),
      ...(at >= 0
        ? [
            svg("rect", {
              class: "chosen-step",
              x: left + (at / number) * wide - 1,
              y: top - 3,
              width: Math.max(3, wide / number + 1),
              height: high + 4,
            }),
          ]
        : []),
    );
  }

  tell(at, x, y) {
    const total = this.total(at);
    const parts = this.names.filter((name) => this.data.causes[name][at] > 0.005 * total);
    showTooltip(
      [
        `step ${this.data.steps[at]}: ${seconds(total)}`,
        ...parts.map((name) =>
          tipLine(causeColor(name), `${name} ${fine(this.data.causes[name][at])}, ${share(this.data.causes[name][at] / total)}`),
        ),
      ],
      x,
      y,
    );
  }

  key(event) {
    const at = this.data?.steps.indexOf(this.chosen);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.data?.steps.length - 1 }[event.key];
    if (to === undefined || this.data?.steps[to] === undefined) return;
    event.preventDefault();
    this.choose(this.data.steps[to]);
  }

  remove() {
    this.resized.disconnect();
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

const MANY_LANES = 8; // further ones are shown on click

function stepTimeline(step) {
  const tracks = [...new Set(step.phases.map(({ track }) => track))];
  const laneOf = (track) =>
    lane(track.replace(/ 0$/, ""), step.phases.filter((phase) => phase.track === track), step.duration_s);
  const isRank = (track) => track.startsWith("rank ");
  const [ranks, others] = [tracks.filter(isRank), tracks.filter((track) => !isRank(track))];
  const most = Math.max(1, ...step.engines.flatMap((engine) => engine.in_flight));
  return element(
    "div.timeline",
    others.map(laneOf),
    step.generating.length ? curveLane("samples", step.generating, Math.max(1, ...step.generating), step.duration_s, "samples in progress") : null,
    fewLanes(step.engines, "engine", ({ number, in_flight, idle }) =>
      curveLane(`engine ${number}`, in_flight, most, step.duration_s, "requests in flight", `${share(idle)} idle`),
    ),
    fewLanes(ranks, "rank", laneOf),
    timelineAxis(step.duration_s, roundTicks(0, step.duration_s, 5), fine),
  );
}

function fewLanes(list, noun, draw) {
  if (list.length <= MANY_LANES) return list.map(draw);
  const rest = list.slice(MANY_LANES);
  return [
    list.slice(0, MANY_LANES).map(draw),
    element("details.more-lanes", element("summary", count(rest.length, `more ${noun}`)), rest.map(draw)),
  ];
}

function lane(label, phases, length) {
  const boxes = phases.map((phase) => {
    const [from, to] = [Math.max(0, phase.start_s) / length, Math.min(length, phase.end_s) / length];
    const name = phase.name + (phase.failed ? " (failed)" : "");
    return withTooltip(
      element(
        "div",
        { class: `phase ${phase.failed ? "failed" : ""}`, "--left": percent(from), "--width": percent(to - from), ...causeColor(phase.name) },
        to - from > 0.06 ? element("span", name) : null,
      ),
      () => [
        `${name}: ${fine(phase.end_s - phase.start_s)}`,
        `of step ${phase.step}, from ${fine(Math.max(0, phase.start_s))} to ${fine(phase.end_s)}`,
      ],
    );
  });
  return timelineLane(label, element("div.lane-track", boxes));
}

// Number of concurrent samples or requests over the step.
function curveLane(label, numbers, most, length, what, note = null) {
  const [wide, high] = [numbers.length, 34];
  const peak = Math.max(0, ...numbers);
  const size = peak ? `up to ${peak} at a time` : "none";
  const points = numbers
    .map((number) => (high - (number / most) * (high - 3)).toFixed(1))
    .map((y, at) => `L${at} ${y}L${at + 1} ${y}`)
    .join("");
  const track = element(
    "div.lane-track",
    svg(
      "svg",
      { class: "generating", viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { d: `M0 ${high}${points}L${wide} ${high}Z` }),
    ),
    element("span.most", [size, note].filter(Boolean).join(", ")),
  );
  const lines = () => [`${label}: ${what}, ${size}`, [note, `over ${seconds(length)}`].filter(Boolean).join(", ")];
  return timelineLane(label, withTooltip(track, lines));
}
