"""Volumes and mounts of a pod."""

from pathlib import Path

import pytest

from pocketkube.containers.volumes import (
    TOKEN_PATH,
    MountError,
    PodVolumes,
    with_service_account_token,
)
from support.pocketkube.sample_pod import ADDRESSES, POD


def test_a_token_volume_is_added_only_where_it_is_missing() -> None:
    account = {"metadata": {"name": "default"}}
    added = with_service_account_token(POD, account)
    assert added["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == TOKEN_PATH
    assert with_service_account_token(added, account) == added
    assert (
        with_service_account_token(POD, {**account, "automountServiceAccountToken": False}) is POD
    )
    assert with_service_account_token(POD, None) is POD


async def test_nested_mounts_and_sub_paths_outside_the_volume_are_refused(tmp_path: Path) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> None:
        return None

    volumes = PodVolumes({**POD}, tmp_path, None, b"", lookup, ADDRESSES)
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
async def test_a_host_path_that_exists_below_the_host_root_is_taken_from_there(
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
        None,
        b"",
        lookup,
        ADDRESSES,
        tmp_path / "root",
    )
    await volumes.make()
    assert (tmp_path / "pod/volumes/v").readlink() == tmp_path / found


async def test_a_secret_mounted_inside_a_config_map_stays_when_the_config_map_changes(
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
    volumes = PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES)
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


async def test_files_are_written_after_a_kubelet_was_killed_during_an_update(
    tmp_path: Path,
) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object]:
        return {"data": {"key": "value"}}

    volume = {"name": "v", "configMap": {"name": "m"}}
    pod = {**POD, "spec": {**POD["spec"], "volumes": [volume]}}
    left = tmp_path / "volumes" / "v" / "..data_new"
    left.parent.mkdir(parents=True)
    left.symlink_to("..gone")
    await PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES).make()
    assert (left.parent / "key").read_text() == "value"
