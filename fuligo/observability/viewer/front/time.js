// Time: seconds by cause, over the run and in one step.

class Time {
  constructor(root) {
    this.lead = element("p", { class: "lead" });
    this.bars = new StepBars((step) => go({ step }));
    this.scale = element("div", { class: "controls" });
    this.legend = element("ul", { class: "legend" });
    this.barsNode = element("figure", { class: "chart wide" }, this.bars.plot);
    this.detail = element("section", { id: "step", "aria-label": "One step" });
    root.append(
      element(
        "section",
        { class: "headline" },
        element("h1", {}, "Time by cause"),
        this.lead,
        this.scale,
        this.barsNode,
        this.legend,
      ),
      this.detail,
    );
    this.latest = latestOnly();
    this.refresh = oneAtATime(() => this.load());
    this.moved();
  }

  moved() {
    this.scale.replaceChildren(
      choice(
        "Show",
        "scale",
        [
          ["seconds", "Seconds"],
          ["share", "Shares"],
        ],
        param("scale") ?? "seconds",
        (scale) => go({ scale: scale === "seconds" ? null : scale }),
      ),
      isReport ? "" : download(`api/trace.json?${new URLSearchParams({ run: chosenRun().name })}`, "trace.json for ui.perfetto.dev"),
    );
    this.refresh();
  }

  updated() {
    const { num_rows, trace_read, generation, indexed } = chosenRun();
    const state = JSON.stringify([num_rows, trace_read, generation, indexed]);
    if (state === this.known) return;
    this.known = state;
    this.refresh();
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
      ...names.map((name) => element("li", {}, swatchOf(causeColour(name)), `${name} ${share(sum(data.causes[name]) / total, 1)}`)),
    );
    await this.loadStep(run, step);
  }

  async loadStep(run, step) {
    let found;
    try {
      found = await this.latest(ask("step", { run: run.name, step }));
    } catch (error) {
      this.detail.replaceChildren(element("h2", {}, `Step ${step}`), empty(error.message));
      return;
    }
    if (found === undefined || currentView !== this) return;
    this.detail.replaceChildren(
      ...[
        element("h2", {}, `Step ${step}`),
        cards([
          ["Duration", seconds(found.duration_s), `ended ${clock(found.start_s + found.duration_s)}`],
          [
            "Main cause",
            found.causes[0]?.name ?? NOTHING,
            found.causes[0] ? `${share(found.causes[0].seconds / found.duration_s)}, ${fine(found.causes[0].seconds)}` : "",
          ],
          ["Trainer idle", share(found.trainer_idle), "neither scoring nor training"],
          ["Engines idle", share(found.engines_idle), found.engines_idle === null ? "the samples have no times" : "no sample being generated"],
        ]),
        found.phases.length ? stepTimeline(found) : notes(["trace.json has no phases of this step; the seconds are from the metrics."]),
        this.causes(found),
        found.longest.length ? this.longest(found) : null,
      ].filter(Boolean),
    );
  }

  causes(found) {
    const total = sum(found.causes.map((cause) => cause.seconds));
    return element(
      "div",
      { class: "scroll" },
      element(
        "table",
        { class: "causes" },
        element("caption", {}, "Each instant counts for one cause: the first of sync, train, score, save, eval, record, rollout that is in progress"),
        tableHead(["Cause", "Time", "Share", "", "Meaning"], (at) => at === 1 || at === 2),
        element(
          "tbody",
          {},
          found.causes.map((cause) =>
            element(
              "tr",
              {},
              element("th", { scope: "row" }, swatchOf(causeColour(cause.name)), cause.name),
              element("td", { class: "number" }, fine(cause.seconds)),
              element("td", { class: "number" }, share(cause.seconds / total, 1)),
              element(
                "td",
                { class: "bar-cell" },
                element("div", { class: "share-bar", "--width": percent(cause.seconds / total), ...causeColour(cause.name) }),
              ),
              element("td", { class: "note" }, CAUSE_TEXTS[cause.name] ?? ""),
            ),
          ),
        ),
        element(
          "tfoot",
          {},
          element(
            "tr",
            {},
            element("th", { scope: "row" }, "All"),
            element("td", { class: "number" }, fine(total)),
            element("td", { class: "number" }, share(total / found.duration_s, 1)),
            element("td"),
            element("td"),
          ),
        ),
      ),
    );
  }

  longest(found) {
    const end = Math.max(...found.longest.map((sample) => sample.end_s));
    return element(
      "div",
      { class: "last-samples" },
      element("h3", {}, "Last samples to finish"),
      element("p", { class: "lead" }, "Earlier by: time by which the rollout would have ended sooner without this sample and those above it."),
      element(
        "div",
        { class: "scroll" },
        element(
          "table",
          {},
          tableHead(["Sample", "Tokens", "Duration", "Earlier by", "Ended", ""], (at) => at > 0 && at < 4),
          element(
            "tbody",
            {},
            found.longest.map((sample) =>
              element(
                "tr",
                {},
                element(
                  "th",
                  { scope: "row" },
                  element(
                    "a",
                    {
                      href: addressWith({ sample: `${found.step}.${sample.row}` }, "samples"),
                      onclick: (event) => (event.preventDefault(), go({ sample: `${found.step}.${sample.row}` }, { view: "samples" })),
                    },
                    `sample ${sample.index}`,
                  ),
                ),
                element("td", { class: "number" }, sample.tokens.toLocaleString("en")),
                element("td", { class: "number" }, fine(sample.end_s - sample.start_s)),
                element("td", { class: "number" }, fine(sample.alone_s)),
                element("td", {}, sample.status),
                element(
                  "td",
                  { class: "bar-cell" },
                  element("div", {
                    class: "span-bar",
                    "--left": percent(Math.max(0, sample.start_s) / end),
                    "--width": percent((sample.end_s - Math.max(0, sample.start_s)) / end),
                  }),
                ),
              ),
            ),
          ),
        ),
      ),
    );
  }

  close() {
    this.bars.remove();
  }
}
