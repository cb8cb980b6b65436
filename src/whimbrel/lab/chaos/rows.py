"""The rows that chaos sends: row n is a function of the seed and n alone. No code of the product.

Every row has its number as a column, so that each result and each dead letter can name the row that caused it. Its
event time follows from the number as well: it does not depend on any clock.

Some rows are bad (without a key, or with text in place of a number), and operators raise on others. A few keys have
many of the records, and a few have a large state.
"""

from __future__ import annotations

from typing import Any

import msgspec

START_US = 1_600_000_000_000_000
STEP_US = 2_000
"""Event time: of row 0, and the step from one row to the next."""
DELAY_US = 900_000
"""The time from a row to its timer."""
HOT, HOT_SHARE = 4, 30
"""This number of accounts has this percentage of the records."""
BAD = 1009
"""One row of this many has no key, and another one has text in place of a number."""

SCHEMA = "row long, account string, shop string, amount long, at long"


class Load(msgspec.Struct, frozen=True):
    """The parameters of the load."""

    seed: int = 1
    rate: float = 500.0
    """Rows per second."""
    accounts: int = 100
    shops: int = 30
    state_bytes: int = 4_000
    """Of each account except the large ones."""
    large: int = 2
    large_bytes: int = 300_000

    @property
    def names(self) -> list[str]:
        """The accounts: keys of the first stage. The last ones are large."""
        return [f"account-{number:03}" for number in range(self.accounts)]

    @property
    def shop_names(self) -> list[str]:
        """The shops: keys of the second stage."""
        return [f"shop-{number:02}" for number in range(self.shops)]

    def weight(self, account: str) -> int:
        """The bytes of an account's state."""
        return self.large_bytes if int(account[-3:]) >= self.accounts - self.large else self.state_bytes


def row(load: Load, n: int) -> dict[str, Any]:
    """Row n."""
    dice = mixed(load.seed, n)
    spread, choice, amount = dice % 1000, (dice >> 10) & 0xFFFF, (dice >> 32) % 1_000_000
    if spread < HOT_SHARE * 10:
        number = choice % HOT
    elif spread == 999 and load.large:
        number = load.accounts - 1 - choice % load.large
    else:
        number = HOT + choice % (load.accounts - HOT - load.large)
    found: dict[str, Any] = {
        "row": n,
        "account": f"account-{number:03}",
        "shop": f"shop-{(dice >> 20) % load.shops:02}",
        "amount": amount,
        "at": event_us(n),
    }
    if is_keyless(n):
        found["account"] = None
    elif is_mistyped(n):
        found["amount"] = "a lot"
    return found


def event_us(n: int) -> int:
    """The event time of row n."""
    return START_US + n * STEP_US


def is_keyless(n: int) -> bool:
    """Whether the intake refuses a row because it has no key."""
    return n % BAD == 17


def is_mistyped(n: int) -> bool:
    """Whether the intake refuses a row because a value has the wrong type."""
    return n % BAD == 500


def is_dropped(amount: int) -> bool:
    """Whether `prepare` drops a row."""
    return amount % 97 == 11


def parts(amount: int) -> int:
    """How many rows `prepare` emits for one."""
    return 2 if amount % 13 == 5 else 1


def ledger_raises(amount: int, part: int) -> bool:
    """Whether the first stage raises on a row."""
    return amount % 211 == 3 + part


def shop_raises(amount: int, part: int) -> bool:
    """Whether the second stage raises on the first stage's result of a row."""
    return amount % 307 == 9 + part


def sets_timer(amount: int) -> bool:
    """Whether a row sets a timer."""
    return amount % 17 == 2


def mixed(seed: int, n: int) -> int:
    """64 pseudo-random bits (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + (n + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
