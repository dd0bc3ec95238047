"""Exceptions that mean "these bytes are not what they should be": one list, for all that decodes.

What lies in a store may have been written by anybody: another language, another version, a disk
that failed. Whoever reads it catches MALFORMED, and says what becomes of it: a dead letter, a
DecodeError, nothing.
"""

from __future__ import annotations

import msgspec

#: msgspec.DecodeError is a ValueError from msgspec 0.21 on only. The others come from readers of
#: our own, and from records of a form that nobody has thought of. RecursionError: nested deeply,
#: or called with hardly any stack left. SystemError: msgspec 0.19 converts a huge integer.
MALFORMED: tuple[type[Exception], ...] = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SystemError,
)
