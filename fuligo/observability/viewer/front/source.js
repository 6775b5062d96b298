// Where the data come from: the server that sent this page, or the page itself.

const isReport = embedded !== null;

async function ask(name, params = {}) {
  if (isReport) return FROM_REPORT[name](params);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(key, one);
  }
  const response = await fetch(`api/${name}?${query}`, { cache: "no-store" });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? `${response.status}`);
  return response.json();
}

const BOUNDS = [
  ["step", "step"],
  ["reward", "reward"],
  ["length", "length"],
  ["advantage", "advantage"],
  ["staleness", "staleness"],
];
const EXACT = [
  ["group", "group"],
  ["engine", "engine"],
];

function fitsFilter(row, params) {
  const within = BOUNDS.every(([name, field]) => {
    const [least, most] = [params[`${name}_min`], params[`${name}_max`]];
    if (!least && !most) return true;
    return row[field] !== null && (!least || row[field] >= Number(least)) && (!most || row[field] <= Number(most));
  });
  const text = (params.text ?? "").trim().toLowerCase();
  return (
    within &&
    (!params.status || row.status === params.status) &&
    (!params.kept || row.kept === (params.kept === "true")) &&
    EXACT.every(([name, field]) => !params[name] || (row[field] ?? -1) === Number(params[name])) &&
    (!params.dataset || row.dataset === params.dataset) &&
    (!params.prompt || row.prompt_key === params.prompt) &&
    (!text || `${row.prompt}\n${row.response}`.toLowerCase().includes(text))
  );
}

function ordering(order) {
  if (order === "oldest") return (a, b) => a.step - b.step || a.row - b.row;
  const newest = (a, b) => b.step - a.step || a.row - b.row;
  const field = order.replace(/^-/, "");
  if (field === "newest") return newest;
  const sign = order.startsWith("-") ? -1 : 1;
  return (a, b) => (a[field] === null) - (b[field] === null) || sign * (a[field] - b[field]) || newest(a, b);
}

const FROM_REPORT = {
  runs: () => ({ runs: embedded.runs }),
  metrics: ({ run }) => embedded.metrics[run],
  differences: () => embedded.differences,
  steps: ({ run }) => embedded.steps[run],
  step: ({ run, step }) => reported(embedded.step[run][step], "The report holds the timelines of a few steps; this one is not among them."),
  health: ({ run }) => embedded.health[run],
  sample: ({ run, of, step, row }) => reported(embedded.sample[run][of][`${step}.${row}`], "The report does not hold this sample."),
  history: ({ run, of, prompt }) => {
    const rows = embedded.samples[run][of].filter((row) => row.prompt_key === prompt).sort(ordering("oldest"));
    return { total: rows.length, rows, indexed: [1, 1] };
  },
  samples: (params) => {
    const rows = embedded.samples[params.run][params.of].filter((row) => fitsFilter(row, params)).sort(ordering(params.order || "newest"));
    const page = rows.slice(params.offset, params.offset + params.limit);
    return { total: rows.length, offset: params.offset, rows: page, searched: 1, indexed: [1, 1] };
  },
};

function reported(found, missing) {
  if (!found) throw new Error(missing);
  return found;
}
