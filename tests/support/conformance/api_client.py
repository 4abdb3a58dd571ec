"""An HTTP client for the Kubernetes API."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from baton_kube.client import Object


class Api:
    """Sends requests to one control plane. Methods return `requests.Response`."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        self.kubeconfig = kubeconfig
        self.server = cluster["server"]
        authority = kubeconfig.with_suffix(".ca")
        authority.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        self.http = requests.Session()
        self.http.trust_env = False  # no proxy and no certificate bundle of the environment
        self.http.verify = str(authority)
        self.http.headers["Authorization"] = f"Bearer {document['users'][0]['user']['token']}"
        self.http.headers["User-Agent"] = "conformance/1"
        self.minor = int(self.get("/version").json()["minor"].rstrip("+"))

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: str
    ) -> requests.Response:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind} if body is not None else {}
        return self.http.request(
            method, self.server + path, params=query, data=data, headers=headers, timeout=20
        )

    def get(self, path: str, **query: str) -> requests.Response:
        return self.request("GET", path, **query)

    def post(self, path: str, body: Any, **query: str) -> requests.Response:
        return self.request("POST", path, body, **query)

    def put(self, path: str, body: Any, **query: str) -> requests.Response:
        return self.request("PUT", path, body, **query)

    def delete(self, path: str, body: Any = None, **query: str) -> requests.Response:
        return self.request("DELETE", path, body, **query)

    def patch(
        self, path: str, body: Any, kind: str = "merge-patch+json", **query: str
    ) -> requests.Response:
        return self.request("PATCH", path, body, f"application/{kind}", **query)

    def apply(self, path: str, body: Any, manager: str, **query: str) -> requests.Response:
        return self.patch(path, body, "apply-patch+yaml", fieldManager=manager, **query)

    def watch(self, path: str, **query: str) -> list[Object]:
        """Return all events until the server ends the watch, after the query's timeoutSeconds."""
        response = self.http.get(self.server + path, params={"watch": "true", **query}, timeout=20)
        if response.status_code != 200:
            return [{"type": "ERROR", "object": response.json()}]
        return [json.loads(line) for line in response.text.splitlines()]

    def as_bearer(self, token: str, path: str) -> requests.Response:
        """Send a GET with this token instead of the administrator's."""
        return self.http.get(
            self.server + path, headers={"Authorization": f"Bearer {token}"}, timeout=20
        )

    def kubectl(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        program = shutil.which("kubectl")
        if program is None:
            pytest.skip("kubectl is not installed")
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "HOME": str(self.kubeconfig.parent),
        }
        text = None if stdin is None else json.dumps(stdin)
        return subprocess.run(
            [program, *arguments],
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
