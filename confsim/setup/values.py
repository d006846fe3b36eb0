"""Values of a configuration group checked against the types of the dataclass that they make."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from confsim.errors import InputError

SWITCH = {"on": True, "off": False, "yes": True, "no": False}
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", types.NoneType: "null"}


def checked(target: Any, group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `on` and `off` as booleans where the target takes one.

    Only fields typed by plain numbers, words, booleans and null are checked; targets that are no dataclasses, and keys
    that they do not have, are left to the target itself.

    Raises:
        InputError: for a value of another type; the message names the key and what it takes.
    """
    if not dataclasses.is_dataclass(target):
        return dict(values)
    hints = typing.get_type_hints(target)
    return {key: _value(f"{group}.{key}", hints.get(key), value) for key, value in values.items()}


def _value(key: str, hint: Any, value: Any) -> Any:
    kinds = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    if not all(kind in NAMES for kind in kinds):
        return value
    if bool in kinds and isinstance(value, str) and str not in kinds:
        value = SWITCH.get(value.lower(), value)
    if not any(_fits(kind, value) for kind in kinds):
        raise InputError(f"{key}={value}: expected {' or '.join(NAMES[kind] for kind in kinds)}")
    if isinstance(value, float) and math.isnan(value):
        raise InputError(f"{key}=nan: expected {' or '.join(NAMES[kind] for kind in kinds)}")
    return value


def _fits(kind: Any, value: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float))
    if kind is int and isinstance(value, float):
        return False
    return isinstance(value, kind)
