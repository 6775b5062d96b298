"""Ray runtime: placement of a run's processes on nodes, and the actors that hold them. The only package that imports ray."""

import os

# Ray reads this variable on import and hides matching lines on the driver's console, which `log_to_driver=False` does not do (2.60). The
# run itself reports which of its nodes is lost.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "has been marked dead")
