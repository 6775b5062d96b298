import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuligo.environments.tools.search import Document, SearchIndex, SearchSettings, SearchTool
from fuligo.errors import DataError

pytest.importorskip("bm25s")

WORDS = ["apple", "banana", "cherry", "damson", "elder", "fig", "grape", "hazel"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(folder: Path, texts: list[str]) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"title": f"t{number}", "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


def lucene_scores(texts: list[str], query: list[str]) -> list[float]:
    """Compute BM25 as Lucene does (k1 = 1.5, b = 0.75), word by word."""
    documents = [re.findall(r"(?u)\b\w\w+\b", text.lower()) for text in texts]
    mean = sum(map(len, documents)) / len(documents)

    def score(document: list[str]) -> float:
        total = 0.0
        for word in query:
            containing = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            count = document.count(word)
            total += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        return total

    return [score(document) for document in documents]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=8),
    query=st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=4),
)
def test_results_are_those_of_bm25_in_order(texts: list[str], query: list[str], tmp_path: Path):
    source = tmp_path / "plain.jsonl"
    source.write_text("".join(json.dumps({"contents": text}) + "\n" for text in texts))
    index = SearchIndex(SearchSettings(documents=source, stopwords=None, cache=tmp_path / "cache"))
    found = index.search(" ".join(query), 3)
    # The empty title adds no word to a text.
    scores = lucene_scores(texts, query)
    best = sorted((-round(score, 5), place) for place, score in enumerate(scores) if score > 0)[:3]
    assert [hit.score for hit in found] == pytest.approx([-score for score, _ in best], abs=1e-4)
    assert [hit.document.text for hit in found] == [texts[place] for _, place in best]


def test_index_is_stored_once_and_read_by_other_processes(tmp_path: Path, cache: Path):
    source = write(tmp_path, ["the apple", "a banana"])
    program = "import sys; from pathlib import Path; from fuligo.environments.tools.search import *; "
    program += "print(SearchTool(SearchSettings(documents=Path(sys.argv[1]), cache=Path(sys.argv[2]))).search('banana'))"
    running = [subprocess.Popen([sys.executable, "-c", program, source, cache], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in running] == ["[1] t1\na banana\n"] * 2
    (folder,) = cache.iterdir()
    stored = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert SearchIndex(SearchSettings(documents=source, cache=cache)).search("apple", 1)[0].document == Document("t0", "the apple")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stored


def test_changed_documents_have_an_index_of_their_own(tmp_path: Path, cache: Path):
    found = []
    for text in ("apple pie", "cherry pie"):
        found.append(SearchTool(SearchSettings(documents=write(tmp_path, [text, "x"]), cache=cache)))
        assert len(SearchIndex(found[-1]._settings).search("cherry", 3)) == (text == "cherry pie")
    assert len(list(cache.iterdir())) == 2


def test_folder_is_searched(tmp_path: Path, cache: Path):
    (tmp_path / "docs" / "more").mkdir(parents=True)
    (tmp_path / "docs" / "more" / "fruit.md").write_text("An apple.")
    (tmp_path / "docs" / "other.txt").write_text("A banana." + " x" * 100)
    (tmp_path / "docs" / "picture.png").write_bytes(b"\xff")
    tool = SearchTool(SearchSettings(documents=tmp_path / "docs", cache=cache, result_chars=9))
    assert tool.search("APPLE?") == "[1] more/fruit.md\nAn apple."
    assert tool.search("banana") == "[1] other.txt\nA banana. ..."
    assert tool.search("the zebra") == tool.search("") == "No document contains a word of the query."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": 1}\n', "line 2: a document is an object with a string `text`"),
        (b"[1]\n", "line 1: a document is an object"),
        (b'{"text": "a"\n', "line 1: it is not JSON"),
        (b"\n", "it holds no document"),
        (b"\xff", "it is not UTF-8 at byte 0"),
    ],
)
def test_bad_documents_are_refused_with_their_place(content: bytes, reason: str, tmp_path: Path, cache: Path):
    (tmp_path / "documents.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(reason)):
        SearchIndex(SearchSettings(documents=tmp_path / "documents.jsonl", cache=cache))
    with pytest.raises(DataError, match="there is no such file"):
        SearchIndex(SearchSettings(documents=tmp_path / "none", cache=cache))
