"""What the text endpoints of HTTP need to know of a model, and what is added to an encoder's graph for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.serving.errors import DeclarationError

TASKS = ("embedding", "token_embedding", "rerank", "classify", "tokenize")
EMBEDDING, TOKEN_EMBEDDING, RERANK, CLASSIFY, TOKENIZE = TASKS
# The output of a tokenizer that lists the tokens of each text, as JSON.
TOKEN_LIST = "token_list"
MEAN, FIRST, LAST = POOLINGS = ("mean", "first", "last")
AUTO = "auto"

# The outputs that a head adds: their names in the file, and in the pipeline.
_PREFIX = "tensorferry."
VECTOR, SCORE, LOGIT, SCORES, LOGITS, TOKENS = (
    _PREFIX + name for name in ("embedding", "score", "logit", "scores", "logits", "tokens")
)
HEAD_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    EMBEDDING: (VECTOR, TOKENS),
    RERANK: (SCORE, LOGIT, TOKENS),
    CLASSIFY: (SCORES, LOGITS, TOKENS),
}


@dataclass(frozen=True, slots=True)
class TextTask:
    """What a pipeline does with texts: its `kind` is one of `TASKS`.

    `labels` are the names of a classifier's classes. Clients of the text endpoints can also ask for the model by the names `served_as`.
    Vectors are `normalized` if the head scales them to length 1.
    """

    kind: str
    labels: Sequence[str] = ()
    served_as: Sequence[str] = ()
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.kind not in TASKS:
            raise DeclarationError(f"task is {self.kind!r}; it must be one of {', '.join(TASKS)}")
        if self.kind == CLASSIFY and not self.labels:
            raise DeclarationError(
                f"the task {CLASSIFY!r} needs labels; give a list with the name of each class"
            )
        if self.labels and self.kind != CLASSIFY:
            raise DeclarationError(
                f"the task {self.kind!r} has no labels; leave them out, or give the task {CLASSIFY!r}"
            )
        for field in ("labels", "served_as"):
            names = getattr(self, field)
            # A text would be a list of its characters.
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise DeclarationError(f"{field} is {names!r}; it must be a list of names")
            object.__setattr__(self, field, tuple(names))


@dataclass(frozen=True, slots=True)
class TextHead:
    """What is added to the end of an encoder's graph for a task.

    `pooling` makes one vector of those of a text's tokens: one of `POOLINGS`; None for a file whose vectors are pooled;
    `AUTO` for what the files beside it say. `normalize` scales vectors to length 1. With `multi_label`, the score of each
    class is a sigmoid of its own. `mask` is the file's name of the input attention_mask. `output` is the output that the
    head reads; "" for the only one that fits.
    """

    task: str
    pooling: str | None = None
    normalize: bool = False
    multi_label: bool = False
    mask: str = "attention_mask"
    output: str = ""

    @property
    def description(self) -> str:
        """Words for the log."""
        if self.task != EMBEDDING:
            return "a score of each text" if self.task == RERANK else "scores of the classes"
        pooled = "as the file pools them" if self.pooling is None else f"by the pooling {self.pooling!r}"
        return f"vectors {pooled}{', scaled to length 1' if self.normalize else ''}"
