"""Text out of committed tokens, piece by piece: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class TextAssembler:
    """Turns the tokens of one answer into text as they come; the pieces joined are the whole text.

    decode: ids to text. ends: tokens that end an answer and are no text of it. stop: the text ends before the first of these;
    what may be the beginning of one is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, ends: Collection[int] = (), stop: Sequence[str] = ()) -> None:
        self._decode, self._ends, self._stop = decode, frozenset(ends), tuple(stop)
        self._ids: list[int] = []
        self._seen = self._open = 0  # ids[_seen:_open] are the context in which ids[_open:] are decoded
        self._held = ""  # decoded, not given out yet
        self.stopped: str | None = None  # the stop string that was found

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns what can be given out."""
        self._ids += [token for token in tokens if token not in self._ends]
        known, text = self._decode(self._ids[self._seen : self._open]), self._decode(self._ids[self._seen :])
        if text.endswith("\ufffd") or len(text) <= len(known):
            return ""  # an incomplete character, or nothing new
        self._seen, self._open = self._open, len(self._ids)
        return self._give(text[len(known) :])

    def finish(self) -> str:
        """The rest, once no token follows."""
        known, text = self._decode(self._ids[self._seen : self._open]), self._decode(self._ids[self._seen :])
        self._open = len(self._ids)
        piece = self._give(text[len(known) :])
        rest, self._held = self._held, ""
        return piece + rest

    def _give(self, piece: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            place, self.stopped = min(places)
            self._held = ""
            return text[:place]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
