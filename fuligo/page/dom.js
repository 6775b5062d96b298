// Elements and numbers. Text becomes text nodes only, so that no part of the document is parsed as markup.

const embedded = JSON.parse(document.getElementById("document").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : String(child))),
  );
  return node;
}

// Replace the children of a node.
function refill(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

// `element("div.card.wide", { title }, ...children)`: tag and classes, attributes if there are any, children.
function element(name, ...rest) {
  const [tag, ...classes] = name.split(".");
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  const node = document.createElement(tag);
  node.classList.add(...classes);
  return fill(node, attributes, rest);
}

const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const section = (id, title, ...children) =>
  element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), ...children);

// Head of a table; `isNumber` tells which columns hold numbers.
const tableHead = (titles, isNumber = () => false) =>
  element("thead", element("tr", titles.map((title, at) => element("th", { scope: "col", class: isNumber(at) ? "number" : null }, title))));

const tableBody = (rows) => element("tbody", rows.map((cells) => element("tr", cells)));
// Table with one row for each list of cells.
const table = (attributes, titles, rows, isNumber) => element("table", attributes, tableHead(titles, isNumber), tableBody(rows));
const numberCell = (text) => element("td.number", text);
const rowTitle = (...children) => element("th", { scope: "row" }, ...children);

const swatch = (color) => element("span.swatch", color);

function cards(list) {
  return element(
    "div.cards",
    list
      .filter(Boolean)
      .map(([label, value, text, bar]) =>
        element(
          "div.card",
          element("span.card-label", label),
          element("strong", value),
          element("span.card-text", text ?? ""),
          bar === undefined || bar === null ? null : element("div.progress", element("div", { "--width": percent(bar) })),
        ),
      ),
  );
}

// Radio buttons of `[key, text, title]`.
function choice(label, name, options, value, choose, kind = "choice") {
  return element(
    "fieldset",
    { class: kind },
    element("legend", label),
    options.map(([key, text, title]) =>
      element(
        "label",
        { title },
        element("input", { type: "radio", name, value: key, checked: key === value, onchange: () => choose(key) }),
        element("span", text),
      ),
    ),
  );
}

// Lane of a timeline; `track` has the class lane-track.
const timelineLane = (label, track) => element("div.lane", element("div.lane-label", label), track);

function timelineAxis(end, ticks, text) {
  const marks = ticks.map((tick) => element("span.tick", { "--left": percent(tick / end) }, tick === 0 ? "0" : text(tick)));
  return fill(timelineLane(null, element("div.lane-track", marks)), { class: "lane axis", "aria-hidden": "true" }, []);
}

const percent = (share) => `${(100 * share).toFixed(3)}%`;
const gibibytes = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function magnitude(number) {
  for (const [size, letter] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (number >= size) {
      const value = number / size;
      return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${letter}`;
    }
  }
  return String(number);
}

function seconds(duration) {
  if (duration >= 7200) return `${(duration / 3600).toFixed(1)} h`;
  if (duration >= 600) return `${(duration / 60).toFixed(1)} min`;
  return `${duration.toFixed(duration < 1 ? 2 : duration < 10 ? 1 : 0)} s`;
}

// 0, 1, 2, 5 -> "0–2, 5"
function ranges(numbers) {
  const runs = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

const spoken = (name) => name.replaceAll("_", " ");
