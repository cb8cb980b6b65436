"""Serializes a user's operator from the driver to Spark's Python workers.

Classes that workers can import are pickled by reference. Others (defined in a script or a notebook) are pickled by
value, with PySpark's cloudpickle; but cloudpickle does not support msgspec Structs, whose fields are in C: a Struct
that it rebuilds has lost them. So Structs are disassembled and rebuilt here with msgspec's own API.

This is the only place that pickles: the bytes go from a user's process to that user's own workers, never across a trust
boundary and never to disk for another version to read.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, NamedTuple, get_args

import msgspec
from pyspark.cloudpickle.cloudpickle import Pickler, _should_pickle_by_reference

from whimbrel.core.errors import Refused
from whimbrel.core.operator import Operator


class Shipment(NamedTuple):
    """A serialized operator. By the digest a worker recognizes one that it has unpacked already."""

    digest: str
    blob: bytes


def ship(operator: Operator) -> Shipment:
    """Pack an operator. Raises `Refused` if it holds something that cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _StructPickler(buffer).dump(operator)  # type: ignore[no-untyped-call]
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Refused(
            f"{type(operator).__name__} cannot be sent to Spark's workers: {error}. Open files, connections and the "
            "like in process(), not in __init__"
        ) from error
    blob = buffer.getvalue()
    return Shipment(hashlib.sha256(blob).hexdigest(), blob)


def unship(shipment: Shipment) -> Operator:
    """Unpack an operator: once per process, not per task."""
    return _unpacked(shipment)


@lru_cache(maxsize=64)
def _unpacked(shipment: Shipment) -> Operator:
    operator = pickle.loads(shipment.blob)
    assert isinstance(operator, Operator)
    return operator


# ── Structs by value ─────────────────────────────────────────────────────────────────────────────────────────────────


class _StructPickler(Pickler):
    """cloudpickle, except for Struct classes that are pickled by value, and the `Meta` in their fields' types."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, msgspec.Struct) and not _travels_by_name(obj):
            return _take_apart(obj)
        if isinstance(obj, msgspec.Meta):
            return _meta, (dict(obj.__rich_repr__()),)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _travels_by_name(cls: type) -> bool:
    return bool(_should_pickle_by_reference(cls))  # type: ignore[no-untyped-call]


def _take_apart(cls: type[msgspec.Struct]) -> tuple[Any, ...]:
    """What `pickle` needs to rebuild the class: how to create it, then which members to set on it.

    Methods are set afterwards, because they may refer to the class itself. `__post_init__` is set at creation, because
    msgspec looks it up then.
    """
    if _reaches(cls, cls):
        raise Refused(f"a field of {cls.__name__} refers to {cls.__name__}: put the class into a module of its own")
    members = {name: member for name, member in vars(cls).items() if not _is_machinery(name, member)}
    first = {name: members.pop(name) for name in ("__post_init__",) if name in members}
    built = (cls.__name__, _own_fields(cls), cls.__bases__, first, cls.__module__, _config(cls))
    return _put_together, built, {**members, "__qualname__": cls.__qualname__}, None, None, _set_members


def _put_together(
    name: str,
    fields: list[Any],
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    module: str,
    config: dict[str, Any],
) -> type:
    made = [(field, kind, msgspec.field(**details)) for field, kind, details in fields]
    return msgspec.defstruct(name, made, bases=bases, namespace=namespace, module=module, **config)


def _meta(constraints: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**constraints)


def _set_members(cls: type, members: dict[str, Any]) -> None:
    for name, member in members.items():
        setattr(cls, name, member)


def _is_machinery(name: str, member: Any) -> bool:
    """Whether msgspec itself adds this member to the class."""
    return (
        name.startswith("__struct_")
        or name in ("__annotations__", "__module__", "__qualname__", "__match_args__", "__slots__", "__weakref__")
        or isinstance(member, MemberDescriptorType)
        or (name == "__dict__")
    )


def _own_fields(cls: type[msgspec.Struct]) -> list[tuple[str, Any, dict[str, Any]]]:
    """The fields that the class adds to its bases': name, type, and arguments of `msgspec.field`."""
    own = inspect.get_annotations(cls)
    fields: list[tuple[str, Any, dict[str, Any]]] = []
    for field in msgspec.structs.fields(cls):
        if field.name in own:
            details = {"name": field.encode_name, "default": field.default, "default_factory": field.default_factory}
            fields.append((field.name, field.type, details))
    return fields


def _config(cls: type[msgspec.Struct]) -> dict[str, Any]:
    config = cls.__struct_config__
    names = (
        "frozen", "eq", "order", "array_like", "gc", "repr_omit_defaults", "omit_defaults", "forbid_unknown_fields",
        "weakref", "dict", "cache_hash", "tag", "tag_field",
    )  # fmt: skip
    chosen = {name: getattr(config, name) for name in names}
    parameters = inspect.signature(cls).parameters
    own = [name for name in inspect.get_annotations(cls) if name in parameters]
    chosen["kw_only"] = bool(own) and all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in own)
    return chosen


def _reaches(start: type, goal: type) -> bool:
    """Whether the types of a class's fields refer to `goal`, directly or indirectly."""
    seen: set[Any] = set()
    queue: list[Any] = [field.type for field in msgspec.structs.fields(start)]
    while queue:
        kind = queue.pop()
        if kind is goal:
            return True
        if kind in seen:
            continue
        seen.add(kind)
        queue += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            queue += [field.type for field in msgspec.structs.fields(kind)]
    return False
