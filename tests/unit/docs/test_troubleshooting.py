"""docs/operate/troubleshooting.md has a row for every reason of the operator and of components."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
OPERATOR = ROOT / "operator" / "baton_operator"
WORD = re.compile(r"[A-Z]+[a-z]+[A-Za-z]*")
#: CamelCase words in the operator's source that are neither reasons nor types of conditions. The
#: test takes every other CamelCase word for a reason, so add new words that are not reasons here.
NOT_REASONS = {
    # Statuses of conditions, units, and names of requests.
    *("True", "False", "Unknown", "Normal", "Warning", "None", "KMGTki", "Ki", "Mi", "Gi", "Ti"),
    *("Accept", "Authorization", "BearerToken", "DeleteOptions", "AnyKube", "List"),
    # Kinds.
    *(
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "ControllerRevision",
        "CustomResourceDefinition",
        "Deployment",
    ),
    *(
        "Event",
        "Gateway",
        "HTTPRoute",
        "Ingress",
        "LLMService",
        "Lease",
        "Namespace",
        "NetworkPolicy",
        "Pod",
        "Role",
    ),
    *(
        "PodDisruptionBudget",
        "RoleBinding",
        "Secret",
        "Service",
        "ServiceAccount",
        "ValidatingAdmissionPolicy",
    ),
    # Reasons of Kubernetes for pods, Deployments, routes and refusals.
    *(
        "Accepted",
        "AlreadyExists",
        "ContainerStatusUnknown",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
    ),
    *(
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "Failed",
        "ImagePullBackOff",
        "InvalidImageName",
    ),
    *(
        "OOMKilled",
        "Pending",
        "PodScheduled",
        "RegistryUnavailable",
        "ReplicaFailure",
        "ResolvedRefs",
    ),
    *("RunContainerError", "Succeeded", "Unschedulable"),
    # Reasons of an engine in `GET /ready`.
    "Asleep",
    # Fields of objects and columns of kubectl.
    *(
        "Age",
        "ClusterIP",
        "Decode",
        "Endpoint",
        "FallbackToLogsOnError",
        "Namespaced",
        "Prefill",
        "Reason",
    ),
    *("RollingUpdate",),
    # A part of a reason: see `_words`.
    "NotFound",
}
CONDITIONS = {
    "Ready",
    "Available",
    "ModelAvailable",
    "PrefillReady",
    "DecodeReady",
    "GatewayReady",
    "Updating",
    "Scaling",
} | {"KVTransferProtected"}


def documented() -> set[str]:
    """Return the words in the first cells of the page's tables."""
    cells = re.findall(
        r"^\| (`[^|]+`) \|",
        (ROOT / "docs" / "operate" / "troubleshooting.md").read_text(),
        re.MULTILINE,
    )
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def of_operator() -> dict[str, str]:
    """Return the possible reasons and condition types of the operator, with their places."""
    found = {}
    for path in sorted(OPERATOR.rglob("*.py")):
        if OPERATOR / "builders" in path.parents:  # fields of objects
            continue
        for word, line in _words(ast.parse(path.read_text())):
            found.setdefault(word, f"{path.relative_to(ROOT)}:{line}")
    return {word: where for word, where in found.items() if word not in NOT_REASONS}


def _words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and WORD.fullmatch(node.value)
        ):
            yield node.value, node.lineno
        elif isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == [
            "Problem"
        ]:
            yield node.name, node.lineno  # its name is the reason
        elif isinstance(node, ast.JoinedStr) and ast.unparse(node).endswith("kind}NotFound'"):
            yield from (("SecretNotFound", node.lineno), ("ConfigMapNotFound", node.lineno))


def of_components() -> dict[str, str]:
    """Return the reasons in the FATAL lines of components, with their places."""
    found = {}
    for component in ("engine", "gateway", "kv_transfer"):
        for path in sorted((ROOT / component).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and len(node.args) > 1 and _takes_a_reason(node.func):
                    found |= {
                        word: f"{path.relative_to(ROOT)}:{line}"
                        for word, line in _words(node.args[0])
                    }
    return found


def _takes_a_reason(function: ast.expr) -> bool:
    """Return whether the first argument of the function is a reason."""
    return ast.unparse(function).endswith(
        ("ConfigurationError", "FetchError", "report_fatal", "super().__init__")
    )


def test_every_reason_is_documented() -> None:
    reasons = of_operator() | of_components()
    assert {
        "AllGroupsReady",
        "InvalidSpec",
        "SecretNotFound",
        "TTFTAboveTarget",
        "InsufficientMemory",
    } <= set(reasons)
    assert {word: where for word, where in reasons.items() if word not in documented()} == {}


def test_every_documented_reason_exists() -> None:
    assert documented() - set(of_operator()) - set(of_components()) - CONDITIONS == set()


def test_every_condition_is_documented() -> None:
    assert documented() >= CONDITIONS
