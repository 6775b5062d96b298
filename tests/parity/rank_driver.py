"""Driver of a trainer with several ranks, in a process that a test kills: `python -m tests.parity.rank_driver FILE`.

The file holds pickled settings. Once the ranks are loaded, the process id of the second one is printed.
"""

import asyncio
import pickle
import sys
from pathlib import Path

from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer


async def drive(settings: TrainerSettings) -> None:
    trainer = LocalTrainer(settings)
    await trainer.load()
    print(trainer.ranks[1].pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(drive(pickle.loads(Path(sys.argv[1]).read_bytes())))
