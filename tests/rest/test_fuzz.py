"""Whatever is sent: the API answers as its own schema says, and never fails (schemathesis, over the OpenAPI schema).

Beside the names that it makes up, it gets those that there are, so that some of its orders are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.rest.house import House, served
from whimbrel.api.api import LONGEST, make_app

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NAMES = {
    "stage": ["count"],
    "site": ["cloud", "edge-1"],
    "other": ["edge-2"],
    "to": ["edge-1", "edge-2"],
    "at": ["cloud"],
    "instance": ["count-1", "count-2", "count-3"],
    "id": ["m1", "m2", "m1/1"],
    "protocol": ["live", "pause", "push", "fetch", "fluid", "replicate", "restart", "auto"],
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with served(tmp_path_factory.mktemp("fuzz") / "data") as house:
        yield house


nobody: Any = None
schema = schemathesis.openapi.from_dict(make_app(nobody, threading.Event()).openapi())


@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_whatever_is_sent_is_answered_as_the_schema_says(case: Any, house: House) -> None:
    for given in (case.path_parameters, case.body):
        if isinstance(given, dict):
            for name, known in NAMES.items():
                made_up = given.get(name)
                if isinstance(made_up, str) and len(made_up) % 4 and len(made_up) <= 200:  # a quarter as they are
                    given[name] = known[len(made_up) % len(known)]
    wait = (case.query or {}).get("wait")
    if isinstance(wait, float) and 0 < wait <= LONGEST:
        case.query["wait"] = wait / LONGEST / 10
    headers = {"Authorization": f"Bearer {house.server.token}"}
    case.call_and_validate(base_url=house.server.url, headers=headers, checks=CHECKS)
