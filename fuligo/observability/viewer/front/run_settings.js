// Settings: differences between several runs, or all settings of one.

class RunSettings {
  constructor() {
    this.node = element("section", { id: "settings" });
  }

  async show(shown) {
    const asked = shown.map((run) => run.name);
    if (JSON.stringify(asked) === this.asked) return;
    this.asked = JSON.stringify(asked);
    if (runs.length > 1) await this.showDifferences(asked);
    else if (!isReport) this.offerAll(asked[0]);
  }

  async showDifferences(names) {
    const { rows } = await ask("differences", { run: names });
    const heads = names.map((name) => [swatch(runColor(name)), name]);
    this.node.replaceChildren(
      element("h2", "Settings that differ"),
      rows.length ? settingsTable(heads, rows) : empty("None. These runs have the same settings."),
    );
  }

  // Fetched on demand, because there are hundreds. A report has none, because environment variables in them may be confidential.
  offerAll(name) {
    const details = element("details.all-settings", element("summary", "Settings of this run"));
    details.addEventListener(
      "toggle",
      async () => {
        const { rows } = await ask("settings", { run: name });
        details.append(rows.length ? settingsTable([["Value"]], rows) : empty("config.yaml is missing or cannot be read."));
      },
      { once: true },
    );
    this.node.replaceChildren(details);
  }
}

function settingsTable(heads, rows) {
  const cells = rows.map((row) => [
    rowTitle(element("span.soft", `${row.group} `), row.name),
    row.values.map((value) => element("td", element("code", value))),
  ]);
  return element("div.scroll", table({ class: "settings" }, ["Setting", ...heads], cells));
}
