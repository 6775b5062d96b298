"""Time and memory to open a large jsonl file: the index of `fuligo.data` compared with a list of all rows, each in its own process.

python benchmarks/prompt_index.py [--rows 1000000] [--row-bytes 1000]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READS = 10_000


def write_rows(path: Path, num_rows: int, row_bytes: int) -> None:
    with path.open("w") as out:
        for row in range(num_rows):
            start = f'{{"label": "{row}", "input": "'
            out.write(start + "x" * (row_bytes - len(start) - 3) + '"}\n')


def index(path: Path) -> None:
    from fuligo.data.row_file import JsonlFile

    begin_bytes, begin_s = peak_bytes(), time.perf_counter()
    file = JsonlFile(path)
    opened_s = time.perf_counter() - begin_s
    begin_read_s = time.perf_counter()
    for read in range(READS):
        row = read * 7919 % len(file)
        assert file[row]["label"] == str(row)
    report(opened_s, (time.perf_counter() - begin_read_s) / READS, peak_bytes() - begin_bytes)


def load(path: Path) -> None:
    begin_bytes, begin_s = peak_bytes(), time.perf_counter()
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    opened_s = time.perf_counter() - begin_s
    report(opened_s, 0.0, peak_bytes() - begin_bytes)
    del rows


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(opened_s: float, read_s: float, grown_bytes: int) -> None:
    print(json.dumps({"opened_s": opened_s, "read_us": read_s * 1e6, "memory_mb": grown_bytes / 1e6}))


def measure(mode: str, path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, mode, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--row-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        write_rows(path, arguments.rows, arguments.row_bytes)
        indexed, loaded = measure("index", path), measure("load", path)
    print(f"{arguments.rows:,} rows of {arguments.row_bytes:,} bytes")
    print(f"index  open {indexed['opened_s']:.2f} s, then {indexed['read_us']:.0f} us per random row; memory {indexed['memory_mb']:.0f} MB")
    print(f"load   open {loaded['opened_s']:.2f} s; memory {loaded['memory_mb']:.0f} MB")
    speed, memory = loaded["opened_s"] / indexed["opened_s"], loaded["memory_mb"] / indexed["memory_mb"]
    print(f"the index opens {speed:.1f} x faster and needs {memory:.0f} x less memory")


if __name__ == "__main__":
    if sys.argv[1:2] in (["index"], ["load"]):
        {"index": index, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main()
