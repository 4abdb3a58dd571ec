"""A simulated scheduler, simulated kubelets and a simulated Deployment controller.

For the tests of the Reconciler.
"""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.observe.observation import member
from support.operator.simulation.api_server import NAMESPACE, ApiServer

#: Environment variable of templates whose pods never become ready.
BROKEN = {"name": "BROKEN", "value": "1"}
#: Pods that the service controls under other names are copies by another client.
MEMBER_NAME = re.compile(r"-(prefill|decode)-(0|[1-9][0-9]*)$")


class Nodes:
    """Simulates the nodes. Each call of `kubelet()` makes one change to one pod."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        #: Requests of engines by address.
        self.unfinished: dict[str, int] = {}
        #: Number of member pods for which the nodes have room.
        self.capacity = 100
        self._addresses = (f"10.1.{n // 250}.{n % 250 + 1}" for n in itertools.count())

    def pods(self) -> list[Object]:
        """Return the member pods of the service that exists now."""
        services = self.server.list(f"{names.PLURAL}.{names.GROUP}")
        uids = [service["metadata"]["uid"] for service in services]
        found = [
            pod for pod in self.server.list("pods") if any(controlled_by(pod, uid) for uid in uids)
        ]
        return [pod for pod in found if MEMBER_NAME.search(pod["metadata"]["name"])]

    def kubelet(self, pod: Object) -> None:
        """Make the next change of a member pod, such as binding, starting or becoming ready."""
        name, now = pod["metadata"]["name"], self.server.now
        observed = member(pod)
        if observed.deletion is not None:
            self.server.remove("pods", name)
        elif observed.failed:
            return
        elif not pod["spec"].get("nodeName"):
            bound = sum(bool(each["spec"].get("nodeName")) for each in self.pods())
            if bound < self.capacity:
                self._bind(name)
            elif observed.no_room_since is None:
                self._no_room(name, now)
        elif not observed.started:
            self._run(name, next(self._addresses), ready=False)
        elif not observed.ready and BROKEN not in pod["spec"]["containers"][0]["env"]:
            self._run(name, pod["status"]["podIP"], ready=True)
        elif (left := self.unfinished.get(pod["status"].get("podIP", ""), 0)) > 0:
            self.unfinished[pod["status"]["podIP"]] = left - 1

    def _bind(self, name: str) -> None:
        def bind(pod: Object) -> None:
            pod["spec"]["nodeName"] = "node"
            pod["status"] = {
                **pod.get("status", {}),
                "conditions": [{"type": "PodScheduled", "status": "True"}],
            }

        self.server.edit("pods", name, bind)

    def _no_room(self, name: str, now: datetime) -> None:
        condition = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            "lastTransitionTime": now.isoformat(),
        }  # fmt: skip

        def say(pod: Object) -> None:
            pod["status"] = {**pod.get("status", {}), "conditions": [condition]}

        self.server.edit("pods", name, say)

    def _run(self, name: str, address: str, *, ready: bool) -> None:
        container = {
            "name": "engine", "restartCount": 0, "ready": ready, "started": True,
            "state": {"running": {"startedAt": datetime(2020, 1, 1, tzinfo=UTC).isoformat()}},
        }  # fmt: skip
        condition = {"type": "Ready", "status": "True" if ready else "False"}

        def run(pod: Object) -> None:
            pod["status"] = {
                "phase": "Running", "podIP": address, "containerStatuses": [container],
                "conditions": [condition],
            }  # fmt: skip

        self.server.edit("pods", name, run)

    def container_dies(self, name: str) -> None:
        def die(pod: Object) -> None:
            status = pod.get("status") or {}
            for container in status.get("containerStatuses") or []:
                container |= {
                    "started": False,
                    "ready": False,
                    "restartCount": container["restartCount"] + 1,
                }
                container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
            status["conditions"] = [{"type": "Ready", "status": "False"}]

        self.server.edit("pods", name, die)

    def pod_fails(self, name: str) -> None:
        def fail(pod: Object) -> None:
            pod["status"] = {**pod.get("status", {}), "phase": "Failed", "conditions": []}

        self.server.edit("pods", name, fail)

    def pod_vanishes(self, name: str) -> None:
        self.server.remove("pods", name)

    def pod_is_deleted(self, name: str) -> None:
        """Simulate that another client deletes the pod, with the pod's grace period."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
        self.server.request("DELETE", path, None, {}, "application/json")

    def deployments(self) -> None:
        """Run the Deployment controller and the kubelet of its pods."""
        for deployment in self.server.list("deployments.apps"):
            spec, metadata = deployment["spec"], deployment["metadata"]
            template = spec["template"]
            wanted = names.content_hash(template)
            mine = [pod for pod in self.server.list("pods") if controlled_by(pod, metadata["uid"])]
            current = [pod for pod in mine if pod["metadata"]["labels"].get("hash") == wanted]
            for pod in [each for each in mine if each not in current] + current[spec["replicas"] :]:
                self.server.remove("pods", pod["metadata"]["name"])
            for _ in range(spec["replicas"] - len(current)):
                reference = {
                    "apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                }  # fmt: skip
                pod = self.server.put(
                    {
                        "metadata": {
                            "generateName": f"{metadata['name']}-",
                            "labels": {**template["metadata"]["labels"], "hash": wanted},
                            "ownerReferences": [reference],
                        },
                        "spec": template["spec"],
                    },
                    "pods",
                )
                self._run(pod["metadata"]["name"], next(self._addresses), ready=True)

            def report(obj: Object, replicas: int = spec["replicas"]) -> None:
                seen = obj["metadata"]["generation"]
                obj["status"] = {
                    "observedGeneration": seen,
                    "replicas": replicas,
                    "updatedReplicas": replicas,
                }

            if (deployment.get("status") or {}).get("observedGeneration") != metadata["generation"]:
                self.server.edit("deployments.apps", metadata["name"], report)
