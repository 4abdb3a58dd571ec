"""An image contains what its commands import, and nothing else of Baton."""

from __future__ import annotations

import json
import re
import tarfile
from importlib.metadata import distributions
from typing import IO

from support.images.container import Image
from support.images.dockerfile import ROOT
from support.images.imports import PACKAGES, SCRIPTS, imported

BUILT = ROOT / "build/images"


def commands(image: Image) -> set[str]:
    return {path.name for path in (image.root / "opt/baton/bin").glob("baton*")}


def test_the_packages_are_those_that_the_commands_import(image: Image) -> None:
    wanted = {module.partition(".")[0] for module in imported(commands(image))}
    found = {path.name for path in image.site_packages.iterdir()}
    assert found & set(PACKAGES) == wanted & set(PACKAGES)


def test_every_module_that_the_commands_import_is_there(image: Image) -> None:
    for module in imported(commands(image)):
        if module.partition(".")[0] in PACKAGES:
            path = image.site_packages / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_the_commands_are_those_of_the_component(images: dict[str, Image]) -> None:
    assert commands(images["operator"]) == {"baton-operator"}
    assert commands(images["gateway"]) == {"baton-gateway", "baton-model"}
    assert commands(images["engine-cpu"]) == set(SCRIPTS) - {"baton", "baton-operator"}


def test_no_compiler_no_triton_no_pip(image: Image) -> None:
    """CPUs do not use Triton, which has a size of one gigabyte."""
    assert not [path for path in ("gcc", "g++", "cc") if (image.root / "usr/bin" / path).exists()]
    assert not {"triton", "pip"} & {path.name for path in image.site_packages.iterdir()}


def packages_of_last_layer(name: str) -> set[str]:
    with tarfile.open(BUILT / f"{name}.tar") as archive:

        def blob(path: str) -> IO[bytes]:
            file = archive.extractfile(path)
            assert file
            return file

        def described(digest: str) -> IO[bytes]:
            return blob(f"blobs/{digest.replace(':', '/')}")

        index = json.load(blob("index.json"))
        layers = json.load(described(index["manifests"][0]["digest"]))["layers"]
        with tarfile.open(fileobj=described(layers[-1]["digest"])) as layer:
            found = re.findall(r"site-packages/(\w+)/", "\n".join(layer.getnames()))
    return set(found)


def test_the_last_layer_has_the_code_without_its_dependencies(image: Image, name: str) -> None:
    """So a code change rebuilds only this layer, of a few megabytes."""
    found = packages_of_last_layer(name)
    assert "baton_protocol" in found
    assert found <= set(PACKAGES)


def test_the_sbom_lists_every_installed_package(image: Image, name: str) -> None:
    sbom = json.loads((BUILT / f"{name}.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {(part["name"].lower(), part["version"]) for part in sbom["components"]}
    installed = {
        (found.metadata["Name"].lower(), found.version)
        for found in distributions(path=[str(image.site_packages)])
    }
    assert len(installed) > 10
    assert installed <= listed
    debian = [
        part for part in sbom["components"] if part.get("purl", "").startswith("pkg:deb/debian/")
    ]
    assert "libc6" in {part["name"] for part in debian}
