// Small controls shared by the views.

const swatchOf = (colour) => element("span", { class: "swatch", ...colour });

function choice(label, name, options, value, choose) {
  return element(
    "fieldset",
    { class: "choice" },
    element("legend", {}, label),
    options.map(([key, text]) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name, value: key, checked: key === value, onchange: () => choose(key) }),
        element("span", {}, text),
      ),
    ),
  );
}

function cards(list) {
  return element(
    "div",
    { class: "cards" },
    list
      .filter(Boolean)
      .map(([label, value, text, bar]) =>
        element(
          "div",
          { class: "card" },
          element("span", { class: "card-label" }, label),
          element("strong", {}, value),
          element("span", { class: "card-text" }, text ?? ""),
          bar === undefined || bar === null ? null : element("div", { class: "progress" }, element("div", { "--width": percent(bar) })),
        ),
      ),
  );
}

const notes = (texts, kind = "warning") =>
  texts.length
    ? element(
        "ul",
        { class: `notes ${kind}` },
        texts.map((text) => element("li", {}, text)),
      )
    : null;

const empty = (text) => element("p", { class: "empty" }, text);

function pill(text, kind = "") {
  return element("span", { class: `pill ${kind}` }, text);
}

// Delay a call until typing pauses.
function afterPause(work, pause_ms = 250) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), pause_ms);
  };
}

function download(href, text) {
  return element("a", { class: "quiet", href, download: "" }, text);
}
