"""Check a pod template against the restricted profile of the Pod Security Standards.

`RULES` has the controls of the profile. Baton's own pods comply with all of them, except for
volumes with a hostPath. So a violation comes from the user's overlay, and its path is a path in the
overlay.

`check` also refuses credentials that the service does not name: other accounts, their tokens, other
Secrets, and volumes of CSI drivers, which may mount secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from baton_kube.client import Object
from baton_operator.builders.pod_template.free_form_fields import must_be
from baton_operator.builders.restrictions import Restrictions

CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
#: Fields of the pod spec that an overlay must not change.
_KEPT = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken", "nodeName")
_SYSCTLS = (
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
)
_SELINUX_TYPES = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
#: The profile also admits csi. It is missing here, because a driver may mount secrets from outside
#: the cluster.
_VOLUMES = (
    *("configMap", "downwardAPI", "emptyDir", "ephemeral", "image"),
    *("persistentVolumeClaim", "projected", "secret"),
)
_PROJECTIONS = ("configMap", "downwardAPI", "secret")
#: Annotations that set AppArmor and seccomp profiles on older API servers, or their beginnings.
_PROFILES = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)


class ProfileRule(NamedTuple):
    """The allowed values of one field of a pod."""

    field: str  #: Path in the pod. `*` stands for each item of a list.
    expected: str  #: Completes the error message "<path> must be ...".
    is_allowed: Callable[[Any], bool]  #: The argument is the value; None if the field is unset.


def _one_of(*values: Any) -> Callable[[Any], bool]:
    # 1 == True in Python, but not in JSON.
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _kinds_in(known: Collection[str]) -> Callable[[Any], bool]:
    """Return a function that checks whether all non-null fields of an object are in `known`."""
    return lambda value: (
        isinstance(value, dict)
        and all(kind in known for kind, source in value.items() if source is not None)
    )


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_filtering(seccomp_profile: Any) -> bool:
    return isinstance(seccomp_profile, dict) and seccomp_profile.get("type") in (
        "RuntimeDefault",
        "Localhost",
    )


#: Fields of the security contexts of pods and containers.
_SHARED = (
    ProfileRule(
        "runAsUser",
        "above 0 or unset",
        lambda user: user is None or (type(user) is int and user > 0),
    ),
    ProfileRule("windowsOptions.hostProcess", "false or unset", _is_off),
    ProfileRule(
        "appArmorProfile.type",
        "RuntimeDefault, Localhost or unset",
        _one_of(None, "RuntimeDefault", "Localhost"),
    ),
    ProfileRule(
        "seLinuxOptions.type", f"one of {_SELINUX_TYPES}", _one_of(None, "", *_SELINUX_TYPES)
    ),
    ProfileRule("seLinuxOptions.user", "unset", _one_of(None, "")),
    ProfileRule("seLinuxOptions.role", "unset", _one_of(None, "")),
)
_OF_PODS = (
    *(
        ProfileRule(f"spec.{field}", "false or unset", _is_off)
        for field in ("hostNetwork", "hostPID", "hostIPC")
    ),
    ProfileRule("spec.securityContext.runAsNonRoot", "true", _one_of(True)),
    ProfileRule(
        "spec.securityContext.seccompProfile",
        "of type RuntimeDefault or Localhost",
        _is_filtering,
    ),
    ProfileRule("spec.securityContext.sysctls.*.name", "a safe sysctl", _one_of(*_SYSCTLS)),
    *(rule._replace(field=f"spec.securityContext.{rule.field}") for rule in _SHARED),
    ProfileRule("spec.volumes.*", f"one of {_VOLUMES}", _kinds_in(("name", *_VOLUMES))),
    ProfileRule(
        "spec.volumes.*.projected.sources.*",
        f"one of {_PROJECTIONS}: no token or certificate of an account",
        _kinds_in(_PROJECTIONS),
    ),
)
_OF_CONTAINERS = (
    ProfileRule("securityContext.privileged", "false or unset", _is_off),
    ProfileRule("securityContext.allowPrivilegeEscalation", "false", _one_of(False)),
    ProfileRule(
        "securityContext.capabilities.drop",
        'a list with "ALL"',
        lambda value: isinstance(value, list) and "ALL" in value,
    ),
    ProfileRule(
        "securityContext.capabilities.add",
        "NET_BIND_SERVICE or unset",
        lambda value: (
            value is None
            or (isinstance(value, list) and all(each == "NET_BIND_SERVICE" for each in value))
        ),
    ),
    ProfileRule("securityContext.procMount", "Default or unset", _one_of(None, "Default")),
    ProfileRule("securityContext.runAsNonRoot", "true or unset", _one_of(None, True)),
    ProfileRule(
        "securityContext.seccompProfile",
        "unset, or of type RuntimeDefault or Localhost",
        lambda profile: profile is None or _is_filtering(profile),
    ),
    *(rule._replace(field=f"securityContext.{rule.field}") for rule in _SHARED),
    ProfileRule("ports.*.hostPort", "unset", _one_of(None, 0)),
    *(
        ProfileRule(f"{handler}.{action}.host", "unset", _one_of(None, ""))
        for handler in (
            *("livenessProbe", "readinessProbe", "startupProbe"),
            *("lifecycle.postStart", "lifecycle.preStop"),
        )
        for action in ("httpGet", "tcpSocket")
    ),
)
RULES = (
    *_OF_PODS,
    *(
        rule._replace(field=f"spec.{containers}.*.{rule.field}")
        for containers in CONTAINER_LISTS
        for rule in _OF_CONTAINERS
    ),
)


def check(
    own: Object, merged: Object, path: str, restrictions: Restrictions, secrets: Collection[str]
) -> None:
    """Raise ValueError if the user's overlay requests what `restrictions` do not allow.

    Args:
        own: the pod template without the overlay.
        merged: the pod template with the overlay.
        path: path of the overlay in the spec, for the error message.
        secrets: names of the Secrets that the service names in its own fields.
    """
    try:
        _check_profile(own, merged, path)
        _check_host_path_mounts(own, merged, path, restrictions)
        _check_credentials(own, merged, path, restrictions, secrets)
    except ValueError as error:
        raise ValueError(f"{error}: the operator's setting templates is restricted") from None


def _check_profile(own: Object, merged: Object, path: str) -> None:
    # Baton's own volumes are left out: `Restrictions.check_host_paths` has checked them.
    spec = merged["spec"]
    volumes = spec.get("volumes")
    if isinstance(volumes, list):
        volumes = [volume for volume in volumes if volume not in own["spec"]["volumes"]]
    pod = {"metadata": merged["metadata"], "spec": {**spec, "volumes": volumes}}
    for rule in RULES:
        for field, value in _fields(pod, rule.field.split("."), path):
            if not rule.is_allowed(value):
                raise must_be(rule.expected, field, value)
    for name, profile in (merged["metadata"].get("annotations") or {}).items():
        if name.startswith(_PROFILES) and profile != "runtime/default":
            raise must_be("runtime/default", f"{path}.metadata.annotations.{name}", profile)


def _check_host_path_mounts(
    own: Object, merged: Object, path: str, restrictions: Restrictions
) -> None:
    """Raise ValueError if a hostPath volume that must be read-only has a writable mount."""
    read_only = [
        volume["name"]
        for volume in own["spec"]["volumes"]
        if "hostPath" in volume
        and not restrictions.allows_host_path(volume["hostPath"]["path"], is_writable=True)
    ]
    for containers in CONTAINER_LISTS:
        steps = ["spec", containers, "*", "volumeMounts", "*"]
        for field, mount in _fields(merged, steps, path):
            if not isinstance(mount, dict):
                raise must_be("an object", field, mount)
            if mount.get("name") in read_only and mount.get("readOnly") is not True:
                raise must_be("true", f"{field}.readOnly", mount.get("readOnly"))


def _check_credentials(
    own: Object, merged: Object, path: str, restrictions: Restrictions, secrets: Collection[str]
) -> None:
    for name in _KEPT:
        before, after = own["spec"].get(name), merged["spec"].get(name)
        if before != after:
            raise must_be("unset" if before is None else str(before), f"{path}.spec.{name}", after)
    for steps, key, value in _objects(merged["spec"], (f"{path}.spec",)):
        field = "".join(steps)
        if "secret" in key.lower():
            # The Secret is named by `secretName` or by `name`, depending on the kind of reference.
            # The API server ignores the other one, so both are checked.
            found = [value[each] for each in ("secretName", "name") if each in value]
            if not found or not all(isinstance(name, str) and name in secrets for name in found):
                raise must_be("a Secret that another field of the service names", field, value)
        elif key == "annotations":  # of the claim of an ephemeral volume
            restrictions.check_annotations(value, field)
        elif key == "labels":  # likewise
            restrictions.check_labels(value, field)


def _fields(node: Any, steps: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field of `node` that `steps` select.

    A step is the name of a field, or `*` for all items of a list. The value is None if the field or
    an object that contains it is unset. An unset list has no items.

    Raises:
        ValueError: a value is not the object or list that a step needs.
    """
    if not steps:
        yield path, node
    elif steps[0] == "*":
        if node is not None and not isinstance(node, list):
            raise must_be("a list", path, node)
        for index, item in enumerate(node or []):
            yield from _fields(item, steps[1:], f"{path}[{_label(item, index)}]")
    else:
        if node is not None and not isinstance(node, dict):
            raise must_be("an object", path, node)
        yield from _fields((node or {}).get(steps[0]), steps[1:], f"{path}.{steps[0]}")


def _objects(
    node: Any, steps: tuple[str, ...], key: str = ""
) -> Iterator[tuple[tuple[str, ...], str, Object]]:
    """Yield (parts of the path, field name, object) for each object in `node`, at any depth.

    The field name is empty if the object is an item of a list.
    """
    if isinstance(node, dict):
        yield steps, key, node
        for name, value in node.items():
            yield from _objects(value, (*steps, f".{name}"), name)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _objects(item, (*steps, f"[{_label(item, index)}]"))


def _label(item: Any, index: int) -> str | int:
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) else index
