"""Sizes of axes as products of an integer and symbols, such as 4 × rows × seq."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Limits, because a hostile graph could double both with each node.
_MOST_SYMBOLS = 64
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A number that is unknown before the model runs.

    `counts_rows`: it depends on the number of rows in the batch. `is_size`: it is the length of an axis, and so never
    negative.
    """

    name: str
    counts_rows: bool = False
    is_size: bool = True


ROWS = Symbol("rows", counts_rows=True)


@dataclass(frozen=True, slots=True)
class Product:
    """An integer times at least one symbol. Symbols are sorted."""

    factor: int
    symbols: tuple[Symbol, ...]

    def __str__(self) -> str:
        parts = [] if self.factor == 1 else [str(self.factor)]
        return "*".join([*parts, *(symbol.name for symbol in self.symbols)])


# An int if it is fully known.
Size = int | Product


def of_symbol(symbol: Symbol) -> Product:
    """The symbol as a size."""
    return Product(1, (symbol,))


NUMBER_OF_ROWS = of_symbol(ROWS)


def unknown(name: str, *origins: object, is_size: bool = True) -> Product:
    """Return a new symbol for a function of `origins`. Equal names mean equal numbers."""
    if len(name) > _LONGEST_NAME:
        name = f"?{hashlib.sha256(name.encode()).hexdigest()}"
    return of_symbol(Symbol(name, any(counts_rows(origin) for origin in origins), is_size))


def counts_rows(size: object) -> bool:
    """Whether the size depends on the number of rows in the batch."""
    return isinstance(size, Product) and any(symbol.counts_rows for symbol in size.symbols)


def is_size(size: object) -> bool:
    """Whether the number is known to be at least zero."""
    if isinstance(size, Product):
        return size.factor >= 0 and all(symbol.is_size for symbol in size.symbols)
    return isinstance(size, int) and size >= 0


def product(*sizes: Size) -> Size:
    """Return the product of the sizes."""
    factor = math.prod(size.factor if isinstance(size, Product) else int(size) for size in sizes)
    symbols = [symbol for size in sizes if isinstance(size, Product) for symbol in size.symbols]
    if abs(factor) >= 2**63 or len(symbols) > _MOST_SYMBOLS:
        raise OverflowError("a size is too large")
    if not symbols or not factor:
        return factor
    return Product(factor, tuple(sorted(symbols)))


def quotient(size: Size, divisor: Size) -> Size | None:
    """Return `size` divided by `divisor` if that is exact for all values of the symbols, else None."""
    above = size if isinstance(size, Product) else Product(int(size), ())
    below = divisor if isinstance(divisor, Product) else Product(int(divisor), ())
    if not below.factor or above.factor % below.factor:
        return None
    left = Counter(above.symbols)
    left.subtract(below.symbols)
    if any(count < 0 for count in left.values()):
        return None
    factor = above.factor // below.factor
    symbols = tuple(sorted(left.elements()))
    return Product(factor, symbols) if symbols and factor else factor


def total(one: Size, other: Size) -> Size:
    """Return the sum of two sizes."""
    if isinstance(one, Product) and isinstance(other, Product) and one.symbols == other.symbols:
        factor = one.factor + other.factor
        return Product(factor, one.symbols) if factor else 0
    if isinstance(one, Product) or isinstance(other, Product):
        if one == 0 or other == 0:
            return other if one == 0 else one
        return unknown(f"({one}+{other})", one, other, is_size=is_size(one) and is_size(other))
    return one + other


def fixed(sizes: Iterable[object]) -> list[int]:
    """Return the sizes that are known."""
    return [size for size in sizes if isinstance(size, int)]
