"""A Hugging Face hub on loopback with the endpoints that `huggingface_hub` uses, and faults.

For the tests of the model fetcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from support.fetch.file_server import Handler, serving

TOKEN = "hf_let_me_in"
LFS_SUFFIX = ".safetensors"


@dataclass
class FakeHub:
    """A fake hub with one repository. Tests may change the fields while the hub serves."""

    repo: str
    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    branch: str = "main"
    #: Only requests with TOKEN are allowed.
    private: bool = False
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    #: Number of times that a file will be sent with a flipped byte.
    damage: dict[str, int] = field(default_factory=dict)
    #: Number of times that a file's connection will be closed in the middle of the body.
    truncate: dict[str, int] = field(default_factory=dict)
    #: Number of requests that will get 503.
    unavailable: int = 0
    #: Bytes of a safetensors body after which the hub waits for `release`.
    hold_after: int | None = None
    release: threading.Event = field(default_factory=threading.Event)
    #: Set when a body waits.
    held: threading.Event = field(default_factory=threading.Event)
    #: Number of requested bodies by file.
    downloads: Counter[str] = field(default_factory=Counter)
    #: (file, first byte) of each body.
    ranges: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def etag(self, name: str) -> str:
        if name.endswith(LFS_SUFFIX):
            return hashlib.sha256(self.files[name]).hexdigest()
        content = self.files[name]
        return hashlib.sha1(
            b"blob %d\0" % len(content) + content, usedforsecurity=False
        ).hexdigest()

    def siblings(self) -> list[dict[str, object]]:
        result: list[dict[str, object]] = []
        for name in self.files:
            size = self.claimed_sizes.get(name, len(self.files[name]))
            entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": self.etag(name)}
            if name.endswith(LFS_SUFFIX):
                entry["lfs"] = {"sha256": self.etag(name), "size": size, "pointerSize": 134}
            result.append(entry)
        return result


class _Handler(Handler):
    hub: FakeHub

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server calls)
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if hub.unavailable > 0:
            hub.unavailable -= 1
            self._refuse(503, "")
        elif hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "RepoNotFound")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._info(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._refuse(404, "EntryNotFound")

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def _info(self, repo: str, revision: str) -> None:
        if repo != self.hub.repo:
            self._refuse(404, "RepoNotFound")
        elif revision not in (self.hub.branch, self.hub.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            info = {
                "id": repo,
                "modelId": repo,
                "sha": self.hub.commit,
                "private": False,
                "siblings": self.hub.siblings(),
            }
            body = json.dumps(info).encode()
            self.send_head(200, len(body), {"Content-Type": "application/json"})
            self.wfile.write(body)

    def _file(self, repo: str, revision: str, name: str) -> None:
        hub = self.hub
        if repo != hub.repo or revision != hub.commit or name not in hub.files:
            self._refuse(404, "EntryNotFound")
            return
        content = hub.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first = int(asked[1]) if asked else 0
        headers = {
            "ETag": f'"{hub.etag(name)}"',
            "X-Repo-Commit": hub.commit,
            "Accept-Ranges": "bytes",
        }
        if asked:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        body = content[first:]
        if hub.damage.get(name, 0) > 0:
            hub.damage[name] -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_head(206 if asked else 200, len(body), headers)
        if self.command == "HEAD":
            return
        hub.downloads[name] += 1
        hub.ranges.append((name, first))
        if hub.truncate.get(name, 0) > 0:
            hub.truncate[name] -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif hub.hold_after is not None and name.endswith(LFS_SUFFIX):
            self.wfile.write(body[: hub.hold_after])
            self.wfile.flush()
            hub.held.set()
            hub.release.wait()
            self.wfile.write(body[hub.hold_after :])
        else:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_head(status, 0, {"X-Error-Code": code} if code else {})


@contextlib.contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Serve the repository org/model with these files during the block. Yield the hub."""
    hub = FakeHub("org/model", files)
    with serving(_Handler, hub=hub) as hub.url:
        try:
            yield hub
        finally:
            hub.release.set()


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
