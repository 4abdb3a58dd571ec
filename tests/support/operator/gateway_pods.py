"""The pod template of the gateway, and the files that it mounts."""

from __future__ import annotations

from typing import Any

from baton_kube.client import Object
from baton_operator.builders.gateway import (
    gateway_deployment,
)
from support.operator.services import resolved


def mounted(pod: Object) -> dict[str, str]:
    """Return the mount path of each Secret in the first container."""
    paths = {
        mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]
    }
    return {
        v["secret"]["secretName"]: paths[v["name"]] for v in pod["spec"]["volumes"] if "secret" in v
    }


def pod_template(**spec: Any) -> Object:
    template: Object = gateway_deployment.build(resolved(gateway=spec))["spec"]["template"]
    return template
