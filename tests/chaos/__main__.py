"""Long draw of faults: `make chaos MINUTES=30 SEED=7`. Prints a table of what was drawn, and exits with 1 if a run did not survive."""

import argparse
import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.campaign import EXACT, MODES, Campaign, Strike
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.machine import machine, why_not
from tests.e2e.conftest import save_prompts
from tests.tiny import save_checkpoint

NUM_ROLLOUTS = 80
"""Rollouts of each run."""


def main() -> int:
    """Strike runs, each in a mode of its own, until the time is over; return the exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="what to draw; by default something new")
    parser.add_argument("--directory", type=Path, default=None, help="keeps strikes.jsonl, and the log and records of runs that failed")
    given = parser.parse_args()
    if reason := why_not():
        print(f"cannot run a campaign: {reason}", file=sys.stderr)
        return 2
    seed = random.randrange(2**31) if given.seed is None else given.seed
    directory = given.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, records in {directory}", flush=True)
    end, strikes, failed, number = time.monotonic() + 60 * given.minutes, [], 0, 0
    model = save_checkpoint(directory / "model")
    while time.monotonic() < end:
        number += 1
        place = directory / f"run_{number:03d}"
        place.mkdir()
        survived, struck = run_once(place, model, f"{seed}.{number}", end)
        strikes += struck
        failed += not survived
        if survived:
            shutil.rmtree(place)
    print(table(strikes))
    print(f"{len(strikes)} faults in {number} runs, seed {seed}; {failed} runs failed")
    return min(failed, 1)


def run_once(place: Path, model: Path, seed: str, end: float) -> tuple[bool, list[Strike]]:
    """Strike one run until it has all rollouts, or the time is over; return whether it survived, and the strikes."""
    draw = random.Random(seed)
    name = draw.choice(list(MODES))
    with machine(place) as own:
        campaign = Campaign(own, model, save_prompts(place / "prompts.jsonl"), NUM_ROLLOUTS, MODES[name], draw, _recorder(place))
        print(f"run {place.name}, {name}:", flush=True)
        try:
            campaign.survive(_drawn(draw, end))
            campaign.assert_ledger(campaign.uninterrupted(place / "uninterrupted") if MODES[name] is EXACT else None)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            shutil.copytree(campaign.run_dir, place / "failed", dirs_exist_ok=True)
            return False, campaign.strikes
        print(f"  survived {len(campaign.strikes)} faults", flush=True)
        return True, campaign.strikes


def _recorder(place: Path) -> Callable[[Strike], None]:
    def record(strike: Strike) -> None:
        with (place.parent / "strikes.jsonl").open("a") as file:
            file.write(json.dumps({"run": place.name, **dataclasses.asdict(strike)}) + "\n")

    return record


def _drawn(draw: random.Random, end: float) -> Iterator[Fault]:
    while time.monotonic() < end:
        [fault] = draw.choices(FAULTS, [fault.frequency for fault in FAULTS])
        print(f"  {fault.name}", flush=True)
        yield fault


def table(strikes: list[Strike]) -> str:
    """Return a Markdown table with a line for each kind of fault."""
    lines = ["| fault | drawn | run continued | run ended, resumed | median s | longest s |", "|---|---|---|---|---|---|"]
    for name, drawn in sorted(Counter(strike.fault for strike in strikes).items()):
        own = [strike for strike in strikes if strike.fault == name]
        ended, seconds = sum(strike.ended for strike in own), [strike.seconds for strike in own]
        lines.append(f"| {name} | {drawn} | {drawn - ended} | {ended} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
