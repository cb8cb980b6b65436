"""`whimbrel bench`: measure, on this machine, in one run."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from whimbrel.cli.compare import compare
from whimbrel.lab.bench import report

bench = typer.Typer(name="bench", help="Measure on this machine, candidates against each other.", no_args_is_help=True)
bench.command()(compare)


@bench.command()
def throughput(
    keys: Annotated[int, typer.Option(min=1, help="Keys.")] = 10_000,
    rows: Annotated[int, typer.Option(min=1, help="Rows to measure, after a warm-up.")] = 100_000,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows per micro-batch.")] = 20_000,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="Written to the report; the rows do not depend on it.")] = 1,
) -> None:
    """Whimbrel against stock PySpark: the same keyed count, one result per record, alternating in one session.

    Example: whimbrel bench throughput --keys 10000 --rows 100000
    """
    from whimbrel.lab.bench.throughput import throughput as measure
    from whimbrel.spark.session import BOTH_COMPILERS, brief_session

    console = Console()
    console.print(f"{keys:,} keys, batches of {batch_rows:,} rows; starting Spark ...")
    with brief_session("whimbrel-bench", extra=BOTH_COMPILERS) as (spark, folder):
        figures = measure(spark, folder, keys=keys, rows=rows, batch_rows=batch_rows, warm_up=5)
    table = Table(title=f"{batch_rows:,} rows a micro-batch, {keys:,} keys")
    for column in ("candidate", "median batch, ms", "rows/s"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for name, ms in figures["batch_ms"].items():
        table.add_row(name, f"{ms:,.0f}", f"{figures['rows_per_s'][name]:,}")
    console.print(table)
    for name, ratio in figures["ratio"].items():
        console.print(f"{ratio} × {name.removeprefix('vs_')}")
    if json is not None:
        report.write({**report.heading(seed), **figures}, json)
    if not figures["results_equal"]:
        console.print("[bold red]the candidates' results differ[/]")
        raise typer.Exit(1)


@bench.command()
def overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Batches of the processor alone, in this process.")] = 150,
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches through Spark.")] = 30,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="Written to the report; the rows do not depend on it.")] = 1,
) -> None:
    """The cost of migratability while nothing moves: the group processor with and without the code for moves.

    Example: whimbrel bench overhead
    """
    from whimbrel.lab.bench.overhead import in_process, through_spark
    from whimbrel.spark.session import brief_session

    console = Console()
    alone = in_process(rounds)
    _print_ratio(console, "the processor alone", alone)
    with brief_session("whimbrel-bench") as (spark, folder):
        whole = through_spark(spark, folder, batches)
    _print_ratio(console, "micro-batches through Spark", whole)
    if json is not None:
        figures = {"ratio": alone["ratio"], "in_process": alone, "through_spark": whole}
        report.write({**report.heading(seed), **figures}, json)
    if not whole["results_equal"]:
        console.print("[bold red]the candidates' results differ[/]")
        raise typer.Exit(1)


def _print_ratio(console: Console, what: str, figures: dict[str, Any]) -> None:
    times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in figures["batch_ms"].items())
    console.print(f"{what}: {figures['ratio']:.3f} × ({times}; {figures['batches']} batches)", highlight=False)


@bench.command()
def checkpoints(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each, after one warm-up.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured seconds per load and round.")] = 20.0,
    rate: Annotated[float, typer.Option(min=1, help="Records per second, while the load is steady.")] = 2000.0,
    keys: Annotated[int, typer.Option(min=1, help="Keys.")] = 10_240,
    state_bytes: Annotated[int, typer.Option(min=0, help="Bytes of state per key.")] = 1024,
    save_every: Annotated[float, typer.Option(min=0.01, help="Seconds between two increments.")] = 5.0,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the sequence of keys.")] = 1,
) -> None:
    """The cost of a central store: the same stage with and without one, alternating in one session.

    Example: whimbrel bench checkpoints --rounds 4
    """
    from whimbrel.lab.bench.checkpoints import REMEMBER, measure
    from whimbrel.spark.session import brief_session

    console = Console()
    console.print(f"{keys:,} keys of {state_bytes:,} bytes, {rate:,.0f} records/s, saved every {save_every:g} s")
    with brief_session("whimbrel-bench", extra=REMEMBER) as (spark, folder):
        figures = measure(
            spark,
            folder,
            rounds=rounds,
            seconds=seconds,
            rate=rate,
            keys=keys,
            state_bytes=state_bytes,
            save_every=save_every,
            seed=seed,
            show=lambda what: console.print(what, style="dim", highlight=False),
        )
    for what, ratio in figures["ratio"].items():
        text = ", ".join(f"{name} {value:,.3f}" for name, value in figures[what].items())
        console.print(f"{what}: {ratio:.3f} × ({text})", highlight=False)
    if json is not None:
        report.write({**report.heading(seed), **figures}, json)
    if not figures["results_right"]:
        console.print("[bold red]results are wrong, or the store is incomplete[/]")
        raise typer.Exit(1)


@bench.command()
def latency(
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each profile.")] = 2,
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches measured in each, after a warm-up.")] = 30,
    rows: Annotated[int, typer.Option(min=1, help="Rows per micro-batch.")] = 200,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="Written to the report; the rows do not depend on it.")] = 1,
) -> None:
    """A small micro-batch of a stage under Whimbrel's Spark profile and under Spark's own, each in its own JVM.

    Example: whimbrel bench latency
    """
    from whimbrel.lab.bench.profiles import latency as measure

    console = Console()

    def show(name: str, times: list[float]) -> None:
        console.print(f"{name}: median {median(times):.0f} ms of {len(times)} micro-batches", highlight=False)

    figures = measure(rounds, batches, rows, show)
    text = ", ".join(f"{name} {ms:.0f} ms" for name, ms in figures["batch_ms"].items())
    console.print(f"{figures['ratio']:.2f} × ({text})", highlight=False)
    if json is not None:
        report.write({**report.heading(seed), **figures}, json)


@bench.command()
def transport(
    megabytes: Annotated[int, typer.Option(min=1, help="Megabytes of large appends, for each kind of content.")] = 500,
    entry: Annotated[int, typer.Option(min=1000, max=16_000_000, help="Bytes of a large append.")] = 1_000_000,
    small: Annotated[int, typer.Option(min=10, help="Small appends, one after the other.")] = 500,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the contents.")] = 1,
) -> None:
    """Appends from one place to another: two processes on this machine, over TLS, through spool, receiver and logs.

    Example: whimbrel bench transport --megabytes 500
    """
    from whimbrel.lab.bench.transport import transport as measure

    console = Console()
    runs = [measure(megabytes, entry, small, seed, embedded) for embedded in (True, False)]
    table = Table(title=f"appends of {entry:,} bytes, and small ones")
    columns = ("logs", "incompressible, MB/s", "records, MB/s", "small append, median ms", "p99 ms")
    for column in (*columns, "CPU, s/GB, sender", "receiver"):
        table.add_column(column, justify="left" if column == "logs" else "right")
    for run in runs:
        rates, times, cpu = run["mb_per_s"], run["small_ms"], run["cpu_s_per_gb"]
        cells = (*(rates.values()), times["median"], times["p99"], *(cpu.values()))
        table.add_row(run["logs"], *(f"{cell:,.1f}" for cell in cells))
    console.print(table)
    if json is not None:
        report.write({**report.heading(seed), "runs": runs}, json)
