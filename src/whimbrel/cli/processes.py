"""`whimbrel up`, and the processes that it starts: `orchestrator`, `gateway`, `site`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from whimbrel.core.errors import Conflict, Refused, Retry, WhimbrelError
from whimbrel.core.text import visible
from whimbrel.deploy.deployment import TRIGGER, Deployment, load_job
from whimbrel.deploy.gateway import GatewayProcess
from whimbrel.deploy.life import Process, end_with_input, live
from whimbrel.deploy.logformat import LogSettings
from whimbrel.deploy.orchestrator import OrchestratorProcess, settled_in
from whimbrel.deploy.up import REFUSED, supervise
from whimbrel.host.contract import MICRO_BATCH
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import PROCESS
from whimbrel.roles.gateway import SAVE_EVERY
from whimbrel.roles.site import check_stages
from whimbrel.rpc.peers import DEAD, SUSPECT
from whimbrel.rpc.tls import Tls, tls_of

PIPELINE = "The Python file that makes the pipeline: job.py, or job.py:name."
Job = Annotated[str, typer.Option(help=PIPELINE)]
Data = Annotated[Path, typer.Option(help="The directory that all processes of the deployment share.")]
Sites = Annotated[str, typer.Option(help="The sites, separated by commas; all keys start at the first.")]
Links = Annotated[str, typer.Option(help='The links between the sites, e.g. "delay=100ms,rate=20mbit".')]
Trigger = Annotated[str, typer.Option(help="The minimum interval between batches of an instance.")]
HostName = Annotated[
    str, typer.Option("--host", help='What runs the instances: "micro-batch" (Spark), or "inline" (without a JVM).')
]
Keep = Annotated[bool, typer.Option("--keep", help="Never trim the ingress log.")]
MaxBacklog = Annotated[int, typer.Option(help="The source waits while an inbox holds more records.")]
Store = Annotated[str | None, typer.Option(help="Where states are saved: a directory, or s3://bucket/prefix.")]
SaveEvery = Annotated[float, typer.Option(help="Seconds between two increments.")]
Reserve = Annotated[int, typer.Option(help="Bytes that must be free on a disk; below, no input is accepted.")]
Durability = Annotated[str, typer.Option(help='"process", or "power": acknowledged data survives a power failure.')]
AcceptLoss = Annotated[
    str | None,
    typer.Option(help="Instances whose checkpoint is gone, a,b: they start without the state of their keys."),
]
Suspect = Annotated[float, typer.Option(help="Seconds without a heartbeat until a process is suspect.")]
Dead = Annotated[float, typer.Option(help="Seconds without a heartbeat until it is dead.")]
NoRestore = Annotated[bool, typer.Option("--no-restore", help="Do not restore keys automatically when a site is dead.")]
RestoreTo = Annotated[
    str | None, typer.Option(help="The sites where keys may be restored: a,b. If not given, any other.")
]
Port = Annotated[int, typer.Option(help="The port of the HTTP API; 0: any free port.")]
Url = Annotated[
    str | None, typer.Option("--orchestrator", help="The address of the orchestrator, if not on this machine.")
]
Certificate = Annotated[Path | None, typer.Option(help="TLS: a PEM file, issued for 127.0.0.1.")]
Key = Annotated[Path | None, typer.Option(help="TLS: the key of the certificate.")]
Ca = Annotated[Path | None, typer.Option(help="TLS: the authority that has signed the certificates of all processes.")]
LogFormat = Annotated[str, typer.Option(help="The format of log lines on standard error: text, or json.")]
LogLevel = Annotated[str, typer.Option(help="The lowest level that is logged: debug, info, warning, error.")]
File = Annotated[
    Path | None,
    typer.Option(help="The deployment file, if every site is a place of its own: places, addresses, homes."),
]
Keys = Annotated[Path | None, typer.Option(help="The folder that `whimbrel certificates` made for the orchestrator.")]
Chosen = Annotated[Path | None, typer.Option(hidden=True)]
Child = Annotated[bool, typer.Option("--until-input-ends", help="End when the standard input ends.")]


def orchestrator(
    data: Data,
    job: Annotated[str | None, typer.Option(help=PIPELINE)] = None,
    deployment: File = None,
    keys: Keys = None,
    sites: Sites = "cloud,edge-1",
    links: Links = "ideal",
    trigger: Trigger = TRIGGER,
    host: HostName = MICRO_BATCH,
    keep: Keep = False,
    max_backlog: MaxBacklog = 200_000,
    store: Store = None,
    save_every: SaveEvery = SAVE_EVERY,
    reserve: Reserve = RESERVE,
    durability: Durability = PROCESS,
    accept_loss: AcceptLoss = None,
    suspect: Suspect = SUSPECT,
    dead: Dead = DEAD,
    no_restore: NoRestore = False,
    restore_to: RestoreTo = None,
    port: Port = 0,
    certificate: Certificate = None,
    key: Key = None,
    ca: Ca = None,
    addresses: Chosen = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_input_ends: Child = False,
) -> None:
    """Run the orchestrator of a deployment.

    Example: whimbrel orchestrator --job job.py --data DIR --sites cloud,edge-1
    """
    log = LogSettings("orchestrator", log_format, log_level)
    if deployment is not None:
        from whimbrel.deploy.places import orchestrator_of

        lost = _names(accept_loss) if accept_loss else []
        make = orchestrator_of(deployment, addresses, data, keys, port, suspect, dead, lost)
        run_process(make, log, until_input_ends, private=True)
        return
    if job is None:
        raise Refused("nothing to run: give --job FILE, or --deployment FILE")
    there = Deployment(
        _names(sites), links, trigger, keep, max_backlog, _address(store), save_every, reserve, durability, host
    )
    run_process(
        lambda: OrchestratorProcess(
            load_job(job),
            data,
            there,
            port=port,
            suspect=suspect,
            dead=dead,
            restores=not no_restore,
            restore_to=_names(restore_to) if restore_to else (),
            tls=tls_of(certificate, key, ca),
            accept_loss=_names(accept_loss) if accept_loss else (),
        ),
        log,
        until_input_ends,
        private=True,
    )


def gateway(
    job: Job,
    data: Data,
    orchestrator: Url = None,
    certificate: Certificate = None,
    key: Key = None,
    ca: Ca = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_input_ends: Child = False,
) -> None:
    """Run the gateway of a deployment: where records enter and results leave.

    Example: whimbrel gateway --job job.py --data DIR
    """
    make = lambda: GatewayProcess(load_job(job), data, orchestrator, tls_of(certificate, key, ca))  # noqa: E731
    run_process(make, LogSettings("gateway", log_format, log_level), until_input_ends)


def site(
    name: Annotated[str, typer.Argument(help="One of the deployment's sites.")],
    job: Job,
    data: Data,
    host: HostName = MICRO_BATCH,
    orchestrator: Url = None,
    certificate: Certificate = None,
    key: Key = None,
    ca: Ca = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_input_ends: Child = False,
) -> None:
    """Run a site of a deployment: the instances that are to run there.

    Example: whimbrel site edge-1 --job job.py --data DIR
    """

    def make() -> Process:
        if host == MICRO_BATCH:
            from whimbrel.spark.session import launch

            launch()  # the JVM starts while the site's modules are imported
        from whimbrel.deploy.site import SiteProcess

        return SiteProcess(name, load_job(job), data, orchestrator, tls_of(certificate, key, ca), host)

    run_process(make, LogSettings(f"site {name}", log_format, log_level), until_input_ends, private=True)


def up(
    data: Data,
    job: Annotated[str | None, typer.Argument(help=PIPELINE)] = None,
    deployment: File = None,
    sites: Sites = "cloud,edge-1",
    links: Links = "ideal",
    trigger: Trigger = TRIGGER,
    host: HostName = MICRO_BATCH,
    keep: Keep = False,
    max_backlog: MaxBacklog = 200_000,
    store: Store = None,
    save_every: SaveEvery = SAVE_EVERY,
    reserve: Reserve = RESERVE,
    durability: Durability = PROCESS,
    accept_loss: AcceptLoss = None,
    suspect: Suspect = SUSPECT,
    dead: Dead = DEAD,
    no_restore: NoRestore = False,
    restore_to: RestoreTo = None,
    port: Port = 0,
    certificate: Certificate = None,
    key: Key = None,
    ca: Ca = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    until_done: Annotated[bool, typer.Option("--until-done", help="End when everything is delivered.")] = False,
    until_input_ends: Child = False,
) -> None:
    """Run a pipeline as processes: an orchestrator, a gateway, and each site. A process that dies is restarted.

    Ctrl-C ends all; started again with the same directory, the pipeline continues where it stopped.

    With `--deployment` every site is a place: it has a directory, a gateway and a disk of its own below DIR, as on a
    machine of its own. The file says the rest.

    Examples: whimbrel up job.py --sites cloud,edge-1 --data DIR

              whimbrel up --deployment traffic.toml --data DIR
    """
    if deployment is not None:
        if job is not None:
            raise Refused(f"the deployment file names the job, so {job} is one too many: leave it out")
        from whimbrel.cli.places import up_places

        changed = {
            "--sites": sites != "cloud,edge-1",
            "--links": links != "ideal",
            "--trigger": trigger != TRIGGER,
            "--host": host != MICRO_BATCH,
            "--keep": keep,
            "--max-backlog": max_backlog != 200_000,
            "--store": store is not None,
            "--save-every": save_every != SAVE_EVERY,
            "--reserve": reserve != RESERVE,
            "--durability": durability != PROCESS,
            "--no-restore": no_restore,
            "--restore-to": restore_to is not None,
            "--certificate": certificate is not None or key is not None or ca is not None,
        }
        if any(changed.values()):
            name = next(name for name, is_given in changed.items() if is_given)
            raise Refused(f"{name} cannot be combined with --deployment: the deployment file says what it can be")
        settings = ["--port", str(port), "--suspect", str(suspect), "--dead", str(dead)]
        settings += ["--accept-loss", accept_loss] if accept_loss else []
        up_places(deployment, data, log_format, log_level, settings, until_done, until_input_ends)
        return
    if job is None:
        raise Refused("nothing to run: give the file that makes the pipeline, or --deployment FILE")
    tls = tls_of(certificate, key, ca)
    check_stages(load_job(job), host)
    LogSettings("up", log_format, log_level)  # an error in it is reported once, and not by every process
    shared = ["--job", job, "--data", str(data), "--until-input-ends"]
    shared += ["--log-format", log_format, "--log-level", log_level]
    if tls is not None:
        tls.client()  # an error in the files is reported once, and not by every process
        shared += ["--certificate", str(tls.certificate), "--key", str(tls.key), "--ca", str(tls.ca)]
    settings = ["--sites", sites, "--links", links, "--trigger", trigger, "--max-backlog", str(max_backlog)]
    settings += ["--host", host]
    settings += ["--reserve", str(reserve), "--save-every", str(save_every), "--durability", durability]
    settings += ["--accept-loss", accept_loss] if accept_loss else []
    settings += ["--suspect", str(suspect), "--dead", str(dead), "--port", str(port)]
    settings += [*(["--keep"] if keep else []), *(["--store", store] if store is not None else [])]
    settings += [*(["--no-restore"] if no_restore else []), *(["--restore-to", restore_to] if restore_to else [])]
    me = [sys.executable, "-m", "whimbrel"]
    commands = {"orchestrator": [*me, "orchestrator", *shared, *settings], "gateway": [*me, "gateway", *shared]}
    commands |= {f"site {name}": [*me, "site", name, *shared, "--host", host] for name in _names(sites)}
    if host == MICRO_BATCH and _wants_archive():
        _report("sites start in two thirds of the time once `whimbrel warm` has run on this machine")
    if until_input_ends:
        threading.Thread(target=end_with_input, name="parent", daemon=True).start()
    supervise(commands, _report, finished(data, tls) if until_done else lambda: False)


def _wants_archive() -> bool:
    from whimbrel.spark.archive import is_wanted

    return is_wanted()


def _names(sites: str) -> list[str]:
    return [name.strip() for name in sites.split(",")]


def _address(store: str | None) -> str | None:
    """The absolute path of a directory, which is the same for every process."""
    return store if store is None or "://" in store else str(Path(store).resolve())


def _report(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def finished(data: Path, tls: Tls | None) -> Callable[[], bool]:
    """A function that asks the orchestrator at most once per second. Raises if the pipeline can never finish."""
    asked = time.monotonic()
    there = settled_in(data, tls)

    def has_finished() -> bool:
        nonlocal asked
        if time.monotonic() < asked + 1:
            return False
        asked = time.monotonic()
        try:
            failure = there.failure()
            if failure is None:
                return there.has_finished()
        except Retry:
            return False
        raise WhimbrelError(
            f"not everything can be delivered: {failure}; fix that, and run the same command again to continue"
        )

    return has_finished


def run_process(
    make: Callable[[], Process], log: LogSettings, until_input_ends: bool, *, private: bool = False
) -> None:
    """Run a process until it is ended; a refusal ends it with a status that says that a restart cannot help."""
    try:
        live(make, until_input_ends=until_input_ends, private=private, log=log)
    except Conflict:  # the conflicting process may be about to end
        raise
    except Refused as error:
        typer.echo(f"whimbrel: {visible(error, lines=True)}", err=True)
        raise typer.Exit(REFUSED) from error
