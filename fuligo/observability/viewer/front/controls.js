// Small controls shared by the views.

// Link to another view.
const link = (text, changes, view) =>
  element("a", { href: addressWith(changes, view), onclick: (event) => (event.preventDefault(), go(changes, { view })) }, text);

// Choice between the samples of training and of evaluations; `choose` is called with null for those of training.
function setChoice(label, of, choose) {
  const sets = [
    ["train", "Training"],
    ["eval", "Evaluations"],
  ];
  return choice(label, "of", sets, of, (chosen) => choose(chosen === "train" ? null : chosen));
}

const notes = (texts) => (texts.length ? element("ul.notes", texts.map((text) => element("li", text))) : null);
const tipLine = (color, text) => element("span.tip-line", swatch(color), text);
const empty = (text) => element("p.empty", text);
const pill = (text, kind = "") => element("span", { class: `pill ${kind}` }, text);
// Text with the numbers of read and of recorded steps; empty once all are read.
const stepsRead = ([read, all]) => (read < all ? `${read} of ${all} steps read` : "");

// Delay a call until typing pauses.
function afterPause(work, pause_ms = 250) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), pause_ms);
  };
}
