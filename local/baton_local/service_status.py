"""The state of an LLMService and its pods, as `baton status` shows them."""

from __future__ import annotations

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.reconcile_errors import Problem
from baton_operator.status.reasons import Failure
from pocketkube.conditions import has_condition
from pocketkube.containers.process import container_pids

#: Reasons of failures that end only when a user corrects the service, or the model or the object
#: that the message names. Other failures may end while `baton up` waits: the machine may get free
#: memory (`InsufficientMemory`), and a Secret may be created (`SecretNotFound`).
FINAL_REASONS = frozenset(
    {
        # Reasons of the service as a whole.
        *(problem.__name__ for problem in Problem.__subclasses__() if not problem.is_retried),
        # Reasons that the operator decides from the state of pods.
        *(Failure.MODEL_MISSING, Failure.IMAGE_VOLUME_UNSUPPORTED, Failure.INCOMPATIBLE_PEERS),
        # Reasons of the model, which a component prints before it exits.
        *("ModelNotFound", "ModelInvalid", "ModelUriInvalid", "ModelAccessDenied"),
        *("ModelSourceInvalid", "ModelSourceUnsupported", "ModelCacheInvalid"),
        # Other reasons that a component prints before it exits.
        *("InvalidConfig", "InvalidTokenizer", "InvalidAccess", "ServiceKeyInvalid"),
        *("KVMemoryTooSmall", "KVTransferInvalid", "InsufficientDevices", "ConfigurationError"),
    }
)


class PodStatus(msgspec.Struct):
    """The state of one pod of a service."""

    name: str
    role: str
    ip: str
    phase: str
    ready: bool
    restarts: int
    #: Why the pod is not ready, as its containers report.
    reason: str
    #: ID of the first container; empty before its start.
    container_id: str = ""
    #: Pid of the container's process, set by `with_pids`.
    pid: int | None = None
    #: KV bytes sent and received, by transport (`ucx tcp/lo`); empty if not read from the engine.
    kv_bytes: dict[str, int] = {}


class ServiceCondition(msgspec.Struct):
    """One condition of an LLMService."""

    type: str
    status: str
    reason: str
    message: str


class ServiceStatus(msgspec.Struct):
    """An LLMService and its pods, as `baton status` prints them."""

    service: str
    namespace: str
    endpoint: str
    #: The model's name in requests.
    model: str
    conditions: list[ServiceCondition]
    pods: list[PodStatus]
    #: `curl` arguments that reach the service through its Ingress; empty without an Ingress.
    ingress: str
    kubeconfig: str
    #: False if the LLMService was deleted. Then only the names and the kubeconfig are set.
    exists: bool = True

    @property
    def ready(self) -> bool:
        """Whether the condition Ready is True."""
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)

    @property
    def final_failure(self) -> ServiceCondition | None:
        """A condition Ready or ModelAvailable that is False for one of FINAL_REASONS; else None."""
        failures = (
            condition
            for condition in self.conditions
            if condition.type in ("Ready", "ModelAvailable")
            and condition.status == "False"
            and condition.reason in FINAL_REASONS
        )
        return next(failures, None)


def pod_status(pod: Object) -> PodStatus:
    """Return the status of a Pod object."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    waiting = [(c.get("state") or {}).get("waiting") or {} for c in containers]
    ended = [(c.get("lastState") or {}).get("terminated") or {} for c in containers]
    reason = next((w["reason"] for w in waiting if w.get("reason")), "")
    messages = [t["message"].strip() for t in ended if t.get("message")]
    message = next((text.splitlines()[-1] for text in messages if text), "")
    return PodStatus(
        name=metadata["name"],
        role=(metadata.get("labels") or {}).get(names.LABEL_ROLE, ""),
        ip=status.get("podIP") or "",
        phase="Terminating" if metadata.get("deletionTimestamp") else status.get("phase") or "",
        ready=has_condition(pod, "Ready"),
        restarts=sum(c.get("restartCount") or 0 for c in containers),
        reason=": ".join(filter(None, (reason, message))) if reason else "",
        container_id=next((c["containerID"] for c in containers if c.get("containerID")), ""),
    )


def with_pids(status: ServiceStatus) -> ServiceStatus:
    """Return `status` with the pid of each pod whose container runs on this machine."""
    pids = container_pids()
    pods = [msgspec.structs.replace(pod, pid=pids.get(pod.container_id)) for pod in status.pods]
    return msgspec.structs.replace(status, pods=pods)
