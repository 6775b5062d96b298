// Line chart of one metric over several runs. Hovering marks the same place in all charts; dragging zooms them.

const CHART = { height: 168, left: 46, right: 10, top: 8, bottom: 20 };
const charts = new Set();
let pointedAt = null;

function pointAllAt(x) {
  pointedAt = x;
  for (const one of charts) one.point();
}

// Labels of ticks with as many digits as it takes to tell them apart: 0.9996, 0.9998, 1 instead of 1, 1, 1.
function distinct(ticks, format) {
  for (let digits = 3; ; digits++) {
    const labels = ticks.map((tick) => format(tick, digits));
    if (digits >= 12 || new Set(labels).size === labels.length) return labels;
  }
}

class Chart {
  constructor({ title, unit = "", zoom = () => {}, format = figure }) {
    Object.assign(this, { title, unit, zoom, format, series: [], bands: [], kind: "step", log: false, range: null });
    this.value = element("span.chart-value");
    this.plot = svg("svg", { class: "plot", height: CHART.height, "aria-hidden": "true" });
    this.node = element(
      "figure.chart",
      { tabindex: 0, role: "img", "aria-label": title },
      element("figcaption", element("span.chart-title", title), this.value),
      this.plot,
    );
    this.plot.addEventListener("pointermove", (event) => this.moved(event));
    this.plot.addEventListener("pointerleave", () => this.left());
    this.plot.addEventListener("pointerdown", (event) => this.pressed(event));
    this.plot.addEventListener("dblclick", () => this.zoom(null));
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("blur", () => this.left());
    this.resized = new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw());
    this.resized.observe(this.node);
    charts.add(this);
  }

  // series: [{name, color, points, smooth}]; bands: [{first, last, severity}] along the x axis.
  show(series, { kind = "step", log = false, range = null, bands = [] } = {}) {
    Object.assign(this, { series, kind, log, range, bands });
    this.draw();
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const { left, right, top, bottom, height } = CHART;
    this.lines = this.series.map((one) => ({ ...one, points: this.visible(one.points), smooth: this.visible(one.smooth) }));
    const all = this.lines.flatMap((one) => one.points);
    this.plot.replaceChildren();
    if (!all.length) {
      this.plot.append(
        svg("text", { x: this.width / 2, y: height / 2, class: "nothing" }, this.log ? "no value above 0" : "no values yet"),
      );
      this.value.textContent = "";
      this.axis = null;
      return;
    }
    this.axis = this.axes(all);
    this.plot.append(...this.frame(), ...this.drawnBands(), ...this.drawnLines(left, top, this.width - right, height - bottom));
    this.marker = svg("g", { class: "marker" });
    this.plot.append(this.marker);
    this.point();
  }

  visible(points) {
    const [low, high] = this.range ?? [-Infinity, Infinity];
    return (points ?? []).filter(({ x, y }) => x >= low && x <= high && (!this.log || y > 0));
  }

  axes(all) {
    const xs = all.map(({ x }) => x);
    const ys = all.map(({ y }) => y);
    const span = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    let [x0, x1] = this.range ?? span(xs);
    let [y0, y1] = span(ys);
    if (this.kind === "step" && x1 - x0 < 2) [x0, x1] = [Math.floor(x0 === x1 ? Math.max(0, x0 - 1) : x0), Math.floor(x1) + 1]; // steps are integers
    else if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (this.log) [y0, y1] = y0 === y1 ? [y0 / 2, y1 * 2] : [y0, y1];
    else if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) / 2, y1 + Math.abs(y1) / 2];
    else {
      const room = (y1 - y0) * 0.05;
      [y0, y1] = [y0 >= 0 && y0 - room < 0 ? 0 : y0 - room, y1 + room];
    }
    const { left, right, top, bottom, height } = CHART;
    const [wide, high] = [this.width - left - right, height - top - bottom];
    const rise = this.log ? (y) => Math.log(y / y0) / Math.log(y1 / y0) : (y) => (y - y0) / (y1 - y0);
    return {
      x0,
      x1,
      y0,
      y1,
      x: (x) => left + ((x - x0) / (x1 - x0)) * wide,
      y: (y) => top + (1 - rise(y)) * high,
      at: (pixel) => x0 + ((pixel - left) / wide) * (x1 - x0),
    };
  }

  frame() {
    const { left, right, height, bottom } = CHART;
    const { x0, x1, y0, y1, x, y } = this.axis;
    const across = this.log ? logTicks(y0, y1) : roundTicks(y0, y1, 3);
    const along = roundTicks(x0, x1, Math.max(2, Math.floor(this.width / 110))).filter(
      (tick) => this.kind !== "step" || Number.isInteger(tick),
    );
    const labels = distinct(across, (tick, digits) => this.format(tick, digits));
    return [
      ...across.flatMap((tick) => [
        svg("line", { class: "grid", x1: left, x2: this.width - right, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "tick-y", x: left - 6, y: y(tick) }, labels[across.indexOf(tick)]),
      ]),
      ...along
        .map((tick) => [tick, axisText(this.kind, tick)])
        .filter(([, text], at, all) => at === 0 || text !== all[at - 1][1])
        .map(([tick, text]) => svg("text", { class: "tick-x", x: x(tick), y: height - bottom + 14 }, text)),
    ];
  }

  drawnBands() {
    const { top, height, bottom } = CHART;
    return this.bands
      .filter(({ first, last }) => last >= this.axis.x0 && first <= this.axis.x1)
      .map(({ first, last, severity }) => {
        const from = this.axis.x(Math.max(first - 0.5, this.axis.x0));
        const to = this.axis.x(Math.min(last + 0.5, this.axis.x1));
        return svg("rect", { class: `band ${severity}`, x: from, y: top, width: Math.max(2, to - from), height: height - top - bottom });
      });
  }

  drawnLines(left, top, right, bottom) {
    const { x, y } = this.axis;
    const clamp = (value) => Math.max(top, Math.min(bottom, value));
    const path = (points) =>
      thinned(points, 2 * (right - left))
        .map((point, at) => `${at ? "L" : "M"}${x(point.x).toFixed(1)} ${clamp(y(point.y)).toFixed(1)}`)
        .join("");
    return this.lines.flatMap((one) => {
      const dots =
        one.points.length < 3
          ? one.points.map((point) => svg("circle", { class: "dot", ...one.color, cx: x(point.x), cy: y(point.y), r: 3 }))
          : [];
      const main = svg("path", { class: "line", ...one.color, d: path(one.smooth.length ? one.smooth : one.points) });
      return [one.smooth.length ? svg("path", { class: "line faint", ...one.color, d: path(one.points) }) : null, main, ...dots].filter(
        Boolean,
      );
    });
  }

  // Show the values under the pointer, or the latest ones.
  point() {
    if (!this.axis) return;
    this.marker.replaceChildren();
    const inside = pointedAt !== null && pointedAt >= this.axis.x0 && pointedAt <= this.axis.x1;
    const last = this.lines.length === 1 ? (this.lines[0].smooth.at(-1) ?? this.lines[0].points.at(-1)) : null;
    if (!inside) {
      this.value.textContent = last ? `${this.format(last.y)}${this.unit ? ` ${this.unit}` : ""}` : "";
      return;
    }
    const near = this.nearest(pointedAt);
    if (!near.length) return;
    const { top, height, bottom } = CHART;
    const at = this.axis.x(near[0].point.x);
    this.marker.append(svg("line", { x1: at, x2: at, y1: top, y2: height - bottom }));
    for (const { one, point } of near) {
      this.marker.append(svg("circle", { class: "dot", ...one.color, cx: this.axis.x(point.x), cy: this.axis.y(point.y), r: 3.5 }));
    }
    this.value.textContent = near.length === 1 ? this.format(near[0].point.y) : "";
  }

  nearest(x) {
    return this.lines
      .map((one) => {
        const shown = one.smooth.length ? one.smooth : one.points;
        let [low, high] = [0, shown.length - 1];
        while (high - low > 1) {
          const middle = (low + high) >> 1;
          if (shown[middle].x <= x) low = middle;
          else high = middle;
        }
        const at = shown.length && Math.abs(shown[high].x - x) < Math.abs(shown[low].x - x) ? high : low;
        return { one, point: shown[at], raw: one.points[at] };
      })
      .filter(({ point }) => point);
  }

  moved(event) {
    if (!this.axis) return;
    const box = this.plot.getBoundingClientRect();
    const x = this.axis.at(event.clientX - box.left);
    pointAllAt(x);
    this.tell(x, event.clientX, box.top + 12);
    if (this.from !== undefined) this.drag(event.clientX - box.left);
  }

  tell(x, clientX, clientY) {
    const near = this.nearest(x);
    if (!near.length) return;
    const lines = near.map(({ one, point, raw }) => {
      const exact = raw && raw.y !== point.y ? ` (${this.format(raw.y)})` : "";
      return tipLine(one.color, `${near.length > 1 ? `${one.name}  ` : ""}${this.format(point.y)}${exact}`);
    });
    showTooltip([`${AXES[this.kind]} ${axisText(this.kind, near[0].point.x)}`, ...lines], clientX, clientY);
  }

  left() {
    pointAllAt(null);
    hideTooltip();
  }

  pressed(event) {
    if (!this.axis || event.pointerType === "touch") return;
    this.from = event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.setPointerCapture(event.pointerId);
    this.chosen = svg("rect", { class: "brush", y: CHART.top, height: CHART.height - CHART.top - CHART.bottom, x: this.from, width: 0 });
    this.plot.append(this.chosen);
    this.plot.addEventListener("pointerup", (end) => this.released(end), { once: true });
  }

  drag(to) {
    this.chosen.setAttribute("x", Math.min(this.from, to));
    this.chosen.setAttribute("width", Math.abs(to - this.from));
  }

  released(event) {
    const to = event.clientX - this.plot.getBoundingClientRect().left;
    const ends = [this.axis.at(this.from), this.axis.at(to)].sort((a, b) => a - b);
    const wide = Math.abs(to - this.from) > 8;
    this.from = undefined;
    this.chosen.remove();
    if (wide) this.zoom(ends);
  }

  key(event) {
    if (event.key === "Escape") return this.left();
    if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !this.axis) return undefined;
    event.preventDefault();
    const xs = [...new Set(this.lines.flatMap((one) => one.points.map(({ x }) => x)))].sort((a, b) => a - b);
    const now =
      pointedAt === null
        ? xs.length - 1
        : xs.reduce((best, x, at) => (Math.abs(x - pointedAt) < Math.abs(xs[best] - pointedAt) ? at : best), 0);
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 };
    const x = xs[Math.max(0, Math.min(xs.length - 1, moves[event.key]))];
    pointAllAt(x);
    const box = this.plot.getBoundingClientRect();
    this.tell(x, box.left + this.axis.x(x), box.top + 12);
    this.node.setAttribute("aria-label", `${this.title}: ${document.getElementById("tooltip").textContent}`);
    return undefined;
  }

  remove() {
    this.resized.disconnect();
    charts.delete(this);
  }
}
