"""The checks: invariants after every step, and at the end a comparison with a sequential run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import msgspec

from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERYTHING
from whimbrel.core.names import place_of
from whimbrel.core.record import Evicted, Kind, Result
from whimbrel.host.inline import InlineHost
from whimbrel.lab.sim.actors import Actor, InstanceActor, Violation
from whimbrel.lab.sim.egress import OutletActor
from whimbrel.lab.sim.ingress import GatewayActor
from whimbrel.lab.sim.job import Job
from whimbrel.lab.sim.oracle import Oracle
from whimbrel.lab.sim.world import World


class Invariants:
    """Cheap checks after every step: they detect an error where it happens, not where it becomes visible.

    Each check runs only after a step of an actor that can violate it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.emitter: dict[tuple[str, int], str] = {}
        self.read = dict.fromkeys(world.outboxes, 0)
        self.epochs: dict[str, dict[str, int]] = {place: {} for place in world.places}
        self.looked = dict.fromkeys(world.gateways, 0)
        """By gateway: how much of its ingress log has been looked at."""
        self.lives: dict[str, tuple[bool, InlineHost]] = {}
        self.asked: dict[str, tuple[list[Instance], int]] = {}
        self.shared: dict[str, set[str]] = {}
        """By key that several instances hold: these instances. `asked`: by instance inspected for it, its parts and its
        last batch. Only a step of its own, or a restart, changes them; `lives` shows whether another was restarted."""

    def __call__(self, actor: Actor) -> None:
        """Check the state that the actor may have changed."""
        if self.world.saves:
            self.world.store.note()
        if isinstance(actor, GatewayActor):
            self._known_keys(actor)
            return
        if isinstance(actor, InstanceActor):
            self._one_emitter(actor.name, actor.spoken)
        elif isinstance(actor, OutletActor) and actor.committed != self.epochs[actor.place]:
            self._growing_epochs(actor.place, actor.committed)
        self._one_holder(actor)

    def _known_keys(self, gateway: GatewayActor) -> None:
        """A gateway knows the key of every record in its ingress log, whenever it died."""
        if not gateway.is_there:
            return
        history, start = gateway.ingress.history, self.looked[gateway.name]
        taken = {one.key for _, records in history[start:] for one in records if one.kind == Kind.DATA}
        if unknown := taken - gateway.gateway.keys.keys():
            raise Violation("lost", f"{gateway.name} does not know {sorted(unknown)}, whose records are in its log")
        self.looked[gateway.name] = len(history)

    def _one_emitter(self, name: str, spoken: list[Result]) -> None:
        """At most one instance emits for a key in an epoch."""
        if len(spoken) == self.read[name]:
            return
        for result in spoken[self.read[name] :]:
            if self._is_fenced(name, result):
                continue
            first = self.emitter.setdefault((result.key, result.epoch), name)
            if first != name:
                raise Violation("one emitter", f"{first} and {name} both emit {result.key} in epoch {result.epoch}")
        self.read[name] = len(spoken)

    def _is_fenced(self, name: str, result: Result) -> bool:
        """Whether an instance without its state, which has not read that it lost its keys, emits what gates refuse."""
        is_renewed = self.world.instances[name].lives > 1
        return is_renewed and all(result.epoch < epochs.get(result.key, 0) for epochs in self.epochs.values())

    def _one_holder(self, actor: Actor) -> None:
        """One instance holds a key's state, or both ends of a move that copies do; state left over by an abort does
        not count."""
        asked = dict(self.asked)
        for name, one in self.world.instances.items():
            life = one.alive, one.host
            if one is actor or self.lives.get(name) != life:
                self.lives[name] = life
                asked.pop(name, None)
                if one.alive and one.is_whole:  # one that repeats a batch has the state from before it
                    asked[name] = one.parts, one.batch
        if asked != self.asked:
            self.asked = asked
            self.shared = _shared(asked)
        if not self.shared or not self.world.coordinator.alive:
            return
        unsettled = list(self.world.coordinator.coordinator.open.values())
        for key, names in self.shared.items():
            concerned = [migration for migration in unsettled if key in migration.move.selection]
            ends = [{m.move.source, m.move.destination} for m in concerned if not m.is_over and not m.move.switch]
            names = names - {migration.move.destination for migration in concerned if migration.is_over}
            if len(names) > 1 and names not in ends:
                names = {name for name in names if not self._is_clearing(name)}
                if len(names) > 1 and names not in ends:
                    raise Violation("one holder", f"{key} is held by {sorted(names)}")

    def _is_clearing(self, name: str) -> bool:
        """Whether an instance may still hold state of keys that were restored elsewhere."""
        return any(
            migration.move.protocol == "restore" and name in migration.move.parties
            for migration in self.world.coordinator.coordinator.migrations.values()
            if migration.has_begun and not migration.has_received(Evicted, name)
        )

    def _growing_epochs(self, place: str, committed: dict[str, int]) -> None:
        """The epoch that a gate accepts for a key never decreases."""
        before = self.epochs[place]
        for key, epoch in committed.items():
            if epoch < before.get(key, 0):
                raise Violation("growing epochs", f"{key} went from epoch {before[key]} to {epoch}")
        self.epochs[place] = committed


def _shared(instances: dict[str, tuple[list[Instance], int]]) -> dict[str, set[str]]:
    """By key that more than one instance holds: these instances."""
    held = [part.table.entries for parts, _ in instances.values() for part in parts]
    if len(set().union(*held)) == sum(map(len, held)):
        return {}
    holders: dict[str, set[str]] = defaultdict(set)
    for name, (parts, _) in instances.items():
        for key in (key for part in parts for key in part.table.entries):
            holders[key].add(name)
    return {key: names for key, names in holders.items() if len(names) > 1}


def check_end(world: World) -> None:
    """Check that every record takes effect exactly once, in its key's order, with the results of a sequential run."""
    gone = {name for name, actor in world.instances.items() if actor.gone}
    unsettled = [
        m for m in world.coordinator.coordinator.open.values() if not m.is_over or m.move.destination not in gone
    ]
    if unsettled:
        raise Violation("settled", f"{unsettled[0].move.id} is still {unsettled[0].phase}")
    for gateway in world.gateways.values():
        _check_passed_on(world, gateway) if world.spread.enters else _check_taken_in(gateway)
    expected = Oracle(remembers=world.saves)
    expected.follow(world)
    got: dict[str, list[Any]] = defaultdict(list)
    for place, outlet in world.outlets.items():
        _check_place(world, place)
        for result in outlet.delivered:
            got[result.key].append((result.seq, result.n, result.values))
        if outlet.gate.held or outlet.gate.early:
            raise Violation("lost", f"the gate still holds results of {sorted(outlet.gate.held)}, or closings")
    for key in world.keys:
        found = sorted(got[key], key=lambda one: one[:2]) if world.spread.how == "each" else got[key]
        _compare(key, found, expected.results[key])
    _check_store(world, expected)
    parked = [letter for outlet in world.outlets.values() for letter in outlet.parked]
    letters = Counter((letter.key, letter.seq, letter.error, letter.event) for letter in parked)
    if letters != expected.letters:
        missing, extra = expected.letters - letters, letters - expected.letters
        raise Violation("parked", f"dead letters missing {sorted(missing)[:3]}, too many {sorted(extra)[:3]}")
    for name, actor in world.instances.items():
        if name in gone:
            continue
        if not actor.running or actor.host.has_work:
            raise Violation("settled", f"{name} is stopped, or has not read its inbox to the end")
        if any(part.moves.evictions for part in actor.parts):
            raise Violation("settled", f"{name} still waits for routers to stop sending it records")
        if any(part.table.waiting or part.moves.open for part in actor.parts):
            raise Violation("settled", f"{name} still has a move open")
        if any(part.table.stashed or part.table.gathered for part in actor.parts):
            raise Violation("settled", f"{name} still has pieces of a state")
        if any(part.table.replicas or part.moves.replications or part.moves.standbys for part in actor.parts):
            raise Violation("settled", f"{name} still has a standby's copies")
        if any(part.moves.aborted for part in actor.parts):
            raise Violation("settled", f"{name} still has an entry of an aborted move")


def _check_place(world: World, place: str) -> None:
    """Check that a place has no results that belong elsewhere, and those of each key in their order."""
    delivered, spread = world.outlets[place].delivered, world.spread
    if spread.how == "homes":
        strange = {result.key for result in delivered if spread.receivers[result.key] != place}
    elif spread.how == "each":
        here = [actor for name, actor in world.instances.items() if spread.place_of(name) == place]
        made = {(result.key, result.epoch) for actor in here for result in actor.spoken}
        strange = {result.key for result in delivered if (result.key, result.epoch) not in made}
    else:
        return
    if strange:
        raise Violation("wrong", f"{place} has results of {sorted(strange)} that belong elsewhere")
    for key in world.keys:
        places = [(result.seq, result.n) for result in delivered if result.key == key]
        if places != sorted(places):
            raise Violation("out of order", f"{key} at {place}: {places}")


def _check_taken_in(gateway: GatewayActor) -> None:
    """Check that all acknowledged records are in the ingress log, once and in order."""
    entries = [records for _, records in gateway.ingress.history if records[0].kind == Kind.DATA]
    taken = [[(record.key, record.body) for record in records] for records in entries]
    given = [[(key, event) for key, event, _ in events] for events in gateway.acknowledged]
    if taken != given:
        what = "lost" if len(taken) < len(given) else "duplicated"
        raise Violation(what, f"{gateway.name} acknowledged {len(given)} entries, its log has {len(taken)}")


def _check_passed_on(world: World, entered: GatewayActor) -> None:
    """Check that all records acknowledged at an entrance are in the logs of their homes, once and in order."""
    for home in world.gateways.values():
        writer = "devices" if home is entered else f"devices@{place_of(entered.name)}"
        taken = [(record.key, record.body) for records in home.ingress.by_writer[writer] for record in records]
        rows = [(key, event) for events in entered.acknowledged for key, event, _ in events]
        given = [row for row in rows if world.homes[row[0]] == home.name]
        if taken != given:
            what = "lost" if len(taken) < len(given) else "duplicated"
            raise Violation(what, f"{home.name} has {len(taken)} records of {entered.name}, {len(given)} entered there")


def _check_store(world: World, expected: Oracle) -> None:
    """Check that every version is its key's state as of its seq, and the newest has all changes up to the horizon."""
    for version in world.store.whole():
        key_state = version.unpacked()
        state = msgspec.msgpack.decode(key_state.state, type=Job.State)
        past = [(then, timers) for seq, then, timers in expected.past[version.key] if seq <= version.seq]
        if not past or past[-1] != (state, key_state.timers):
            raise Violation("wrong", f"{version.key} never had the state {state} of its version at seq {version.seq}")
    newest = world.store.newest(EVERYTHING) if world.saves else {}
    for name in world.store.of_bases():
        with world.store.without(name):
            if world.store.newest(EVERYTHING) != newest:
                raise Violation("lost", f"versions of {name} are nowhere else")
    if not world.saves:
        return
    (gateway,) = world.gateways.values()
    covered = [*world.store.covered, (gateway.horizon(), {key: version.seq for key, version in newest.items()})]
    for horizon, seqs in covered:
        for key in gateway.mine:
            due = [seq for seq, _, _ in expected.past[key] if seq <= horizon]
            if due and seqs.get(key, -1) < due[-1]:
                raise Violation("lost", f"{key} is covered up to seq {horizon}, but no version includes {due[-1]}")


def _compare(key: str, got: list[Any], expected: list[Any]) -> None:
    if got == expected:
        return
    ids, wanted = [g[:2] for g in got], [e[:2] for e in expected]
    if len(set(ids)) < len(ids):
        raise Violation("duplicated", f"{key}: {sorted(i for i in set(ids) if ids.count(i) > 1)}")
    if set(wanted) - set(ids):
        raise Violation("lost", f"{key}: {sorted(set(wanted) - set(ids))}")
    if set(ids) - set(wanted):
        raise Violation("wrong", f"{key}: unexpected results {sorted(set(ids) - set(wanted))}")
    if ids != wanted:
        raise Violation("out of order", f"{key}: {_first(ids, wanted)}")
    raise Violation("wrong", f"{key}: {_first(got, expected)}")


def _first(got: list[Any], expected: list[Any]) -> str:
    one, other = next(pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1])
    return f"{one} instead of {other}"
