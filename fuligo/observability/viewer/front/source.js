// Source of the data: the server of this page, or the page itself (a report).

const isReport = embedded !== null;

async function ask(name, params = {}) {
  if (isReport) return FROM_REPORT[name](params);
  const query = new URLSearchParams();
  appendAll(query, params);
  const response = await fetch(`api/${name}?${query}`, { cache: "no-store" });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? `${response.status}`);
  return response.json();
}

// A report has no server, so filters are applied here; their names say what to compare (`reward_min`, `reward_max`, `status`).
function passes(row, filters) {
  return Object.entries(filters).every(([name, wanted]) => {
    if (!wanted) return true;
    const [column, bound] = name.split("_");
    if (column === "part" && bound && !filters.part) return true;
    const value = name === "prompt" ? row.prompt_key : column === "part" ? (row.parts[filters.part] ?? null) : row[column];
    if (name === "part") return value !== null;
    if (name === "text") return `${row.prompt}\n${row.response}`.toLowerCase().includes(wanted.trim().toLowerCase());
    if (bound) return value !== null && (bound === "min" ? value >= Number(wanted) : value <= Number(wanted));
    return String(value) === wanted;
  });
}

function ordering(order) {
  if (order === "oldest") return (a, b) => a.step - b.step || a.row - b.row;
  const newest = (a, b) => b.step - a.step || a.row - b.row;
  return order === "newest" ? newest : (a, b) => byField(order)(a, b) || newest(a, b);
}

// Ascending, or descending after "-"; rows without a value come last.
function byField(order) {
  const field = order.replace(/^-/, "");
  const sign = order.startsWith("-") ? -1 : 1;
  return (a, b) => (a[field] === null) - (b[field] === null) || sign * (a[field] - b[field]);
}

const FROM_REPORT = {
  runs: () => ({ runs: embedded.runs }),
  metrics: ({ run }) => embedded.metrics[run],
  differences: () => embedded.differences,
  steps: ({ run }) => embedded.steps[run],
  step: ({ run, step }) => reported(embedded.step[run][step], "This report has no timeline of this step."),
  health: ({ run }) => embedded.health[run],
  sample: ({ run, of, step, row }) => reported(embedded.sample[run][of][`${step}.${row}`], "This report does not include this sample."),
  history: ({ run, of, prompt, dataset }) => {
    const rows = embedded.samples[run][of].filter((row) => passes(row, { prompt, dataset })).sort(ordering("oldest"));
    return { total: rows.length, rows, indexed: [1, 1] };
  },
  // A report has the first prompts of every order, of all datasets together.
  prompts: ({ run, of, order, offset, limit }) => {
    const [difference, byMean] = [byField(order), byField(order.replace("pass_rate", "mean"))];
    const rows = [...embedded.prompts[run][of]].sort((a, b) => difference(a, b) || byMean(a, b));
    const any_passes = rows.some((row) => row.pass_rate !== null);
    return { total: rows.length, any_passes, offset, rows: rows.slice(offset, offset + limit), indexed: [1, 1] };
  },
  others: ({ run, of, prompt, step, dataset }) => ({
    runs: embedded.runs
      .filter(({ name }) => name !== run)
      .map(({ name }) => {
        const rows = embedded.samples[name][of].filter((row) => passes(row, { prompt, dataset }));
        const nearest = rows.map((row) => row.step).sort((a, b) => Math.abs(a - step) - Math.abs(b - step) || a - b)[0];
        return { run: name, step: nearest, members: rows.filter((row) => row.step === nearest).slice(0, 16) };
      })
      .filter(({ members }) => members.length),
  }),
  samples: ({ run, of, order, offset, limit, ...filters }) => {
    const rows = embedded.samples[run][of].filter((row) => passes(row, filters)).sort(ordering(order || "newest"));
    return { total: rows.length, offset, rows: rows.slice(offset, offset + limit), searched: 1, indexed: [1, 1] };
  },
};

function reported(found, missing) {
  if (!found) throw new Error(missing);
  return found;
}
