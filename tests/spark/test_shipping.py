"""An operator arrives at a worker as it was, also when its classes are defined in a script."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.spark.rig import Running
from whimbrel.core.errors import Refused
from whimbrel.core.operator import Operator
from whimbrel.spark.shipping import ship, unship

SCRIPT = """
{future}
import sys
from typing import Annotated, Any
import msgspec
import whimbrel.core.operator as wb
from whimbrel.spark.shipping import ship

class Point(msgspec.Struct, frozen=True, array_like=True):
    x: float
    y: float = 0.5

class Common(wb.State):
    seen: int = 0
    names: list[str] = []

    def see(self, name):
        self.seen += 1
        self.names.append(name)
        return self

class Strict(msgspec.Struct, kw_only=True, tag="s", rename="camel", forbid_unknown_fields=True):
    low_value: Annotated[int, msgspec.Meta(ge=0)] = 3
    must: int

class Walk(wb.Operator):
    class State(Common):
        points: list[Point] = msgspec.field(default_factory=lambda: [Point(1.0)])
        strict: Strict | None = None
        born: bool = False

        def __post_init__(self):
            self.born = True

        def copy(self):
            return Walk.State(points=self.points)

        @property
        def last(self):
            return self.points[-1]

        @classmethod
        def named(cls, name):
            return cls().see(name)

    def __init__(self, step):
        self.step = step

    def process(self, key, event, state, emit):
        state.see(key)
        state.points.append(Point(state.last.x + self.step))
        emit(x=state.last.x)

if __name__ == "__main__":
    sys.stdout.buffer.write(ship(Walk(2.0)).blob)
"""

CHECK = """
import sys, pickle, msgspec
sys.modules["__main__"].__dict__.pop("Walk", None)
walk = pickle.loads(sys.stdin.buffer.read())
out = []
state = walk.State()
walk.process("k", None, state, lambda **values: out.append(values))
walk.process("k", None, state, lambda **values: out.append(values))
assert out == [{"x": 3.0}, {"x": 5.0}], out
assert state.seen == 2 and state.names == ["k", "k"] and state.born
assert walk.State().names == [] and len(walk.State().points) == 1, "defaults are not shared"
blob = msgspec.msgpack.encode(state)
again = msgspec.msgpack.decode(blob, type=walk.State)
assert again == state and again.copy().points == state.points and type(again.last) is type(state.last)
assert walk.State.named("n").names == ["n"]
point = type(state.last)
assert msgspec.msgpack.decode(msgspec.msgpack.encode(point(1.0))) == [1.0, 0.5]
try:
    state.last.x = 1
except AttributeError:
    pass
else:
    raise AssertionError("Point was frozen")
strict = msgspec.structs.fields(walk.State)
strict = next(field.type for field in strict if field.name == "strict").__args__[0]
assert msgspec.json.encode(strict(must=1)) == b'{"type":"s","lowValue":3,"must":1}', msgspec.json.encode(strict(must=1))
for wrong in (b'{"type":"s","must":1,"other":2}', b'{"type":"s","must":1,"lowValue":-1}'):
    try:
        msgspec.json.decode(wrong, type=strict)
    except msgspec.ValidationError:
        pass
    else:
        raise AssertionError(wrong)
print("fine")
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_classes_of_a_script_travel_by_value(future: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(future=future))
    blob = subprocess.run([sys.executable, str(script)], capture_output=True, check=True, cwd=tmp_path).stdout
    check = subprocess.run([sys.executable, "-c", CHECK], input=blob, capture_output=True, cwd="/")
    assert check.stdout == b"fine\n", check.stderr.decode()


def test_a_struct_that_refers_to_itself_is_refused_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from __future__ import annotations
        import whimbrel.core.operator as wb
        from whimbrel.spark.shipping import ship

        class Node(wb.State):
            children: list[Node] = []

        class Tree(wb.Operator):
            State = Node
            def process(self, key, event, state, emit): pass

        ship(Tree())
        """)
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "put the class into a module of its own" in run.stderr


def test_what_workers_can_import_travels_by_name() -> None:
    shipment = ship(Running())
    assert b"Running" in shipment.blob
    assert len(shipment.blob) < 200
    assert type(unship(shipment)) is Running


def test_a_process_unpacks_an_operator_once() -> None:
    shipment = ship(Running())
    assert unship(shipment) is unship(pickle.loads(pickle.dumps(shipment)))


class Locked(Operator):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_an_operator_that_cannot_travel_is_refused_with_a_way_out() -> None:
    with pytest.raises(Refused, match=r"Locked cannot be sent to Spark's workers: .* in process"):
        ship(Locked())
