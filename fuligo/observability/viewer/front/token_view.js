// Response token by token, colored by values of the engine and the trainer.

const PARTS = 256; // tokens per paragraph; paragraphs out of sight are not laid out
// least: full color means at least this value, so that noise stays pale. needs: columns that must be recorded; default: the key.
const BOTH = ["engine_logprobs", "trainer_logprobs"];
const TEACHER = ["teacher_logprobs", "trainer_logprobs"];
const COLORS = [
  { key: "diff", title: "Difference", least: 0.01, needs: BOTH, signed: true, lead: "engine minus trainer log-probability, nats" },
  { key: "engine_logprobs", title: "Engine", least: 0.5, lead: "negative log-probability of the engine, nats" },
  { key: "trainer_logprobs", title: "Trainer", least: 0.5, lead: "negative log-probability of the trainer, nats" },
  { key: "entropy", title: "Entropy", least: 0.1, lead: "entropy of the policy's distribution, nats" },
  { key: "advantages", title: "Advantage", least: 0.1, signed: true, lead: "advantage of the token" },
  { key: "values", title: "Value", least: 0.1, signed: true, lead: "expected return before the token" },
  { key: "teacher", title: "Teacher", least: 0.1, needs: TEACHER, signed: true, lead: "teacher minus trainer log-probability, nats" },
  { key: "mask", title: "Mask", least: 1, lead: "tokens that are trained on" },
  { key: "versions", title: "Version", lead: "policy version that sampled the token" },
  { key: "engines", title: "Served by", lead: "engine that sampled the token" },
];

function tokenValues(tokens, key) {
  if (key === "diff" || key === "teacher")
    return tokens[key === "diff" ? "engine_logprobs" : "teacher_logprobs"].map((value, at) =>
      value === null || tokens.trainer_logprobs[at] === null ? null : value - tokens.trainer_logprobs[at],
    );
  if (key === "engine_logprobs" || key === "trainer_logprobs") return tokens[key].map((value) => (value === null ? null : -value));
  return tokens[key];
}

const SOURCES = { sampled: "of the policy", appended: "of tools and users", template: "of the chat template" };

class TokenView {
  constructor(tokens, choose) {
    this.tokens = tokens;
    const isRecorded = (name) => tokens[name]?.length === tokens.ids.length;
    const isShown = (key) => key !== "engines" || chosenRun().engines.length > 1;
    this.available = COLORS.filter(({ key, needs = [key] }) => needs.every(isRecorded) && isShown(key));
    this.facts = element("div.token-facts", { "aria-live": "polite" });
    this.legend = element("div.token-legend");
    this.text = element("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens of the response: arrow keys move" });
    this.choice = element("div");
    this.node = element("div.token-view", this.choice, this.legend, this.text, this.facts);
    this.onchoose = choose;
    this.drawTokens();
    this.text.addEventListener("pointerover", (event) => this.over(event));
    this.text.addEventListener("click", (event) => event.target.dataset.at && this.mark(Number(event.target.dataset.at)));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.color(param("color"));
    this.tell(null);
  }

  drawTokens() {
    const { ids, texts } = this.tokens;
    this.cells = ids.map((id, at) =>
      element("span.token", { "data-at": at }, texts ? shownToken(texts[at]) : String(id), texts ? null : " "),
    );
    const parts = [];
    for (let at = 0; at < ids.length; at += PARTS) parts.push(element("span.token-part", this.cells.slice(at, at + PARTS)));
    this.text.replaceChildren(...parts);
    if (!texts && ids.length)
      this.text.before(element("p.soft", "The tokenizer is not on this machine: tokens are shown by their ids."));
  }

  color(wanted) {
    const chosen = this.available.find(({ key }) => key === wanted) ?? this.available[0];
    if (!chosen) {
      this.choice.replaceChildren(empty("The run recorded no values per token."));
      return;
    }
    const options = this.available.map(({ key, title }) => [key, title]);
    const choose = (key) => (this.onchoose(key), this.recolor(key));
    this.choice.replaceChildren(choice("Color by", "color", options, chosen.key, choose));
    this.recolor(chosen.key);
  }

  recolor(key) {
    const chosen = COLORS.find((one) => one.key === key);
    const values = tokenValues(this.tokens, key);
    this.text.dataset.color = key;
    if (key === "versions" || key === "engines") return this.colorKinds(values, chosen, key === "versions" ? "version" : "engine");
    // Tokens that are not trained on (such as tool output and messages of users) have no place on the scale.
    const given = this.tokens.mask && key !== "mask" ? this.tokens.mask.map((trained) => !trained) : [];
    const known = values.filter((value, at) => value !== null && !given[at]).map(Math.abs);
    const sorted = Float64Array.from(known).sort();
    const most = Math.max(chosen.least, sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 0);
    this.cells.forEach((cell, at) => {
      const value = values[at];
      cell.className = `token ${given[at] ? `given ${this.tokens.sources[at]}` : value === null ? "unknown" : value < 0 ? "minus" : "plus"}`;
      cell.style.setProperty("--heat", value === null || given[at] ? 0 : Math.min(1, Math.abs(value) / most).toFixed(3));
    });
    const text =
      key === "mask"
        ? `${known.filter((value) => value > 0).length} of ${known.length} tokens are trained on`
        : `${chosen.lead}; full color at ${figure(most, 3)}`;
    this.legend.replaceChildren(
      key === "mask" ? "" : element("span", { class: `ramp ${chosen.signed ? "signed" : ""}` }),
      element("span", text),
      chosen.signed ? element("span.soft", "blue: below 0, red: above") : "",
      given.some(Boolean) ? element("span.soft", this.givenText(given)) : "",
    );
    return undefined;
  }

  // Describe the gray tokens: "gray, not trained on: 12 tokens of tools and users, 8 tokens of the chat template".
  givenText(given) {
    const numbers = Object.keys(SOURCES).map((source) => [source, this.tokens.sources.filter((one, at) => given[at] && one === source).length]);
    return `gray, not trained on: ${numbers
      .filter(([, number]) => number)
      .map(([source, number]) => `${count(number, "token")} ${SOURCES[source]}`)
      .join(", ")}`;
  }

  // Color values that are categories, one color each.
  colorKinds(values, chosen, noun) {
    const kinds = [...new Set(values.filter((value) => value !== null))].sort((a, b) => a - b);
    const color = (kind) => ({ "--hue": RUN_HUES[kinds.indexOf(kind) % RUN_HUES.length] });
    this.cells.forEach((cell, at) => {
      cell.className = `token ${values[at] === null ? "unknown" : "kind"}`;
      if (values[at] !== null) cell.style.setProperty("--hue", color(values[at])["--hue"]);
    });
    this.legend.replaceChildren(
      ...kinds.map((kind) =>
        element("span.key", swatch(color(kind)), `${noun} ${kind}: ${count(values.filter((one) => one === kind).length, "token")}`),
      ),
      element("span.soft", chosen.lead),
    );
  }

  over(event) {
    if (event.target.dataset.at !== undefined) this.tell(Number(event.target.dataset.at));
  }

  mark(at) {
    this.cells[this.at]?.classList.remove("chosen");
    this.at = at;
    this.cells[at].classList.add("chosen");
    this.tell(at);
  }

  reveal(at) {
    this.mark(at);
    this.cells[at].scrollIntoView({ block: "center" });
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (!this.cells.length || !(event.key in moves || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.cells.length - 1 : (this.at ?? -1) + moves[event.key];
    this.mark(Math.max(0, Math.min(this.cells.length - 1, to)));
    this.cells[this.at].scrollIntoView({ block: "nearest" });
  }

  tell(at) {
    const { tokens } = this;
    if (at === null) {
      this.facts.replaceChildren(
        element("span.soft", this.cells.length ? "Hover over a token, or move with the arrow keys." : "No token was sampled."),
      );
      return;
    }
    const value = (name, digits = 4) => (tokens[name] ? figure(tokens[name][at], digits) : NOTHING);
    const both = tokens.engine_logprobs && tokens.trainer_logprobs && tokens.trainer_logprobs[at] !== null;
    const facts = [
      ["token", `${at} of ${this.cells.length}`],
      ["id", tokens.ids[at]],
      ["text", tokens.texts ? JSON.stringify(tokens.texts[at]) : NOTHING],
      ["engine", value("engine_logprobs")],
      ["trainer", value("trainer_logprobs")],
      ["difference", both ? signed(tokens.engine_logprobs[at] - tokens.trainer_logprobs[at]) : NOTHING],
      ["probability", tokens.engine_logprobs ? share(Math.exp(tokens.engine_logprobs[at]), 2) : NOTHING],
      ["entropy", value("entropy")],
      ["advantage", value("advantages")],
      ["value", tokens.values ? value("values") : null],
      ["return", tokens.returns ? value("returns") : null],
      ["reference", tokens.ref_logprobs ? value("ref_logprobs") : null],
      ["teacher", tokens.teacher_logprobs ? value("teacher_logprobs") : null],
      ["from", { sampled: "policy", appended: "tool or user", template: "chat template" }[tokens.sources[at]]],
      ["trained on", tokens.mask ? (tokens.mask[at] ? "yes" : "no") : NOTHING],
      ["version", value("versions")],
      ["served by", tokens.engines ? (tokens.engines[at] === null ? NOTHING : `engine ${tokens.engines[at]}`) : null],
    ];
    this.facts.replaceChildren(
      ...facts
        .filter(([, text]) => text !== null)
        .map(([name, text]) => element("span.fact", element("span.soft", name), element("b", text))),
    );
  }
}

// Line ends are marked and kept, to show what was sampled. A token without text is the rest of a character.
const shownToken = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t") || "⋯";
