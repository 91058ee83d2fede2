"""Generated section of a hand-written page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """Text between two marks."""

    begin: str
    end: str

    def of(self, page: str) -> str:
        """Return the section's text in the page."""
        return page.partition(self.begin)[2].partition(self.end)[0].strip()

    def replaced(self, page: str, text: str) -> str:
        """Return the page with new text in the section; raise ValueError if the marks are missing."""
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"the page has no {self.begin} ... {self.end}")
        return f"{before}{self.begin}\n\n{text}\n\n{self.end}{after}"
