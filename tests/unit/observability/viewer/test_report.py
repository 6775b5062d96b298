"""Reports: answers to all requests of the page, within a size."""

from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pytest

from fuligo.cli import main
from fuligo.errors import ConfigError
from fuligo.observability.viewer.report import ReportSize, chosen_samples, chosen_steps, report_document, write_report
from fuligo.observability.viewer.run import RunReader
from tests.unit.observability.viewer.recorded_run import FAILED, NUM_STEPS, SCRIPT


@pytest.mark.parametrize(("steps", "most", "chosen"), [(range(5), 8, [0, 1, 2, 3, 4]), (range(100), 3, [0, 50, 99]), ([], 3, [])])
def test_steps_are_spread(steps, most: int, chosen: list[int]) -> None:
    assert chosen_steps(list(steps), most) == chosen


def test_report_chooses_whole_groups_and_troubled_samples(run: RunReader) -> None:
    table = run.samples.table()
    picked = table.take(chosen_samples(table, [0, NUM_STEPS - 1], ReportSize(num_groups=2)))
    places = set(zip(picked["step"].to_pylist(), picked["row"].to_pylist(), strict=True))
    assert FAILED in places
    for step in (0, NUM_STEPS - 1):
        sizes = Counter(picked.filter(pc.field("step") == step)["group"].to_pylist())
        assert set(sizes.values()) == {4}


def test_tokens_are_bounded(run: RunReader) -> None:
    document = report_document([run], ReportSize(max_tokens=100))
    for of in ("train", "eval"):
        tokens = sum(len(sample["tokens"]["ids"]) for sample in document["sample"]["recorded"][of].values())
        assert 0 < tokens <= 100
    assert len(document["samples"]["recorded"]["train"]) > len(document["sample"]["recorded"]["train"])


def test_the_command_writes_it(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    assert main(["view", str(recorded), "--export", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert "connect-src 'none'" in text
    assert SCRIPT[:17] not in text.partition('id="document"')[2].partition("</script>")[0]
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


def test_report_refuses_a_path_that_cannot_be_written(run: RunReader, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another path"):
        write_report([run], tmp_path / "missing" / "report.html")
