// Time: seconds by cause, over the run and in one step.

class Time extends View {
  constructor(root) {
    super();
    this.lead = element("p.lead");
    this.bars = new StepBars((step) => go({ step }));
    this.scale = element("div.controls");
    this.legend = element("ul.legend");
    this.barsNode = element("figure.chart.wide", this.bars.plot);
    this.detail = element("section", { id: "step", "aria-label": "One step" });
    root.append(
      element("section.headline", element("h1", "Time by cause"), this.lead, this.scale, this.barsNode, this.legend),
      this.detail,
    );
    this.latest = latestOnly();
    this.moved();
  }

  moved() {
    const query = new URLSearchParams({ run: chosenRun().name });
    const scales = [
      ["seconds", "Seconds"],
      ["share", "Shares"],
    ];
    this.scale.replaceChildren(
      choice("Show", "scale", scales, param("scale") ?? "seconds", (scale) => go({ scale: scale === "seconds" ? null : scale })),
      isReport ? "" : element("a.quiet", { href: `api/trace.json?${query}`, download: "" }, "trace.json for ui.perfetto.dev"),
    );
    super.moved();
  }

  get state() {
    const { num_rows, trace_read, generation, indexed } = chosenRun();
    return { num_rows, trace_read, generation, indexed };
  }

  async load() {
    const run = chosenRun();
    const data = await ask("steps", { run: run.name });
    if (currentView !== this) return;
    if (!data.steps.length) {
      this.lead.textContent = "No step is complete yet.";
      return;
    }
    const step = param("step") === null ? data.steps.at(-1) : Number(param("step"));
    this.bars.show(data, step, param("scale") === "share");
    const names = this.bars.names;
    const total = sum(names.map((name) => sum(data.causes[name])));
    const longest = names[0];
    this.lead.textContent = longest
      ? `${count(data.steps.length, "step")} in ${duration(total)}; largest cause: ${longest} (${share(sum(data.causes[longest]) / total)}). Select a step with a click or the arrow keys.${data.trace_read < 1 ? ` ${share(data.trace_read)} of the trace is read.` : ""}`
      : "The metrics contain no times.";
    this.legend.replaceChildren(
      ...names.map((name) => element("li", swatch(causeColor(name)), `${name} ${share(sum(data.causes[name]) / total, 1)}`)),
    );
    await this.loadStep(run, step);
  }

  async loadStep(run, step) {
    let found;
    try {
      found = await this.latest(ask("step", { run: run.name, step }));
    } catch (error) {
      this.detail.replaceChildren(element("h2", `Step ${step}`), empty(error.message));
      return;
    }
    if (found === undefined || currentView !== this) return;
    const [first] = found.causes;
    refill(
      this.detail,
      element("h2", `Step ${step}`),
      cards([
        ["Duration", seconds(found.duration_s), `ended ${clock(found.start_s + found.duration_s)}`],
        ["Main cause", first?.name ?? NOTHING, first ? `${share(first.seconds / found.duration_s)}, ${fine(first.seconds)}` : ""],
        ["Trainer idle", share(found.trainer_idle), "neither scoring nor training"],
        ["Engines idle", share(found.engines_idle), found.engines_idle === null ? "the samples have no times" : "no sample being generated"],
      ]),
      found.phases.length ? stepTimeline(found) : notes(["trace.json has no phases of this step; the seconds are from the metrics."]),
      this.causes(found),
      found.longest.length ? this.longest(found) : null,
    );
  }

  causes(found) {
    const total = sum(found.causes.map((cause) => cause.seconds));
    const rows = found.causes.map((cause) => [
      rowTitle(swatch(causeColor(cause.name)), cause.name),
      numberCell(fine(cause.seconds)),
      numberCell(share(cause.seconds / total, 1)),
      element("td.bar-cell", element("div.share-bar", { "--width": percent(cause.seconds / total), ...causeColor(cause.name) })),
      element("td.note", CAUSE_TEXTS[cause.name] ?? ""),
    ]);
    const all = [rowTitle("All"), numberCell(fine(total)), numberCell(share(total / found.duration_s, 1)), element("td"), element("td")];
    return element(
      "div.scroll",
      element(
        "table.causes",
        element("caption", "Each instant counts for one cause: the first of sync, train, score, save, eval, record, rollout that is in progress"),
        tableHead(["Cause", "Time", "Share", "", "Meaning"], (at) => at === 1 || at === 2),
        tableBody(rows),
        element("tfoot", element("tr", all)),
      ),
    );
  }

  longest(found) {
    const end = Math.max(...found.longest.map((sample) => sample.end_s));
    const rows = found.longest.map((sample) => [
      rowTitle(link(`sample ${sample.index}`, { sample: `${found.step}.${sample.row}` }, "samples")),
      numberCell(sample.tokens.toLocaleString("en")),
      numberCell(fine(sample.end_s - sample.start_s)),
      numberCell(fine(sample.alone_s)),
      element("td", sample.status),
      element(
        "td.bar-cell",
        element("div.span-bar", {
          "--left": percent(Math.max(0, sample.start_s) / end),
          "--width": percent((sample.end_s - Math.max(0, sample.start_s)) / end),
        }),
      ),
    ]);
    const titles = ["Sample", "Tokens", "Duration", "Earlier by", "Ended", ""];
    return element(
      "div.last-samples",
      element("h3", "Last samples to finish"),
      element("p.lead", "Earlier by: time by which the rollout would have ended sooner without this sample and those above it."),
      element("div.scroll", table({}, titles, rows, (at) => at > 0 && at < 4)),
    );
  }

  close() {
    this.bars.remove();
  }
}
