"""A pod for the tests of containers and of the pod status."""

from typing import Any

POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "0123456789",
        "labels": {"b": "2", "a": '1"'},
    },
    "spec": {"containers": [{"name": "main", "command": ["x"]}], "nodeName": "n"},
}
#: Values of the downward API.
ADDRESSES = {"status.podIP": "127.77.0.2", "status.hostIP": "127.77.0.1"}
