"""Check pods against the `restricted` profile of Kubernetes' Pod Security Standards.

For the tests of the pods and of the chart.

All controls of the profiles `baseline` and `restricted` are checked, with the fields and values of
https://kubernetes.io/docs/concepts/security/pod-security-standards/.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton_kube.client import Object

#: `image` came with Kubernetes 1.31. The policy admits it like the others.
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def violations(metadata: Object, spec: Object) -> list[str]:
    """Return the violations of a Linux pod or pod template; empty if the profile admits the pod."""
    return [*_pod(metadata, spec), *(f"{where}: {what}" for where, what in _containers(spec))]


def _pod(metadata: Object, spec: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is true"
    for volume in spec.get("volumes") or []:
        for kind in set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kind}"
    security = spec.get("securityContext") or {}
    for sysctl in security.get("sysctls") or []:
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']} is set"
    for name, value in (metadata.get("annotations") or {}).items():
        if (
            name.startswith(APPARMOR)
            and value != "runtime/default"
            and not value.startswith("localhost/")
        ):
            yield f"annotation {name} is {value}"
    yield from (f"pod: {what}" for what in _shared(security))


def _containers(spec: Object) -> Iterator[tuple[str, str]]:
    pod = spec.get("securityContext") or {}
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind) or []:
            for what in _container(container, pod):
                yield container["name"], what


def _container(container: Object, pod: Object) -> Iterator[str]:
    security = container.get("securityContext") or {}
    yield from _shared(security)
    if security.get("privileged"):
        yield "privileged is true"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if (security.get("procMount") or "Default") != "Default":
        yield "procMount is not Default"
    capabilities = security.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield "capabilities.drop has no ALL"
    if more := set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield f"capabilities.add has {sorted(more)}"
    non_root = security.get("runAsNonRoot")
    if (pod.get("runAsNonRoot") if non_root is None else non_root) is not True:
        yield "runAsNonRoot is not true"
    profile = security.get("seccompProfile") or pod.get("seccompProfile") or {}
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile.type is not RuntimeDefault or Localhost"
    for port in filter(None, container.get("ports") or []):  # a null is an empty port
        if port.get("hostPort"):
            yield f"hostPort {port['hostPort']} is used"
    handlers = [container.get(f"{probe}Probe") for probe in ("liveness", "readiness", "startup")]
    handlers += [(container.get("lifecycle") or {}).get(hook) for hook in ("postStart", "preStop")]
    for handler in filter(None, handlers):
        for action in ("httpGet", "tcpSocket"):
            if (handler.get(action) or {}).get("host"):
                yield f"a probe or hook uses the host {handler[action]['host']}"


def _shared(security: Object) -> Iterator[str]:
    """Yield violations in the fields that security contexts of pods and containers share.

    A null is an unset field.
    """
    if security.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if security.get("runAsNonRoot") is False:
        yield "runAsNonRoot is false"
    if (security.get("windowsOptions") or {}).get("hostProcess"):
        yield "it is a Windows HostProcess"
    if ((security.get("seccompProfile") or {}).get("type") or "RuntimeDefault") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "seccompProfile is Unconfined"
    if ((security.get("appArmorProfile") or {}).get("type") or "RuntimeDefault") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "appArmorProfile is Unconfined"
    linux = security.get("seLinuxOptions") or {}
    if (linux.get("type") or "") not in SELINUX_TYPES or linux.get("user") or linux.get("role"):
        yield f"seLinuxOptions are {linux}"
