"""An image contains what its commands import, and nothing else of Baton."""

from __future__ import annotations

import json
from importlib.metadata import distributions

from support.images.container import Image
from support.images.dockerfile import ROOT
from support.images.imports import PACKAGES, SCRIPTS, imported

SBOMS = ROOT / "build/images"


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
    """A CPU needs no Triton, which has a gigabyte."""
    assert not [path for path in ("gcc", "g++", "cc") if (image.root / "usr/bin" / path).exists()]
    assert not {"triton", "pip"} & {path.name for path in image.site_packages.iterdir()}


def test_the_sbom_lists_every_installed_package(image: Image, name: str) -> None:
    sbom = json.loads((SBOMS / f"{name}.cdx.json").read_text())
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
