// Memory of each kind of GPU and of the host.

function memorySection() {
  const gpuBars = plan.memory.filter(isGpuBar);
  const scale = barScale(gpuBars);
  const names = [...new Set(plan.memory.flatMap((bar) => bar.items.filter((item) => item.num_bytes > 0).map((item) => item.name)))];
  return section(
    "memory",
    "Memory",
    lead("Peak memory of each kind of GPU; the line marks the GPU's capacity."),
    legend(names.map((name) => [itemLabel(name), itemColor(name)])),
    div("memory-bars", plan.memory.map((bar) => memoryRow(bar, isGpuBar(bar) ? scale : barScale([bar])))),
    capacities(),
    element("details", {}, element("summary", {}, "Numbers and their derivation"), memoryTable()),
  );
}

const memoryRow = (bar, scale) =>
  div(
    "memory-row",
    div("memory-owner", bold(bar.owner), element("span", {}, isGpuBar(bar) ? count(bar.num_gpus, "GPU") : "")),
    memoryBar(bar, scale),
    div(
      "memory-figures",
      bold(gibibytes(bar.used_bytes)),
      ` of ${gibibytes(bar.capacity_bytes)}`,
      span(bar.fits ? "" : "bad", roomText(bar)),
    ),
  );

function capacities() {
  return plan.engine_capacities.map((capacity) => {
    const group = engineGroups[capacity.group];
    return element(
      "p",
      { class: "capacity-text" },
      `Each ${group.worker_type} engine holds `,
      bold(`${magnitude(capacity.kv_cache_tokens)} tokens`),
      " of KV cache: ",
      bold(count(capacity.concurrent_sequences, "sequence")),
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
