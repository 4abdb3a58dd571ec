"""Set the defaults of CRDs, validate the CRDs, and compile their served versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pocketkube.apiserver.errors import (
    FieldError,
    forbidden_value,
    invalid_value,
    required,
    unsupported_value,
)
from pocketkube.apiserver.resources import SCALE, STATUS, Object, Resource
from pocketkube.apiserver.schema.cel import RuleSyntaxError
from pocketkube.apiserver.schema.structural import StructuralSchema

LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class CustomVersion:
    """One served version of a custom resource."""

    resource: Resource
    schema: StructuralSchema
    #: `subresources.scale` of the CRD's version.
    scale: Object | None
    #: `additionalPrinterColumns` of the CRD's version.
    columns: tuple[Object, ...]


def custom_versions(crd: Object) -> Iterator[CustomVersion]:
    """Compile and yield the served versions of a custom resource definition.

    Raises:
        RuleSyntaxError: a CEL rule does not compile.
        re.error: a pattern does not compile.
    """
    spec, names = crd["spec"], crd["spec"]["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        below = version.get("subresources") or {}
        resource = Resource(
            group=spec["group"],
            version=version["name"],
            kind=names["kind"],
            plural=names["plural"],
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            subresources=((STATUS,) if "status" in below else ())
            + ((SCALE,) if "scale" in below else ()),
            singular=names.get("singular", ""),
            list_kind=names.get("listKind", ""),
            custom=True,
        )
        schema = StructuralSchema(version["schema"]["openAPIV3Schema"])
        columns = tuple(version.get("additionalPrinterColumns") or ())
        yield CustomVersion(resource, schema, below.get("scale"), columns)


def default_crd(crd: Object) -> None:
    """Set the defaults of a custom resource definition, in place."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    if kind := names.get("kind"):
        names.setdefault("singular", kind.lower())
        names.setdefault("listKind", f"{kind}List")
    spec.setdefault("conversion", {"strategy": "None"})
    for version in spec.get("versions") or []:
        for column in version.get("additionalPrinterColumns") or []:
            column.setdefault("priority", 0)


def validate_crd(crd: Object) -> list[FieldError]:
    """Validate a custom resource definition, and return the errors."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    errors = [
        required(f"spec.{name}") for name in ("group", "scope", "versions") if not spec.get(name)
    ]
    errors += [required(f"spec.names.{name}") for name in ("plural", "kind") if not names.get(name)]
    if errors:
        return errors
    expected = f"{names['plural']}.{spec['group']}"
    if crd["metadata"]["name"] != expected:
        detail = 'must be spec.names.plural+"."+spec.group'
        errors.append(invalid_value("metadata.name", crd["metadata"]["name"], detail))
    if spec["scope"] not in ("Cluster", "Namespaced"):
        errors.append(unsupported_value("spec.scope", spec["scope"], ("Cluster", "Namespaced")))
    if not LABEL_1035.fullmatch(names["plural"]):
        errors.append(
            invalid_value("spec.names.plural", names["plural"], "must be a DNS-1035 label")
        )
    if (spec.get("conversion") or {}).get("strategy", "None") != "None":
        errors.append(
            unsupported_value("spec.conversion.strategy", spec["conversion"]["strategy"], ("None",))
        )
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        errors.append(
            invalid_value(
                "spec.versions",
                spec["versions"],
                "must have exactly one version marked as storage version",
            )
        )
    for index, version in enumerate(spec["versions"]):
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            errors.append(required(path, "schemas are required"))
        else:
            errors += _validate_structural(schema, path, root=True)
    if not errors:
        try:
            list(custom_versions(crd))
        except (RuleSyntaxError, re.error) as error:
            errors.append(invalid_value("spec.versions", spec["versions"], str(error)))
    return errors


def _validate_structural(schema: Object, path: str, root: bool = False) -> Iterator[FieldError]:
    """Yield the reasons why `schema` is not structural."""
    free = schema.get("x-kubernetes-int-or-string") or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not schema.get("type") and (root or not free):
        where = "root" if root else "object fields"
        yield required(f"{path}.type", f"must not be empty for specified {where}")
    if root and schema.get("type") not in (None, "object"):
        yield invalid_value(f"{path}.type", schema["type"], "must be object at the root")
    properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
    if properties and isinstance(extra, dict):
        yield forbidden_value(
            f"{path}.additionalProperties",
            "additionalProperties and properties are mutual exclusive",
        )
    for name, below in properties.items():
        if not (root and name in ("metadata", "apiVersion", "kind")):
            yield from _validate_structural(below, f"{path}.properties[{name}]")
    if isinstance(items := schema.get("items"), dict):
        yield from _validate_structural(items, f"{path}.items")
    elif schema.get("type") == "array":
        yield required(f"{path}.items", "must be specified")
    if isinstance(extra, dict):
        yield from _validate_structural(extra, f"{path}.additionalProperties")
