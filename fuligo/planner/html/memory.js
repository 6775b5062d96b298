// Memory of each kind of GPU and of the host.

function memorySection() {
  const gpuBars = plan.memory.filter(isGpuBar);
  const scale = barScale(gpuBars);
  const names = [...new Set(plan.memory.flatMap((bar) => bar.items.filter((item) => item.num_bytes > 0).map((item) => item.name)))];
  return section(
    "memory",
    "Memory",
    element("p", { class: "lead" }, "Peak memory of each kind of GPU; the line marks the GPU's capacity."),
    legend(names.map((name) => [itemLabel(name), itemColour(name)])),
    element(
      "div",
      { class: "memory-bars" },
      plan.memory.map((bar) => memoryRow(bar, isGpuBar(bar) ? scale : barScale([bar]))),
    ),
    capacities(),
    element("details", {}, element("summary", {}, "Numbers and their derivation"), memoryTable()),
  );
}

function memoryRow(bar, scale) {
  return element(
    "div",
    { class: "memory-row" },
    element(
      "div",
      { class: "memory-owner" },
      element("b", {}, bar.owner),
      element("span", {}, isGpuBar(bar) ? count(bar.num_gpus, "GPU") : ""),
    ),
    memoryBar(bar, scale),
    element(
      "div",
      { class: "memory-figures" },
      element("b", {}, gibibytes(bar.used_bytes)),
      ` of ${gibibytes(bar.capacity_bytes)}`,
      element("span", { class: bar.fits ? "" : "bad" }, roomText(bar)),
    ),
  );
}

function capacities() {
  return plan.engine_capacities.map((capacity) => {
    const group = engineGroups[capacity.group];
    return element(
      "p",
      { class: "capacity-text" },
      `Each ${group.worker_type} engine holds `,
      element("b", {}, `${magnitude(capacity.kv_cache_tokens)} tokens`),
      " of KV cache: ",
      element("b", {}, count(capacity.concurrent_sequences, "sequence")),
      " of the longest prompt and response at a time.",
    );
  });
}

function memoryTable() {
  return scrollable(
    "Memory by item",
    element(
      "table",
      {},
      tableHead(["Where", "What", "Size", "Derivation"]),
      plan.memory.map((bar) =>
        tableBody(
          bar.items.map((item, index) => [
            index === 0 ? element("th", { scope: "rowgroup", rowspan: bar.items.length }, bar.owner) : null,
            element("td", {}, itemLabel(item.name)),
            numberCell(gibibytes(item.num_bytes)),
            element("td", { class: "note" }, item.note),
          ]),
        ),
      ),
    ),
  );
}

// Wrap a wide table so that it scrolls, also by keyboard, without widening the page.
const scrollable = (label, table) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
