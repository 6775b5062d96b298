// Health: alarms in words, with the curves behind them.

class Health extends View {
  constructor(root) {
    super();
    this.alarms = element("section.headline", { "aria-label": "Alarms" });
    this.grid = new ChartsGrid({ zoom: () => {} });
    this.log = element("section", { id: "log" });
    root.append(this.alarms, element("section", element("h2", "Watched metrics"), this.grid.node), this.log);
    this.moved();
  }

  get state() {
    const { num_rows, generation } = chosenRun();
    return { num_rows, generation };
  }

  async load() {
    const run = chosenRun();
    const health = await ask("health", { run: run.name });
    await updateCurves(run, ["perf/step_s", ...health.watched]);
    if (currentView !== this) return;
    // Notes are counted separately, because the badge of the tab leaves them out.
    const isNote = (alarm) => alarm.severity === "note";
    const ongoing = health.alarms.filter((alarm) => alarm.ongoing);
    const told = [
      [ongoing.filter((alarm) => !isNote(alarm)).length, "ongoing alarm"],
      [ongoing.filter(isNote).length, "note"],
    ].filter(([number]) => number);
    this.alarms.replaceChildren(
      element(
        "h1",
        run.num_rows === 0
          ? "No step is complete yet"
          : told.length
            ? told.map(([number, noun]) => count(number, noun)).join(", ")
            : health.alarms.length
              ? "No ongoing alarms"
              : "No alarms",
      ),
      element(
        "p.lead",
        health.alarms.length
          ? "Limits are rules of thumb; an alarm shows where to look."
          : `${count(health.watched.length, "curve")} watched, no alarm.`,
      ),
      ...(health.agreement ? [element("p", health.agreement)] : []),
      ...health.alarms.map((alarm) => this.alarm(alarm)),
    );
    this.grid.show(health.watched, (key) => {
      const bands = health.alarms
        .filter((alarm) => alarm.key === key)
        .map((alarm) => ({ first: alarm.first_step, last: alarm.last_step, severity: alarm.severity }));
      return [[{ name: run.name, color: runColor(run.name), points: curve(run, key, "step"), smooth: [] }], { bands }];
    });
    this.log.replaceChildren(
      ...(health.log.length
        ? [element("h2", "Last warnings of the log"), element("pre.log", health.log.join("\n"))]
        : []),
    );
  }

  alarm(alarm) {
    const steps = { step_min: alarm.first_step, step_max: alarm.last_step };
    return element(
      "article",
      { class: `alarm ${alarm.severity} ${alarm.ongoing ? "" : "over"}` },
      element("h3", alarm.title, alarm.ongoing ? null : pill("past")),
      element("p", alarm.text),
      element(
        "p.alarm-links",
        element("code", alarm.key),
        link("samples of these steps", steps, "samples"),
        link(`time of step ${alarm.first_step}`, { step: alarm.first_step }, "time"),
      ),
    );
  }

  close() {
    this.grid.remove();
  }
}
