"""A control plane for install tests, and the operator as a release starts it.

For the end-to-end tests of the installation.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import yaml
from kubernetes import client, config

from baton_kube.client import Object
from baton_operator.names import GROUP, PLURAL, VERSION
from pocketkube.ports import free_ports
from support.waiting import eventually

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/baton"
CRD = f"{PLURAL}.{GROUP}"
RELEASE = "baton"


class Cluster:
    """A control plane with clients of an administrator, and one namespace for the release."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = f"system-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        api = config.new_client_from_config(str(kubeconfig))
        self.core = client.CoreV1Api(api)
        self.apps = client.AppsV1Api(api)
        self.rbac = client.RbacAuthorizationV1Api(api)
        self.definitions = client.ApiextensionsV1Api(api)
        self.custom = client.CustomObjectsApi(api)
        self.minor = int(client.VersionApi(api).get_code().minor.rstrip("+"))

    def new_namespace(self) -> str:
        name = f"team-{uuid.uuid4().hex[:8]}"
        self.core.create_namespace({"metadata": {"name": name}})
        eventually(
            lambda: [a for a in self.core.list_namespaced_service_account(name).items if a.secrets],
            timeout_s=30,
            what=f"the default account of {name}, without which no pod is admitted",
        )
        return name

    def crd(self) -> Object | None:
        """Return the CRD's spec: None if the CRD does not exist, empty if it is not served yet."""
        try:
            crd = self.definitions.read_custom_resource_definition(CRD)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        spec: Object = self.definitions.api_client.sanitize_for_serialization(crd.spec)
        return (
            spec
            if any(
                c.type == "Established" and c.status == "True" for c in crd.status.conditions or []
            )
            else {}
        )

    def create_service(self, namespace: str, name: str) -> None:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "LLMService",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "pvc://models/x"}, "prefill": {"replicas": 1}},
        }

        def created() -> bool:  # the server may not serve the kind yet
            try:
                self.custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, body)
            except client.ApiException as error:
                if error.status == 404:
                    return False
                raise
            return True

        eventually(created, timeout_s=30, what="LLMServices to be served")

    def services(self) -> list[str]:
        return [
            s["metadata"]["name"]
            for s in self.custom.list_cluster_custom_object(GROUP, VERSION, PLURAL)["items"]
        ]

    def pods(self, namespace: str) -> list[str]:
        return sorted(pod.metadata.name for pod in self.core.list_namespaced_pod(namespace).items)

    def wait_for_members(self, namespace: str, service: str, log: Path) -> None:
        """Wait until the operator has created a pod of each role and a status of the service.

        Args:
            log: log of the operator, for the message of a failure.
        """

        def probe() -> bool:
            pods, conditions = self.pods(namespace), self.conditions(namespace, service)
            assert {f"{service}-prefill-0", f"{service}-decode-0"} <= set(pods), (
                f"{pods}\n{log.read_text()[-2000:]}"
            )
            assert "Ready" in conditions, f"{conditions}\n{log.read_text()[-2000:]}"
            return True

        eventually(probe, timeout_s=60, what=f"pods and status of {service}")

    def conditions(self, namespace: str, name: str) -> list[str]:
        service = self.custom.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        return [condition["type"] for condition in service.get("status", {}).get("conditions", [])]

    @contextmanager
    def operator(self, *more: str) -> Iterator[Path]:
        """Run the operator with the arguments and the ServiceAccount of the release's Deployment.

        Args:
            more: further arguments, such as `--lease-namespace`.

        Yields:
            the path of the operator's log.
        """
        deployment = self.apps.read_namespaced_deployment(f"{RELEASE}-operator", self.namespace)
        pod = deployment.spec.template.spec
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": []},
        }
        account = pod.service_account_name
        token = self.core.create_namespaced_service_account_token(
            account, self.namespace, request
        ).status.token
        document = yaml.safe_load(self.kubeconfig.read_text())
        document["users"][0]["user"] = {"token": token}
        kubeconfig, log = self._folder / "operator.kubeconfig", self._folder / "operator.log"
        kubeconfig.write_text(yaml.safe_dump(document))
        [port] = free_ports(1)
        command = [sys.executable, "-m", "baton_operator.cli", *pod.containers[0].args]
        command += [
            "--kubeconfig",
            str(kubeconfig),
            "--host",
            "127.0.0.1",
            "--http-port",
            str(port),
            *more,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield log
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                assert answer.status == 200
            process.terminate()
            assert process.wait(20) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
