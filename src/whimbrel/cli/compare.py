"""`whimbrel bench compare`: protocols side by side, under the same load, on one machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from whimbrel.core.errors import UnknownName
from whimbrel.lab.bench import report
from whimbrel.lab.bench.comparison import Comparison
from whimbrel.lab.bench.oracle import FAULTS
from whimbrel.lab.bench.run import Setting, described
from whimbrel.lab.bench.scenarios import SCENARIOS, candidate, overridden, scenario_named, shortened
from whimbrel.lab.bench.summary import MOVED, RESTORED, STILL, figures

FOLDER = Path("whimbrel-bench")
WIDTH = 140
"""The width of tables that are written to a file."""
WORKLOADS = ("key-count",)
RATIOS = ("stoppage_ms", "peak_ms", "duration_ms", "stabilised_ms", "bytes_sent")
HEADINGS = {
    "stoppage_ms": "stopped ms",
    "peak_ms": "peak ms",
    "duration_ms": "took ms",
    "p99_ratio": "p99 during/before",
    "stabilised_ms": "stable after ms",
    "bytes_sent": "MiB sent",
    "silent": "in silence",
    "intermediate": "intermediate",
    "replay_ms": "replayed ms",
    "commit_ms": "commit ms",
    "batch_ms": "batch ms",
}


def compare(
    scenario: Annotated[str, typer.Option(help=f"One of: {', '.join(SCENARIOS)}.")] = "key-count",
    protocols: Annotated[str, typer.Option(help="Instead of the scenario's: live,pause,push:order=key")] = "",
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(WORKLOADS)}.")] = "key-count",
    keys: Annotated[int | None, typer.Option(min=1, help="Keys.")] = None,
    state_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of state of each key.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Records per second.")] = None,
    share: Annotated[float | None, typer.Option(min=0.001, max=1, help="The share of the keys that moves.")] = None,
    link: Annotated[str | None, typer.Option(help="Between the sites: delay=100ms,rate=20mbit; or none.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="How often each candidate runs.")] = None,
    plots: Annotated[Path, typer.Option(help="The folder for pictures and the result file.")] = FOLDER,
    short: Annotated[bool, typer.Option("--short", help="A few seconds per run: to check that it works.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the records.")] = 1,
) -> None:
    """Compare protocols: the same load and the same move, alternating in one session.

    Example: whimbrel bench compare --protocols live,pause,restart --keys 10000 --rate 2000 --link none
    """
    if workload not in WORKLOADS:
        raise UnknownName("workload", workload, list(WORKLOADS))
    wanted = scenario_named(scenario)
    if short:
        wanted = shortened(wanted)
    given: dict[str, Any] = {"keys": keys, "state_bytes": state_bytes, "rate": rate}
    given = {name: value for name, value in given.items() if value is not None}
    if share is not None:
        given |= {"share": share, "moved": None}
    if link is not None:
        given["link"] = None if link in ("none", "") else link
    wanted = overridden(wanted, given, [candidate(text) for text in protocols.split(",") if text])
    if repeat is not None:
        wanted = msgspec.structs.replace(wanted, repeat=repeat)
    comparison = Comparison(scenario, wanted, seed)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(f"[bold]{scenario}[/]: {wanted.about}")
    if short or given:
        console.print(f"here: {described(wanted.points()[0].parameters)}", highlight=False)
    console.print(f"{len(comparison.plan)} runs after a warm-up; starting Spark ...")
    interrupted = False
    try:
        _run(console, comparison)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted; these are the results so far")
    _conclude(console, comparison, plots, json)
    if interrupted:
        raise KeyboardInterrupt
    if not comparison.held:
        console.print("[bold red]not every run kept every guarantee[/]")
        raise typer.Exit(1)


def _run(console: Console, comparison: Comparison) -> None:
    from whimbrel.spark.session import session

    live = Status("warming up", console=console) if sys.stdout.isatty() else None
    spark = session("whimbrel-bench", extra=comparison.memory)

    def show(number: int, setting: Setting, what: str) -> None:
        if live is not None:
            place = f"run {number} of {len(comparison.plan)}" if number else "warm-up"
            live.update(f"{place}: {setting.label}: {what}")

    def report(number: int, setting: Setting, done: dict[str, Any]) -> None:
        console.print(
            f"{number:3} of {len(comparison.plan)}  {setting.label}: {_described(done)}",
            highlight=False,
            soft_wrap=True,
        )

    shown: AbstractContextManager[Any] = live or nullcontext()
    try:
        with shown:
            comparison.run(spark, show, report)
    finally:
        spark.stop()


def _described(run: dict[str, Any]) -> str:
    """One run as a line."""
    if "error" in run:
        return f"[red]failed[/]: {run['error']}"
    found = figures(run)
    text = [f"{HEADINGS[name]} {_figure(name, found[name])}" for name in _shown(found)]
    broken = [f"[red]{name} {run['records'][name]}[/]" for name in FAULTS if run["records"][name]]
    outcomes = [f"[red]{m['outcome']}: {m['reason']}[/]" for m in run["migrations"] if m["outcome"] != "done"]
    return ", ".join(text + broken + outcomes)


def _conclude(console: Console, comparison: Comparison, plots: Path, json: Path | None) -> None:
    """Print the tables, and write the pictures and files of the finished runs."""
    from whimbrel.lab.bench.charts import draw

    done = comparison.report()
    stem = f"{comparison.name}-{(done['revision'] or 'unversioned')[:12]}"
    done["pictures"] = [str(path) for path in draw(done, plots, stem)] if comparison.runs else []
    result = plots / f"{stem}.json"
    for path in filter(None, (result, json)):
        report.write(done, path)
    if comparison.runs:
        console.print(_summary(done))
        for label, versus in done["ratios"].items():
            for baseline, ratio in versus.items():
                text = ", ".join(f"{HEADINGS[name]} × {ratio[name]:.2f}" for name in RATIOS if name in ratio)
                console.print(f"{label} / {baseline.removeprefix('vs_')}: {text}", highlight=False)
        for text in (*_growth(done.get("growth", {})), *_prices(done.get("restoration", {}))):
            console.print(text, highlight=False)
    if done["published"]:
        console.print(_published(done["published"]))
    console.print("\n".join([*(f"picture: {path}" for path in done["pictures"]), f"report:  {result}"]))


def _growth(growth: dict[str, Any]) -> Iterator[str]:
    """The result of a sweep of sizes, as lines."""
    for label, line in growth.get("fit", {}).items():
        if line:
            slope, besides = f"{line['slope']:.1f} ms for each MiB", f"{line['intercept']:,.0f} ms besides"
            yield f"{label}: {slope} and {besides}, r² {line['r2']:.3f}"
    for label, found in growth.get("staying", {}).items():
        for beside in found:
            times = ", ".join(f"{keys} that stay: {ms:,.0f} ms" for keys, ms in beside["duration_ms"].items())
            yield f"{label}: {beside['moved']:,} keys beside {times}; {beside['ratio']:.2f} ×"
    for size, ms in growth.get("copy_ms", {}).items():
        yield f"a bare copy of {int(size) / 2**20:,.2f} MiB through a log: {ms:,.0f} ms"


def _prices(prices: dict[str, float]) -> Iterator[str]:
    """The costs of restorations, as lines."""
    if prices:
        silent, real = f"{prices['silent_ms']:.3f} ms", f"{prices['intermediate_ms']:.3f} ms"
        yield f"restore: {silent} for each record in silence, {real} for each intermediate one"
        yield f"and {prices['once_ms']:,.0f} ms once, r² {prices['r2']:.3f}; all {prices['record_ms']:.3f} ms a record"


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    """The figures of a move, of a restoration, or, without a move, of the micro-batches."""
    if row["replay_ms"] is not None:
        return (*MOVED[:3], *RESTORED)
    return MOVED if row["duration_ms"] is not None else STILL


def _summary(done: dict[str, Any]) -> Table:
    table = Table(title="Medians")
    shown = _shown(done["cells"][0])
    varied = list(done["cells"][0]["parameters"])
    for column in ("candidate", *varied, "runs", *(HEADINGS[name] for name in shown)):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for row in done["cells"]:
        places = [f"{row['parameters'][name]}" for name in varied]
        table.add_row(row["label"], *places, str(row["runs"]), *(_figure(name, row[name]) for name in shown))
    return table


def _published(lines: list[dict[str, str]]) -> Table:
    table = Table(title="Published, on other machines and engines")
    for column in ("system", "venue", "what", "figure", "condition"):
        table.add_column(column)
    for line in lines:
        figure = f"{line['figure']} {line['unit']}"
        table.add_row(line["system"], line["venue"], line["what"], figure, line["condition"])
    return table


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "bytes_sent":
        return f"{value / 2**20:,.2f}"
    return f"{value:,.2f}" if name == "p99_ratio" else f"{value:,.0f}"
