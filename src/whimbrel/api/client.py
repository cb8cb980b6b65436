"""The client of the API: the same methods as `App`, the same handles, the same errors, from another process.

Every order carries a unique idempotency key, so the client can safely retry an order that got no answer.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import msgspec

from whimbrel.api.problems import error_of
from whimbrel.core.errors import Refused, Retry, Unavailable
from whimbrel.orchestrator.handle import outcome_of
from whimbrel.orchestrator.orders import (
    Checkpoint,
    InstanceStatus,
    MigrationStatus,
    Receipt,
    Route,
    SiteStatus,
    StageStatus,
)
from whimbrel.orchestrator.plan import read_plan
from whimbrel.rpc.access import OPERATING, Credential, Secret, find_url, value_of

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
LOOK = 10.0
"""The most seconds that one call waits for a migration."""
TRIES = 3
"""How often a call without an answer is tried."""
PAUSE = 0.2
"""Seconds before a call is retried."""
AWAY = 30.0
"""Seconds that the application may be unreachable during a wait: it may be restarting."""


class Client:
    """A client of a running application. Created by `connect`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """The status as plain data."""
        return self._get(dict[str, Any], "status")

    def sites(self) -> list[SiteStatus]:
        """The sites, with their instances, keys and state."""
        return self._get(list[SiteStatus], "sites")

    def stages(self) -> list[StageStatus]:
        """The stages, with their instances."""
        return self._get(list[StageStatus], "stages")

    def routes(self, stage: str, apart: int = 100) -> list[Route]:
        """What each instance of a stage owns; with at most `apart` names of individually routed keys."""
        return self._get(list[Route], "stages", stage, "routes", apart=apart)

    # ── Migrations ───────────────────────────────────────────────────────────────────────────────────────────────

    def migrate(
        self,
        stage: str,
        *,
        to: str,
        keys: Iterable[str] | None = None,
        bins: Iterable[int] | None = None,
        **options: Any,
    ) -> RemoteHandle:
        """Move keys of a stage to a site, while it runs; options as in `App.migrate`."""
        some = {
            "keys": None if keys is None else [keys] if isinstance(keys, str) else list(keys),
            "bins": None if bins is None else list(bins),
        }
        return self._order(["migrations"], {"stage": stage, "to": to, **some, **read_plan(options)})

    def scale(self, stage: str, *, instances: int, at: str, **options: Any) -> RemoteHandle:
        """Distribute the keys of a stage at a site over `instances` instances; options as in `App.scale`."""
        return self._order(["stages", stage, "scale"], {"instances": instances, "at": at, **read_plan(options)})

    def drain(self, site: str, *, to: Iterable[str] | None = None, **options: Any) -> RemoteHandle:
        """Move everything away from a site: to these sites, or all others; options as in `App.drain`."""
        others = None if to is None else [to] if isinstance(to, str) else list(to)
        return self._order(["sites", site, "drain"], {"to": others, **read_plan(options)})

    def _order(self, path: Sequence[str], body: Mapping[str, Any]) -> RemoteHandle:
        given = {name: value for name, value in body.items() if value is not None}
        receipt = self._post(Receipt, *path, body=given)
        return RemoteHandle(self, receipt.ids, receipt.why)

    def migrations(self) -> list[MigrationStatus]:
        """All migrations, in the order in which they were ordered."""
        return self._get(list[MigrationStatus], "migrations")

    def migration(self, id: str, wait: float = 0, *, warm: bool = False) -> MigrationStatus:
        """A migration: now, or when it is over (or warm), but after `wait` seconds at the latest."""
        return self._get(MigrationStatus, "migrations", id, wait=wait, warm=warm)

    def handle(self, *ids: str) -> RemoteHandle:
        """A handle on migrations that were ordered before."""
        return RemoteHandle(self, list(ids))

    def story(self, id: str) -> list[str]:
        """The events of a migration, one per line."""
        return self._get(list[str], "migrations", id, "story")

    def abort(self, id: str, reason: str = "called off") -> MigrationStatus:
        """Abort a migration. After its point of no return the migration completes instead."""
        return self._post(MigrationStatus, "migrations", id, "abort", body={"reason": reason})

    def take_over(self, id: str) -> MigrationStatus:
        """Let a warm standby take over its keys."""
        return self._post(MigrationStatus, "migrations", id, "take_over")

    def cut(self, site: str, other: str) -> None:
        """Cut the link between two sites, in both directions."""
        self._post(Receipt, "links", "cut", body={"site": site, "other": other})

    def mend(self, site: str, other: str) -> None:
        """Restore the link between two sites."""
        self._post(Receipt, "links", "mend", body={"site": site, "other": other})

    # ── One instance ─────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self, instance: str) -> InstanceStatus:
        """Let an instance finish its batch, then pause it; its records wait in its inbox."""
        return self._post(InstanceStatus, "instances", instance, "pause")

    def resume(self, instance: str) -> InstanceStatus:
        """Resume an instance; returns when it serves."""
        return self._post(InstanceStatus, "instances", instance, "resume")

    def state(self, instance: str) -> InstanceStatus:
        """The current state of an instance."""
        return self._get(InstanceStatus, "instances", instance, "state")

    def checkpoint(self, instance: str) -> Checkpoint:
        """Where the checkpoint of an instance is, and its last batch."""
        return self._get(Checkpoint, "instances", instance, "checkpoint")

    def save(self, instance: str) -> Checkpoint:
        """Order an increment of an instance, and of its whole stage, to the central store now.

        Returns when it is ordered; the number of the checkpoint in `status()` grows when it is done.
        """
        return self._post(Checkpoint, "instances", instance, "checkpoint")

    def invoke(self, instance: str, site: str, checkpoint: int | None = None) -> RemoteHandle:
        """Restore all keys of an instance at another instance of a site, from saved state: the newest versions, or
        those of a checkpoint."""
        return self._order(["instances", instance, "invoke"], {"site": site, "checkpoint": checkpoint})

    def detach(self, instance: str) -> RemoteHandle:
        """Remove an instance from its stage: its keys move to others, then it stops."""
        return self._order(["instances", instance, "detach"], {})

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, kind: type[T], *path: str, **query: Any) -> T:
        return self._call("GET", path, kind, params=query)

    def _post(self, kind: type[T], *path: str, body: Mapping[str, Any] | None = None) -> T:
        headers = {"Idempotency-Key": uuid4().hex}
        return self._call("POST", path, kind, headers=headers, **({} if body is None else {"content": _json(body)}))

    def _call(self, method: str, path: Sequence[str], kind: type[T], **more: Any) -> T:
        import httpx

        place = "/" + "/".join(quote(part, safe="") for part in path)
        failed, retry_until = 0, time.monotonic() + AWAY
        while True:
            try:
                answer = self._http.request(method, place, **more)
            except httpx.TransportError as error:  # the answer may be lost: the call has an idempotency key
                failed += 1
                if failed == TRIES:
                    raise Unavailable(f"{self._http.base_url} does not answer: {error}") from error
                time.sleep(PAUSE * failed)
                continue
            if answer.status_code == 200:
                break
            problem = error_of(answer.status_code, answer.content)
            if type(problem) is not Retry or time.monotonic() > retry_until:
                raise problem
            time.sleep(PAUSE)  # an earlier attempt of this call, whose answer was lost, is still being processed
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the answer is not from Whimbrel: {error}; is the address right?") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<client of {self._http.base_url}>"


class RemoteHandle:
    """An order to migrate, given through the API: watch it, wait for it, abort it."""

    def __init__(self, client: Client, ids: list[str], why: Sequence[str] = ()) -> None:
        self._client, self.ids, self.why = client, ids, list(why)

    @property
    def migrations(self) -> list[MigrationStatus]:
        """The migrations as they are now: one per instance that owned some of the keys."""
        return [self._client.migration(id) for id in self.ids]

    @property
    def is_noop(self) -> bool:
        """Whether there was nothing to do: every key was already at the destination."""
        return not self.ids

    @property
    def outcome(self) -> str:
        """`already there`, `done`, `aborted`, or the current phase."""
        return outcome_of({migration.phase for migration in self.migrations})

    @property
    def progress(self) -> list[str]:
        """The story so far, one line per event."""
        return [line for id in self.ids for line in self._client.story(id)]

    def wait(self, timeout: float | None = None) -> RemoteHandle:
        """Block until the order is over. Raises `Unavailable` on timeout (in seconds); the migrations continue."""
        return self._wait(timeout, warm=False)

    def wait_warm(self, timeout: float | None = None) -> RemoteHandle:
        """Block until a standby is warm, or the order is over. Raises `Unavailable` on timeout (in seconds)."""
        return self._wait(timeout, warm=True)

    def _wait(self, timeout: float | None, *, warm: bool) -> RemoteHandle:
        deadline = None if timeout is None else time.monotonic() + timeout
        for id in self.ids:
            answered, waits = time.monotonic(), True
            while True:
                left = LOOK if deadline is None else max(0.0, min(LOOK, deadline - time.monotonic()))
                left = left if waits else 0.0
                try:
                    found = self._client.migration(id, left, warm=warm)
                except Unavailable:
                    now = time.monotonic()
                    if now - answered > AWAY or (deadline is not None and now > deadline):
                        raise
                    time.sleep(PAUSE)
                    waits = not waits  # the server may have too many waiting calls: then poll without waiting
                    continue
                answered = time.monotonic()
                if found.is_over or (warm and found.is_standby):
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise Unavailable(f"migration {', '.join(self.ids)} is still {self.outcome} after {timeout} s")
                if not waits:
                    time.sleep(PAUSE)
                    waits = True
        return self

    def take_over(self) -> RemoteHandle:
        """Let the warm standbys take over their keys. Raises `Refused` if there is none."""
        standbys = [migration.id for migration in self.migrations if migration.is_standby]
        if not standbys:
            raise Refused(
                f"no standby is waiting here: it is {self.outcome}; order one with protocol='replicate', standby=True"
            )
        for id in standbys:
            self._client.take_over(id)
        return self

    def abort(self, reason: str = "called off") -> RemoteHandle:
        """Abort the migrations. After its point of no return a migration completes instead; see `outcome`."""
        for id in self.ids:
            self._client.abort(id, reason)
        return self

    def __repr__(self) -> str:
        return f"<migration {', '.join(self.ids) or '-'}: {self.outcome}>"


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    data: str | Path | None = None,
    certificate: str | Path | None = None,
    timeout: float = 60.0,
) -> Client:
    """Connect to an application that is served (`App.serve`).

    `data`: its data directory, which holds its address and token, if they are not given; the token is read again when
    it has been rotated. `certificate`: a PEM file with the certificate to trust, if no authority that this machine
    trusts has signed it. `timeout`: seconds that one call may take, in addition to its `wait`.
    """
    if data is None and (url is None or token is None):
        raise Refused("no address: give the url and the token, or the data directory that holds them")
    url = find_url(Path(str(data))) if url is None else url
    credential: Credential = Secret(Path(str(data)) / OPERATING) if token is None else token
    value_of(credential)
    import httpx  # takes 0.1 s: imported only by programs that connect

    from whimbrel.rpc.bearer import Bearer

    try:
        trusted = True if certificate is None else ssl.create_default_context(cafile=certificate)
    except (OSError, ssl.SSLError) as error:
        raise Refused(f"{certificate} is not a certificate: {error}") from error
    headers = {"Content-Type": "application/json"}
    try:
        httpx.Headers({"Authorization": value_of(credential)})  # a header cannot hold every text
        http = httpx.Client(
            base_url=url,
            auth=Bearer(credential),
            headers=headers,
            timeout=timeout + LOOK,
            verify=trusted,
            trust_env=False,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise Refused(f"{url!r} is not an address, or the token is invalid: {error}") from error
    if http.base_url.scheme not in ("http", "https") or not http.base_url.host:
        raise Refused(f"{url!r} is not an address: it must begin with http:// or https://")
    return Client(http)


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except TypeError as error:
        raise Refused(f"the arguments cannot be encoded as JSON: {error}") from error
