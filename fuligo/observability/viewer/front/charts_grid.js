// Grid of charts, grouped by metric key.

const GROUPS = [
  [
    "Learning",
    [
      "rollout/reward_mean",
      /^eval\/.*\/(mean|pass)@/,
      /^rollout\/(mean|pass)@/,
      /^rollout\/(reward|sample)\//,
      "rollout/response_len_mean",
      "rollout/truncated_ratio",
      "rollout/zero_std_ratio",
    ],
  ],
  [
    "Training",
    [
      "train/loss",
      "train/entropy",
      "train/kl",
      "train/grad_norm",
      "train/clip_fraction",
      "train/logprob_abs_diff",
      "train/skipped_share",
      "rollout/staleness",
    ],
  ],
  ["GPUs", ["perf/gpu_utilization", "perf/gpu_memory", /^perf\/gpu\/\d+\/(utilization|memory)$/]],
  ["Speed", ["perf/step_s", "rollout/tokens_per_s", "train/tokens_per_s", "perf/idle_fraction"]],
];
const UNITS = [
  [/tokens_per_s$/, "tokens/s"],
  [/_s$/, "s"],
  [/_len_|_tokens$/, "tokens"],
  [/entropy|\/kl|logprob/, "nats"],
];
const unitOf = (key) => UNITS.find(([pattern]) => pattern.test(key))?.[1] ?? "";

function groupsOf(keys) {
  const left = new Set(keys);
  const groups = GROUPS.map(([title, wanted]) => {
    const found = wanted.flatMap((one) => [...left].filter((key) => (one instanceof RegExp ? one.test(key) : one === key)));
    for (const key of found) left.delete(key);
    return [title, found];
  }).filter(([, found]) => found.length);
  return { groups, rest: [...left].sort() };
}

// Move redundant curves from the groups to the rest: metrics that repeat another one, and pass rates and shares of skipped samples
// that never change.
// `points`: values of all shown runs, by key.
function withoutRepetition({ groups, rest }, points) {
  const seen = new Map();
  const moved = [];
  const kept = groups.map(([title, keys]) => [
    title,
    keys.filter((key) => {
      const values = points(key);
      // Means of the same numbers differ in their last bits where they are summed in another order.
      const text = JSON.stringify(values, (_, value) => (typeof value === "number" ? Number(value.toPrecision(9)) : value));
      const isFlat = /\/pass@|\/skipped_share$/.test(key) && values.every((run) => run.length >= 3 && run.every((value) => value === run[0]));
      const isNew = !isFlat && !(values.some((run) => run.length >= 2) && seen.has(text));
      if (isNew) seen.set(text, key);
      else moved.push(key);
      return isNew;
    }),
  ]);
  return { groups: kept.filter(([, keys]) => keys.length), rest: [...rest, ...moved].sort() };
}

class ChartsGrid {
  constructor({ zoom }) {
    this.zoom = zoom;
    this.node = element("div.grid-charts");
    this.charts = new Map();
  }

  // draw: key -> [series, options]
  show(keys, draw) {
    for (const [key, chart] of this.charts) {
      if (keys.includes(key)) continue;
      chart.remove();
      chart.node.remove();
      this.charts.delete(key);
    }
    for (const key of keys) {
      if (!this.charts.has(key)) {
        const chart = new Chart({ title: key, unit: unitOf(key), zoom: this.zoom });
        chart.node.dataset.key = key;
        this.charts.set(key, chart);
      }
      const chart = this.charts.get(key);
      if (this.node.children[keys.indexOf(key)] !== chart.node)
        this.node.insertBefore(chart.node, this.node.children[keys.indexOf(key)] ?? null);
      chart.show(...draw(key));
    }
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
  }
}
