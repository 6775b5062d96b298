"""Reader of a run directory for `fuligo view`, which reads only what was added or changed since the last request."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from fuligo.observability.viewer.agreement import DIFFERENCE
from fuligo.observability.viewer.alarms import Alarm, alarms, with_cause
from fuligo.observability.viewer.attribution import Cause
from fuligo.observability.viewer.metric_columns import MetricColumns, finite, median
from fuligo.observability.viewer.mismatch import Explanation, explanation, mismatches
from fuligo.observability.viewer.now import Now, State, current_activity, is_locked, recent_step_s, run_state
from fuligo.observability.viewer.run_files import SampleSet, is_readable, missing_files
from fuligo.observability.viewer.sample_index import SampleIndex
from fuligo.observability.viewer.sample_query import TextSearch
from fuligo.observability.viewer.sample_rows import UNREADABLE
from fuligo.observability.viewer.settings import Settings, read_settings
from fuligo.observability.viewer.step_time import NEIGHBORS, StepTime, step_causes, step_time
from fuligo.observability.viewer.tokens import TokenTexts
from fuligo.observability.viewer.trace_reader import TraceReader

logger = logging.getLogger(__name__)
BUDGET_S = 0.2
"""Seconds of reading per run before it is the next run's turn."""
PAUSE_S = 1.0
"""Seconds to wait if nothing was new."""
ASLEEP_S = 60.0
"""Seconds without a request after which reading pauses."""
MAX_SEARCHES = 8
MAX_LOG_BYTES = 64 * 1024
_TOKENIZER_SETTINGS = ("model.hf_checkpoint", "checkpoint.hf_checkpoint")


class RunReader:
    """Reader of one run. Methods may be called from several threads."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.lock = threading.RLock()
        self.metrics = MetricColumns(path / "metrics.jsonl")
        self.evaluations = MetricColumns(path / "eval" / "metrics.jsonl", "num_rollouts")
        self.trace = TraceReader(path / "trace.json")
        self.samples = SampleIndex(path)
        self.eval_samples = SampleIndex(path, "eval")
        self._searches: OrderedDict[tuple[SampleSet, str], TextSearch] = OrderedDict()
        self._settings: tuple[float, Settings] = (-1.0, {})
        self._causes: dict[int, tuple[int, list[Cause]]] = {}
        self._explained: dict[tuple[int, int], Explanation | None] = {}
        self._tokens: TokenTexts | None = None
        self._alarms: tuple[tuple[int, int], list[Alarm]] = ((-1, -1), [])

    def update_metrics(self) -> None:
        """Read new lines of metrics and evaluations; fast enough to do for every request."""
        with self.lock:
            for columns, name in ((self.metrics, "metrics.jsonl"), (self.evaluations, "eval/metrics.jsonl")):
                if is_readable(self.path, self.path / name):
                    columns.update()

    def update_rest(self, budget_s: float) -> bool:
        """Read trace and samples for about `budget_s` seconds; return whether anything was new."""
        with self.lock:
            read = is_readable(self.path, self.path / "trace.json") and self.trace.update(max_chunks=1)
        changed = self.samples.update(budget_s)
        return self.eval_samples.update(budget_s) or changed or read

    def index(self, of: SampleSet) -> SampleIndex:
        return self.samples if of == "train" else self.eval_samples

    @property
    def settings(self) -> Settings:
        """Settings in `config.yaml`, read again when it changes."""
        path, changed = self.path / "config.yaml", self._changed("config.yaml")
        if changed is None:
            return {}
        if changed != self._settings[0]:
            self._settings = (changed, read_settings(path) if is_readable(self.path, path) else {})
        return self._settings[1]

    @property
    def num_rollouts(self) -> int | None:
        value = self.settings.get("data.num_rollout")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def datasets(self) -> list[str]:
        """Names of the datasets that are evaluated: `held_out` of `eval/held_out/mean@1`."""
        keys = [key.split("/") for key in self.evaluations.columns]
        return list(dict.fromkeys("/".join(parts[1:-1]) for parts in keys if len(parts) > 2 and parts[0] == "eval"))

    def state(self) -> tuple[State, float | None]:
        """Return the state and the seconds since a file changed."""
        changes = finite(map(self._changed, ("metrics.jsonl", "trace.json", "log.txt")))
        age_s = max(0.0, time.time() - max(changes)) if changes else None
        state = run_state(
            num_done=self.metrics.num_done,
            num_rollouts=self.num_rollouts,
            locked=bool(is_locked(self.path / "metrics.jsonl")),
            age_s=age_s,
            step_s=recent_step_s(self.metrics),
        )
        return state, age_s

    def _changed(self, name: str) -> float | None:
        try:
            return (self.path / name).stat().st_mtime
        except OSError:
            return None

    def now(self) -> Now:
        with self.lock:
            return current_activity(self.metrics, self.num_rollouts, self.trace)

    def problems(self) -> list[str]:
        """Describe files that are missing or damaged, and what the page cannot show as a result."""
        texts = missing_files(self.path)
        for number, name in ((self.metrics.num_damaged, "metrics.jsonl"), (self.trace.num_damaged, "trace.json")):
            if number:
                texts.append(f"{name}: {number} line{'s' * (number > 1)} cannot be read and {'are' if number > 1 else 'is'} skipped")
        for index, what in ((self.samples, "step"), (self.eval_samples, "evaluation")):
            damaged = dict(index.damaged)
            for step, problem in sorted(damaged.items())[:3]:
                texts.append(f"cannot read the samples of {what} {step}: {problem}")
            if len(damaged) > 3:
                texts.append(f"cannot read the samples of {len(damaged) - 3} more {what}s")
        return texts

    def alarms(self) -> list[Alarm]:
        """Return the alarms, with the cause of a disagreement if the samples of its first step show it."""
        return [with_cause(alarm, self._cause(alarm.first_step)) if alarm.key == DIFFERENCE else alarm for alarm in self._known_alarms()]

    def num_ongoing_alarms(self) -> dict[str, int]:
        """Return the number of alarms at the latest step, by severity; notes do not count."""
        ongoing = [alarm.severity for alarm in self._known_alarms() if alarm.ongoing]
        return {severity: ongoing.count(severity) for severity in ("error", "warning")}

    def _known_alarms(self) -> list[Alarm]:
        """Return the alarms, computed once per state of the metrics, because the page asks every second."""
        state = (self.metrics.generation, self.metrics.num_rows)
        if self._alarms[0] != state:
            self._alarms = (state, alarms(self.metrics))
        return self._alarms[1]

    def _cause(self, step: int) -> Explanation | None:
        key = (step, self.metrics.generation)
        if key not in self._explained:
            path = self.samples.file(step)
            if path is None:
                return None
            try:
                self._explained[key] = explanation(step, mismatches(path), self._expected_version(step))
            except UNREADABLE:
                self._explained[key] = None
        return self._explained[key]

    def _expected_version(self, step: int) -> int | None:
        """Return the version that a step's newest tokens should have: the one before its training, less the median lag; None if unknown."""
        row = self.metrics.row_of_step(step)
        before = self.metrics.column("policy_version")[row - 1] if row else None
        ahead = median(finite(self.metrics.column("rollout/staleness")[:row])) or 0.0
        return None if before is None else int(before) - round(ahead)

    def causes(self) -> list[tuple[int, list[Cause]]]:
        """Return the causes of every step, from phases only. They are cached until a phase is added to a step or its neighbors."""
        with self.lock:
            result = []
            for value in self.metrics.steps:
                step = int(value or 0)
                near = range(step - NEIGHBORS, step + NEIGHBORS + 1)
                num_phases = sum(len(self.trace.by_step[other]) for other in near if other in self.trace.by_step)
                known = self._causes.get(step)
                if known is None or known[0] != num_phases:
                    known = self._causes[step] = (num_phases, step_causes(self.metrics, self.trace, step))
                result.append((step, known[1]))
            return result

    def step_time(self, step: int) -> StepTime | None:
        files = {other: path for other in range(step, step + NEIGHBORS + 1) if (path := self.samples.file(other)) is not None}
        with self.lock:
            return step_time(self.metrics, self.trace, step, files)

    @property
    def tokens(self) -> TokenTexts:
        if self._tokens is None:
            named = [Path(value) for key in _TOKENIZER_SETTINGS if isinstance(value := self.settings.get(key), str)]
            saved = sorted(self.path.glob("checkpoints/iter_*/hf"), reverse=True)[:1]
            self._tokens = TokenTexts([*named, *saved])
        return self._tokens

    def log_warnings(self, limit: int = 20) -> list[str]:
        """Return the last warnings and errors of `log.txt`, newest first; only the end of the file is read."""
        path = self.path / "log.txt"
        if not is_readable(self.path, path):
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return [line[:500] for line in reversed(lines) if " WARNING " in line or " ERROR " in line][:limit]

    def search(self, of: SampleSet, text: str) -> TextSearch:
        """Return the search for a text, with the results that it has found so far."""
        key = (of, text.lower())
        with self.lock:
            if key not in self._searches:
                self._searches[key] = TextSearch(text)
                while len(self._searches) > MAX_SEARCHES:
                    self._searches.popitem(last=False)
            self._searches.move_to_end(key)
            return self._searches[key]


class Watcher:
    """Thread that keeps runs up to date while the page is open."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._woken = threading.Event()
        self._last_visit_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watcher")

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Continue reading, because a request arrived."""
        self._last_visit_s = time.monotonic()
        self._woken.set()

    def _watch(self) -> None:
        while True:
            changed = False
            for run in self._runs:
                try:
                    changed |= run.update_rest(BUDGET_S)
                except Exception:  # one broken run must not stop the others from updating
                    logger.exception("cannot read the run %s", run.path)
            if not changed:
                time.sleep(PAUSE_S)
            if time.monotonic() - self._last_visit_s > ASLEEP_S:
                self._woken.clear()
                self._woken.wait()
