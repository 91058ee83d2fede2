"""The part of a page that a program writes, amid what people have written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """What is between two marks."""

    begin: str
    end: str

    def of(self, page: str) -> str:
        """What the page has there."""
        return page.partition(self.begin)[2].partition(self.end)[0].strip()

    def replaced(self, page: str, text: str) -> str:
        """The page with this there; ValueError when it has no place for it."""
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"the page has no {self.begin} ... {self.end}")
        return f"{before}{self.begin}\n\n{text}\n\n{self.end}{after}"
