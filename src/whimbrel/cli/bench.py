"""`whimbrel bench`: measure, on this machine, in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from whimbrel.bench import report
from whimbrel.cli.compare import compare

bench = typer.Typer(name="bench", help="Measure on this machine, candidates side by side.", no_args_is_help=True)
bench.command()(compare)


@bench.command()
def throughput(
    keys: Annotated[int, typer.Option(min=1, help="Keys.")] = 10_000,
    rows: Annotated[int, typer.Option(min=1, help="Rows to measure, after a warm-up.")] = 100_000,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows a micro-batch.")] = 20_000,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="Stands in the report; the rows do not depend on it.")] = 1,
) -> None:
    """Whimbrel against stock PySpark: the same keyed count, one result per record, in one session, taking turns.

    Example: whimbrel bench throughput --keys 10000 --rows 100000
    """
    from whimbrel.bench.throughput import throughput as measure
    from whimbrel.spark.session import BOTH_COMPILERS, session

    console = Console()
    console.print(f"{keys:,} keys, batches of {batch_rows:,} rows; starting Spark ...")
    spark = session("whimbrel-bench", extra=BOTH_COMPILERS)
    try:
        with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder:
            figures = measure(spark, Path(folder), keys=keys, rows=rows, batch_rows=batch_rows, warm_up=5)
    finally:
        spark.stop()
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
