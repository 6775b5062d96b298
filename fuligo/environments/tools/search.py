"""Search over local documents by BM25, as a tool.

bm25s computes and stores the index: sparse matrices in numpy arrays, which are read through a memory map, so that processes share them.
(rank-bm25 scores every document in a Python loop and stores nothing.)
"""

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field

from fuligo.errors import ConfigError, DataError

if TYPE_CHECKING:
    import bm25s

_TEXT_FILES = {".txt", ".md"}
_FORMAT = b"1"


class SearchSettings(BaseModel):
    """Settings of the search tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: Path
    """JSON lines with `text` (or `contents`) and optionally `title`; or a folder with .txt and .md files, whose titles are their paths."""
    num_results: int = Field(default=3, ge=1)
    result_chars: int = Field(default=1000, ge=1)
    """Longest passage [characters]; longer ones are cut."""
    stopwords: str | None = "en"
    """Language whose most frequent words are ignored (en, de, fr, es, it, nl, pt, sv, ...); null ignores none."""
    cache: Path | None = None
    """Folder of stored indices; by default $XDG_CACHE_HOME/fuligo/search."""


@dataclass(frozen=True, slots=True)
class Document:
    """Document of the collection."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """Document that matches a query, with its BM25 score."""

    document: Document
    score: float


class SearchIndex:
    """Documents and their BM25 index. Read-only, so that all episodes can share it."""

    def __init__(self, settings: SearchSettings) -> None:
        """Read the documents, and load their index from the cache or build it.

        Raises ConfigError if bm25s is not installed, and DataError if the documents cannot be read.
        """
        try:
            import bm25s
        except ImportError:
            raise ConfigError("cannot search: bm25s is not installed; pip install 'fuligo[search]'") from None
        self._library = bm25s
        self._stopwords = settings.stopwords or []
        self.documents = tuple(_read(settings.documents))
        if not self.documents:
            raise DataError(
                f"cannot search {settings.documents}: it holds no document; name JSON lines, or a folder with .txt or .md files"
            )
        self._index = self._load(settings.cache or (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuligo" / "search"))

    def search(self, query: str, num_results: int) -> list[Hit]:
        """Return the documents that match best, best first, equal ones in the order of the collection, without those with score 0."""
        tokens = self._library.tokenize([query], stopwords=self._stopwords, return_ids=False, show_progress=False)
        known = [token for token in next(iter(tokens)) if token in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.lexsort((np.arange(len(scores)), -scores))[:num_results]
        return [Hit(self.documents[place], float(scores[place])) for place in best if scores[place] > 0]

    def _load(self, cache: Path) -> "bm25s.BM25":
        """Return the stored index, or compute and store it. Its folder gets its final name only when it is complete."""
        digest = hashlib.sha256(orjson.dumps([_FORMAT.decode(), self._library.__version__, self._stopwords]))
        for document in self.documents:
            digest.update(orjson.dumps([document.title, document.text]))
        folder = cache / digest.hexdigest()[:32]
        if not folder.is_dir():
            self._store(folder)
        return self._library.BM25.load(folder, mmap=True, load_corpus=False)

    def _store(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        index = self._library.BM25()
        texts = [f"{document.title}\n{document.text}" for document in self.documents]
        index.index(self._library.tokenize(texts, stopwords=self._stopwords, show_progress=False), show_progress=False)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
        try:
            index.save(unfinished, show_progress=False)
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has stored the same index in the meantime
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _read(source: Path) -> Iterator[Document]:
    """Yield the documents of a file or folder, in a fixed order. Raises DataError if it does not exist, or a document is malformed."""
    if source.is_dir():
        for path in sorted(path for path in source.rglob("*") if path.suffix in _TEXT_FILES and path.is_file()):
            yield Document(str(path.relative_to(source)), _text(path))
    elif source.is_file():
        for number, line in enumerate(_text(source).split("\n"), 1):
            if line.strip():
                yield _document(line, f"{source}, line {number}")
    else:
        raise DataError(f"cannot search {source}: there is no such file or folder; check `documents`")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot search {path}: it is not UTF-8 at byte {error.start:,}; convert it to UTF-8") from None


def _document(line: str, place: str) -> Document:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"cannot search {place}: it is not JSON ({error}); write one object per line") from None
    text = row.get("text", row.get("contents")) if isinstance(row, dict) else None
    if not isinstance(text, str) or not isinstance(title := row.get("title", ""), str):
        raise DataError(
            f"cannot search {place}: a document is an object with a string `text` or `contents` and optionally a string `title`, "
            f"not {row!r:.80}"
        )
    return Document(title, text)


_shared: dict[SearchSettings, SearchIndex] = {}
_lock = threading.Lock()


def shared_index(settings: SearchSettings) -> SearchIndex:
    """Return the index that all episodes with these settings share. The first call builds it, and raises as `SearchIndex` does."""
    with _lock:
        if settings not in _shared:
            _shared[settings] = SearchIndex(settings)
        return _shared[settings]


class SearchTool:
    """Tool `search`."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def search(self, query: str) -> str:
        """Search the documents by words and return the best passages. `query`: a few words."""
        hits = shared_index(self._settings).search(query, self._settings.num_results)
        if not hits:
            return "No document contains a word of the query."
        return "\n\n".join(f"[{number}] {self._show(hit.document)}" for number, hit in enumerate(hits, 1))

    def _show(self, document: Document) -> str:
        limit = self._settings.result_chars
        text = document.text if len(document.text) <= limit else document.text[:limit] + " ..."
        return f"{document.title}\n{text}" if document.title else text
