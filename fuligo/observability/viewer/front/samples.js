// Samples: list with filters, and the selected sample.

const FILTERS = [
  ["step", "Step"],
  ["reward", "Reward"],
  ["length", "Tokens"],
  ["advantage", "Advantage"],
];
const FILTER_NAMES = [
  ...FILTERS.flatMap(([name]) => [`${name}_min`, `${name}_max`]),
  ...["staleness_min", "status", "kept", "group", "engine", "dataset", "part", "part_min", "part_max", "prompt", "text"],
];
const OF_TRAINING = ["advantage_min", "advantage_max", "staleness_min", "kept", "engine"];
const ORDERS = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-length", "longest"],
  ["length", "shortest"],
  ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"],
  ["-staleness", "most stale"],
  ["engine", "by engine"],
];
const ORDERS_OF_EVALUATIONS = ORDERS.filter(([key]) => !/advantage|staleness|engine/.test(key));

const KEPT = [
  ["", "any"],
  ["true", "yes"],
  ["false", "no (dropped)"],
];
const twice = (word) => [String(word), String(word)];

const listHead = (ofEvaluations, withEngines) =>
  element(
    "div.list-head",
    { "aria-hidden": "true" },
    element("span", ofEvaluations ? "After" : "Step"),
    element("span", "Reward"),
    element("span", "Tokens"),
    ofEvaluations ? null : element("span.advantage", "Adv."),
    withEngines ? element("span.engine", "Eng.") : null,
    element("span", "Prompt, response"),
  );

class Samples {
  constructor(root) {
    this.sets = element("div.controls.sets");
    this.bar = element("div.filters", { role: "search" });
    this.head = element("div");
    this.found = element("p.found", { role: "status" });
    this.list = new SampleList({
      question: () => this.question(),
      choose: (row) => go({ sample: `${row.step}.${row.row}` }, { quietly: this.isOpen }),
      status: (answer) => this.showFound(answer),
    });
    this.view = new SampleView({ of: () => this.of, close: () => this.closeSample(), open: (step, row) => go({ sample: `${step}.${row}` }) });
    this.split = element("div.split", element("div.list-side", this.found, this.head, this.list.node), this.view.node);
    root.append(this.sets, this.bar, this.split);
    this.escape = (event) => event.key === "Escape" && this.isOpen && this.closeSample();
    addEventListener("keydown", this.escape);
    this.typed = afterPause((name, value) => go({ [name]: value, sample: null }, { quietly: true }));
    this.asked = null;
    this.moved();
  }

  get run() {
    return chosenRun();
  }

  // Set of samples: of training or of evaluations.
  get of() {
    return param("of") === "eval" ? "eval" : "train";
  }

  get numSamples() {
    return this.of === "eval" ? this.run.num_eval_samples : this.run.num_samples;
  }

  get isOpen() {
    return param("sample") !== null;
  }

  question() {
    const filters = Object.fromEntries(FILTER_NAMES.map((name) => [name, param(name)]));
    const order = this.orders.some(([key]) => key === param("order")) ? param("order") : "newest";
    return { run: this.run.name, of: this.of, order, ...filters };
  }

  get orders() {
    return this.of === "eval" ? ORDERS_OF_EVALUATIONS : ORDERS;
  }

  moved() {
    this.drawSets();
    this.drawFilters();
    this.drawHead();
    const question = JSON.stringify(this.question());
    if (question !== this.asked) {
      this.asked = question;
      this.known = this.numSamples;
      this.list.reload().catch((error) => this.found.replaceChildren(notes([error.message])));
    }
    this.split.classList.toggle("open", this.isOpen);
    if (this.isOpen) {
      const [step, row] = param("sample").split(".").map(Number);
      this.list.select(param("sample"));
      this.view.show(this.run, step, row);
    } else this.list.select(null);
  }

  updated() {
    this.drawSets();
    if (this.isOpen) this.view.updated();
    if (this.numSamples !== this.known) {
      this.known = this.numSamples;
      this.drawHead();
      this.drawFilters();
      this.list.reload({ keep: true });
    }
  }

  // Columns that would be empty, or equal for all samples, are not shown.
  drawHead() {
    const [ofEvaluations, withEngines] = [this.of === "eval", this.of === "train" && this.run.engines.length > 1];
    Object.assign(this.list, { withAdvantage: !ofEvaluations, withEngines });
    this.split.classList.toggle("of-eval", ofEvaluations);
    this.split.classList.toggle("with-engines", withEngines);
    this.head.replaceChildren(listHead(ofEvaluations, withEngines));
  }

  // Draw the choice between training and evaluations; empty without evaluations.
  drawSets() {
    const shown = this.run.num_eval_samples > 0 || this.of === "eval";
    if (this.sets.childElementCount > 0 === shown && this.of === this.drawn) return;
    this.drawn = this.of;
    const forget = Object.fromEntries([...OF_TRAINING, "dataset", "part", "part_min", "part_max", "step_min", "step_max", "group", "prompt"].map((name) => [name, null]));
    this.sets.replaceChildren(shown ? setChoice("Samples of", this.of, (of) => go({ ...forget, of, sample: null })) : "");
  }

  showFound({ total, searched, indexed }) {
    const [read, search] = [stepsRead(indexed), searched < 1 ? `${share(searched)} searched` : ""];
    const found = `${count(total, "sample")}${isReport ? " in this report" : ""}`;
    const none = this.numSamples ? "No sample matches." : "No samples recorded.";
    this.found.textContent = total === 0 && !search && !read ? none : [found, search, read].filter(Boolean).join(" · ");
  }

  closeSample() {
    this.view.shown = null;
    go({ sample: null });
    this.list.node.focus();
  }

  drawFilters() {
    if (this.bar.contains(document.activeElement) && ["number", "search"].includes(document.activeElement.type)) return;
    const field = (name, attributes) =>
      element("input", { name, value: param(name) ?? "", oninput: (event) => this.typed(name, event.target.value), ...attributes });
    const menu = (name, label, options, chosen = param(name) ?? "") => {
      const entries = options.map(([value, text]) => element("option", { value, selected: value === chosen }, text));
      const onchange = (event) => go({ [name]: event.target.value, sample: null });
      return element("label.field", element("span", label), element("select", { name, "aria-label": label, onchange }, entries));
    };
    const range = (name, label) => {
      const bound = (end, placeholder) => field(`${name}_${end}`, { type: "number", step: "any", placeholder, "aria-label": `${label} ${placeholder}` });
      return element("div.range", bound("min", "from"), bound("max", "to"));
    };
    const active = FILTER_NAMES.filter((name) => param(name) !== null);
    const withoutFilters = Object.fromEntries(FILTER_NAMES.map((name) => [name, null]));
    const ofTraining = this.of === "train";
    const number = (name, label, placeholder, spoken = label) =>
      element("div.field.narrow", element("span", label), field(name, { type: "number", min: 0, placeholder, "aria-label": spoken }));
    refill(
      this.bar,
      element("label.field.wide", element("span", "Text"), field("text", { type: "search", placeholder: "prompt or response" })),
      ...FILTERS.filter(([name]) => ofTraining || name !== "advantage").map(([name, label]) =>
        element("div.field", element("span", name === "step" && !ofTraining ? "After rollouts" : label), range(name, label)),
      ),
      menu("status", "Ended", [["", "any"], ...["completed", "truncated", "aborted", "failed"].map(twice)]),
      ofTraining && menu("kept", "Trained on", KEPT),
      ofTraining && number("staleness_min", "Stale by", "≥", "Stale by at least"),
      ofTraining && this.run.engines.length > 1 && menu("engine", "Engine", [["", "any"], ...this.run.engines.map(twice)]),
      !ofTraining && this.run.datasets.length > 1 && menu("dataset", "Dataset", [["", "any"], ...this.run.datasets.map(twice)]),
      this.partFields(menu, range),
      number("group", "Group", "any"),
      menu("order", "Order", this.orders, param("order") ?? "newest"),
      element("button.quiet.clear", { type: "button", hidden: active.length === 0, onclick: () => go(withoutFilters) }, "Clear"),
    );
  }

  // Filters by one part of the reward, if it has parts.
  partFields(menu, range) {
    const parts = this.run.parts[this.of];
    if (!parts.length) return null;
    const part = param("part");
    return [
      menu("part", "Part of reward", [["", "any"], ...parts.map(twice)]),
      part ? element("div.field", element("span", part), range("part", part)) : null,
    ];
  }

  close() {
    removeEventListener("keydown", this.escape);
    this.list.remove();
    this.view.remove();
  }
}
