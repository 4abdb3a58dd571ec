"""Build the images of docker/ with buildah, and write an archive and an SBOM of each.

Usage: python hack/build_images.py [OPTIONS] [ARGUMENTS OF buildah build]

The folder of `--output` gets NAME.tar, an OCI archive that a registry or a node can load, and
NAME.cdx.json, its SBOM. The SBOM is CycloneDX and lists the Python and Debian packages of the
image. buildah needs no daemon, and runs the commands of a Dockerfile in a chroot.

Arguments that this program does not know are arguments of `buildah build`. With `--volume` a
machine behind a proxy adds its certificates and its pip.conf for the time of the build.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Repository and suffix of the tag of each Dockerfile's image.
IMAGES = {
    "operator": ("baton-operator", ""),
    "gateway": ("baton-gateway", ""),
    "engine-cpu": ("baton", "-cpu"),
    "engine-cuda": ("baton", ""),
}
#: Prints the SBOM of the Python packages in an image. The program runs in a container of the image,
#: where the SBOM tool is mounted at /sbom.
LIST_PYTHON_PACKAGES = """
import runpy, sys
sys.path.append("/sbom")
sys.argv = ["cyclonedx-py", "environment", "--output-reproducible", "/opt/baton/bin/python"]
runpy.run_module("cyclonedx_py", run_name="__main__")
"""


def main() -> None:
    """Build the images that the command line names.

    Raises:
        subprocess.CalledProcessError: a command failed. Its output is on the terminal.
    """
    parser = argparse.ArgumentParser(
        description="Build the images of docker/ with buildah.", allow_abbrev=False
    )
    parser.add_argument("--base", help="base image (default: the one in the Dockerfile)")
    parser.add_argument("--torch-index", help="package index with torch (default: PyTorch's)")
    parser.add_argument("--only", nargs="+", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--output", type=Path, default=ROOT / "build/images", metavar="FOLDER")
    options, more = parser.parse_known_args()
    if options.base:
        more = ["--build-arg", f"BASE={options.base}", *more]
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tools:
        install_sbom_tool(tools)
        for name in options.only:
            image = tag(name)
            arguments = list(more)
            if options.torch_index and name.startswith("engine"):
                arguments += ["--build-arg", f"TORCH_INDEX={options.torch_index}"]
            run("buildah", "build", "--isolation", "chroot", "--layers", *arguments,
                "--tag", image, "--file", f"docker/{name}.Dockerfile", ".")  # fmt: skip
            sbom = options.output / f"{name}.cdx.json"
            sbom.write_text(json.dumps(describe(image, tools), indent=1) + "\n")
            archive = options.output / f"{name}.tar"
            archive.unlink(missing_ok=True)
            run("buildah", "push", "--quiet", image, f"oci-archive:{archive}:{image}")
            print(f"{image}: {archive} ({archive.stat().st_size / 1e6:.0f} MB), {sbom}", flush=True)


def tag(name: str) -> str:
    """Return the tag of the image that `docker/<name>.Dockerfile` describes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    repository, suffix = IMAGES[name]
    return f"localhost/{repository}:{version}{suffix}"


def install_sbom_tool(folder: str) -> None:
    """Install cyclonedx-py into `folder`, for the Python of the images."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    for_images = ["--only-binary", ":all:", "--python-version", "3.11", "--target", folder]
    run(*install, *for_images, "-r", "docker/locks/sbom.txt")


def describe(image: str, tools: str) -> dict[str, Any]:
    """Return the SBOM of `image`.

    Args:
        tools: the folder of `install_sbom_tool`.
    """
    container = output("buildah", "from", "--pull-never", image)
    enter = ["buildah", "run", "--isolation", "chroot", "--user", "root"]
    enter += ["--volume", f"{tools}:/sbom:ro", container, "--"]
    try:
        sbom = json.loads(output(*enter, "python3", "-c", LIST_PYTHON_PACKAGES))
        packages = output(*enter, "dpkg-query", "--show",
                          "--showformat", "${Package} ${Version} ${Architecture}\n")  # fmt: skip
    finally:
        run("buildah", "rm", container)
    name, _, version = image.rpartition("/")[2].partition(":")
    root = {"type": "container", "bom-ref": image, "name": name, "version": version}
    sbom["metadata"]["component"] = root
    for line in packages.splitlines():
        package, release, architecture = line.split()
        purl = f"pkg:deb/debian/{package}@{release}?arch={architecture}"
        sbom["components"].append(
            {"type": "library", "bom-ref": purl, "name": package, "version": release, "purl": purl}
        )
    return sbom


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def output(*command: str) -> str:
    """Run `command` and return what it prints, without the line break at the end."""
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return finished.stdout.strip()


if __name__ == "__main__":
    main()
