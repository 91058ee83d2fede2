"""A generator of text: words in, words out one by one.

A chain of words stands in for a language model: each word is followed by one that has followed it, and the word before it, in
the help texts of Python. A real model yields its pieces in the same way.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

from tensorferry.serving import INT32, STRING, InvalidInput, model

MOST_WORDS = 1000


@model(
    inputs={"prompt": STRING[1], "words": INT32[1]},
    outputs={"piece": STRING[1]},
    example={"prompt": ["The"], "words": [2]},
    streams=True,
    workers=8,
)
class Writer:
    """Gives at most `words` words that go on after the prompt. Equal prompts give equal words."""

    def load(self) -> None:
        """Read the texts."""
        words = " ".join(topics.values()).split()
        self.after: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (first, second), (_, third) in pairwise(pairwise(words)):
            self.after["", second].append(third)
            self.after[first, second].append(third)

    def __call__(self, prompt: Any, words: Any) -> Iterator[list[str]]:
        """Yield the words."""
        if not 0 <= words[0] <= MOST_WORDS:
            raise InvalidInput(f"words is {words[0]}; it must be from 0 to {MOST_WORDS}")
        chance = random.Random(prompt[0])
        before, last = ["", "", *prompt[0].split()][-2:]
        for _ in range(words[0]):
            found = self.after.get((before, last)) or self.after.get(("", last))
            if not found:
                return
            before, last = last, chance.choice(found)
            yield [last]
