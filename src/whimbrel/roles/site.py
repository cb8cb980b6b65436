"""The construction of a site's hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from whimbrel.core.errors import UnknownName
from whimbrel.core.increments import STORE
from whimbrel.host.contract import INLINE, Engine, Host, InstanceSpec, Saved, check_host
from whimbrel.host.threaded import InlineEngine, check_stage
from whimbrel.log.disk import Disk
from whimbrel.log.folder import Logs
from whimbrel.pipeline import Pipeline
from whimbrel.site.links import Network
from whimbrel.site.site import Make


def engine_of(host: str, name: str, spark: Any = None) -> Engine:
    """The engine of a kind of host. `name`: of the SparkSession, if it starts one; `spark`: the user's own."""
    if check_host(host) == INLINE:
        return InlineEngine()
    from whimbrel.spark.engine import SparkEngine  # an inline host loads no Spark

    return SparkEngine(name, spark)


def saved_by(host: str) -> Callable[[Path], Saved]:
    """What reads the checkpoints of a kind of host, in a process that runs none."""
    if check_host(host) == INLINE:
        return InlineEngine.saved
    from whimbrel.spark.checkpoint import Checkpoint

    return Checkpoint


def check_stages(pipeline: Pipeline, host: str) -> None:
    """Raise `UnknownName` if there is no such host, and `Refused` if it cannot run a stage of the pipeline."""
    if check_host(host) == INLINE:
        for stage in pipeline.stages:
            check_stage(stage.name, stage.prepare)


def host_maker(
    pipeline: Pipeline,
    logs: Logs,
    engine: Engine,
    links: Network,
    schemas: Mapping[str, pa.Schema],
    trigger: str,
    appended: Callable[[str], None] = lambda stage: None,
) -> Make:
    """A function that makes the host of an instance. `schemas`: by stage, of its input. `appended` is called with the
    stage in which an outbox has a new entry."""
    stages = {stage.name: stage for stage in pipeline.stages}

    def make(instance: str, checkpoint: Path) -> Host:
        name = stage_of(instance)
        if name not in stages:
            raise UnknownName("instance", instance, [])
        stage = stages[name]
        spec = InstanceSpec(
            name=instance,
            stage=name,
            operator=stage.operator,
            schema=schemas[name],
            prepare=stage.prepare,
            groups=stage.groups,
            partitions=stage.partitions,
            trigger=trigger,
        )
        return engine.host(
            spec,
            inbox=logs.path(f"inbox-{instance}"),
            outbox=logs.outbox(instance),
            inbox_of=lambda to: logs.increments(instance) if to == STORE else links.inbox(instance, to),
            checkpoint=checkpoint,
            appended=partial(appended, name),
            durable=logs.durable,
        )

    return make


def site_disk(name: str, data: Path, reserve: int) -> Disk:
    """The disk that a site writes to: its checkpoints, the logs, and temporary files of its hosts."""
    return Disk(name, [data / "sites" / name, data / "logs", Path(tempfile.gettempdir())], reserve)


def stage_of(instance: str) -> str:
    """The stage that an instance belongs to."""
    return instance.rpartition("-")[0]
