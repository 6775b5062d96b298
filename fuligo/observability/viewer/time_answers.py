"""Answers to the page's requests for the time of steps, as plain JSON values."""

from typing import Any

from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_rows import number

Answer = dict[str, Any]


def steps_answer(run: RunReader) -> Answer:
    """Return the seconds of every step by cause: one list per cause, one entry per step."""
    run.update_metrics()
    causes = run.causes()
    names = list(dict.fromkeys(cause.name for _, of_step in causes for cause in of_step))
    seconds = {name: [0.0] * len(causes) for name in names}
    for at, (_, of_step) in enumerate(causes):
        for cause in of_step:
            seconds[cause.name][at] = round(cause.seconds, 4)
    idle = [number(value) for value in run.metrics.column("perf/idle_fraction")]
    return {"steps": [step for step, _ in causes], "causes": seconds, "idle": idle, "trace_read": run.trace.share_read}


def step_answer(run: RunReader, step: int) -> Answer | None:
    """Return the timeline of one step, in seconds since its start; None if its times were not recorded."""
    run.update_metrics()
    found = run.step_time(step)
    if found is None:
        return None
    start, end = found.window
    return {
        "step": found.step,
        "start_s": start,
        "duration_s": round(end - start, 6),
        "causes": [{"name": cause.name, "seconds": round(cause.seconds, 6)} for cause in found.causes],
        "phases": [
            {
                "track": track,
                "name": phase.name,
                "step": phase.step,
                "start_s": round(phase.start_s - start, 6),
                "end_s": round(phase.end_s - start, 6),
                "failed": phase.failed,
            }
            for track, phase in found.phases
        ],
        "generating": found.generating,
        "engines": [{"number": engine.number, "in_flight": engine.in_flight, "idle": round(engine.idle, 5)} for engine in found.engines],
        "longest": [
            {
                **{name: getattr(sample, name) for name in ("row", "index", "tokens", "status")},
                "start_s": round(sample.start_s - start, 6),
                "end_s": round(sample.end_s - start, 6),
                "alone_s": round(sample.alone_s, 6),
            }
            for sample in found.longest
        ],
        "trainer_idle": round(found.trainer_idle, 5),
        "engines_idle": None if found.engines_idle is None else round(found.engines_idle, 5),
    }
