"""Plain values as text, so that the process which knows the right answer can compare without running anything."""

from __future__ import annotations

from typing import Any


def encode(value: Any) -> str:
    """A text that two plain values share exactly when Python calls them equal (1, 1.0 and True do; a list and a tuple
    do not).

    Plain values are None, Ellipsis, numbers, strings, bytes, and lists, tuples, sets and dictionaries of them.
    Subclasses count as their base, whose own methods read them: an `__eq__` of the value's class has no say.

    Raises:
        TypeError: There is something else in it, or a NaN, which equals nothing.
    """
    if value is None or value is Ellipsis:
        return repr(value)
    if isinstance(value, int):
        return f"n{int.__add__(value, 0):x}"
    if isinstance(value, float):
        return _encode_float(float.__add__(value, 0.0))
    if isinstance(value, complex):
        number = complex.__add__(value, 0j)
        return f"{_encode_float(number.real)}{'' if number.imag == 0 else 'i' + _encode_float(number.imag)}"
    if isinstance(value, str):
        text = str.__str__(value)
        return f"s{len(text)}:{text}"
    if isinstance(value, bytes | bytearray):
        return f"b{bytes(value).hex()}"
    if isinstance(value, list):
        return f"[{','.join(map(encode, list.__iter__(value)))}]"
    if isinstance(value, tuple):
        return f"({','.join(map(encode, tuple.__iter__(value)))})"
    if isinstance(value, set):
        return f"{{{','.join(sorted(map(encode, set.__iter__(value))))}}}"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(encode, frozenset.__iter__(value))))}}}"
    if isinstance(value, dict):
        items = [f"{encode(key)}={encode(entry)}" for key, entry in dict.items(value)]
        return f"d{{{','.join(sorted(items))}}}"
    raise TypeError(f"a value of type {type(value).__name__} is not plain data, which this test compares with")


def _encode_float(number: float) -> str:
    if number != number:
        raise TypeError("NaN equals nothing")
    return f"n{int(number):x}" if number.is_integer() else float.hex(number)
