"""A server on this machine that speaks the Hugging Face hub's API, as far as downloads go, and can do so badly.

Repositories are dicts of files by commit. Large files and those named in `lfs` are stored as the hub stores them: with
SHA-256 for a checksum, others with git's.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".parquet", ".bin")


def commit_of(files: dict[str, bytes]) -> str:
    listed = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
    return hashlib.sha1(repr(listed).encode()).hexdigest()


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checksum_of(name: str, data: bytes) -> str:
    if name.endswith(LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """`repositories` by kind and name hold files by revision; `main` is a revision like others.

    `served` lists the paths of files whose contents were asked for, with the byte from which. `breaks_after` ends the
    connection once after so many bytes of a file, and `holds` sends the second half when it is set; `damaged` are names
    whose contents arrive changed.
    """

    url: str = ""
    repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    breaks_after: dict[str, int] = field(default_factory=dict)
    holds: dict[str, threading.Event] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    # Of a listing, instead of a file's own.
    sizes: dict[str, int] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)

    def put(self, kind: str, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Gives a repository a commit, and moves a branch there."""
        commit = commit_of(files)
        self.repositories.setdefault((kind, name), {}).update({commit: files, revision: files})
        return commit

    def environment(self, cache: Path) -> dict[str, str]:
        """What a program needs to use this hub, with caches below `cache`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache / "huggingface"),
            "XDG_CACHE_HOME": str(cache),
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
        }

    @property
    def downloaded(self) -> list[str]:
        return [name for name, _ in self.served]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        words = [unquote(word) for word in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {self.path}")
        if words[0] == "api" and len(words) < 6:  # what the library asks of the hub for itself
            self._send(404, b"")
            return
        if words[0] == "api":
            kind, name, action, revision = words[1], "/".join(words[2:4]), words[4], words[5]
        else:
            kind = words.pop(0) if words[0] == "datasets" else "models"
            name, action, revision = "/".join(words[:2]), words[2], words[3]
        self.name, self.revision = name, revision
        revisions = self.hub.repositories.get((kind, name))
        has_token = self.headers.get("Authorization", "").removeprefix("Bearer ") in self.hub.tokens
        if revisions is None or (name in self.hub.gated and not has_token):
            error = "GatedRepo" if revisions else "RepoNotFound"
            self._send(403 if revisions else 404, b"", {"X-Error-Code": error})
        elif revision not in revisions:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif action == "resolve":
            self._send_file(revisions[revision], "/".join(words[4:]), has_body)
        else:
            self._send(200, json.dumps(self._listing(revisions[revision], action)).encode())

    def _listing(self, files: dict[str, bytes], action: str) -> object:
        entries = []
        for name, data in files.items():
            size, checksum = self.hub.sizes.get(name, len(data)), checksum_of(name, data)
            blob = hashlib.sha1(data).hexdigest()
            lfs = {"sha256": checksum, "oid": checksum, "size": size, "pointerSize": 130}
            is_lfs = name.endswith(LFS_SUFFIXES)
            if action == "tree":
                entry = {"type": "file", "path": name, "size": size}
                entry |= {"oid": blob, "lfs": lfs} if is_lfs else {"oid": checksum}
            else:
                entry = {"rfilename": name, "size": size}
                entry |= {"blobId": blob, "lfs": lfs} if is_lfs else {"blobId": checksum}
            entries.append(entry)
        if action == "tree":
            return entries
        return {"id": self.name, "sha": commit_of(files), "siblings": entries, "tags": []}

    def _send_file(self, files: dict[str, bytes], name: str, has_body: bool) -> None:
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        headers = {
            "ETag": f'"{checksum_of(name, data)}"',
            "X-Repo-Commit": commit_of(files),
            "Accept-Ranges": "bytes",
        }
        if name.endswith(LFS_SUFFIXES):
            headers |= {
                "X-Linked-Etag": headers["ETag"],
                "X-Linked-Size": str(len(data)),
            }
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if name in self.hub.damaged:
            data = bytes(255 - byte for byte in data)
        if has_body:
            self.hub.served.append((name, start))
        self._send(206 if asked else 200, data[start:], headers, has_body, name)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        has_body: bool = True,
        name: str = "",
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not has_body or self.command == "HEAD":
            return
        if (until := self.hub.breaks_after.pop(name, None)) is not None:
            body = body[:until]
            self.close_connection = True
        if (held := self.hub.holds.get(name)) is not None:
            self.wfile.write(body[: len(body) // 2])
            body = body[len(body) // 2 :]
            held.wait(60)
        with suppress(OSError):  # nobody reads it any more
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
