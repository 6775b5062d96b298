// Page: switches views and polls the runs.

const VIEW_TITLES = { overview: "Overview", samples: "Samples", prompts: "Prompts", time: "Time", health: "Health" };
const VIEW_CLASSES = { overview: Overview, samples: Samples, prompts: Prompts, time: Time, health: Health };
var currentView = null;

function openView() {
  currentView?.close?.();
  hideTooltip();
  const main = document.getElementById("main");
  main.replaceChildren();
  main.dataset.view = address.view;
  drawTop();
  currentView = null;
  const view = new VIEW_CLASSES[address.view](main);
  currentView = view;
  view.updated();
  scrollTo(0, 0);
}

function drawTop() {
  document.getElementById("views").replaceChildren(
    ...VIEWS.map((view) =>
      element(
        "a",
        {
          href: addressWith({}, view),
          "aria-current": view === address.view ? "page" : null,
          onclick: (event) => {
            if (event.metaKey || event.ctrlKey || event.shiftKey) return;
            event.preventDefault();
            if (view !== address.view) go({}, { view });
          },
        },
        VIEW_TITLES[view],
        view === "health" ? element("span", { id: "alarm-badge" }) : null,
      ),
    ),
  );
  drawBadge();
  const select = document.getElementById("run");
  select.hidden = runs.length < 2 || address.view === "overview";
  select.replaceChildren(...runs.map((run) => element("option", { value: run.name, selected: run === chosenRun() }, run.name)));
}

const alarmBadge = (run) =>
  element(
    "span",
    { class: `badge ${run.alarms.error ? "error" : "warning"}`, title: `${count(numAlarms(run), "ongoing alarm")}: ${run.name}` },
    String(numAlarms(run)),
  );

// Show the number of ongoing alarms of all runs next to the tab Health and in the title of the browser's tab.
function drawBadge() {
  const all = { name: runs.map((run) => run.name).join(", "), alarms: { error: 0, warning: 0 } };
  for (const run of runs) for (const severity of ["error", "warning"]) all.alarms[severity] += run.alarms[severity];
  document.getElementById("alarm-badge").replaceChildren(...(numAlarms(all) ? [alarmBadge(all)] : []));
  document.title = document.title.replace(/^\(\d+\) /, "");
  if (numAlarms(all)) document.title = `(${numAlarms(all)}) ${document.title}`;
}

const poll = oneAtATime(async () => {
  const connection = document.getElementById("connection");
  try {
    const before = fingerprint();
    runs = (await ask("runs")).runs;
    connection.textContent = "";
    drawBadge();
    if (before !== fingerprint() || runs.some((run) => isLive(run))) currentView?.updated();
  } catch {
    connection.textContent = "no answer from fuligo view; showing the last state";
  }
});

const fingerprint = () => JSON.stringify(runs.map(({ age_s, clock_s, ...rest }) => rest));

async function start() {
  themeButton();
  document.getElementById("run").addEventListener("change", (event) => {
    const kept = { run: event.target.value, sample: null, step: null };
    go(kept);
    openView();
  });
  runs = (await ask("runs")).runs;
  openView();
  if (isReport) return;
  setInterval(() => document.hidden || poll(), POLL_MS);
  document.addEventListener("visibilitychange", () => document.hidden || poll());
}

start();
