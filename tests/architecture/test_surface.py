"""What users import is a promise: a name comes or goes only together with this list."""

import whimbrel

SURFACE = [
    "App",
    "Client",
    "Context",
    "Csv",
    "Handle",
    "Items",
    "JsonLines",
    "Link",
    "Operator",
    "Parquet",
    "Pipeline",
    "Refused",
    "RemoteHandle",
    "Retry",
    "State",
    "Stop",
    "UnknownName",
    "WhimbrelError",
    "connect",
    "run",
]


def test_the_public_surface_is_this_list() -> None:
    assert list(whimbrel.__all__) == SURFACE


def test_every_public_name_says_what_it_is() -> None:
    silent = [name for name in SURFACE if not getattr(whimbrel, name).__doc__]
    assert not silent
