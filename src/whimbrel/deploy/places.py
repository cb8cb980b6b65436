"""A deployment of places: what its orchestrator is made of, and what a deployment on one machine needs to start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from whimbrel.core.errors import Refused
from whimbrel.core.names import SUPERVISOR
from whimbrel.deploy.deployment import TRIGGER, Deployment, load_job
from whimbrel.deploy.layout import Layout, choose_addresses, homes_of, read_layout
from whimbrel.deploy.orchestrator import OrchestratorProcess
from whimbrel.log.private import make_folder
from whimbrel.rpc.access import share_credentials
from whimbrel.rpc.tls import Tls
from whimbrel.transport.certificates import Authority

GATEWAY, SITE = "gateway", "site"
"""The roles of a place: a process each."""


def orchestrator_of(
    file: Path,
    addresses: Path | None,
    data: Path,
    keys: Path | None,
    port: int,
    suspect: float,
    dead: float,
    accept_loss: Collection[str] = (),
) -> Callable[[], OrchestratorProcess]:
    """A function that makes the orchestrator of a deployment file."""
    layout = read_layout(file, addresses)
    if layout.store is not None:
        raise Refused(f"{file}: a central store serves one place only at present; leave [store] out")
    if not layout.orchestrator.endpoint[1]:
        raise Refused(f'{file}: the orchestrator needs an address: [orchestrator] address = "HOST:PORT"')
    folder = keys if keys is not None else Path(layout.tls.folder) / SUPERVISOR if layout.tls is not None else None
    if folder is None:
        raise Refused("the orchestrator needs its certificate: give --keys DIR; `whimbrel certificates` makes it")

    def make() -> OrchestratorProcess:
        pipeline = load_job(job_of(layout, file))
        return OrchestratorProcess(
            pipeline,
            data,
            Deployment(
                list(layout.places),
                trigger=layout.trigger or TRIGGER,
                durability=layout.durability,
                host=layout.host,
            ),
            port=port,
            suspect=suspect,
            dead=dead,
            tls=Tls.of(folder),
            accept_loss=accept_loss,
            homes=homes_of(pipeline, layout),
            links={pair: link for pair, link in layout.links.items() if pair == tuple(sorted(pair))},
            keys=folder,
            endpoint=layout.orchestrator.endpoint,
        )

    return make


def job_of(layout: Layout, file: Path) -> str:
    """The pipeline's file: its path in a deployment file is relative to that file."""
    return str(file.resolve().parent / layout.job)


# ── On one machine ───────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(file: Path, data: Path) -> tuple[Layout, Path, Path]:
    """What a deployment on this machine needs before it starts: the layout, the file with the chosen ports, and the
    folder with certificates and credentials, made unless the layout names one."""
    make_folder(data)
    addresses = data / "addresses.json"
    choose_addresses(read_layout(file), addresses)
    layout = read_layout(file, addresses)
    if layout.tls is not None:
        return layout, addresses, Path(layout.tls.folder)
    keys = make_folder(data / "keys")
    authority = Authority(keys)
    for name in [*layout.places, SUPERVISOR]:
        authority.issue(name)
    share_credentials(keys, layout.places)
    return layout, addresses, keys


def processes_of(place: str, shared: Sequence[str]) -> dict[str, list[str]]:
    """By name: the commands of the processes of a place."""
    me = [sys.executable, "-m", "whimbrel", "place", place]
    return {f"{role} {place}": [*me, "--role", role, *shared] for role in (GATEWAY, SITE)}


def all_processes(
    layout: Layout, file: Path, data: Path, addresses: Path, keys: Path, log: Sequence[str], settings: Sequence[str]
) -> dict[str, list[str]]:
    """By name: the commands of all processes, each place in a directory of its own."""
    shared = ["--deployment", str(file), "--addresses", str(addresses), "--until-input-ends", *log]
    me = [sys.executable, "-m", "whimbrel"]
    own = ["--data", str(orchestrator_data(layout, data)), "--keys", str(keys / SUPERVISOR)]
    found = {SUPERVISOR: [*me, SUPERVISOR, *own, *shared, *settings]}
    for name, entry in layout.places.items():
        folder = Path(entry.data) if entry.data else data / name
        found |= processes_of(name, ["--data", str(folder), "--keys", str(keys / name), *shared])
    return found


def orchestrator_data(layout: Layout, data: Path) -> Path:
    """The directory of the orchestrator of a deployment on this machine."""
    return Path(layout.orchestrator.data) if layout.orchestrator.data else data / SUPERVISOR
