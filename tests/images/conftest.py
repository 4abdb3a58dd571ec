"""The images that `make images` has built."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.images.container import Image, close_image, open_image
from support.images.dockerfile import ROOT


def _build_images() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_images", ROOT / "hack/build_images.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD_IMAGES = _build_images()


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, Image]]:
    """Name of the Dockerfile -> image, without the CUDA image."""
    if shutil.which("buildah") is None:
        pytest.fail("buildah is not installed: run apt-get install buildah, and then make images")
    opened: dict[str, Image] = {}
    try:
        for name in BUILD_IMAGES.IMAGES:
            if name != "engine-cuda":
                opened[name] = open_image(BUILD_IMAGES.tag(name))
        yield opened
    finally:
        for image in opened.values():
            close_image(image)


@pytest.fixture(params=["operator", "gateway", "engine-cpu"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def image(images: dict[str, Image], name: str) -> Image:
    return images[name]
