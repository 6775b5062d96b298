// Virtual list: only the visible lines exist, and only their pages are fetched.

const LINE_HEIGHT = 52;
const PAGE_LINES = 40;
const MAX_HEIGHT = 12_000_000; // limit of browsers

class SampleList {
  constructor({ question, choose, status }) {
    Object.assign(this, { question, choose, status, total: 0, chosen: null, pages: new Map(), asking: new Map(), round: 0 });
    this.lines = element("div.lines");
    this.node = element("div.sample-list", { tabindex: 0, role: "listbox", "aria-label": "Samples" }, this.lines);
    this.node.addEventListener("scroll", () => this.draw(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.lines.addEventListener("click", (event) => {
      const line = event.target.closest("[data-at]");
      if (line) this.pick(Number(line.dataset.at));
    });
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.node);
  }

  // Fetch the list again. `keep`: show the old lines until the answer arrives, because the list has only grown.
  reload({ keep = false } = {}) {
    this.round++;
    this.asking.clear();
    if (keep) this.stale = this.pages;
    else {
      this.stale = new Map();
      this.total = 0;
      this.node.scrollTop = 0;
    }
    this.pages = new Map();
    return this.fetchPage(Math.max(0, Math.floor(this.first / PAGE_LINES)));
  }

  get first() {
    return Math.floor(this.node.scrollTop / LINE_HEIGHT);
  }

  line(at) {
    const page = this.pages.get(Math.floor(at / PAGE_LINES)) ?? this.stale?.get(Math.floor(at / PAGE_LINES));
    return page?.[at % PAGE_LINES];
  }

  async fetchPage(page) {
    if (this.pages.has(page)) return;
    if (!this.asking.has(page)) this.asking.set(page, this.receivePage(page, this.round));
    await this.asking.get(page);
  }

  async receivePage(page, round) {
    const answer = await ask("samples", { ...this.question(), offset: page * PAGE_LINES, limit: PAGE_LINES });
    if (round !== this.round) return;
    this.asking.delete(page);
    this.pages.set(page, answer.rows);
    this.total = answer.total;
    this.status(answer);
    this.draw();
    if (answer.searched < 1) {
      await new Promise((resolve) => setTimeout(resolve, 30));
      if (round === this.round) await this.reload({ keep: true });
    }
  }

  draw() {
    this.lines.style.height = `${Math.min(this.total * LINE_HEIGHT, MAX_HEIGHT)}px`;
    const first = Math.max(0, this.first - 4);
    const last = Math.min(this.total, this.first + Math.ceil(this.node.clientHeight / LINE_HEIGHT) + 4);
    const drawn = [];
    for (let at = first; at < last; at++) {
      const row = this.line(at);
      if (!this.pages.has(Math.floor(at / PAGE_LINES))) this.fetchPage(Math.floor(at / PAGE_LINES));
      drawn.push(row ? this.drawLine(row, at) : element("div.line.waiting", { "--top": `${at * LINE_HEIGHT}px` }));
    }
    this.lines.replaceChildren(...drawn);
    this.node.classList.toggle("none", this.total === 0);
  }

  drawLine(row, at) {
    const key = `${row.step}.${row.row}`;
    return element(
      "div.line.sample",
      {
        role: "option",
        id: `line-${key}`,
        "aria-selected": String(key === this.chosen),
        "aria-posinset": at + 1,
        "aria-setsize": this.total,
        "data-at": at,
        "--top": `${at * LINE_HEIGHT}px`,
      },
      element("span.line-step", row.step),
      rewardPill(row.reward),
      element("span.line-number", { title: "tokens" }, row.length),
      this.withAdvantage
        ? element("span.line-number.advantage", { title: "advantage" }, row.advantage === null ? "" : signed(row.advantage, 2))
        : null,
      this.withEngines ? element("span.line-number.engine", { title: "engine" }, row.engine ?? NOTHING) : null,
      element(
        "span.line-text",
        element("span.line-prompt", row.prompt),
        element("span.line-response", row.response || (row.error ? `failed: ${row.error}` : "(empty)")),
      ),
      element("span.line-marks", ...marksOf(row)),
    );
  }

  async pick(at) {
    this.at = at;
    if (!this.line(at)) await this.fetchPage(Math.floor(at / PAGE_LINES));
    const row = this.line(at);
    if (!row || this.at !== at) return;
    this.select(`${row.step}.${row.row}`);
    this.choose(row);
  }

  select(key) {
    this.chosen = key;
    this.node.setAttribute("aria-activedescendant", key ? `line-${key}` : "");
    this.draw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / LINE_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    const now = this.at ?? -1;
    const to = event.key in moves ? now + moves[event.key] : event.key === "Home" ? 0 : event.key === "End" ? this.total - 1 : null;
    if (to === null || this.total === 0) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(this.total - 1, to));
    const top = at * LINE_HEIGHT;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    if (top + LINE_HEIGHT > this.node.scrollTop + this.node.clientHeight) this.node.scrollTop = top + LINE_HEIGHT - this.node.clientHeight;
    this.pick(at);
  }

  remove() {
    this.round++;
    this.resized.disconnect();
  }
}

function rewardPill(reward) {
  const kind = reward === null ? "none" : reward > 0 ? "good" : "low";
  return element("span", { class: `reward ${kind}`, title: "reward" }, reward === null ? NOTHING : figure(reward, 3));
}

function marksOf(row) {
  return [
    row.dataset ? pill(row.dataset) : null,
    row.status !== "completed" ? pill(row.status, row.status) : null,
    row.kept ? null : pill(row.drop_reason ? `dropped: ${row.drop_reason}` : "dropped", "dropped"),
    row.staleness > 0 ? pill(`stale by ${row.staleness}`, "stale") : null,
  ].filter(Boolean);
}
