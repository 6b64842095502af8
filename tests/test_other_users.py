"""What other users of the machine cannot do to a run, in the folders that they share with it.

Does not prove anything of what MindSpore, vLLM and other libraries keep there; see test_fork_server.py for processes.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ranks_as_processes import native, run

from mindgrpo.backend.cpu import host as host_module
from mindgrpo.backend.cpu.host import LocalRanks
from mindgrpo.backend.cpu.shared_group import shared_group
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.errors import UserError
from mindgrpo.processes.job import remove_shared_files
from mindgrpo.run.trl_arguments import with_arguments

ROOT = Path(__file__).resolve().parent.parent
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
ME, NOBODY = 12345, 65534
PR_SET_DUMPABLE = 4


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # As a process that was started by this user: it may see its own descriptors.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)


@pytest.fixture
def shared_folders() -> Iterator[tuple[Path, Path]]:
    """Two like /dev/shm and /tmp."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folders = Path(name, "first"), Path(name, "second")
        for folder in folders:
            folder.mkdir()
            folder.chmod(0o1777)
        yield folders


def _meet_where_somebody_was_first(
    host: LocalRanks, size: int, folders: tuple[Path, Path]
) -> float:
    host_module.BOARD_FOLDERS, host_module.MEET_SECONDS = folders, 5.0
    board = folders[0] / f"mindgrpo-{host.job}-board"
    if host.rank == 0:
        foreign = board.with_suffix(".foreign")
        header = host_module.header_bytes(size)
        foreign.write_bytes(bytes(header + size * host_module.MAX_OFFERS * 16))
        foreign.chmod(0o666)
        os.chown(foreign, NOBODY, NOBODY)
        foreign.rename(board)
    while not board.exists():
        os.sched_yield()
    become(ME)
    total = np.ones(1)
    shared_group(host, range(size), 1000).sum_into(total, total)
    return float(total[0])


@AS_ROOT
def test_ranks_do_not_meet_in_a_file_that_another_user_has_put_there(
    shared_folders: tuple[Path, Path],
) -> None:
    assert run(native(), 2, _meet_where_somebody_was_first, shared_folders) == {0: 2.0, 1: 2.0}
    (foreign,) = shared_folders[0].iterdir()
    assert foreign.stat().st_uid == NOBODY and not any(foreign.read_bytes())


def test_a_link_in_place_of_the_ranks_file_does_not_have_another_file_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("mindgrpo-job-board", "mindgrpo-job-board.partial"):
        (folder / name).symlink_to(precious)
    monkeypatch.setattr(host_module, "BOARD_FOLDERS", (folder,))
    assert LocalRanks("job", 0, 1).board is not None
    assert precious.read_text() == "kept" and list(folder.iterdir()) == []


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where C kernels and data sets are kept; empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINDGRPO_NATIVE", raising=False)
    native_library.build.cache_clear()
    (tmp_path / "mindgrpo").mkdir()
    yield tmp_path / "mindgrpo"
    native_library.build.cache_clear()


@pytest.fixture
def quick_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a line in place of a library."""
    compiler = cache.parent / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo compiled >"$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


@AS_ROOT
@pytest.mark.usefixtures("quick_compiler")
def test_no_kernel_is_taken_from_a_folder_of_another_user(cache: Path) -> None:
    native_library.build()
    native_library.build.cache_clear()
    os.chown(cache, NOBODY, NOBODY)
    with pytest.raises(native_library.Unavailable) as refused:
        native_library.build()
    assert f"{cache} cannot hold the C kernels (it belongs to another user)" in str(refused.value)
    assert "XDG_CACHE_HOME" in refused.value.remedy
    with pytest.raises(UserError, match="it belongs to another user"):
        with_arguments(None, None, [{"prompt": "1+1=", "answer": "2"}], None)


@AS_ROOT
@pytest.mark.usefixtures("quick_compiler")
def test_a_kernel_that_another_user_has_put_into_a_writable_folder_is_compiled_anew(
    cache: Path,
) -> None:
    cache.chmod(0o777)
    path = native_library.build()
    native_library.build.cache_clear()
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)
    assert native_library.build().read_text() == "compiled\n"
    assert path.stat().st_uid == os.getuid()
    assert cache.stat().st_mode & 0o777 == 0o700


@AS_ROOT
def test_a_launcher_leaves_alone_what_another_user_has_named_as_its_own() -> None:
    job = str(os.getpid())
    path = Path("/dev/shm") / f"mindgrpo-{job}-theirs"
    path.touch()
    try:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                become(ME)
                remove_shared_files(job)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert path.exists()
    finally:
        path.unlink()


def test_no_program_keeps_files_in_tmp_under_a_name_that_others_can_take_first() -> None:
    folders = [ROOT / name for name in ("mindgrpo", "scripts", "examples")]
    paths = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh")
    ]
    named = [path for path in paths if re.search(r"""[\s"'=-]/tmp/\w""", path.read_text())]
    assert len(paths) > 200 and named == []
