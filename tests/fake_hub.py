"""Hub on this machine: the part of the Hugging Face Hub's HTTP API that downloads and uploads of repositories use.

A repository is a folder `ROOT/models/ORG/NAME` or `ROOT/datasets/ORG/NAME`. Its only commit is `COMMIT`.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Running server."""

    root: Path
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""
    tokens: set[str] = field(default_factory=set)
    """Values of the Authorization headers."""
    created: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests that created repositories."""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the variables with which the Hub's libraries use this server and the cache `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", **more}

    def files(self, repository: str) -> list[Path]:
        """Return the files of `models/ORG/NAME`."""
        return sorted(path for path in (self.root / repository).rglob("*") if path.is_file())


@contextmanager
def serve_hub(root: Path) -> Iterator[FakeHub]:
    """Serve the repositories below `root`."""
    hub = FakeHub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._download(body=False)

    def do_GET(self) -> None:
        kind, repository, rest = self._named()
        if rest[:1] == ["resolve"]:
            self._download(body=True)
        elif rest == ["whoami-v2"] or repository.parts[-1:] == ("whoami-v2",):
            signed_in = "Bearer" in self.headers.get("Authorization", "")
            self._json({"name": "acme", "type": "user", "orgs": []} if signed_in else {"error": "no token"}, 200 if signed_in else 401)
        elif kind is None or not repository.is_dir():
            self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["tree"]:
            self._json([self._entry(repository, path) for path in sorted(repository.rglob("*")) if self._below(repository, path, rest[2:])])
        else:
            files = sorted(path for path in repository.rglob("*") if path.is_file())
            siblings = [{"rfilename": str(path.relative_to(repository))} for path in files]
            self._json({"id": "/".join(repository.parts[-2:]), "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, repository, rest = self._named()
        if urlsplit(self.path).path == "/api/repos/create":
            told = json.loads(body)
            self.hub.created.append(told)
            name = f"{told['organization']}/{told['name']}" if told.get("organization") else told["name"]
            (self.hub.root / "models" / name).mkdir(parents=True, exist_ok=True)
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        elif rest[:1] == ["paths-info"]:
            self._json([self._entry(repository, path) for name in json.loads(body)["paths"] if (path := repository / name).exists()])
        elif rest[:1] == ["preupload"]:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self._json({"files": files})
        elif rest[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    path = repository / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            self._json(
                {
                    "success": True,
                    "commitOid": COMMIT,
                    "commitUrl": f"{self.hub.url}/{'/'.join(repository.parts[-2:])}/commit/{COMMIT}",
                    "hookOutput": "",
                }
            )
        else:
            self._json({"error": "not here"}, 404)

    def _named(self) -> tuple[str | None, Path, list[str]]:
        """Return the kind of the repository, its folder, and the parts of the path after its name."""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        parts = path.strip("/").removeprefix("api/").split("/")
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        if len(parts) < 2:
            return None, self.hub.root, parts
        return kind, self.hub.root / kind / parts[0] / parts[1], parts[2:]

    def _below(self, repository: Path, path: Path, folder: list[str]) -> bool:
        return path.relative_to(repository).parts[: len(folder)] == tuple(folder) and path != repository.joinpath(*folder)

    def _entry(self, repository: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(repository))
        if path.is_dir():
            return {"type": "directory", "oid": COMMIT, "size": 0, "path": name}
        return {"type": "file", "oid": _etag(path), "size": path.stat().st_size, "path": name}

    def _download(self, *, body: bool) -> None:
        _, repository, rest = self._named()
        file = repository.joinpath(*rest[2:])
        if rest[:1] != ["resolve"] or not file.is_file():
            code = "EntryNotFound" if repository.is_dir() else "RepoNotFound"
            self._reply(b"", 404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
            return
        content = file.read_bytes()
        self._reply(content, 200, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, body=body)

    def _json(self, value: object, code: int = 200, **headers: str) -> None:
        self._reply(json.dumps(value).encode(), code, {"Content-Type": "application/json", **headers})

    def _reply(self, content: bytes, code: int, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
