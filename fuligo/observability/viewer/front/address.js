// The state of the view is in the address after "#", so that a link restores it.

const VIEWS = ["overview", "samples", "prompts", "time", "health"];

function readAddress() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: VIEWS.includes(view) ? view : "overview", params: new URLSearchParams(query ?? "") };
}

let address = readAddress();
const param = (name) => address.params.get(name);

function addressWith(changes, view = address.view) {
  const params = new URLSearchParams(view === address.view ? address.params : keptBetweenViews());
  for (const name of Object.keys(changes)) params.delete(name);
  appendAll(params, changes);
  const query = params.toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// Append parameters: a list gives one per item, and empty values are left out.
function appendAll(params, values) {
  for (const [name, value] of Object.entries(values))
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") params.append(name, one);
}

function keptBetweenViews() {
  const kept = new URLSearchParams();
  for (const [name, value] of address.params) if (name === "run" || name === "hide") kept.append(name, value);
  return kept;
}

// `quietly` adds no entry to the browser's history; for sliders and typing.
function go(changes, { view = address.view, quietly = false } = {}) {
  const target = addressWith(changes, view);
  const changedView = view !== address.view;
  history[quietly ? "replaceState" : "pushState"](null, "", target);
  address = readAddress();
  if (changedView) openView();
  else currentView?.moved?.();
}

addEventListener("popstate", () => {
  const before = address.view;
  address = readAddress();
  if (address.view === before) currentView?.moved?.();
  else openView();
});
