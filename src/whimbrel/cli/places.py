"""`whimbrel place`: one place of a deployment; and what `whimbrel up --deployment` starts on one machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from whimbrel.cli.processes import Child, LogFormat, LogLevel, finished, run_process
from whimbrel.cli.screen import echo
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.names import SUPERVISOR
from whimbrel.deploy.deployment import load_job
from whimbrel.deploy.layout import Layout, read_layout
from whimbrel.deploy.life import Process, end_with_input
from whimbrel.deploy.logformat import LogSettings
from whimbrel.deploy.places import (
    GATEWAY,
    SITE,
    all_processes,
    job_of,
    orchestrator_data,
    prepare,
    processes_of,
)
from whimbrel.deploy.up import supervise
from whimbrel.host.contract import MICRO_BATCH
from whimbrel.rpc.tls import Tls

DeploymentFile = Annotated[Path, typer.Option(help="The deployment file, the same at all places.")]
Addresses = Annotated[Path | None, typer.Option(hidden=True)]


def place(
    name: Annotated[str, typer.Argument(help="One of the places in the deployment file.")],
    deployment: DeploymentFile,
    data: Annotated[Path | None, typer.Option(help="Its directory, instead of the one in the file.")] = None,
    keys: Annotated[Path | None, typer.Option(help="The folder that `whimbrel certificates` made for it.")] = None,
    orchestrator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the orchestrator, instead of the one in the file.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="Run only its gateway, or only its site, in this process.")] = None,
    addresses: Addresses = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_input_ends: Child = False,
) -> None:
    """Run a place of a deployment: its gateway and its site. A process that dies is restarted.

    A place works while all others are away. Started again, it continues where it stopped.

    Example: whimbrel place edge-1 --deployment traffic.toml --data /var/lib/whimbrel --keys keys/edge-1
    """
    layout = read_layout(deployment, addresses)
    if name not in layout.places:
        raise UnknownName("place", name, list(layout.places))
    if orchestrator is not None:
        layout = msgspec.structs.replace(
            layout, orchestrator=msgspec.structs.replace(layout.orchestrator, address=orchestrator)
        )
    if not layout.places[name].endpoint[1]:
        raise Refused(f'{name} needs an address: address = "HOST:PORT" in its table of the deployment file')
    folder, secrets = _folder(layout, name, data), _keys(layout, name, keys)
    if role is not None:
        _run(
            name,
            layout,
            deployment,
            folder,
            secrets,
            role,
            LogSettings(f"{role} {name}", log_format, log_level),
            until_input_ends,
        )
        return
    shared = ["--deployment", str(deployment), "--data", str(folder), "--keys", str(secrets), "--until-input-ends"]
    shared += ["--log-format", log_format, "--log-level", log_level]
    shared += ["--orchestrator", orchestrator] if orchestrator is not None else []
    shared += ["--addresses", str(addresses)] if addresses is not None else []
    if until_input_ends:
        threading.Thread(target=end_with_input, name="parent", daemon=True).start()
    supervise(processes_of(name, shared), echo, lambda: False)


def _folder(layout: Layout, name: str, given: Path | None) -> Path:
    found = given or (Path(entry) if (entry := layout.places[name].data) else None)
    if found is None:
        raise Refused(f"{name} needs a directory: give --data DIR, or data = in its table of the deployment file")
    return found


def _keys(layout: Layout, name: str, given: Path | None) -> Path:
    if given is None and layout.tls is None:
        raise Refused(
            f"{name} needs the folder with its certificate: give --keys DIR, or [tls] folder = in the deployment file; "
            "`whimbrel certificates` makes it"
        )
    found = given if given is not None else Path(layout.tls.folder if layout.tls else "") / name
    if not (found / "certificate.pem").exists():
        raise Refused(f"{found} has no certificate.pem: make it with `whimbrel certificates`, and copy its folder here")
    return found


def _run(
    name: str, layout: Layout, file: Path, data: Path, keys: Path, role: str, log: LogSettings, until_input_ends: bool
) -> None:
    def make() -> Process:
        from whimbrel.deploy.place import Place, PlaceGateway, PlaceSite

        if role == GATEWAY:
            return PlaceGateway(Place(name, layout, load_job(job_of(layout, file)), data, keys))
        if role != SITE:
            raise UnknownName("role", role, [GATEWAY, SITE])
        if layout.host == MICRO_BATCH:
            from whimbrel.spark.session import launch

            launch()  # the JVM starts while the site's modules are imported
        return PlaceSite(Place(name, layout, load_job(job_of(layout, file)), data, keys))

    run_process(make, log, until_input_ends, private=True)


def up_places(
    file: Path,
    data: Path,
    log_format: str,
    log_level: str,
    settings: Sequence[str],
    until_done: bool,
    until_input_ends: bool,
) -> None:
    """Run all processes of a deployment on this machine, each place in a directory of its own. `settings`: options of
    the orchestrator."""
    LogSettings("up", log_format, log_level)  # an error in it is reported once, and not by every process
    layout, addresses, keys = prepare(file, data)
    load_job(job_of(layout, file))
    own = orchestrator_data(layout, data)
    log = ["--log-format", log_format, "--log-level", log_level]
    there = all_processes(layout, file, data, addresses, keys, log, settings)
    echo(f"the orchestrator is in {own}: whimbrel status --data {own}")
    if until_input_ends:
        threading.Thread(target=end_with_input, name="parent", daemon=True).start()
    supervise(there, echo, finished(own, Tls.of(keys / SUPERVISOR)) if until_done else lambda: False)
