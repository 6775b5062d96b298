"""Record of the adapter of every policy version in a run directory, which proves which adapter sampled which tokens."""

from contextlib import closing
from pathlib import Path

from fuligo.errors import WeightSyncError
from fuligo.formats.weight_manifest import WeightsDigest
from fuligo.observability.jsonl import JsonLines, read_json_lines


class AdapterRecord:
    """File `adapters.jsonl`: a line for each version that engines received, with the digest of its adapter.

    Samples name the version of each token (`versions`).

    Args:
        continues: the run resumes from a checkpoint; otherwise it starts over, and lines of an earlier attempt without steps are removed.
    """

    def __init__(self, path: Path, *, continues: bool) -> None:
        self._path = path
        if not continues:
            path.unlink(missing_ok=True)
        records = read_json_lines(path) if path.exists() else []
        self._known = {record["version"]: WeightsDigest(**record["adapter"]) for record in records}

    def add(self, version: int, adapter: WeightsDigest) -> None:
        """Record a new version; versions from it on, which a run had before it resumed, are removed."""
        with closing(JsonLines(self._path)) as file:
            if any(known >= version for known in self._known):
                file.cut_back(lambda record: record["version"] < version)
            file.append({"version": version, "adapter": adapter._asdict()})
        self._known = {known: digest for known, digest in self._known.items() if known < version} | {version: adapter}

    def check(self, version: int, adapter: WeightsDigest) -> None:
        """Check that a version that is sent again, as after a resume, has the adapter that it had before; record it if it is new.

        A digest in another data type, as after a change of --precision, cannot be compared. The only version of a run directory is
        replaced: it has no samples yet, because an attempt with another checkpoint ended before its first step. Raises WeightSyncError if
        it has another adapter.
        """
        known = self._known.get(version)
        if known is None or self._known.keys() == {version}:
            self.add(version, adapter)
        elif known != adapter and known.num_bytes == adapter.num_bytes:
            raise WeightSyncError(
                f"cannot resume: {self._path} has adapter {known.checksum} as policy version {version}, but the checkpoint has "
                f"{adapter.checksum}: the recorded samples are another adapter's; resume from this run's own checkpoint, or choose another "
                "--run-dir"
            )
