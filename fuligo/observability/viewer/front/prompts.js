// Prompts by pass rate: which are solved, which never are, and which change.

const PROMPT_PAGE = 50;
const PROMPT_COLUMNS = [
  ["pass_rate", "Pass rate"],
  ["mean", "Mean reward"],
  ["change", "First to last"],
  ["num_samples", "Samples"],
];

class Prompts extends View {
  constructor(root) {
    super();
    this.controls = element("div.controls");
    this.found = element("p.found", { role: "status" });
    this.body = element("div.scroll");
    this.more = element("button.quiet", { type: "button", hidden: true, onclick: () => this.extend() }, "Show more");
    root.append(this.controls, this.found, this.body, this.more);
    this.moved();
  }

  get of() {
    return param("of") === "eval" ? "eval" : "train";
  }

  get order() {
    return param("order") ?? "pass_rate";
  }

  moved() {
    this.size = PROMPT_PAGE;
    this.drawControls();
    super.moved();
  }

  get state() {
    const { name, num_samples, num_eval_samples } = chosenRun();
    return { name, num_samples, num_eval_samples };
  }

  extend() {
    this.size += 3 * PROMPT_PAGE;
    this.refresh();
  }

  drawControls() {
    const run = chosenRun();
    this.controls.replaceChildren(
      run.num_eval_samples > 0 || this.of === "eval"
        ? setChoice("Prompts of", this.of, (of) => go({ of, dataset: null }))
        : "",
      this.of === "eval" && !isReport && run.datasets.length > 1
        ? choice("Dataset", "dataset", [["", "all"], ...run.datasets.map(twice)], param("dataset") ?? "", (dataset) => go({ dataset }))
        : "",
    );
  }

  async load() {
    const run = chosenRun();
    const question = { run: run.name, of: this.of, dataset: param("dataset"), order: this.order, offset: 0, limit: Math.min(200, this.size) };
    const answer = await ask("prompts", question);
    if (currentView !== this) return;
    const read = stepsRead(answer.indexed);
    // With a shaped reward, such as one with a length penalty, correct answers may stay below 1: a pass rate of 0% would mislead.
    const rule = answer.any_passes ? "a response passes with a reward of at least 1" : "no pass rates, as no response has a reward of at least 1";
    const found = answer.total ? `${count(answer.total, "prompt")}, ${rule}` : "No judged samples recorded.";
    this.found.textContent = [found, read].filter(Boolean).join(" · ");
    this.body.replaceChildren(...(answer.total ? [this.table(answer.rows)] : []));
    this.more.hidden = answer.rows.length >= answer.total || this.size >= 200;
  }

  table(rows) {
    return element(
      "table.prompts",
      element(
        "thead",
        element(
          "tr",
          element("th", { scope: "col" }, "Prompt"),
          PROMPT_COLUMNS.map(([key, title]) => this.head(key, title)),
          element("th.wide", { scope: "col" }, "Mean reward by step"),
        ),
      ),
      tableBody(rows.map((row) => this.cells(row))),
    );
  }

  head(key, title) {
    const sorted = this.order.replace(/^-/, "") === key;
    const descends = this.order.startsWith("-");
    const mark = sorted ? (descends ? " ↓" : " ↑") : "";
    const isWide = key === "mean" || key === "num_samples";
    const attributes = { scope: "col", class: `number ${isWide ? "wide" : ""}`, "aria-sort": sorted ? (descends ? "descending" : "ascending") : null };
    if (key === "mean") return element("th", attributes, title);
    const next = sorted && !descends ? `-${key}` : key;
    return element("th", attributes, element("button", { type: "button", onclick: () => go({ order: next }) }, title + mark));
  }

  cells(row) {
    const target = { prompt: row.prompt_key, of: this.of === "eval" ? "eval" : null, dataset: row.dataset };
    const isNamed = row.dataset && !param("dataset") && chosenRun().datasets.length > 1;
    return [
      element(
        "td",
        element("button.prompt", { type: "button", onclick: () => go(target, { view: "samples" }) }, row.text || "(not recorded)"),
        isNamed ? [" ", pill(row.dataset)] : null,
      ),
      element(
        "td.number",
        { title: row.pass_rate === null ? `no response${row.dataset ? " of this dataset" : ""} has a reward of at least 1` : null },
        row.pass_rate === null ? NOTHING : share(row.pass_rate),
      ),
      element("td.number.wide", figure(row.mean, 3)),
      element("td.number", row.num_steps > 1 ? `${figure(row.first, 3)} → ${figure(row.last, 3)}` : figure(row.last, 3)),
      element("td.number.wide", row.num_samples),
      element("td.wide", sparkline(row.steps)),
    ];
  }
}

// Mean reward by step as a small curve, whose scale includes 0 and 1.
function sparkline(points) {
  const [width, height, room] = [140, 26, 3];
  const node = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img" });
  node.setAttribute("aria-label", points.map(([step, reward]) => `step ${step}: ${figure(reward, 3)}`).join(", "));
  if (!points.length) return node;
  const span = (values) => [Math.min(...values), Math.max(...values)];
  const [x0, x1] = span(points.map(([step]) => step));
  const [y0, y1] = span([0, 1, ...points.map(([, reward]) => reward)]);
  const x = (step) => (x0 === x1 ? width / 2 : room + ((step - x0) / (x1 - x0)) * (width - 2 * room));
  const y = (reward) => height - room - ((reward - y0) / (y1 - y0)) * (height - 2 * room);
  const places = points.map(([step, reward]) => [x(step).toFixed(1), y(reward).toFixed(1)]);
  node.append(svg("path", { d: places.map(([left, top], at) => `${at ? "L" : "M"}${left} ${top}`).join("") }));
  const [left, top] = places.at(-1);
  node.append(svg("circle", { cx: left, cy: top, r: 2.2 }));
  return node;
}
