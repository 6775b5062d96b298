// State shared by all views: the runs, their colors, and the selected run.

const RUN_HUES = [265, 25, 155, 75, 320, 200, 110, 350];
const POLL_MS = 1000;
let runs = [];

const runColor = (name) => {
  const at = runs.findIndex((run) => run.name === name);
  return { "--hue": RUN_HUES[Math.max(0, at) % RUN_HUES.length] };
};
const chosenRun = () => runs.find((run) => run.name === param("run")) ?? runs[0];
const hiddenRuns = () => new Set(address.params.getAll("hide"));
const visibleRuns = () => {
  const hidden = hiddenRuns();
  const shown = runs.filter((run) => !hidden.has(run.name));
  return shown.length ? shown : runs;
};

const isLive = (run) => run.state === "running" || run.state === "quiet" || run.state === "empty";

function stateText(run) {
  if (run.state === "quiet") return `no output for ${duration(run.age_s)}`;
  if (run.state === "stopped") return run.num_rollouts ? `stopped after ${run.num_done} of ${run.num_rollouts} steps` : "not running";
  return run.state === "empty" ? "no step yet" : run.state;
}

// Class of the pill: a run with ongoing alarms is not green, whatever its state.
function stateClass(run) {
  if (run.state !== "running" && run.state !== "finished") return run.state;
  return run.alarms.error ? "failed" : run.alarms.warning ? "stopped" : run.state;
}

const numAlarms = (run) => run.alarms.error + run.alarms.warning;

// Wrap a function so that calls do not overlap; calls during a run cause one more run after it.
function oneAtATime(work) {
  let running = null;
  let again = false;
  return async function run() {
    if (running) {
      again = true;
      return running;
    }
    running = (async () => {
      do {
        again = false;
        await work();
      } while (again);
    })();
    try {
      await running;
    } finally {
      running = null;
    }
  };
}

// View of the page: `load` draws it, and draws it again whenever the address or the `state` of what it shows changes.
class View {
  constructor() {
    this.refresh = oneAtATime(() => this.load());
  }

  moved() {
    this.refresh();
  }

  updated() {
    const state = JSON.stringify(this.state);
    if (state !== this.known) this.refresh();
    this.known = state;
  }
}

// Wrap requests so that answers to outdated ones become undefined.
function latestOnly() {
  let newest = 0;
  return async (question) => {
    const mine = ++newest;
    const answer = await question;
    return mine === newest ? answer : undefined;
  };
}
