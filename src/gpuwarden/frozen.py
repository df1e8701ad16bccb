"""Values that are made thousands of times a second: frozen to who checks the types, and to who reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def frozen(cls: type[T]) -> type[T]:
        """Make a dataclass with slots that is frozen by agreement: nothing enforces it at run time.

        One that enforces it sets each field by a call, and takes 3.4 µs where this takes 1.4, of 24 fields.
        """
else:
    frozen = dataclass(slots=True, unsafe_hash=True)
