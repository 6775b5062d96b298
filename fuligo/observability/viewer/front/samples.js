// Samples: find them, read them.

const FILTERS = [
  ["step", "Step", true],
  ["reward", "Reward", true],
  ["length", "Tokens", true],
  ["advantage", "Advantage", true],
];
const FILTER_NAMES = [
  ...FILTERS.flatMap(([name]) => [`${name}_min`, `${name}_max`]),
  "staleness_min",
  "status",
  "kept",
  "group",
  "prompt",
  "text",
];
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
];

const listHead = () =>
  element(
    "div",
    { class: "list-head", "aria-hidden": "true" },
    ["Step", "Reward", "Tokens", "Adv.", "Prompt, answer"].map((title) => element("span", {}, title)),
  );

class Samples {
  constructor(root) {
    this.bar = element("div", { class: "filters", role: "search" });
    this.found = element("p", { class: "found", role: "status" });
    this.list = new SampleList({
      question: () => this.question(),
      choose: (row) => go({ sample: `${row.step}.${row.row}` }, { quietly: this.isOpen }),
      status: (answer) => this.told(answer),
    });
    this.view = new SampleView({ close: () => this.closeSample(), open: (step, row) => go({ sample: `${step}.${row}` }) });
    this.split = element(
      "div",
      { class: "split" },
      element("div", { class: "list-side" }, this.found, listHead(), this.list.node),
      this.view.node,
    );
    root.append(this.bar, this.split);
    this.escape = (event) => event.key === "Escape" && this.isOpen && this.closeSample();
    addEventListener("keydown", this.escape);
    this.typed = afterPause((name, value) => go({ [name]: value, sample: null }, { quietly: true }));
    this.asked = null;
    this.moved();
  }

  get run() {
    return chosenRun();
  }

  get isOpen() {
    return param("sample") !== null;
  }

  question() {
    const filters = Object.fromEntries(FILTER_NAMES.map((name) => [name, param(name)]));
    return { run: this.run.name, order: ORDERS.some(([key]) => key === param("order")) ? param("order") : "newest", ...filters };
  }

  moved() {
    this.drawFilters();
    const question = JSON.stringify(this.question());
    if (question !== this.asked) {
      this.asked = question;
      this.known = this.run.num_samples;
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
    if (this.run.num_samples !== this.known) {
      this.known = this.run.num_samples;
      this.list.reload({ keep: true });
    }
  }

  told({ total, searched, indexed }) {
    const read = indexed[0] < indexed[1] ? ` · ${indexed[0]} of ${indexed[1]} steps read` : "";
    const search = searched < 1 ? ` · ${share(searched)} searched` : "";
    const note = isReport ? " in this report" : "";
    this.found.textContent = `${count(total, "sample")}${note}${search}${read}`;
    if (total === 0 && searched === 1 && indexed[0] >= indexed[1])
      this.found.textContent = this.run.num_samples ? "No sample fits." : "No samples are recorded.";
  }

  closeSample() {
    this.view.shown = null;
    go({ sample: null });
    this.list.node.focus();
  }

  drawFilters() {
    if (this.bar.contains(document.activeElement) && ["number", "search"].includes(document.activeElement.type)) return;
    const field = (name, attributes) => {
      const input = element("input", { name, value: param(name) ?? "", ...attributes });
      input.addEventListener("input", () => this.typed(name, input.value));
      return input;
    };
    const menu = (name, label, options, chosen) => {
      const select = element(
        "select",
        { name, "aria-label": label },
        options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)),
      );
      select.addEventListener("change", () => go({ [name]: select.value, sample: null }));
      return element("label", { class: "field" }, element("span", {}, label), select);
    };
    const active = FILTER_NAMES.filter((name) => param(name) !== null);
    this.bar.replaceChildren(
      element(
        "label",
        { class: "field wide" },
        element("span", {}, "Text"),
        field("text", { type: "search", placeholder: "in prompt or answer" }),
      ),
      ...FILTERS.map(([name, label]) =>
        element(
          "div",
          { class: "field" },
          element("span", {}, label),
          element(
            "div",
            { class: "range" },
            field(`${name}_min`, { type: "number", step: "any", placeholder: "from", "aria-label": `${label} from` }),
            field(`${name}_max`, { type: "number", step: "any", placeholder: "to", "aria-label": `${label} to` }),
          ),
        ),
      ),
      menu(
        "status",
        "Ended",
        [["", "any way"], ...["completed", "truncated", "aborted", "failed"].map((status) => [status, status])],
        param("status") ?? "",
      ),
      menu(
        "kept",
        "Trained on",
        [
          ["", "or not"],
          ["true", "yes"],
          ["false", "no: dropped"],
        ],
        param("kept") ?? "",
      ),
      element(
        "div",
        { class: "field narrow" },
        element("span", {}, "Stale by"),
        field("staleness_min", { type: "number", min: 0, placeholder: "≥", "aria-label": "Stale by at least" }),
      ),
      element(
        "div",
        { class: "field narrow" },
        element("span", {}, "Group"),
        field("group", { type: "number", min: 0, placeholder: "any", "aria-label": "Group" }),
      ),
      menu("order", "Order", ORDERS, param("order") ?? "newest"),
      element(
        "button",
        {
          type: "button",
          class: "quiet clear",
          hidden: active.length === 0,
          onclick: () => go(Object.fromEntries(FILTER_NAMES.map((name) => [name, null]))),
        },
        "Clear",
      ),
    );
  }

  close() {
    removeEventListener("keydown", this.escape);
    this.list.remove();
    this.view.remove();
  }
}
