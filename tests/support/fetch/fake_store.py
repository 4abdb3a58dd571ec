"""An S3 object store on loopback: listings, ranges, conditions, one access key, and faults.

For the tests of the model fetcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.fetch.file_server import Handler, serving

ACCESS_KEY = "AKIDALLOWED"
#: Number of objects in one page of a listing.
PAGE = 4


@dataclass
class FakeStore:
    """A fake store with one bucket. Tests may change the fields while the store serves."""

    bucket: str
    objects: dict[str, bytes]
    #: Number of requests that will get 503.
    unavailable: int = 0
    #: Number of bodies of more than 1 MiB that will be closed in the middle.
    truncate: int = 0
    #: An object that is replaced when it is read. The body of that response is incomplete.
    replace_on_read: str = ""
    #: (key, first byte) of each requested body.
    offsets: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def tag(self, key: str) -> str:
        return f'"{hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()}"'


class _Handler(Handler):
    store: FakeStore

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server calls)
        store, url = self.store, urlsplit(self.path)
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        if store.unavailable > 0:
            store.unavailable -= 1
            self._refuse(503, "SlowDown")
        elif f"Credential={ACCESS_KEY}/" not in (self.headers.get("Authorization") or ""):
            self._refuse(403, "InvalidAccessKeyId")
        elif bucket != store.bucket:
            self._refuse(404, "NoSuchBucket")
        elif not key:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            self._list(query["prefix"], query["delimiter"], query.get("continuation-token", ""))
        elif key not in store.objects:
            self._refuse(404, "NoSuchKey")
        elif self.headers.get("If-Match") not in (None, store.tag(key)):
            self._refuse(412, "PreconditionFailed")
        else:
            self._object(key)

    def _list(self, prefix: str, delimiter: str, after: str) -> None:
        keys = sorted(key for key in self.store.objects if key.startswith(prefix) and key > after)
        page = keys[:PAGE]
        here = [key for key in page if delimiter not in key.removeprefix(prefix)]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.store.tag(key))}</ETag>"
            f"<Size>{len(self.store.objects[key])}</Size></Contents>"
            for key in here
        )
        more = len(keys) > PAGE
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{contents}</ListBucketResult>"
        )
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _object(self, key: str) -> None:
        store, content = self.store, self.store.objects[key]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        first = int(asked[1]) if asked else 0
        store.offsets.append((key, first))
        headers = {"ETag": store.tag(key), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = key == store.replace_on_read or (store.truncate > 0 and len(content) > 2**20)
        if cut:
            store.truncate = max(store.truncate - 1, 0)
        if key == store.replace_on_read:
            store.objects[key] = content[::-1]
            store.replace_on_read = ""
        self._answer(206 if asked else 200, content[first:], headers, cut=cut)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(
            status,
            f"<Error><Code>{code}</Code></Error>".encode(),
            {"Content-Type": "application/xml"},
        )

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        self.send_head(status, len(body), headers)
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut


@contextlib.contextmanager
def fake_store(bucket: str, objects: dict[str, bytes]) -> Iterator[FakeStore]:
    store = FakeStore(bucket, objects)
    with serving(_Handler, store=store) as store.url:
        yield store
