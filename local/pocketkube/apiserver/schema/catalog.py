"""The kinds that are served now: the built-in kinds, and the versions of established CRDs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pocketkube.apiserver.resources import BUILTIN, Object, Resource
from pocketkube.apiserver.schema.apiextensions import CustomVersion, custom_versions
from pocketkube.apiserver.schema.merge_strategy import (
    BuiltinFieldTypes,
    CustomFieldTypes,
    FieldTypes,
)


@dataclass
class Catalog:
    """The built-in and custom resources that the API server currently serves."""

    _resources: dict[tuple[str, str, str], Resource] = field(default_factory=dict)
    _custom: dict[Resource, CustomVersion] = field(default_factory=dict)
    _types: dict[Resource, FieldTypes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for resource in BUILTIN:
            self._add(resource, BuiltinFieldTypes(resource.kind))

    def _add(self, resource: Resource, types: FieldTypes) -> None:
        self._resources[resource.group, resource.version, resource.plural] = resource
        self._types[resource] = types

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._resources.values()))

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._resources.get((group, version, plural))

    def builtin(self, plural: str) -> Resource:
        """Return the built-in resource of core/v1 with the plural name `plural`, such as `pods`."""
        return self._resources["", "v1", plural]

    def by_storage(self, storage: str) -> Resource:
        """Return the resource with the storage key `storage`; of several, the one added first."""
        return next(
            resource for resource in self._resources.values() if resource.storage_key == storage
        )

    def groups(self) -> list[str]:
        return list(
            dict.fromkeys(resource.group for resource in self._resources.values() if resource.group)
        )

    def versions(self, group: str) -> list[str]:
        return list(dict.fromkeys(r.version for r in self._resources.values() if r.group == group))

    def types(self, resource: Resource) -> FieldTypes:
        return self._types[resource]

    def custom(self, resource: Resource) -> CustomVersion | None:
        return self._custom.get(resource)

    def establish(self, crd: Object) -> None:
        """Serve the versions of a validated CRD instead of the CRD's previous versions."""
        self.withdraw(crd)
        for version in custom_versions(crd):
            self._add(version.resource, CustomFieldTypes(version.schema.schema))
            self._custom[version.resource] = version

    def withdraw(self, crd: Object) -> None:
        """Stop serving all versions of a CRD."""
        spec = crd["spec"]
        for resource in list(self._resources.values()):
            if resource.custom and (resource.group, resource.plural) == (
                spec["group"],
                spec["names"]["plural"],
            ):
                del self._resources[resource.group, resource.version, resource.plural]
                del self._custom[resource]
                del self._types[resource]
