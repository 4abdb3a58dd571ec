"""Volumes and mounts of a pod."""

from pathlib import Path

import pytest

from pocketkube.containers.volumes import (
    TOKEN_PATH,
    MountError,
    PodVolumes,
    with_service_account_token,
)

POD = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "0123456789",
        "labels": {"b": "2", "a": '1"'},
    },
    "spec": {"containers": [{"name": "main", "command": ["x"]}], "nodeName": "n"},
}


ADDRESSES = {"status.podIP": "127.77.0.2", "status.hostIP": "127.77.0.1"}


def test_a_token_volume_is_added_only_where_it_is_missing() -> None:
    account = {"metadata": {"name": "default"}}
    added = with_service_account_token(POD, account)
    assert added["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == TOKEN_PATH
    assert with_service_account_token(added, account) == added
    assert (
        with_service_account_token(POD, {**account, "automountServiceAccountToken": False}) is POD
    )
    assert with_service_account_token(POD, None) is POD


async def test_mounts_that_nest_or_climb_are_refused(tmp_path: Path) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> None:
        return None

    volumes = PodVolumes({**POD}, tmp_path, None, b"", lookup, ADDRESSES)  # type: ignore[arg-type]
    nested = [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/a/b"}]
    with pytest.raises(MountError, match="lies inside mountPath /a"):
        volumes.mount({"name": "main", "volumeMounts": nested})
    with pytest.raises(MountError, match="must stay inside"):
        volumes.mount(
            {"name": "main", "volumeMounts": [{"name": "a", "mountPath": "/a", "subPath": "../x"}]}
        )


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/models/demo", "root/models/demo"),
        ("/models/demo/", "root/models/demo"),
        ("/models/other", "/models/other"),
        ("/", "/"),
        ("/.", "/"),
        ("/models/../../outside", "/models/../../outside"),
        ("/gone", "/gone"),
    ],
)
async def test_a_host_path_is_looked_for_below_the_host_root_and_never_outside_it(
    tmp_path: Path, path: str, found: str
) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> None:
        return None

    (tmp_path / "root/models/demo").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/gone").symlink_to("nowhere")
    pod = {**POD, "spec": {**POD["spec"], "volumes": [{"name": "v", "hostPath": {"path": path}}]}}
    volumes = PodVolumes(
        pod,
        tmp_path / "pod",
        None,  # type: ignore[arg-type]
        b"",
        lookup,
        ADDRESSES,
        tmp_path / "root",
    )
    await volumes.make()
    assert (tmp_path / "pod/volumes/v").readlink() == tmp_path / found


async def test_a_secret_may_be_mounted_inside_a_config_map_and_stays_when_that_changes(
    tmp_path: Path,
) -> None:
    config = {"old.json": "{}"}

    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object]:
        return {"data": dict(config) if kind == "ConfigMap" else {"key": "c2VjcmV0"}}

    spec = {
        "volumes": [
            {"name": "c", "configMap": {"name": "c"}},
            {"name": "s", "secret": {"secretName": "s"}},
        ]
    }
    pod = {**POD, "spec": {**POD["spec"], **spec}}
    volumes = PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES)  # type: ignore[arg-type]
    mounts = [{"name": "c", "mountPath": "/etc/x"}, {"name": "s", "mountPath": "/etc/x/s"}]
    await volumes.make()
    root = volumes.mount({"name": "main", "volumeMounts": mounts})
    config["new.json"] = config.pop("old.json")
    await volumes.make()
    assert sorted(path.name for path in (root / "etc/x").iterdir() if path.name[0] != ".") == [
        "new.json",
        "s",
    ]
    assert (root / "etc/x/s/key").read_text() == "secret"


async def test_files_are_written_although_a_kubelet_was_killed_while_switching(
    tmp_path: Path,
) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object]:
        return {"data": {"key": "value"}}

    volume = {"name": "v", "configMap": {"name": "m"}}
    pod = {**POD, "spec": {**POD["spec"], "volumes": [volume]}}
    left = tmp_path / "volumes" / "v" / "..data_new"
    left.parent.mkdir(parents=True)
    left.symlink_to("..gone")
    await PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES).make()  # type: ignore[arg-type]
    assert (left.parent / "key").read_text() == "value"
