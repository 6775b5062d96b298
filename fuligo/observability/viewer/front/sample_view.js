// Sample: prompt, response token by token, group, and the same prompt at other steps.

class SampleView {
  constructor({ of, close, open }) {
    Object.assign(this, { of, closeIt: close, open });
    this.node = element("article.sample-view", { "aria-label": "Sample", tabindex: -1 });
    this.latest = latestOnly();
    this.showRelated = oneAtATime(() => this.drawRelated());
  }

  async show(run, step, row) {
    const of = this.of();
    const key = `${run.name}:${of}:${step}.${row}`;
    if (this.shown === key) return;
    this.shown = key;
    this.related = null;
    this.history?.remove();
    let sample;
    try {
      sample = await this.latest(ask("sample", { run: run.name, of, step, row }));
    } catch (error) {
      this.node.replaceChildren(this.bar(`Step ${step}, row ${row}`), notes([error.message]));
      return;
    }
    if (sample === undefined || this.shown !== key) return;
    const tokens = new TokenView(sample.tokens, (color) => go({ color }, { quietly: true }));
    refill(
      this.node,
      this.bar(`Sample ${sample.index}`),
      this.facts(sample),
      this.why(sample),
      this.prompt(sample),
      episodePart(sample, (at) => tokens.reveal(at)),
      part("Answer", tokens.node, folded("As plain text", element("pre.prose", sample.response || "(nothing)"))),
      this.group(sample),
      (this.othersPart = element("section.part", { "aria-label": "The same prompt in other runs", hidden: true })),
      (this.historyPart = element("section.part", { "aria-label": "This prompt over time" })),
      this.rest(sample),
    );
    this.node.scrollTop = 0;
    this.related = { run, of, sample };
    this.drawn = {};
    await this.showRelated();
  }

  // Samples are read in the background, so more of the prompt at other steps and in other runs becomes known.
  updated() {
    if (this.related && this.numRead !== samplesRead()) this.showRelated();
  }

  async drawRelated() {
    const { related } = this;
    if (!related) return;
    this.numRead = samplesRead();
    const { run, of, sample } = related;
    const question = { run: run.name, of, prompt: sample.prompt_key, dataset: sample.dataset };
    try {
      const [history, others] = await Promise.all([
        ask("history", question),
        runs.length > 1 ? ask("others", { ...question, step: sample.step }) : { runs: [] },
      ]);
      if (related !== this.related) return;
      if (this.isNew("history", history.rows)) this.drawHistory(run, of, sample, history.rows);
      if (this.isNew("others", others.runs)) this.drawOthers(of, others.runs);
    } catch (error) {
      if (related === this.related) this.historyPart.replaceChildren(notes([error.message]));
    }
  }

  // Whether the answer differs from the one that is shown.
  isNew(name, answer) {
    const before = this.drawn[name];
    this.drawn[name] = JSON.stringify(answer);
    return before !== this.drawn[name];
  }

  bar(title) {
    return element(
      "header.sample-bar",
      element("h2", title),
      element("button.quiet", { type: "button", onclick: () => this.closeIt() }, "Close"),
    );
  }

  facts(sample) {
    const facts = [
      ["reward", rewardPill(sample.reward)],
      ...Object.entries(sample.parts).map(([name, value]) => [name, figure(value, 3)]),
      ["label", sample.label === null ? null : sample.label],
      ["images", sample.images?.length ? sample.images.join(", ") : null],
      this.of() === "eval" ? ["after", count(sample.step, "rollout")] : ["step", sample.step],
      ["dataset", sample.dataset],
      ["engine", enginesOf(sample)],
      [
        "group",
        element(
          "a",
          {
            href: addressWith({ group: sample.group, dataset: sample.dataset, sample: null }),
            onclick: (event) => (event.preventDefault(), go({ group: sample.group, dataset: sample.dataset })),
          },
          sample.group,
        ),
      ],
      ["tokens", `${sample.prompt_tokens} + ${sample.length}`],
      ["advantage", sample.advantage === null ? null : signed(sample.advantage)],
      [
        "ended",
        [sample.status, sample.finish_reason && sample.finish_reason !== sample.status ? ` (${sample.finish_reason})` : ""].join(""),
      ],
      ["took", spanText(sample.spans)],
    ];
    return element(
      "dl.sample-facts",
      facts
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => element("div", element("dt", name), element("dd", value))),
    );
  }

  why(sample) {
    return notes(
      [
        sample.error ? `Failed: ${sample.error}` : null,
        sample.kept ? null : `Its group was dropped${sample.drop_reason ? `: ${sample.drop_reason}` : ""}.`,
        sample.status === "truncated" ? "Truncated at the maximum length." : null,
        sample.staleness > 0
          ? `Its oldest token is ${sample.staleness} version${sample.staleness > 1 ? "s" : ""} older than the newest token of this step.`
          : null,
      ].filter(Boolean),
    );
  }

  prompt(sample) {
    return part(
      "Prompt",
      sample.segments.map(({ source, name, text }) =>
        element(
          "div",
          { class: `message ${source}`, title: source === "template" ? "added by the chat template" : null },
          element("span.role", name),
          element("div.prose", source === "template" ? shownToken(text) : text),
        ),
      ),
    );
  }

  group(sample) {
    if (sample.members.length < 2) return null;
    return element(
      "section.part",
      { "aria-label": "The group side by side" },
      element("h3", `Group: ${count(sample.members.length, "response")} to the same prompt`),
      sideBySide("Answers of the group", sample.members.map((member) => this.member(member, member.row === sample.row))),
    );
  }

  member(member, current, open = () => this.open(member.step, member.row)) {
    return element(
      "button",
      { type: "button", class: `member ${current ? "current" : ""}`, "aria-current": current ? "true" : null, onclick: open },
      element(
        "span.member-head",
        rewardPill(member.reward),
        element("span", `${member.length} tokens`),
        member.advantage === null ? null : element("span", signed(member.advantage, 2)),
        marksOf(member),
      ),
      element("span.prose", shortened(member.response || member.error || "(nothing)", 1200)),
    );
  }

  // Responses of the other runs to this prompt, each at the step nearest to the sample's.
  drawOthers(of, others) {
    this.othersPart.hidden = !others.length;
    this.othersPart.replaceChildren(
      element("h3", "The same prompt in other runs"),
      ...others.map(({ run: name, step, members }) =>
        element(
          "div.other-run",
          element(
            "p.soft",
            swatch(runColor(name)),
            ` ${name}, ${of === "eval" ? `after ${count(step, "rollout")}` : `step ${step}`}: mean reward ${figure(meanReward(members), 3)}`,
          ),
          sideBySide(
            `Answers of ${name}`,
            members.map((member) =>
              this.member(member, false, () => {
                go({ run: name, sample: `${member.step}.${member.row}` });
                openView();
              }),
            ),
          ),
        ),
      ),
    );
  }

  drawHistory(run, of, sample, history) {
    this.history?.remove();
    const steps = [...new Set(history.map((row) => row.step))];
    if (steps.length < 2) {
      this.historyPart.replaceChildren(
        element("h3", "This prompt over time"),
        element("p.soft", "In the samples read so far, it was drawn only in this step."),
      );
      return;
    }
    const byStep = steps.map((step) => history.filter((row) => row.step === step));
    const points = byStep.map((rows) => ({ x: rows[0].step, y: meanReward(rows) })).filter(({ y }) => y !== null);
    this.history = new Chart({ title: "mean reward of this prompt" });
    this.historyPart.replaceChildren(
      element("h3", "This prompt over time"),
      this.history.node,
      element(
        "div.history",
        byStep.map((rows) => {
          const [{ step, row }] = rows;
          const current = { "aria-current": step === sample.step ? "true" : null };
          const text = `${of === "eval" ? "after" : "step"} ${step}: ${figure(meanReward(rows), 3)}`;
          return element("button.quiet", { type: "button", ...current, onclick: () => this.open(step, row) }, text);
        }),
      ),
    );
    this.history.show([{ name: "reward", color: runColor(run.name), points, smooth: [] }], {});
  }

  rest(sample) {
    const metadata = Object.keys(sample.metadata ?? {}).length ? JSON.stringify(sample.metadata, null, 1) : null;
    return metadata && folded("Metadata", element("pre", metadata));
  }

  remove() {
    this.shown = null;
    this.related = null;
    this.history?.remove();
  }
}

const part = (title, ...children) => element("section.part", element("h3", title), ...children);
const folded = (title, ...children) => element("details.plain", element("summary", title), ...children);
const sideBySide = (label, members) => element("div.members", { tabindex: 0, role: "group", "aria-label": label }, members);

// Each run's numbers of samples read so far, of training and of evaluations, as text.
const samplesRead = () => runs.map((run) => `${run.num_samples} ${run.num_eval_samples}`).join();

// All engines of a continued response, in order.
function enginesOf(sample) {
  const engines = [...new Set((sample.tokens.engines ?? []).filter((engine) => engine !== null))];
  return engines.length ? engines.join(", ") : sample.engine;
}

const meanReward = (rows) => {
  const known = rows.map((row) => row.reward).filter((reward) => reward !== null);
  return known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : null;
};

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most)}…` : text);

function spanText(spans) {
  const total = new Map();
  for (const { name, start_s, end_s } of spans) total.set(name, (total.get(name) ?? 0) + end_s - start_s);
  return [...total].map(([name, time]) => `${name} ${fine(time)}`).join(", ");
}
