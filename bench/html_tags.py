"""Elements of an HTML page as functions, and numbers as text. Whatever is not an element already is escaped."""

from __future__ import annotations

import html


class Element(str):
    """Markup that is safe as it stands: only `tag` and `join` make it."""


def tag(name: str, /, *children: str | None, **attributes: object) -> Element:
    """<name attributes>children</name>. Text is escaped; None is left out; `class_` and `data_value` lose their
    underscores: class, data-value. An attribute that is True stands alone, one that is None or False is left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{html.escape(str(value), quote=True)}"')
    inside = join(*children)
    if name in ("meta", "br", "line", "rect", "circle", "path", "polyline", "polygon"):
        closing = f"</{name}>" if inside else ""
        return Element(f"<{' '.join(parts)}{'>' + inside + closing if inside else ' />'}")
    return Element(f"<{' '.join(parts)}>{inside}</{name}>")


def join(*children: str | None) -> Element:
    """The children one after the other, text escaped."""
    return Element(
        "".join(one if isinstance(one, Element) else html.escape(one, quote=False) for one in children if one)
    )


def style(css: str) -> Element:
    """A style sheet; CSS is no text to be escaped."""
    assert "<" not in css, "a style sheet would end its element"
    return Element(f"<style>{css}</style>")


def digits(value: float, number: int = 3) -> str:
    """A number in so many significant digits, never in powers of ten."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{number}g}")
    whole = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    if whole:
        return f"{rounded:.{max(0, number - whole)}f}"
    return f"{rounded:.{number + 8}f}"[: number + 2 + leading_zeros(rounded)]


def leading_zeros(value: float) -> int:
    """Zeros between the point and the first digit of |value| < 1."""
    text = f"{abs(value):.12f}".split(".")[1]
    return min(len(text) - len(text.lstrip("0")), 8) + (value < 0)


def seconds_text(seconds: float) -> str:
    """A time with its unit, four significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)):
        if seconds >= size * 0.99995:
            return f"{digits(seconds / size, 4)} {unit}"
    return f"{digits(seconds * 1e9, 4)} ns"


def rate_text(rate: float, unit: str) -> str:
    """A rate with its prefix, such as "3.21 TFLOP/s" for unit "FLOP/s"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size * 0.9995:
            return f"{digits(rate / size)} {prefix}{unit}"
    return f"{digits(rate)} {unit}"


def bytes_text(number: float) -> str:
    """A size in KiB, MiB or GiB."""
    for prefix, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{digits(number / size)} {prefix}"
    return f"{number:.0f} B"


def share_text(share: float) -> str:
    """A share in percent."""
    return f"{digits(share * 100)} %"
