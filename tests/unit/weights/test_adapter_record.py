"""Record of adapter digests by policy version, also after a resume."""

from pathlib import Path

import pytest

from fuligo.errors import WeightSyncError
from fuligo.formats.weight_manifest import DIGEST_SCHEME, WeightsDigest
from fuligo.observability.jsonl import read_json_lines
from fuligo.weights.adapter import AdapterRecord

FIRST, SECOND, THIRD = (WeightsDigest(2, 64, DIGEST_SCHEME + letter * 32) for letter in "abc")


def test_versions_after_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "adapters.jsonl"
    record = AdapterRecord(file, continues=False)
    record.check(0, FIRST)
    record.add(1, SECOND)
    record.add(2, THIRD)

    resumed = AdapterRecord(file, continues=True)
    resumed.check(1, SECOND)
    resumed.add(2, FIRST)
    found = [(line["version"], line["adapter"]["checksum"]) for line in read_json_lines(file)]
    assert found == [(0, FIRST.checksum), (1, SECOND.checksum), (2, FIRST.checksum)]


def test_a_resume_with_another_adapter_is_refused(tmp_path: Path) -> None:
    before = AdapterRecord(tmp_path / "adapters.jsonl", continues=False)
    before.add(2, SECOND)
    before.add(3, FIRST)
    resumed = AdapterRecord(tmp_path / "adapters.jsonl", continues=True)
    with pytest.raises(
        WeightSyncError, match=r"cannot resume: .* has adapter xxh3:aaaa\w+ as policy version 3, but the checkpoint has xxh3:bbbb"
    ):
        resumed.check(3, SECOND)
    resumed.check(3, SECOND._replace(num_bytes=32))  # another data type


def test_digests_of_older_versions_of_fuligo_are_not_compared(tmp_path: Path) -> None:
    before = AdapterRecord(tmp_path / "adapters.jsonl", continues=False)
    before.add(2, FIRST._replace(checksum="a" * 32))  # BLAKE2b, without a name
    before.add(3, FIRST._replace(checksum="b" * 32))
    AdapterRecord(tmp_path / "adapters.jsonl", continues=True).check(3, SECOND)


def test_another_checkpoint_of_the_same_version_is_taken_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "adapters.jsonl"
    AdapterRecord(file, continues=True).check(3, FIRST)
    AdapterRecord(file, continues=True).check(3, SECOND)
    assert [line["adapter"]["checksum"] for line in read_json_lines(file)] == [SECOND.checksum]


def test_a_run_that_starts_over_ignores_an_attempt_that_failed_before_its_first_step(tmp_path: Path) -> None:
    file = tmp_path / "adapters.jsonl"
    AdapterRecord(file, continues=False).check(0, FIRST)
    AdapterRecord(file, continues=False).check(0, SECOND)  # another seed, say
    assert [line["adapter"]["checksum"] for line in read_json_lines(file)] == [SECOND.checksum]
