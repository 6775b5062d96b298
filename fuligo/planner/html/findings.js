// Findings, fixes, and assumptions of the estimates.

function copyButton(text) {
  const button = element("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy it manually"; // browsers may deny the clipboard to a page opened from a file
    }
  });
  return button;
}

const command = (text) => div("command", element("code", {}, text), copyButton(text));

// Join the flags to add, ready to be pasted; list other changes.
const asTyped = (changes) => {
  const isFlag = (change) => change.startsWith("--");
  const rest = changes.filter((change) => !isFlag(change));
  return [changes.filter(isFlag).join(" "), ...rest].filter(Boolean).join("; ");
};

const finding = (kind, ...children) => element("article", { class: `finding ${kind}` }, ...children);

function findingsSection() {
  return section(
    "findings",
    "Findings",
    plan.findings.map((found) =>
      finding(
        found.severity,
        element("h3", {}, span("severity", found.severity), element("code", {}, found.id)),
        element("p", {}, found.text),
        found.fix.length ? [element("p", { class: "fix-title" }, "Fix (tested against all rules):"), command(asTyped(found.fix))] : null,
        found.advice ? element("p", { class: "advice" }, found.advice) : null,
      ),
    ),
    plan.notes.map((note) => finding("note", element("h3", {}, span("severity", "note")), element("p", {}, note))),
  );
}

function suggestionsSection() {
  const shown = plan.suggestions.map(({ flags, saved_bytes: saved, cost }) =>
    finding("suggestion", command(asTyped(flags)), element("p", {}, saved > 0 ? [bold(`${gibibytes(saved)} less`), ", "] : null, cost)),
  );
  return section("suggestions", "Changes that make it fit", lead("Cheapest first."), shown);
}

const assumptionsSection = () =>
  section(
    "assumptions",
    "Assumptions of the estimates",
    list("assumptions", plan.assumptions.map((sentence) => element("li", {}, sentence))),
  );
