"""Runs commands in an image as the pods of the operator do.

For tests/images.

The root is read-only, `/tmp` is the only writable folder, the user is the image's user, and the
processes of other pods are invisible. The network is the test's own: a pod gets an address of
127.0.0.0/8. This needs root, and programs of util-linux and coreutils, but no container runtime.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def buildah(*arguments: str) -> str:
    finished = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, f"buildah {shlex.join(arguments)}: {finished.stderr}"
    return finished.stdout.strip()


@dataclass
class Image:
    """An image with its files in the folder `root`."""

    tag: str
    container: str
    root: Path
    config: dict[str, Any]

    @property
    def site_packages(self) -> Path:
        return self.root / "opt/baton/lib/python3.11/site-packages"

    def command(
        self,
        *line: str,
        folders: Mapping[Path, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command that runs `line` in the image.

        Args:
            line: the command in the image; empty for the image's entry point.
            folders: folder of this machine -> where it is mounted read-only in the image.
            environment: variables in addition to those of the image.
        """
        root = shlex.quote(str(self.root))
        steps = [
            "set -e",
            f"mount --bind {root} {root}",
            f"mount --rbind /dev {root}/dev",
            f"mount --rbind /sys {root}/sys",
            f"mount -t proc proc {root}/proc",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
        ]
        for source, target in (folders or {}).items():
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
            steps += [
                f"mount --bind {shlex.quote(str(source))} {root}{target}",
                f"mount -o remount,bind,ro {root}{target}",
            ]
        steps.append(f"mount -o remount,bind,ro {root}")
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        inside = [
            *("chroot", f"--userspec={self.config['User']}", str(self.root)),
            *("env", "-i", *self.config["Env"], *variables),
            *(line or self.config["Entrypoint"]),
        ]
        # The shell is process 1 of the namespace and stays root, because --kill-child kills only a
        # child that is root. All processes of the namespace end with process 1.
        steps += ["set +e", shlex.join(inside), "exit $?"]
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
        return [*enter, "\n".join(steps)]

    def run(self, *line: str, expect: int = 0) -> str:
        """Run `line` in the image and return what it prints to stdout and stderr."""
        finished = subprocess.run(
            self.command(*line),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == expect, finished.stdout
        return finished.stdout


def open_image(tag: str) -> Image:
    """Return an image of buildah's store. `close_image` removes the files."""
    container = buildah("from", "--pull-never", tag)
    config = json.loads(buildah("inspect", "--type", "image", tag))["OCIv1"]["config"]
    return Image(tag, container, Path(buildah("mount", container)), config)


def close_image(image: Image) -> None:
    buildah("rm", image.container)
