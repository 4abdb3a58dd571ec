"""The member pods of the prefill and decode groups."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.spec_engine import Engine
from baton_operator.builders import config_maps, engine_settings
from baton_operator.builders.pod_template import pod
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import ENGINE_HTTP_PORT, ENGINE_PORT, KV_PORT

CONTAINER = "engine"
#: Folders for compiled kernels. The root file system is read-only.
CACHES = {"XDG_CACHE_HOME": "/tmp/.cache", "TRITON_CACHE_DIR": "/tmp/.cache/triton"}


class MemberTemplate:
    """Builds the member pods of one role from one template.

    The pods differ only in their ordinals and in the names made from them. So all of them have one
    revision, which is the hash of the template.

    Raises:
        ValueError: the template overlay cannot be merged, or the coordinator has no address yet.
    """

    def __init__(self, resolved: ResolvedService, role: names.MemberRole) -> None:
        self._owner = resolved
        self._role = role
        group = resolved.group(role)
        self._template = pod.pod_template(
            resolved,
            role,
            container=_container(resolved, role),
            pod={
                "restartPolicy": "Always",
                "serviceAccountName": names.engine_account_name(resolved.name),
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "subdomain": names.members_service_name(resolved.name),
            },
            template=group.template if group else None,
            resources=group.resources if group else None,
            extra=_lasting_volumes(resolved.engine(role)),
        )
        #: Pods with another revision are replaced.
        self.revision = names.content_hash(self._template)
        #: Pods with the same value can be ranks of one topology. Empty: the pods are independent
        #: engines.
        self.expert_group = resolved.expert_group(role)

    def pod(self, ordinal: int) -> Object:
        """Return the member pod with this ordinal.

        All pods share the template's nested values, so the caller must not change them.
        """
        template = self._template
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


def _lasting_volumes(engine: Engine) -> list[tuple[Object, Object]]:
    """Return (volume, mount) of each volume that outlives the pod."""
    mounted: list[tuple[Object, Object]] = []
    for name, storage, path in (
        ("compile-cache", engine.compile_cache, engine_settings.COMPILE_CACHE_PATH),
        ("diagnostics", engine.diagnostics, engine_settings.DIAGNOSTICS_PATH),
    ):
        if storage is not None:
            source: Object = (
                {"persistentVolumeClaim": {"claimName": storage.claim}}
                if storage.claim
                else {"hostPath": {"path": storage.host_path, "type": "DirectoryOrCreate"}}
            )
            mounted.append(({"name": name, **source}, {"name": name, "mountPath": path}))
    return mounted


def _container(resolved: ResolvedService, role: names.MemberRole) -> Object:
    threads = resolved.engine(role).num_threads
    return {
        "name": CONTAINER,
        "command": ["baton-engine", "--config", f"{config_maps.MOUNT_PATH}/{role}.json"],
        "env": pod.identity_env(**CACHES, **({"OMP_NUM_THREADS": str(threads)} if threads else {})),
        "ports": [
            {"name": "engine", "containerPort": ENGINE_PORT, "protocol": "TCP"},
            {"name": "kv", "containerPort": KV_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": ENGINE_HTTP_PORT, "protocol": "TCP"},
        ],
        # Loading a large checkpoint takes minutes. /health must answer within ten minutes.
        "startupProbe": pod.http_probe("/health", period_s=1, failures=600),
        "livenessProbe": pod.http_probe("/health", period_s=10, failures=6),
        "readinessProbe": pod.http_probe("/ready", period_s=1, failures=3),
    }
