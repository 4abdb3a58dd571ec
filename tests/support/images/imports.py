"""The modules that a command imports with import statements or loads by name.

For the tests of the images and their Dockerfiles.
"""

from __future__ import annotations

import functools
import tomllib

import grimp

from support.images.dockerfile import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["importlinter"]["root_packages"]
SCRIPTS: dict[str, str] = PYPROJECT["project"]["scripts"]
#: Modules that `baton-engine` loads by name.
LOADED_BY_NAME = {
    "baton-engine": [
        "baton_engine.executor.external_launcher",
        "baton_engine.executor.multiproc.multiproc_executor",
        "baton_engine.executor.multiproc.worker_main",
        "baton_engine.executor.ray",
        "baton_engine.executor.uniproc",
        "baton_engine.models.architectures.llama",
        "baton_engine.scheduling.scheduler",
        "baton_engine.worker.worker",
    ]
}
#: Modules that a module starts as a process.
STARTED_AS_PROCESS = {"baton_text.chat_template": "baton_text.template_worker"}


def imported(commands: set[str]) -> set[str]:
    """Return the modules that the commands import, at the start or later.

    Modules of other distributions appear with their first name only, for example `kubernetes`.
    """
    graph = _graph()
    waiting = [SCRIPTS[command].partition(":")[0] for command in commands]
    waiting += [name for command in commands for name in LOADED_BY_NAME.get(command, [])]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in found or module not in graph.modules:
            continue
        found.add(module)
        waiting += graph.find_modules_directly_imported_by(module)
        if module in STARTED_AS_PROCESS:
            waiting.append(STARTED_AS_PROCESS[module])
        if parent := module.rpartition(".")[0]:
            waiting.append(parent)
    return found


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *PACKAGES,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
