"""A data directory is for its owner alone: every folder 0700, every file 0600, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.waiting import until
from tests.faults.children import ROOT, Child
from tests.rest.house import served
from whimbrel.log import EmbeddedLog
from whimbrel.log.large import LARGE
from whimbrel.log.lock import lock_all
from whimbrel.log.private import replace_text
from whimbrel.log.spool import IncrementSpool
from whimbrel.orchestrator.journal import Journal


@pytest.fixture(autouse=True)
def loose() -> Iterator[None]:
    """A umask that lets everybody read and write."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """What others may do in or with everything that lies in a folder, if anything."""
    found = {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
    assert found
    return {name: mode for name, mode in found.items() if mode & 0o077}


def test_an_application_lets_nobody_else_look(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with served(data, store=str(tmp_path / "store")) as house:
        house.post("/migrations", {"stage": "count", "to": "edge-1"})
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
        assert modes(data) == {}
        kinds = {path.name.rpartition(".db")[2] for path in data.rglob("*.db*") if path.is_file()}
        assert kinds >= {"", "-wal", "-shm"}, "SQLite's own files are among those that were looked at"
        assert {"token", "url", "lock", "journal.db", "logs", "sites"} <= {path.name for path in data.iterdir()}


def test_every_kind_of_file_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with lock_all(folder):
        Journal(folder / "journal.db").close()
        log = EmbeddedLog(folder / "logs" / "savings-s-1.db")
        IncrementSpool(log, folder / "logs" / "savings-s-1").append(bytes(LARGE), count=1, writer="w", counter=1)
        replace_text(folder / "url", "http://127.0.0.1:1")
        assert modes(folder) == {}
        assert len(list(folder.rglob("*"))) >= 8


def test_a_directory_that_lets_others_in_is_tightened_unless_it_holds_other_things(tmp_path: Path) -> None:
    for name in ("new", "used", "shared"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "used" / "journal.db").touch()
    (tmp_path / "shared" / "thesis.pdf").touch()
    for name in ("new", "used"):
        with lock_all(tmp_path / name):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    for _ in range(2):
        with pytest.warns(UserWarning, match="other users can access"), lock_all(tmp_path / "shared"):
            assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755


def test_the_umask_of_a_users_process_is_left_alone(tmp_path: Path) -> None:
    with served(tmp_path / "data"):
        assert os.umask(0) == 0


def umask(child: Child) -> int:
    """The umask of a process; -1 if it has ended."""
    status = Path(f"/proc/{child.process.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), -1)


def test_processes_that_write_nothing_for_others_have_a_strict_umask(tmp_path: Path) -> None:
    """The gateway writes results, which are the user's files: only what it keeps for itself is private."""
    data, job = tmp_path / "data", ROOT / "tests" / "processes" / "job.py"
    children: dict[str, Child] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIMBREL_TEST_FOLDER", str(tmp_path))
        for role in (["orchestrator"], ["gateway"], ["site", "cloud"]):
            command = ["-m", "whimbrel", *role, "--job", job, "--data", data]
            children[role[0]] = Child(*command, cwd=tmp_path)
            if role == ["orchestrator"]:
                until(lambda: (data / "url").exists(), f"it serves; {children['orchestrator'].told()}", 100)
    try:
        until(lambda: umask(children["site"]) == 0o077, f"a site is strict; {children['site'].told()}", 100)
        until(lambda: (data / "gateway.lock").exists(), f"the gateway runs; {children['gateway'].told()}", 100)
        assert umask(children["orchestrator"]) == 0o077
        assert umask(children["gateway"]) == 0
        assert modes(data) == {}
    finally:
        for child in children.values():
            child.kill()
