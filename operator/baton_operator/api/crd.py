"""Generate the CustomResourceDefinition from the structs of `llmservice.py`.

The schema is structural and contains the CEL rules of `rules.py`. API servers before Kubernetes
1.25 drop these rules. Server-side apply and client-side validation fail on such servers because of
the rules. For such a server, apply the CRD without the rules or with `--validate=false`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_operator.api import llmservice
from baton_operator.api.field_types import ApiStruct
from baton_operator.api.rules import add_rules
from baton_operator.names import GROUP, KIND, MAX_NAME_LENGTH, PLURAL, SERVICE_NAME, VERSION
from baton_protocol.options.field_comments import field_comments

_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}
_REF = "#/$defs/"


def custom_resource_definition(*, rules: bool = True) -> dict[str, Any]:
    """Return the CustomResourceDefinition of LLMService.

    Args:
        rules: whether to include the CEL rules. Set it to False for servers before Kubernetes 1.25.
    """
    schema = _service_schema()
    if rules:
        add_rules(schema["properties"]["spec"])
    schema["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {
            "type": "object",
            "properties": {
                "name": {
                    "type": "string",
                    "pattern": f"^{SERVICE_NAME.pattern}$",
                    "maxLength": MAX_NAME_LENGTH,
                }
            },
        },
        **schema["properties"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": _COLUMNS,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.decode.replicas",
                "statusReplicasPath": ".status.decode.replicas",
                "labelSelectorPath": ".status.decode.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["llms"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def _service_schema() -> dict[str, Any]:
    """Return the structural schema of LLMService, which has no references and no null type."""
    (root,), definitions = msgspec.json.schema_components(
        [llmservice.LLMService], ref_template=_REF + "{name}"
    )
    _describe(ApiStruct, definitions)
    return _structural(root, definitions)


def _describe(struct: type[ApiStruct], definitions: dict[str, dict[str, Any]]) -> None:
    """Set the field descriptions in the definitions of `struct` and of its subclasses.

    A description is the `#:` comment of the field.

    Args:
        definitions: JSON Schema of each struct, by struct name.
    """
    if struct.__name__ in definitions:
        comments = field_comments(struct)
        properties = definitions[struct.__name__]["properties"]
        for field in msgspec.structs.fields(struct):
            if field.name in comments:
                properties[field.encode_name]["description"] = comments[field.name]
    for derived in struct.__subclasses__():
        _describe(derived, definitions)


def _structural(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = dict(node)
    if "anyOf" in node:  # a field that may be None in Python is optional in the API
        present = [branch for branch in node.pop("anyOf") if branch != {"type": "null"}]
        node = {**(_int_or_string(present) if len(present) == 2 else present[0]), **node}
    if "$ref" in node:
        node = {**definitions[node.pop("$ref").removeprefix(_REF)], **node}
    if "enum" in node:
        node["enum"] = [value for value in node["enum"] if value is not None]
        node["type"] = _JSON_TYPES[type(node["enum"][0])]
    node.pop("title", None)
    if "description" in node:  # a docstring may have several lines
        node["description"] = " ".join(node["description"].split())
    if node.get("default", ...) is None:
        del node["default"]
    elif isinstance(node.get("default"), dict):
        node["default"] = {}  # the fields' own defaults fill it
    if node.get("x-kubernetes-preserve-unknown-fields"):
        node.pop("additionalProperties", None)
        return _ordered(node)
    if node.get("type") == "integer":
        node["format"] = "int64"
    if "items" in node:
        node["items"] = _structural(node["items"], definitions)
    if "properties" in node:
        node["properties"] = {
            name: _structural(field, definitions) for name, field in node["properties"].items()
        }
    if not node.get("required", True):
        del node["required"]
    return _ordered(node)


def _int_or_string(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a structural schema for an integer or a string.

    Args:
        branches: the schemas of the integer and of the string. The result has the bounds of both.
    """
    bounds = {key: value for branch in branches for key, value in branch.items() if key != "type"}
    return {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        **bounds,
    }


def _ordered(node: dict[str, Any]) -> dict[str, Any]:
    """Return `node` with description, type, default and required as the first keys."""
    first = {
        key: node[key] for key in ("description", "type", "default", "required") if key in node
    }
    return first | {key: value for key, value in node.items() if key not in first}


def _column(
    name: str, type_: str, path: str, description: str, *, wide: bool = False
) -> dict[str, Any]:
    column: dict[str, Any] = {
        "name": name,
        "type": type_,
        "description": description,
        "jsonPath": path,
    }
    return column | ({"priority": 1} if wide else {})


_READY = '.status.conditions[?(@.type=="Ready")]'
_AVAILABLE = '.status.conditions[?(@.type=="Available")]'

_COLUMNS = [
    _column("Ready", "string", f"{_READY}.status", "Whether all groups serve"),
    _column("Reason", "string", f"{_READY}.reason", "Reason of the condition Ready"),
    _column("Available", "string", f"{_AVAILABLE}.status", "Whether the service answers requests"),
    _column("Prefill", "integer", ".status.prefill.ready", "Prefill pods that are ready"),
    _column(
        "Prefill-Desired", "integer", ".status.prefill.desired", "Desired prefill pods", wide=True
    ),
    _column("Decode", "integer", ".status.decode.ready", "Decode pods that are ready"),
    _column(
        "Decode-Desired", "integer", ".status.decode.desired", "Desired decode pods", wide=True
    ),
    _column("Endpoint", "string", ".status.endpoint", "URL of the gateway"),
    _column("Age", "date", ".metadata.creationTimestamp", "Since creation"),
]
