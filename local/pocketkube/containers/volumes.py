"""Create the volumes of a pod as folders and links, and mount them below a container's root.

<pod folder>/volumes/<volume>/        content, or a link to the host's path
<pod folder>/containers/<name>/root/  $POCKETKUBE_POD_ROOT; mountPath /x is the link root/x
"""

from __future__ import annotations

import copy
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baton_kube.client import KubeClient, KubeError, Object
from pocketkube.containers.environment import (
    ConfigError,
    Lookup,
    field_value,
    read_data,
)

TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
#: The lifetime that Kubernetes requests for the tokens that it mounts by default.
TOKEN_LIFETIME_S = 3607
#: The ConfigMap with the API server's certificate authority, which Kubernetes creates in each
#: namespace. Here the kubelet provides its content.
ROOT_CA, ROOT_CA_KEY = "kube-root-ca.crt", "ca.crt"

#: The files of a volume: path inside the volume -> content.
Payload = dict[str, bytes]
_PAYLOAD_KINDS = ("configMap", "secret", "projected", "downwardAPI")


class MountError(Exception):
    """A volume cannot be created or mounted now (event FailedMount). The kubelet retries."""


@dataclass
class _Token:
    """A service account token and the time of its renewal."""

    text: str
    #: Monotonic time from which a new token is requested.
    renew_at: float


def with_service_account_token(pod: Object, service_account: Object | None) -> Object:
    """Return the pod with a service account token mounted in every container.

    Containers that already have a mount at `TOKEN_PATH` are not changed. With
    `automountServiceAccountToken: false`, no volume is added. API servers since Kubernetes 1.21 add
    this volume on admission.

    Args:
        pod: the pod, which is not changed.
        service_account: the pod's ServiceAccount. If None, no volume is added.
    """
    wanted = pod["spec"].get("automountServiceAccountToken")
    if wanted is None and service_account is not None:
        wanted = service_account.get("automountServiceAccountToken")
    if service_account is None or wanted is False:
        return pod
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    lacking = [
        container
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]
        if all(
            mount["mountPath"].rstrip("/") != TOKEN_PATH
            for mount in container.get("volumeMounts") or []
        )
    ]
    if not lacking:
        return pod
    name = "kube-api-access-" + pod["metadata"]["uid"][:5]
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}},
        {"configMap": {"name": ROOT_CA, "items": [{"key": ROOT_CA_KEY, "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
            }
        },
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": name, "projected": {"sources": sources}},
    ]
    for container in lacking:
        mount = {"name": name, "mountPath": TOKEN_PATH, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    return pod


class PodVolumes:
    """Creates, refreshes and mounts the volumes of one pod."""

    def __init__(
        self,
        pod: Object,
        folder: Path,
        api: KubeClient,
        ca_pem: bytes,
        lookup: Lookup,
        addresses: Mapping[str, str],
        host_root: Path | None = None,
    ) -> None:
        #: The pod worker replaces the pod by newer versions, whose labels may have changed.
        self.pod = pod
        self._folder = folder
        self._api = api
        self._ca_pem = ca_pem
        self._lookup = lookup
        self._addresses = addresses
        self._host_root = host_root
        self._tokens: dict[tuple[str, str], _Token] = {}
        self._written: dict[str, Payload] = {}

    async def make(self) -> None:
        """Create all volumes. Update the files of existing volumes whose sources have changed.

        Raises:
            MountError: a volume cannot be created.
        """
        (self._folder / "volumes").mkdir(parents=True, exist_ok=True)
        for volume in self.pod["spec"].get("volumes") or []:
            name = volume["name"]
            try:
                payload = await self._payload(volume)
            except (ConfigError, KubeError, OSError, ValueError) as error:
                raise MountError(
                    f'MountVolume.SetUp failed for volume "{name}" : {error}'
                ) from error
            if payload is None:
                self._make_folder(volume)
            elif payload != self._written.get(name):
                _write_atomically(self._path(name), payload, volume)
                self._written[name] = payload

    def mount(self, container: Object) -> Path:
        """Create a new folder with a link for each mount of the container. Return the folder.

        The container's environment variable POCKETKUBE_POD_ROOT is the path of the folder.

        Raises:
            MountError: a mount is invalid.
        """
        root = self._folder / "containers" / container["name"] / "root"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        # Volumes that belong to this pod alone. Other mounts may lie inside them.
        own = {
            volume["name"]
            for volume in self.pod["spec"].get("volumes") or []
            if any(kind in volume for kind in ("emptyDir", *_PAYLOAD_KINDS))
        }
        mounted: dict[PurePosixPath, str] = {}
        for mount in sorted(
            container.get("volumeMounts") or [], key=lambda mount: mount["mountPath"]
        ):
            path = PurePosixPath("/") / mount["mountPath"]
            above = next(
                (other for other in mounted if other in path.parents or other == path), None
            )
            # Mounts are links. A mount inside another mount is a link in the folder of the volume.
            if above is not None and (above == path or mounted[above] not in own):
                raise MountError(
                    f"mountPath {path} lies inside mountPath {above}; only a volume that belongs "
                    "to the pod alone, such as an emptyDir, can contain other mounts"
                )
            mounted[path] = mount["name"]
            link = in_root(root, path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # a link in a volume outlives the container
            link.symlink_to(self._source(mount))
        return root

    def _source(self, mount: Object) -> Path:
        """Return the path in the volume to which the link for `mount` must point.

        A `subPath` that does not exist is created as a folder.
        """
        sub_path = mount.get("subPath") or ""
        if ".." in PurePosixPath(sub_path).parts or sub_path.startswith("/"):
            raise MountError(f"subPath {sub_path!r} must stay inside its volume")
        source = self._path(mount["name"]) / sub_path
        if sub_path and not source.exists():
            source.mkdir(parents=True)
        return source

    def _path(self, volume: str) -> Path:
        return self._folder / "volumes" / volume

    def _make_folder(self, volume: Object) -> None:
        path = self._path(volume["name"])
        if "emptyDir" in volume:
            path.mkdir(exist_ok=True)
        elif source := volume.get("hostPath"):
            host = self._host_path(source["path"])
            _check_host_path(host, source.get("type") or "")
            if not path.is_symlink():
                path.symlink_to(host)
        else:
            kinds = ", ".join(sorted(key for key in volume if key != "name"))
            raise MountError(
                f"volume {volume['name']!r}: {kinds} is not supported here; use hostPath, "
                "emptyDir, configMap, secret, projected or downwardAPI"
            )

    def _host_path(self, path: str) -> Path:
        """Return the path on this machine for the `path` of a hostPath volume.

        If `path` exists in the folder `host_root`, the result is the path in this folder, else
        `path` itself. `/` and paths with `..` are not looked up in `host_root`.
        """
        if self._host_root is not None and ".." not in PurePosixPath(path).parts:
            below = self._host_root / path.lstrip("/")
            if below != self._host_root and below.exists():
                return below
        return Path(path)

    async def _payload(self, volume: Object) -> Payload | None:
        """Return the files of a configMap, secret, projected or downwardAPI volume; else None."""
        if not any(kind in volume for kind in _PAYLOAD_KINDS):
            return None
        projected = volume.get("projected")
        files: Payload = {}
        for source in [volume] if projected is None else projected.get("sources") or []:
            if reference := source.get("configMap"):
                files |= await self._keys("ConfigMap", reference["name"], reference)
            elif reference := source.get("secret"):
                # The field is `secretName` in a volume, and `name` in a projected source.
                name = reference.get("secretName") or reference["name"]
                files |= await self._keys("Secret", name, reference)
            elif "downwardAPI" in source:
                files |= self._downward(source["downwardAPI"])
            elif reference := source.get("serviceAccountToken"):
                files[reference["path"]] = (await self._token(reference)).encode()
            else:
                raise ConfigError(
                    f"projected source {', '.join(sorted(source)) or 'without a type'} is not "
                    "supported here; use configMap, secret, downwardAPI or serviceAccountToken"
                )
        return files

    async def _keys(self, kind: str, name: str, source: Object) -> Payload:
        namespace = self.pod["metadata"]["namespace"]
        if (kind, name) == ("ConfigMap", ROOT_CA):
            data = {ROOT_CA_KEY: self._ca_pem}
        else:
            data = await read_data(kind, namespace, name, source, self._lookup)
        items = source.get("items")
        if not items:
            return data
        missing = [item["key"] for item in items if item["key"] not in data]
        if missing and not source.get("optional"):
            raise ConfigError(
                f"references non-existent {kind.lower().removesuffix('map')} key: {missing[0]}"
            )
        return {item["path"]: data[item["key"]] for item in items if item["key"] in data}

    def _downward(self, source: Object) -> Payload:
        files: Payload = {}
        for item in source.get("items") or []:
            if "fieldRef" not in item:
                raise ConfigError(
                    f"the downwardAPI file {item.get('path')!r} has no fieldRef; other fields are "
                    "not supported here"
                )
            path = item["fieldRef"]["fieldPath"]
            files[item["path"]] = field_value(path, self.pod, self._addresses).encode()
        return files

    async def _token(self, source: Object) -> str:
        audience = source.get("audience") or ""
        key = (audience, source["path"])
        token = self._tokens.get(key)
        if token is not None and time.monotonic() < token.renew_at:
            return token.text
        metadata = self.pod["metadata"]
        account = self.pod["spec"].get("serviceAccountName")
        lifetime = source.get("expirationSeconds") or 3600
        spec: Object = {"audiences": [audience] if audience else [], "expirationSeconds": lifetime}
        if account:  # a token can be bound to a pod only if the pod names the account
            reference = {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": metadata["name"],
                "uid": metadata["uid"],
            }
            spec["boundObjectRef"] = reference
        accounts = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts"
        answer = await self._api.create(
            f"{accounts}/{account or 'default'}/token",
            {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec},
        )
        token = _Token(answer["status"]["token"], time.monotonic() + 0.8 * lifetime)
        self._tokens[key] = token
        return token.text


def in_root(root: Path, container_path: str | PurePosixPath) -> Path:
    """Return the path on this machine for an absolute path in a container.

    Raises:
        MountError: the path contains `..`.
    """
    path = PurePosixPath("/") / container_path
    if ".." in path.parts:
        raise MountError(f"path {path} must not contain '..'")
    return root / path.relative_to("/")


def _check_host_path(path: Path, kind: str) -> None:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate" and not path.exists():
        path.touch()
    tests = {
        "": True,
        "Directory": path.is_dir(),
        "DirectoryOrCreate": path.is_dir(),
        "File": path.is_file(),
        "FileOrCreate": path.is_file(),
        "Socket": path.is_socket(),
        "CharDevice": path.is_char_device(),
        "BlockDevice": path.is_block_device(),
    }
    if not tests.get(kind, False):
        raise MountError(f"hostPath {path} does not have the type {kind} on this machine")


def _write_atomically(path: Path, files: Payload, volume: Object) -> None:
    """Replace all files of a volume atomically.

    `path/<name>` links to `..data/<name>`, and `..data` links to the folder of the newest version.
    A reader never sees a mixture of old and new files.
    """
    path.mkdir(exist_ok=True)
    source: Object = next((volume[kind] for kind in _PAYLOAD_KINDS if kind in volume), {})
    mode = source.get("defaultMode", 0o644)
    version = path / f"..{uuid.uuid4().hex[:12]}"
    for name, content in files.items():
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise MountError(
                f"volume {volume['name']!r}: file path {name!r} must stay inside the volume"
            )
        file = version / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    version.mkdir(exist_ok=True)
    data = path / "..data"
    before = data.resolve() if data.is_symlink() else None
    switch = path / "..data_new"
    switch.unlink(missing_ok=True)  # left by a kubelet that was killed before the next line
    switch.symlink_to(version.name)
    os.replace(switch, data)
    tops = {PurePosixPath(name).parts[0] for name in files}
    for entry in path.iterdir():
        # Other entries are mounts inside this volume.
        written = entry.is_symlink() and entry.readlink().parts[0] == "..data"
        if written and entry.name not in tops:
            entry.unlink()
    for top in tops:
        link = path / top
        if not link.is_symlink():
            link.symlink_to(PurePosixPath("..data") / top)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)
