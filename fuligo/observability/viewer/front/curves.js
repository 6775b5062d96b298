// Cache of every run's metrics, extended incrementally; values by step, time or tokens.

const curvesOf = new Map(); // run -> {generation, step, time, tokens, values: Map(key -> list), evaluations}

// Fetch new values of these keys; keys that are not cached are fetched from the start.
async function updateCurves(run, keys) {
  let known = curvesOf.get(run.name);
  if (!known || known.generation !== run.generation) {
    known = { generation: run.generation, step: [], time: [], tokens: [], values: new Map(), evaluations: { step: [], values: {} } };
    curvesOf.set(run.name, known);
  }
  const present = keys.filter((key) => run.keys.includes(key) || run.eval_keys.includes(key));
  const fresh = present.filter((key) => !known.values.has(key));
  const old = present.filter((key) => known.values.has(key));
  if (fresh.length) await fetchCurves(run, known, fresh, 0);
  if (old.length && known.values.get(old[0]).length < run.num_rows) await fetchCurves(run, known, old, known.values.get(old[0]).length);
}

async function fetchCurves(run, known, keys, after) {
  const answer = await ask("metrics", { run: run.name, keys: keys.join(","), after, generation: known.generation });
  if (answer.generation !== known.generation) {
    curvesOf.delete(run.name); // the run resumed from an earlier step: fetch everything again
    return;
  }
  for (const axis of ["step", "time", "tokens"]) known[axis].splice(answer.start, Infinity, ...answer[axis]);
  for (const key of keys) {
    const values = known.values.get(key) ?? [];
    values.splice(answer.start, Infinity, ...(answer.values[key] ?? []));
    known.values.set(key, values);
  }
  known.evaluations.step = answer.evaluations.step;
  Object.assign(known.evaluations.values, answer.evaluations.values);
}

const AXES = { step: "step", time: "time since start", tokens: "sampled tokens" };
const axisText = (kind, value) =>
  kind === "time" ? duration(value) : kind === "tokens" ? magnitude(Math.round(value)) : String(Math.round(value));

// [{x, y}] of one metric of one run, without nulls.
function curve(run, key, kind) {
  const known = curvesOf.get(run.name);
  if (!known) return [];
  const start = (known.time[0] ?? 0) - (known.values.get("perf/step_s")?.[0] ?? 0);
  const along = { step: known.step, time: known.time.map((time) => time - start), tokens: known.tokens }[kind];
  const evaluated = known.evaluations.values[key];
  const points = [];
  if (evaluated) {
    // An evaluation after n rollouts is shown where the last of them ended.
    known.evaluations.step.forEach((done, at) => {
      const x = kind === "step" ? done : done === 0 ? 0 : along[known.step.indexOf(done - 1)];
      if (evaluated[at] !== null && evaluated[at] !== undefined && x !== undefined) points.push({ x, y: evaluated[at] });
    });
    return points;
  }
  known.values.get(key)?.forEach((y, at) => y !== null && along[at] !== null && points.push({ x: along[at], y }));
  return points;
}

// Exponential moving average without bias towards 0 at its start.
function smoothed(points, weight) {
  let average = 0;
  return points.map(({ x, y }, at) => {
    average = weight * average + (1 - weight) * y;
    return { x, y: average / (1 - weight ** (at + 1)) };
  });
}

// Thin out the points: keep the minimum and the maximum of each interval.
function thinned(points, most) {
  if (points.length <= most) return points;
  const result = [];
  const size = points.length / (most / 2);
  for (let at = 0; at < most / 2; at++) {
    const part = points.slice(Math.floor(at * size), Math.floor((at + 1) * size));
    const low = part.reduce((a, b) => (b.y < a.y ? b : a));
    const high = part.reduce((a, b) => (b.y > a.y ? b : a));
    result.push(...(low === high ? [low] : low.x < high.x ? [low, high] : [high, low]));
  }
  return result;
}
