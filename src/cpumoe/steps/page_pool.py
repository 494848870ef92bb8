"""Paged KV cache: allocates pages, counts references, and finds cached prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the prefix hash of a page: of its tokens and all tokens before them.

    ``before`` is the hash of the page before, or empty. Clients choose the tokens, so the hash is a cryptographic one:
    two prefixes with the same hash cannot be constructed.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=32).digest()


class PagePool:
    """Allocates pages 0 to ``pages - 1`` and counts the sequences that use each.

    A page whose tokens have all been computed is registered by its prefix hash and is immutable from then on, so that
    other sequences can use it too. When the last sequence has released it, it stays in the prefix cache until no free
    page is left; cached pages are then evicted in the order in which they were released (LRU).

    Args:
        evicts_first: evict cached pages before a page is used for the first time: then the cache takes no more memory
            than the longest sequences needed.
    """

    def __init__(self, pages: int, *, evicts_first: bool = False) -> None:
        self._evicts_first = evicts_first
        self._blank = list(reversed(range(pages)))  # free pages, taken from the end
        self._holders = [0] * pages
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}  # by prefix hash
        self._left: OrderedDict[int, None] = OrderedDict()  # evictable pages, least recently released first

    @property
    def available(self) -> int:
        """Number of free and evictable pages."""
        return len(self._blank) + len(self._left)

    def take(self) -> int:
        """Allocate a page for new tokens, evicting one if none is free. Raise IndexError if all pages are in use."""
        if self._left and (self._evicts_first or not self._blank):
            page, _ = self._left.popitem(last=False)
            del self._pages[self._names.pop(page)]
        elif self._blank:
            page = self._blank.pop()
        else:
            raise IndexError("all pages are held")
        self._holders[page] = 1
        return page

    def give_name(self, page: int, name: bytes) -> None:
        """Register an immutable page that is in use under its prefix hash; of several with one hash only the first."""
        if name not in self._pages and page not in self._names:
            self._pages[name] = page
            self._names[page] = name

    def forget_name(self, page: int) -> None:
        """Take a page out of the prefix cache: its tokens are about to change."""
        if (name := self._names.pop(page, None)) is not None:
            del self._pages[name]

    def find(self, name: bytes) -> int | None:
        """Look up a page by prefix hash; None if it is not cached. Acquire it with :meth:`hold` next."""
        return self._pages.get(name)

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def hold(self, page: int) -> None:
        """Acquire a page that was found."""
        self._left.pop(page, None)
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """Release a page. Release the last page of a sequence first: it is the least useful one to other requests."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._names:
                self._left[page] = None
            else:
                self._blank.append(page)
