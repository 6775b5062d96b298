// The config as a table: values that differ from their defaults, or all.

function settingText(value) {
  if (value === null) return "none";
  return typeof value === "object" ? JSON.stringify(value).replaceAll(",", ", ").replaceAll(":", ": ") : String(value);
}

function settingsSection() {
  const body = element("tbody");
  const search = element("input", { type: "search", placeholder: "Filter by name or value", "aria-label": "Filter the settings" });
  const all = element("input", { type: "checkbox" });
  const status = element("p", { class: "lead", "aria-live": "polite" });
  const show = () => {
    const words = search.value.toLowerCase().replaceAll("-", "_").split(/\s+/).filter(Boolean);
    const rows = plan.settings.filter((setting) => {
      const text = `${setting.group} ${setting.name} ${settingText(setting.value)}`.toLowerCase().replaceAll("-", "_");
      return (all.checked || !setting.is_default) && words.every((word) => text.includes(word));
    });
    status.textContent = `${rows.length} of ${count(plan.settings.length, "setting")}`;
    body.replaceChildren(...rows.map(settingRow));
  };
  search.addEventListener("input", show);
  all.addEventListener("change", show);
  show();
  return section(
    "settings",
    "Config",
    div("filters", search, element("label", {}, all, "show defaults too")),
    status,
    scrollable("Settings", element("table", { class: "settings" }, tableHead(["Group", "Name", "Value"]), body)),
  );
}

// Name a group only in its first row.
const settingRow = (setting, index, rows) =>
  element(
    "tr",
    { class: setting.is_default ? "default" : "" },
    element("td", {}, setting.group === rows[index - 1]?.group ? "" : setting.group),
    element("th", { scope: "row" }, element("code", {}, setting.name)),
    element("td", {}, element("code", { class: "value" }, settingText(setting.value))),
  );
