"""The gateway as a process: records enter here and results leave, whether or not the other processes run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from whimbrel.core.names import GATEWAY
from whimbrel.deploy.deployment import agreed
from whimbrel.deploy.ending import end_all
from whimbrel.deploy.life import Heart, new_life, orchestrator_at
from whimbrel.gateway.clock import wall_us
from whimbrel.log.durability import is_power
from whimbrel.log.folder import Logs
from whimbrel.log.lock import lock_role
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, JournalReader
from whimbrel.orchestrator.ports import GatewayBeat, GatewayPort, check_names
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import GatewayRole
from whimbrel.rpc.access import Credential, credential
from whimbrel.rpc.remote import bare, offer
from whimbrel.rpc.server import Server
from whimbrel.rpc.tls import Tls


class GatewayProcess:
    """`whimbrel gateway`."""

    def __init__(self, pipeline: Pipeline, data: Path, orchestrator: str | None = None, tls: Tls | None = None) -> None:
        self._lock = lock_role(data, "gateway")
        self._life, secret = new_life(), credential(data, GATEWAY)
        deployment = agreed(data, pipeline)
        durable = is_power(deployment.durability)
        self.journal = GatewayJournal(data / GATEWAY_JOURNAL, durable)
        self._orchestrator = orchestrator_at(data, secret, orchestrator, tls)
        self.logs = Logs(data / "logs", durable)
        self.role = GatewayRole(
            pipeline,
            self.logs,
            self.journal,
            JournalReader(data / JOURNAL),
            self._orchestrator.receive,
            wall_us,
            keep=deployment.keep,
            max_backlog=deployment.max_backlog,
            reserve=deployment.reserve,
            watch=lambda results, now_us: None,
            store=deployment.store,
            save_every=deployment.save_every,
        )
        self._serve(secret, tls)

    def _serve(self, secret: Credential, tls: Tls | None, host: str = "127.0.0.1", port: int = 0) -> None:
        """Offer the role to the orchestrator, and send it heartbeats, once it starts."""
        api = bare("whimbrel gateway")
        offer(api, GatewayPort, self.role, secret, check_names)
        self.server = Server.between(api, tls, host, port)
        self._heart = Heart(self._beat)

    def start(self) -> None:
        """Start to deliver and to ingest."""
        self.role.start()
        self.server.start()
        self._heart.start()
        self.role.start_feeds()

    def _beat(self) -> None:
        self._orchestrator.beat(GatewayBeat(self._life, self.server.url, self.role.status(), self.role.around.here))

    @property
    def error(self) -> Exception | None:
        """Why the process had to end."""
        return self._heart.error

    def stop(self) -> None:
        """Stop; the content of the logs is delivered at the next start."""
        end_all(self._ends())

    def _ends(self) -> Iterator[Callable[[], object]]:
        yield self._heart.stop
        yield self.server.stop
        yield from self.role.ends()
        yield from self.role.outlet_ends()
        yield from self._ways_end()
        yield self.logs.close
        yield self.journal.close
        yield self._lock.close

    def _ways_end(self) -> Iterator[Callable[[], object]]:
        """The calls that stop what results and records leave by, once no more come."""
        yield from ()
