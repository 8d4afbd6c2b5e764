"""How a recipe's keys are declared: a dataclass field with its meaning and the bounds of its number."""

import math
import operator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from moh_llm.errors import UserError

_RULES = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


def key(meaning: str, default: Any = MISSING, **bounds: float) -> Any:
    """A recipe key: a dataclass field with its meaning for ``--help``, and bounds (`_RULES`) of its number."""
    return field(default=default, metadata={"meaning": meaning, "bounds": bounds})


def require(holds: bool, message: str) -> None:
    """Raise UserError with that message where something does not hold."""
    if not holds:
        raise UserError(message)


@dataclass(frozen=True)
class Keys:
    """Checks each number by the bounds of its key; infinity and NaN are out of all bounds."""

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "") -> None:
        cls._prefix = f"{group}." if group else ""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            for rule, bound in entry.metadata.get("bounds", {}).items():
                holds = value is None or (value < math.inf and _RULES[rule](value, bound))
                name = f"{self._prefix}{entry.name}={value}"
                require(holds, f"{name} must be {rule.replace('_', ' ')} {bound}")
