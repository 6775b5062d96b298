// Overview: state of the runs, and their curves.

const X_AXES = [
  ["step", "Step"],
  ["time", "Time"],
  ["tokens", "Tokens"],
];

class Overview extends View {
  constructor(root) {
    super();
    this.head = element("section.headline", { "aria-label": "Runs" });
    this.controls = element("div.controls");
    this.body = element("div");
    this.config = new RunSettings();
    this.grids = new Map();
    this.restOpen = false;
    root.append(this.head, this.controls, this.body, this.config.node);
    this.moved();
  }

  moved() {
    this.drawControls();
    super.moved();
  }

  updated() {
    this.refresh();
  }

  get settings() {
    const kind = param("x") in AXES ? param("x") : "step";
    const range = param("from") !== null && param("to") !== null ? [Number(param("from")), Number(param("to"))] : null;
    const smoothing = Math.min(0.99, Math.max(0, Number(param("smooth") ?? 0) || 0));
    return { kind, smoothing, log: param("log") === "1", range, find: param("find") ?? "" };
  }

  drawControls() {
    const { kind, smoothing, log, range, find } = this.settings;
    if (this.controls.contains(document.activeElement) && this.slider) {
      this.zoomOut.hidden = !range;
      this.sliderValue.textContent = smoothing.toFixed(2);
      return; // do not redraw while the user types
    }
    const smooth = (event) => go({ smooth: Number(event.target.value) || null }, { quietly: true });
    const scale = { type: "range", min: 0, max: 0.98, step: 0.01, value: smoothing };
    this.slider = element("input", { ...scale, "aria-label": "Smoothing", oninput: smooth });
    this.sliderValue = element("output", smoothing.toFixed(2));
    this.zoomOut = element("button.quiet", { type: "button", hidden: !range, onclick: () => go({ from: null, to: null }) }, "Show all");
    const search = element("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: find });
    search.addEventListener("input", () => go({ find: search.value }, { quietly: true }));
    this.controls.replaceChildren(
      choice("X axis", "x", X_AXES, kind, (x) => go({ x: x === "step" ? null : x, from: null, to: null })),
      element("label.slider", "Smoothing", this.slider, this.sliderValue),
      element(
        "label.check",
        element("input", { type: "checkbox", checked: log, onchange: (event) => go({ log: event.target.checked ? 1 : null }) }),
        "Log scale",
      ),
      search,
      this.zoomOut,
    );
  }

  async load() {
    this.drawHead();
    const shown = visibleRuns();
    const { find } = this.settings;
    const keys = [...new Set(shown.flatMap((run) => [...run.eval_keys, ...run.keys]))];
    const wanted = find ? keys.filter((key) => key.toLowerCase().includes(find.toLowerCase())) : keys;
    const { groups, rest } = groupsOf(wanted);
    const open = find ? true : this.restOpen;
    const asked = ["perf/step_s", ...groups.flatMap(([, found]) => found), ...(open ? rest : [])];
    await Promise.all(shown.map((run) => updateCurves(run, asked)));
    if (currentView !== this) return;
    const shownOnce = find
      ? { groups, rest }
      : withoutRepetition({ groups, rest }, (key) => shown.map((run) => curve(run, key, "step").map(({ y }) => y)));
    this.drawGroups(shownOnce.groups, shownOnce.rest, open, find, keys.length);
    await this.config.show(shown);
  }

  drawGroups(groups, rest, open, find, numKeys) {
    if (!groups.length && !rest.length) {
      this.closeGrids();
      this.body.replaceChildren(empty(numKeys ? `No metric matches “${find}”.` : "No step is complete yet; curves start with the first one."));
      return;
    }
    const sections = [...groups.map(([title, keys]) => [title, keys, true]), ...(rest.length ? [["More", rest, open]] : [])];
    const titles = JSON.stringify(sections.map(([title]) => title).concat(find ? ["found"] : []));
    if (this.drawn !== titles || !this.body.querySelector(".group")) {
      this.closeGrids();
      this.drawn = titles;
      this.body.replaceChildren(...sections.map(([title, keys]) => this.group(title, keys, find)));
    }
    for (const [title, keys, isOpen] of sections) if (isOpen) this.grids.get(title).show(keys, (key) => this.chartOf(key));
  }

  group(title, keys, find) {
    const grid = new ChartsGrid({ zoom: (ends) => go({ from: ends && ends[0].toPrecision(7), to: ends && ends[1].toPrecision(7) }) });
    this.grids.set(title, grid);
    if (title !== "More" || find) return element("section.group", element("h2", title), grid.node);
    const ontoggle = ({ target }) => {
      if (target.open === this.restOpen) return;
      this.restOpen = target.open;
      this.refresh();
    };
    return element("details.group", { open: this.restOpen, ontoggle }, element("summary", count(keys.length, "more metric")), grid.node);
  }

  chartOf(key) {
    const { kind, smoothing, log, range } = this.settings;
    const series = visibleRuns()
      .map((run) => {
        const points = curve(run, key, kind);
        const few = key.startsWith("eval/") || points.length < 4;
        return { name: run.name, color: runColor(run.name), points, smooth: smoothing > 0 && !few ? smoothed(points, smoothing) : [] };
      })
      .filter(({ points }) => points.length);
    return [series, { kind, log, range }];
  }

  drawHead() {
    const run = runs[0];
    const problems = runs.flatMap((one) => one.problems.map((text) => (runs.length > 1 ? `${one.name}: ${text}` : text)));
    if (this.head.contains(document.activeElement)) {
      this.head.querySelector(".live")?.replaceChildren(...this.runTable().childNodes);
      return;
    }
    refill(
      this.head,
      element(
        "div.title",
        element("h1", runs.length === 1 ? run.name : count(runs.length, "run")),
        runs.length === 1 ? pill(alarmedText(run), stateClass(run)) : null,
      ),
      runs.length === 1 ? this.runCards(run) : element("div.scroll", this.runTable()),
      notes(problems),
    );
  }

  runCards(run) {
    const { latest, now } = run;
    const activity = isLive(run) && now.doing ? doingText(run) : stateText(run);
    const end = now.left_s === null ? [NOTHING, ""] : [`in ${duration(now.left_s)}`, `about ${clock(run.clock_s + now.left_s)}`];
    const done = run.num_rollouts ? run.num_done / run.num_rollouts : null;
    return cards([
      ["Step", run.num_rollouts ? `${run.num_done} of ${run.num_rollouts}` : run.num_done, activity, done],
      ["Reward", figure(latest["rollout/reward_mean"], 3), run.first_reward === null ? "" : `from ${figure(run.first_reward, 3)} at step 0`],
      ["Responses", `${figure(latest["rollout/response_len_mean"], 3)} tokens`, "mean length, latest step"],
      ["Speed", `${now.step_s === null ? NOTHING : seconds(now.step_s)} per step`, speedText(latest)],
      isLive(run) ? ["Expected end", ...end] : ["Samples", run.num_samples.toLocaleString("en"), stepsRead(run.indexed) || "recorded"],
    ]);
  }

  runTable() {
    const hidden = hiddenRuns();
    const rows = runs.map((run) => [
      rowTitle(
        element(
          "label.check",
          element("input", { type: "checkbox", checked: !hidden.has(run.name), onchange: (event) => showRun(run.name, event.target.checked) }),
          swatch(runColor(run.name)),
          run.name,
        ),
      ),
      element("td", isLive(run) && run.now.doing ? run.now.doing : stateText(run), numAlarms(run) ? alarmBadge(run) : null),
      numberCell(run.num_rollouts ? `${run.num_done} / ${run.num_rollouts}` : run.num_done),
      numberCell(figure(run.latest["rollout/reward_mean"], 3)),
      numberCell(run.now.step_s === null ? NOTHING : seconds(run.now.step_s)),
      numberCell(isLive(run) ? duration(run.now.left_s) : ""),
    ]);
    return table({ class: "runs live" }, ["Run", "State", "Steps", "Reward", "Per step", "Left"], rows, (at) => at > 1);
  }

  closeGrids() {
    for (const grid of this.grids.values()) grid.remove();
    this.grids.clear();
    this.drawn = null;
  }

  close() {
    this.closeGrids();
  }
}

const alarmedText = (run) => stateText(run) + (numAlarms(run) ? `, ${count(numAlarms(run), "alarm")}` : "");

// The duration is shown if it is long.
function doingText({ now, clock_s }) {
  const since = clock_s - now.since_s;
  return `${now.doing}, step ${now.doing_step}${since > Math.max(10, now.step_s ?? 0) ? `, for ${duration(since)}` : ""}`;
}

function speedText(latest) {
  const rate = latest["rollout/tokens_per_s"];
  return rate === null ? "" : `${figure(Math.round(rate))} tokens/s sampled`;
}

function showRun(name, shown) {
  const hidden = hiddenRuns();
  if (shown) hidden.delete(name);
  else hidden.add(name);
  go({ hide: [...hidden] });
}
