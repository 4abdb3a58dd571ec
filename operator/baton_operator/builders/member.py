"""Member pods of the prefill and decode groups, which the operator makes itself."""

from __future__ import annotations

import copy

from baton_operator import names
from baton_operator.builders import config, pod
from baton_operator.builders.owner import Object, Owner
from baton_protocol.config import ENGINE_HTTP_PORT, ENGINE_PORT, KV_PORT

CONTAINER = "engine"
CACHES = {"XDG_CACHE_HOME": "/tmp/.cache", "TRITON_CACHE_DIR": "/tmp/.cache/triton"}
"""Where compiled kernels and models go: the root file system is read-only, /tmp is the pod's own."""


class MemberTemplate:
    """Makes the pods of one role. Everything but the ordinal is decided here, so the revision is one hash."""

    def __init__(self, owner: Owner, role: names.MemberRole) -> None:
        """Raises ValueError if the template overlay cannot be merged, or the coordinator has no address yet."""
        self._owner = owner
        self._role = role
        group = owner.spec.decode if role == "decode" else owner.spec.prefill
        self._template = pod.pod_template(
            owner,
            role,
            container=_container(owner, role),
            pod={
                "restartPolicy": "Always",
                "serviceAccountName": names.engine_account_name(owner.name),
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "subdomain": names.members_service_name(owner.name),
            },
            template=group.template if group else None,
            resources=group.resources if group else None,
        )
        self.revision = names.content_hash(self._template)
        """Pods that carry another one are replaced."""
        self.expert_group = owner.expert_group(role)
        """Pods that carry the same one can be ranks of one topology. Empty: they are engines of their own."""

    def pod(self, ordinal: int) -> Object:
        """The member with this ordinal."""
        template = copy.deepcopy(self._template)
        name = names.member_name(self._owner.name, self._role, ordinal)
        metadata = self._owner.metadata(name, self._role)
        own = {names.LABEL_MEMBER: "true", names.LABEL_REVISION: self.revision}
        metadata["labels"] = template["metadata"]["labels"] | own
        annotations = template["metadata"].get("annotations") or {}
        if self.expert_group:
            annotations = annotations | {names.ANNOTATION_EXPERT_GROUP: self.expert_group}
        if annotations:
            metadata["annotations"] = annotations
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"hostname": name, **template["spec"]},
        }


def headless_service(owner: Owner) -> Object:
    """Covers pods that are not ready, too: peers must be found while they start."""
    ports = {"engine": ENGINE_PORT, "kv": KV_PORT, "http": ENGINE_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(names.members_service_name(owner.name)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_SERVICE: owner.name, names.LABEL_MEMBER: "true"},
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }


def _container(owner: Owner, role: names.MemberRole) -> Object:
    threads = owner.spec.engine.num_threads
    return {
        "name": CONTAINER,
        "command": ["baton-engine", "--config", f"{config.MOUNT_PATH}/{role}.json"],
        "env": pod.identity_env(**CACHES, **({"OMP_NUM_THREADS": str(threads)} if threads else {})),
        "ports": [
            {"name": "engine", "containerPort": ENGINE_PORT, "protocol": "TCP"},
            {"name": "kv", "containerPort": KV_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": ENGINE_HTTP_PORT, "protocol": "TCP"},
        ],
        # Loading a large checkpoint takes minutes: /health must answer within ten of them, then liveness takes over.
        "startupProbe": pod.http_probe("/health", period_s=1, failures=600),
        "livenessProbe": pod.http_probe("/health", period_s=10, failures=6),
        "readinessProbe": pod.http_probe("/ready", period_s=1, failures=3),
    }
