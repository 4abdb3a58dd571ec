"""A Deployment for the tests of the controllers."""

from typing import Any

from baton_kube.client import Object


def deployment(replicas: int = 2, version: str = "1", **spec: Any) -> Object:
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "main", "image": version}]},
    }
    return {
        "metadata": {"name": "web", "namespace": "ns", "uid": "d1", "generation": 1},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": template,
            **spec,
        },
    }
