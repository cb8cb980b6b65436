"""Bad input, and an operator that fails: each record is in the dead letters with its reason, and the stream goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, explode, lit, sequence

import whimbrel as wb
from tests.spark_app.jobs import EXACT, SCHEMA, Chain, compare, read, rows, sequential
from whimbrel.core.operator import Emit

pytestmark = pytest.mark.spark

LIMIT = 200

BAD = {
    # By line number: the line, and why it goes nowhere.
    3: ('{"n":1}', "no key"),
    4: ('{"key":"k00","n":"many"}', "wrong type"),
    7: ("key=k00 n=1", "not JSON"),
    8: ('{"key":null,"n":1}', "no key"),
    11: ('{"key":"k00","n":1,"note":"' + "x" * LIMIT + '"}', "too large"),
    12: ('{"key":"k00","n":9223372036854775808}', "wrong type"),
    15: ("[1,2]", "wrong type"),
    16: ('{"key":"k00","n":1', "not JSON"),
}
FAILING = {
    # By line number: rows that the operator raises on.
    40: {"key": "k01", "n": -5},
    41: {"key": "twin", "n": -7},
    42: {"key": "moody", "n": -8},
    200: {"key": "only", "n": -6},
}


class Moody(Chain):
    """Raises on negative numbers, always; only `moody` relents at the last try. Notes every try in a file."""

    tries = 3

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        if event.n < 0:
            with self.notes.open("a") as notes:
                notes.write(f"{key}\n")
        if key == "moody" and self.notes.read_text().split().count("moody") == self.tries:
            event = type(event)(key=key, n=8)
        super().process(key, event, state, emit)


def twins(frame: DataFrame) -> DataFrame:
    """Every record of key `twin` becomes two rows: both are known by the number of their record."""
    copies = explode(sequence(lit(1), (col("key") == "twin").cast("int") + 1))
    return frame.withColumn("copy", copies).drop("copy")


def lines(good: list[dict[str, Any]]) -> list[str]:
    """The good rows, with the bad ones and the failing ones at their places."""
    found, rest = dict[int, str](), iter(good)
    for number in range(len(good) + len(BAD) + len(FAILING)):
        odd = BAD[number][0] if number in BAD else json.dumps(FAILING[number]) if number in FAILING else None
        found[number] = odd or json.dumps(next(rest))
    return list(found.values())


def test_every_bad_record_is_kept_with_reason_and_position_and_all_others_are_unaffected(
    spark: SparkSession, tmp_path: Path
) -> None:
    good = list(rows(300)())
    source, out, notes = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "notes"
    source.write_text("\n".join(lines(good)))
    pipeline = wb.Pipeline("bad", source=wb.JsonLines(source, schema=SCHEMA, limit=LIMIT), key="key")
    pipeline.stage("chain", Moody(notes), prepare=twins).sink(wb.JsonLines(out))
    with wb.run(pipeline, sites=["cloud"], spark=spark) as app:
        app.wait(120)
        letters, status = app.dead_letters(), app.status()

    assert compare(sequential([*good, {"key": "moody", "n": 8}]), read(out)) == EXACT

    taken = [letter for letter in letters if letter.source == str(source)]
    assert [(letter.position, letter.reason) for letter in taken] == [(n, reason) for n, (_, reason) in BAD.items()]
    assert all(BAD[letter.position][0].startswith(letter.record) for letter in taken)
    assert all(letter.record and letter.message for letter in taken)

    parked = [letter for letter in letters if letter.reason == "operator failed"]
    assert sorted((letter.message, letter.record) for letter in parked) == [
        ("ValueError: cannot take -5", '{"key":"k01","n":-5}'),
        ("ValueError: cannot take -6", '{"key":"only","n":-6}'),
        ("ValueError: cannot take -7", '{"key":"twin","n":-7}'),
        ("ValueError: cannot take -7", '{"key":"twin","n":-7}'),
    ]
    assert Counter(notes.read_text().split()) == {"k01": 3, "only": 3, "twin": 6, "moody": 3}

    assert status["records"] == {
        "sent": len(good) + len(FAILING),
        "delivered": len(good) + 1,
        "refused": 0,
        "dead_lettered": len(BAD) + len(parked),
    }
    assert status["dead_letters"] == {"no key": 2, "wrong type": 3, "not JSON": 2, "too large": 1, "operator failed": 4}
    assert status["source"] == {"ended": True, "error": None}
