"""A hub on 127.0.0.1: the few addresses that ``huggingface_hub`` asks to download a model, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
#: What the revisions are that the hub has of each model. All have the same files.
REVISIONS = {
    "main": COMMIT,
    COMMIT: COMMIT,
    "v1.0": OTHER_COMMIT,
    "refs/pr/3": OTHER_COMMIT,
    OTHER_COMMIT: OTHER_COMMIT,
}


class _Handler(BaseHTTPRequestHandler):
    models: ClassVar[dict[str, Path]] = {}
    served: ClassVar[list[str]] = []  # files whose content was asked for
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        for name, folder in self.models.items():
            if path == f"api/models/{name}" or path.startswith(f"api/models/{name}/revision/"):
                revision = path.partition("/revision/")[2] or "main"
                if revision not in REVISIONS:
                    return self._not_found("RevisionNotFound")
                files = [{"rfilename": file} for file in _files(folder)]
                return self._json({"id": name, "modelId": name, "sha": REVISIONS[revision], "siblings": files})
            if path.startswith(f"api/models/{name}/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": file,
                        "size": (folder / file).stat().st_size,
                        "oid": _digest(folder / file),
                    }
                    for file in _files(folder)
                ]
                return self._json(tree)
            for file in _files(folder):
                for revision, commit in REVISIONS.items():
                    if path == f"{name}/resolve/{revision}/{file}":
                        return self._file(folder / file, file, commit)
        return self._not_found("RepoNotFound")

    def _not_found(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, path: Path, name: str, commit: str) -> None:
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_digest(path)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.served.append(name)
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what the tests want to know is in ``served``."""


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Hub:
    """``url`` is what ``HF_ENDPOINT`` takes; ``served`` are the files that were downloaded, in their order."""

    def __init__(self, url: str, served: list[str]) -> None:
        self.url = url
        self.served = served


@contextmanager
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    """Serves model folders under their ids."""
    served: list[str] = []
    handler = type("Handler", (_Handler,), {"models": models, "served": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Hub(f"http://127.0.0.1:{server.server_port}", served)
        finally:
            server.shutdown()
            thread.join()
