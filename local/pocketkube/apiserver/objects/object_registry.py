"""Create, read, update and patch objects.

Every write except a deletion takes these steps:

1. Decode the object (`request_bodies`). A patch is applied to the stored object before this step
   (`patches`). A server-side apply is merged into the stored object after it.
2. Set or restore the fields that clients cannot set (`system_fields`), and set defaults.
3. Validate the object, record the owners of its fields (`server_side_apply`) and store it.

`strategies` has the kind-specific steps. `deletion` and `garbage_collection` write to the store
directly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from pocketkube.apiserver import errors
from pocketkube.apiserver.objects import conflicts, patches, server_side_apply, system_fields
from pocketkube.apiserver.objects.deletion import is_released
from pocketkube.apiserver.objects.request_bodies import decode_body
from pocketkube.apiserver.objects.strategies import strategies
from pocketkube.apiserver.resources import Object, RequestInfo, Resource
from pocketkube.apiserver.schema import defaults, validation
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.apiserver.store import Store
from pocketkube.timestamps import timestamp


@dataclass
class WriteOptions:
    """Query parameters of a write, and the warnings to return in the response."""

    #: Name of the field manager.
    manager: str
    #: Whether to validate the write without storing the object.
    dry_run: bool = False
    #: What happens to unknown fields: Ignore, Warn or Strict.
    field_validation: str = "Warn"
    #: Whether server-side apply takes over fields that other managers own.
    force: bool = False
    warnings: list[str] = field(default_factory=list)


class Registry:
    """Creates, reads, updates and patches objects.

    `stored` and `change` return objects as they are stored. The other methods return objects in
    the API version of the request. All methods raise ApiError if they refuse the request.
    """

    def __init__(self, store: Store, catalog: Catalog, service_network: IPv4Network) -> None:
        self.store = store
        self.catalog = catalog
        self._strategies = strategies(store, catalog, service_network)
        for resource in catalog:
            store.open(resource.storage_key)

    def stored(self, info: RequestInfo) -> Object:
        """Return the object that `info` names, as it is stored.

        Raises:
            ApiError: 404, there is no such object.
        """
        found = self.store.get(info.resource.storage_key, info.namespace, info.name)
        if found is None:
            raise errors.not_found(info.resource, info.name)
        return found

    def get(self, info: RequestInfo) -> Object:
        """Return the object that `info` names, in the API version of the request.

        Raises:
            ApiError: 404, there is no such object.
        """
        return self.view(info.resource, self.stored(info))

    def view(self, resource: Resource, obj: Object) -> Object:
        """Return the stored object `obj` in the API version of `resource`."""
        if resource.storage_key == "events" and resource.group:
            return defaults.event_from_core(obj)
        if obj["apiVersion"] == resource.api_version:
            return obj
        return {**obj, "apiVersion": resource.api_version}

    def create(self, info: RequestInfo, obj: Object, options: WriteOptions) -> Object:
        """Create an object, and return it in the API version of the request.

        Raises:
            ApiError: 400 or 422, the object is invalid; 403 or 404, its namespace is terminating or
                does not exist; 409, an object with this name exists.
        """
        new = self._decode(info, obj, options)
        return self.view(info.resource, self._create(info, new, options))

    def _create(
        self,
        info: RequestInfo,
        new: Object,
        options: WriteOptions,
        owned: server_side_apply.FieldSet | None = None,
    ) -> Object:
        resource, metadata = info.resource, new["metadata"]
        system_fields.generate_name(metadata)
        if not metadata.get("name"):
            raise errors.invalid(
                resource, "", [errors.required("metadata.name", "name or generateName is required")]
            )
        if resource.namespaced:
            metadata["namespace"] = info.namespace
            self._require_namespace(info, metadata["name"])
        if self.store.get(resource.storage_key, info.namespace, metadata["name"]) is not None:
            raise errors.already_exists(resource, metadata["name"])
        system_fields.assign(resource, metadata)
        if resource.has_status:
            new.pop("status", None)
        new = self._default(resource, new)
        self._strategies[resource.storage_key].before_create(new)
        return self._write(resource, None, new, options, "", owned)

    def update(self, info: RequestInfo, obj: Object, options: WriteOptions) -> Object:
        """Replace an object, and return it in the API version of the request.

        Raises:
            ApiError: 400 or 422, the object is invalid; 404, there is no such object; 409, the
                given resourceVersion or uid does not match the stored object.
        """
        resource, name = info.resource, info.name
        old = self.stored(info)
        named = {**obj, "metadata": {"name": name, **(obj.get("metadata") or {})}}
        new = self._decode(info, named, options)
        if not new["metadata"].get("resourceVersion") and (
            resource.custom or resource.kind in defaults.VERSIONED
        ):
            error = errors.FieldError(
                "metadata.resourceVersion",
                "FieldValueInvalid",
                "Invalid value: 0x0: must be specified for an update",
            )
            raise errors.invalid(resource, name, [error])
        if new["metadata"]["name"] != name:
            given = new["metadata"]["name"]
            raise errors.bad_request(
                f"the name of the object ({given}) does not match the name on the URL ({name})"
            )
        return self.view(resource, self._replace(resource, old, new, options, info.subresource))

    def patch(
        self, info: RequestInfo, content_type: str, body: Any, options: WriteOptions
    ) -> Object:
        """Apply a patch or a server-side apply, and return the resulting object.

        Args:
            content_type: media type of the patch.
            body: the decoded patch.

        Raises:
            ApiError: 400, 413, 415 or 422, the patch or its result is invalid; 404, there is no
                such object; 409, the given resourceVersion or uid does not match, or an apply
                without `force` would change a field that another manager owns.
        """
        if content_type == "application/apply-patch+yaml":
            return self._apply(info, body, options)
        patched = self.patched(info.resource, self.get(info), content_type, body)
        return self.update(info, patched, options)

    def patched(self, resource: Resource, obj: Object, content_type: str, body: Any) -> Object:
        """Return `obj` after a JSON, merge or strategic merge patch. Nothing is stored.

        Args:
            content_type: media type of the patch.
            body: the decoded patch.
        """
        if content_type == "application/json-patch+json":
            result = patches.json_patch(obj, body)
        elif content_type == "application/merge-patch+json":
            result = patches.merge_patch(obj, body)
        elif content_type == "application/strategic-merge-patch+json" and not resource.custom:
            result = patches.strategic_merge_patch(obj, body, self.catalog.types(resource))
        else:
            raise errors.unknown_media_type(patches.media_types(resource))
        if not isinstance(result, dict) or not isinstance(result.get("metadata"), dict):
            raise errors.bad_request("the patched document is not an object with metadata")
        return result

    def _apply(self, info: RequestInfo, body: Any, options: WriteOptions) -> Object:
        """Create or update an object by server-side apply."""
        resource, subresource = info.resource, info.subresource
        applied = self._decode_applied(info, body, options)
        given = applied["metadata"]
        old = (
            self.stored(info)
            if subresource
            else self.store.get(resource.storage_key, info.namespace, info.name)
        )
        if old is None and (given.get("uid") or given.get("resourceVersion")):
            raise errors.conflict(resource, info.name, "the object to be applied no longer exists")
        live = {"metadata": {}} if old is None else self.view(resource, old)
        new, owned = server_side_apply.apply(
            live,
            applied,
            server_side_apply.Manager(options.manager, "Apply", resource.api_version, subresource),
            self.catalog.types(resource),
            options.force,
        )
        if old is None:
            return self.view(resource, self._create(info, new, options, owned))
        if version := given.get("resourceVersion"):
            new["metadata"]["resourceVersion"] = version
        return self.view(resource, self._replace(resource, old, new, options, subresource, owned))

    def _decode_applied(self, info: RequestInfo, body: Any, options: WriteOptions) -> Object:
        """Decode the body of a server-side apply.

        Returns:
            The fields that the request can write. For a subresource such as `status`, these are
            the field `status` and the resourceVersion. For an object, these are all fields, but
            without `status` if the kind has the subresource `status`.
        """
        metadata = body.get("metadata") or {}
        if metadata.get("managedFields"):
            raise errors.bad_request("metadata.managedFields must be nil")
        if metadata.get("name", info.name) != info.name:
            raise errors.bad_request(
                f"metadata.name {metadata['name']} does not match the name on the URL ({info.name})"
            )
        body = {**body, "metadata": {**metadata, "name": info.name}}
        applied = self._decode(info, body, options, require_type=True)
        if info.subresource:
            version = applied["metadata"].get("resourceVersion")
            applied = {key: value for key, value in applied.items() if key == info.subresource}
            return {**applied, "metadata": {"resourceVersion": version}}
        if info.resource.has_status:
            applied.pop("status", None)
        return applied

    def change(
        self,
        resource: Resource,
        old: Object,
        edit: Callable[[Object], None],
        options: WriteOptions,
        subresource: str = "",
        *,
        validate: bool = True,
    ) -> Object:
        """Replace the stored object `old` with a copy that `edit` has changed. Return the copy.

        A dry run returns the copy without storing it.
        """
        new = copy.deepcopy(old)
        edit(new)
        return self._replace(resource, old, new, options, subresource, validate=validate)

    def _replace(
        self,
        resource: Resource,
        old: Object,
        new: Object,
        options: WriteOptions,
        subresource: str,
        owned: server_side_apply.FieldSet | None = None,
        *,
        validate: bool = True,
    ) -> Object:
        conflicts.check_update(resource, old["metadata"], new["metadata"])
        new = self._default(resource, self._restore(resource, old, new, subresource))
        if "generation" in old["metadata"]:
            new["metadata"]["generation"] = system_fields.next_generation(resource, old, new)
        return self._write(resource, old, new, options, subresource, owned, validate=validate)

    def _restore(self, resource: Resource, old: Object, new: Object, subresource: str) -> Object:
        """Return `new` with the values of `old` in all fields that the request cannot change."""
        if subresource == "status":
            return {**old, "metadata": {**old["metadata"]}, "status": new.get("status", {})}
        if resource.has_status:
            new.pop("status", None)
            new |= {"status": old["status"]} if "status" in old else {}
        system_fields.restore(resource, old["metadata"], new["metadata"])
        self._strategies[resource.storage_key].before_update(old, new)
        return new

    def _write(
        self,
        resource: Resource,
        old: Object | None,
        new: Object,
        options: WriteOptions,
        subresource: str,
        owned: server_side_apply.FieldSet | None,
        *,
        validate: bool = True,
    ) -> Object:
        """Validate `new`, record the field managers that own its fields, and store `new`.

        A terminating object is removed instead if the write removes its last finalizer. A dry run
        stores and removes nothing.

        Args:
            old: the stored object; None if `new` is created.
            owned: the fields that a server-side apply owns; None for any other write.
        """
        if validate:
            self._validate(resource, new, old)
        operation = "Update" if owned is None else "Apply"
        manager = server_side_apply.Manager(
            options.manager, operation, resource.api_version, subresource
        )
        types = self.catalog.types(resource)
        server_side_apply.track(old, new, manager, owned, types, timestamp())
        if options.dry_run or new == old:
            return new
        stored = self.store.put(resource.storage_key, new)
        if not subresource:
            stored = self._strategies[resource.storage_key].after_write(stored)
        metadata = stored["metadata"]
        if old and is_released(old["metadata"], metadata):
            return self.store.remove(
                resource.storage_key, metadata.get("namespace", ""), metadata["name"]
            )
        return stored

    def _decode(
        self, info: RequestInfo, obj: Any, options: WriteOptions, *, require_type: bool = False
    ) -> Object:
        """Decode a request body.

        `options.field_validation` selects whether unknown fields are ignored, reported as warnings
        or refused.
        """
        new, unknown = decode_body(
            self.catalog,
            info,
            obj,
            require_type=require_type,
            strict=options.field_validation == "Strict",
        )
        if options.field_validation == "Warn":
            options.warnings.extend(f'unknown field "{path}"' for path in unknown)
        return new

    def _require_namespace(self, info: RequestInfo, name: str) -> None:
        found = self.stored(RequestInfo(self.catalog.builtin("namespaces"), name=info.namespace))
        if found["metadata"].get("deletionTimestamp"):
            why = (
                f"unable to create new content in namespace {info.namespace} "
                "because it is being terminated"
            )
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {info.namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise errors.forbidden(info.resource, name, why, [cause])

    def _default(self, resource: Resource, obj: Object) -> Object:
        """Return a copy of `obj` in which missing fields have their defaults.

        If the object is a custom resource, `obj` and the copy share `metadata`.
        """
        if custom := self.catalog.custom(resource):
            metadata = obj["metadata"]
            return {
                **custom.schema.default({k: v for k, v in obj.items() if k != "metadata"}),
                "metadata": metadata,
            }
        new = copy.deepcopy(obj)
        defaults.set_defaults(resource.kind, new)
        return new

    def _validate(self, resource: Resource, new: Object, old: Object | None) -> None:
        found = validation.validate(resource, new, old)
        if custom := self.catalog.custom(resource):
            found += custom.schema.validate(new, old)
        if found:
            raise errors.invalid(resource, new["metadata"].get("name", ""), found)
