"""Latency and throughput of the Python tool: programs in fresh sandboxes, and the next program of a session.

python benchmarks/python_tool.py [--calls 200] [--modules numpy sympy]
"""

import argparse
import asyncio
import statistics
import time

from fuligo.environments.tools.python import PythonSession, PythonSettings

CODE = "print(sum(n * n for n in range(1000)))"


async def fresh(settings: PythonSettings) -> None:
    """Run one program in its own sandbox."""
    session = PythonSession(settings)
    assert (await session.run(CODE)).output == "332833500\n"
    session.close()


async def measure(settings: PythonSettings, calls: int) -> None:
    """Print milliseconds per call with one call at a time, and calls per second with as many calls at once as the settings permit."""
    await fresh(settings)  # starts the process that all share
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        await fresh(settings)
        times.append(time.perf_counter() - start)
    print(f"fresh sandbox: median {statistics.median(times) * 1000:.1f} ms, 90% within {sorted(times)[calls * 9 // 10] * 1000:.1f} ms")
    start = time.perf_counter()
    await asyncio.gather(*(fresh(settings) for _ in range(calls)))
    print(f"fresh sandboxes, many at once: {calls / (time.perf_counter() - start):.0f} calls/s")
    session, times = PythonSession(settings), []
    for _ in range(calls):
        start = time.perf_counter()
        await session.run(CODE)
        times.append(time.perf_counter() - start)
    session.close()
    print(f"next program of a session: median {statistics.median(times) * 1000:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--modules", nargs="*", default=[], help="modules to import beforehand, such as numpy sympy")
    arguments = parser.parse_args()
    asyncio.run(measure(PythonSettings(modules=tuple(arguments.modules)), arguments.calls))


if __name__ == "__main__":
    main()
