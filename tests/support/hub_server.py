"""A Hugging Face Hub on this machine: it serves folders as the real one serves repositories.

The real client code runs, down to the socket.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

_KINDS = ("models", "datasets", "spaces")


class Hub:
    """The repositories and a record of the requests.

    Attributes:
        root: `models/OWNER/NAME`, `datasets/OWNER/NAME` and `spaces/OWNER/NAME` are repositories.
        url: Its address.
        gated: Names of repositories whose terms the user has not accepted.
        requests: Method and path of each request, in order.
        private: Names of repositories that the user `me` has made private.
        refused: Paths of files that it does not hand out.
        owners: Owners of repositories by the old name without an owner, which is redirected.
    """

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.private: set[str] = set()
        self.refused: set[str] = set()
        self.owners: dict[str, str] = {}

    def folder(self, name: str, kind: str = "models") -> Path:
        """Return the folder of a repository, which is made if it does not exist."""
        folder = self.root / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def downloads(self) -> list[str]:
        """Return the paths that were downloaded, in order."""
        return [line.split()[1] for line in self.requests if re.match(r"GET .*/resolve/", line)]


@contextlib.contextmanager
def serve_hub(root: Path) -> Iterator[Hub]:
    """Serve the repositories below a folder until the context ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = server.hub = Hub(root, f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the libraries in this process use a Hub, at which its user `me` is logged in."""
    import huggingface_hub.constants as constants

    patch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    patch.setattr("datasets.config.HF_ENDPOINT", url)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("HF_TOKEN", "token")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        old_name = re.match(r"(/api/models/|/api/datasets/|/datasets/|/)(\w+)(?=/|$)", path)
        if old_name and old_name[2] in self.hub.owners:
            name = f"{self.hub.owners[old_name[2]]}/{old_name[2]}"
            self._redirect(old_name[1] + name + self.path[old_name.end() :])
        elif path == "/api/repos/create":
            asked = json.loads(body)
            private = asked.get("private") or asked.get("visibility") == "private"
            self._create(f"{asked.get('organization') or 'me'}/{asked['name']}", private)
        elif path == "/api/whoami-v2":
            self._json({"type": "user", "name": "me", "orgs": []})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/(\w+)/([\w.-]+/[\w.-]+?)(?:/([\w-]+)(/.*)?)?", path):
            kind, name, verb, rest = match.groups()
            self._api(kind, name, verb, (rest or "").lstrip("/"), url.query, body)
        elif match := re.fullmatch(
            r"/(?:(datasets|spaces)/)?([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", path
        ):
            self._file(match[1] or "models", match[2], match[3])
        else:
            self._refuse(404, "RepoNotFound")

    def _create(self, name: str, private: bool) -> None:
        if not name.startswith("me/"):
            self._refuse(403, "Forbidden")
            return
        self.hub.folder(name)
        if private:
            self.hub.private.add(name)
        self._json({"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def _api(
        self, kind: str, name: str, verb: str | None, rest: str, query: str, body: bytes
    ) -> None:
        folder = self._repository(kind, name)
        if folder is None:
            return
        if verb in (None, "revision"):
            self._json(
                {
                    "id": name,
                    "sha": _commit(folder),
                    "private": False,
                    "gated": "manual" if name in self.hub.gated else False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "lastModified": "2026-01-01T00:00:00.000Z",
                    "siblings": [{"rfilename": entry["path"]} for entry in _entries(folder)],
                }
            )
        elif verb == "tree":
            below = rest.partition("/")[2]
            recursive = parse_qs(query).get("recursive", ["false"])[0].lower() in ("true", "1")
            if below and not (folder / below).is_dir():
                self._refuse(404, "EntryNotFound")
            else:
                self._json(_entries(folder, below, recursive=recursive))
        elif verb == "paths-info":
            asked = parse_qs(body.decode()) if b"=" in body else json.loads(body)
            files = [folder / path for path in asked.get("paths", [])]
            self._json([_entry(folder, file) for file in files if file.exists()])
        elif verb == "preupload":
            files = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular"} for path in files]
            self._json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif verb == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = folder / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            commit = _commit(folder)
            link = f"{self.hub.url}/{name}/commit/{commit}"
            self._json({"success": True, "commitOid": commit, "commitUrl": link})
        else:
            self._refuse(404, "EntryNotFound")

    def _file(self, kind: str, name: str, path: str) -> None:
        folder = self._repository(kind, name)
        if folder is None:
            return
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        if path in self.hub.refused:
            self._refuse(403, "Forbidden")
            return
        file = folder / path
        if not file.is_file():
            self._refuse(404, "EntryNotFound", commit=_commit(folder))
            return
        content = file.read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin = int(span[1]) if span else 0
        end = min(int(span[2]) + 1 if span and span[2] else len(content), len(content))
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", _commit(folder))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        if span:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[begin:end])

    def _repository(self, kind: str, name: str) -> Path | None:
        folder = self.hub.root / kind / name
        if kind in _KINDS and folder.is_dir():
            return folder
        self._refuse(404, "RepoNotFound")
        return None

    def _redirect(self, address: str) -> None:
        self.send_response(307)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, answer: object) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entries(folder: Path, below: str = "", *, recursive: bool = True) -> list[dict[str, object]]:
    found = (folder / below).rglob("*") if recursive else (folder / below).glob("*")
    return [_entry(folder, path) for path in sorted(found)]


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _oid(name.encode()), "size": 0}
    content = path.read_bytes()
    return {"type": "file", "path": name, "oid": _oid(content), "size": len(content)}


def _commit(folder: Path) -> str:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    return _oid(
        json.dumps([[n, _oid(f.read_bytes())] for n, f in zip(names, files, strict=True)]).encode()
    )


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
