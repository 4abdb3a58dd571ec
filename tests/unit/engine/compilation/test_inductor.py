"""The folder of compiled pieces: its permissions, and files that cannot be loaded."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton_engine.compilation.inductor import InductorCompiler


def test_compiled_pieces_are_stored_only_in_folders_that_no_other_user_can_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = InductorCompiler(tmp_path / "cache")
    compiler.open("key")
    assert compiler.folder == tmp_path / "cache" / "key"
    assert stat.S_IMODE(compiler.folder.stat().st_mode) == 0o700
    assert not caplog.text

    compiler.folder.chmod(0o777)
    compiler.open("key")  # other users can write code into that folder
    assert compiler.folder.is_dir()
    assert compiler.folder.parent != tmp_path / "cache"
    assert "writable by every user" in caplog.text


def test_a_temporary_folder_is_used_if_the_cache_folder_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = InductorCompiler()
    compiler.open("key")
    (compiler.folder / "piece").touch()
    assert "set compilation.cache_dir to a folder of this user" in caplog.text


def test_a_piece_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = InductorCompiler(tmp_path)
    compiler.open("key")
    path = compiler.folder / "piece-dynamic"
    path.write_bytes(b"half a piece")
    assert compiler._load(path) is None
    assert not path.exists()
    assert "compiling it again" in caplog.text
