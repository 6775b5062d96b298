"""Long draw of faults: `make chaos MINUTES=30 SEED=7`. Prints a table of what was drawn, and exits with 1 if a run did not survive.

A directory (`--directory`) keeps the record, strikes.jsonl, to which further draws add.
"""

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
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.campaign import EXACT_MODES, MODES, Campaign, Strike
from tests.chaos.faults import FAULTS, STANDBY_KILLED, Fault
from tests.chaos.hosts import HOST_FAULTS, HostFault, hosts_campaign
from tests.chaos.machine import machine, why_not
from tests.cluster import hosts
from tests.e2e.conftest import save_prompts
from tests.tiny import save_checkpoint

NUM_ROLLOUTS = 80
"""Rollouts of each run."""
HOSTS = "three hosts"
"""Mode beside those of `MODES`."""
RECORD = "strikes.jsonl"


@dataclass(slots=True)
class Limits:
    """Limits after which no further fault is drawn."""

    end: float
    """Monotonic time."""
    num_faults: int
    """Faults that may still be drawn."""

    @property
    def reached(self) -> bool:
        return time.monotonic() >= self.end or self.num_faults <= 0


def main() -> int:
    """Strike runs, each in a mode of its own, until the time is over or enough is drawn; return the exit code."""
    options = _parser().parse_args()
    if options.table:
        print(table(recorded(options.table)))
        return 0
    if reason := why_not() or hosts.why_not():
        print(f"cannot run a campaign: {reason}", file=sys.stderr)
        return 2
    seed = random.randrange(2**31) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, records in {directory}", flush=True)
    begun, before = time.monotonic(), recorded(directory)
    limits, num_runs, failed = Limits(begun + 60 * options.minutes, options.faults), 0, 0
    model = directory / "model"
    if not model.exists():
        save_checkpoint(model)
    while not limits.reached:
        num_runs += 1
        place = Path(tempfile.mkdtemp(prefix=f"run_{num_runs:03d}_", dir=directory))
        failed += not run_once(place, model, f"{seed}.{num_runs}", limits, options.mode)
    strikes = recorded(directory)
    print(table(strikes))
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(strikes) - len(before)} faults in {num_runs} runs in {minutes:.0f} minutes, seed {seed}; {failed} runs failed")
    if before:
        print(f"the table counts all {len(strikes)} faults of {directory / RECORD}")
    return min(failed, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="draw no more than this")
    parser.add_argument("--mode", choices=[*MODES, HOSTS], default=None, help="of every run; drawn for each by default")
    parser.add_argument("--seed", type=int, default=None, help="what to draw; by default something new")
    parser.add_argument("--directory", type=Path, default=None, help=f"keeps {RECORD}, and the log and records of runs that failed")
    parser.add_argument("--table", type=Path, default=None, metavar="DIRECTORY", help=f"only print the table of a {RECORD}")
    return parser


def run_once(place: Path, model: Path, seed: str, limits: Limits, mode: str | None = None) -> bool:
    """Strike one run until it has all rollouts, or a limit is reached; return whether it survived. The files of a failed run are kept."""
    draw = random.Random(seed)
    name = mode or draw.choice([*MODES, HOSTS])
    print(f"run {place.name}, {name}:", flush=True)
    strike = _strike_hosts if name == HOSTS else _strike_machine
    try:
        num_faults = strike(name, place, model, draw, limits)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    print(f"  survived {num_faults} faults", flush=True)
    shutil.rmtree(place)
    return True


def _strike_machine(name: str, place: Path, model: Path, draw: random.Random, limits: Limits) -> int:
    """Strike a run on a machine of its own; return the number of faults."""
    with machine(place) as own:
        campaign = Campaign(own, model, save_prompts(place / "prompts.jsonl"), NUM_ROLLOUTS, MODES[name], draw, _recorder(place, name))
        try:
            campaign.survive(_drawn(draw, limits, restarts=campaign.restarts))
            is_exact = MODES[name] in EXACT_MODES
            campaign.assert_ledger(campaign.uninterrupted(place.parent / "uninterrupted") if is_exact else None)
        except BaseException:
            shutil.copytree(campaign.run_dir, place / "failed", dirs_exist_ok=True)  # the machine's disk ends with it
            raise
        return len(campaign.strikes)


def _strike_hosts(name: str, place: Path, model: Path, draw: random.Random, limits: Limits) -> int:
    """Strike a run on three hosts; return the number of faults."""
    with hosts_campaign(place, model, save_prompts(place / "prompts.jsonl"), draw, _recorder(place, name)) as campaign:
        campaign.survive(_drawn_for_hosts(draw, limits))
        return len(campaign.strikes)


def _recorder(place: Path, mode: str) -> Callable[[Strike], None]:
    def record(strike: Strike) -> None:
        with (place.parent / RECORD).open("a") as file:
            file.write(json.dumps({"run": place.name, "mode": mode, **dataclasses.asdict(strike)}) + "\n")

    return record


def recorded(directory: Path) -> list[Strike]:
    """Return the strikes of all draws that the directory has kept."""
    file = directory / RECORD
    lines = file.read_text().splitlines() if file.exists() else []
    names = [field.name for field in dataclasses.fields(Strike)]
    return [Strike(**{name: entry[name] for name in names}) for entry in map(json.loads, lines)]


def _drawn(draw: random.Random, limits: Limits, *, restarts: bool) -> Iterator[Fault]:
    faults = [*FAULTS, *([STANDBY_KILLED] if restarts else [])]
    while not limits.reached:
        limits.num_faults -= 1
        [fault] = draw.choices(faults, [fault.frequency(restarts=restarts) for fault in faults])
        print(f"  {fault.name}", flush=True)
        yield fault


def _drawn_for_hosts(draw: random.Random, limits: Limits) -> Iterator[HostFault]:
    while not limits.reached:
        limits.num_faults -= 1
        fault = draw.choice(HOST_FAULTS)
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
