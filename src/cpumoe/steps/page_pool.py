"""Pages of keys and values: who holds them, and where the beginnings of texts are found again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full page by its tokens and all tokens before them; ``before`` is the name of the page before, or empty.

    Clients choose the tokens, so it is a hash in which nobody can find two texts of one name.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=32).digest()


class PagePool:
    """Hands out pages 0 to ``pages - 1`` and counts who holds them.

    A page whose tokens have all been computed gets a name, by which others may hold it too; nobody writes into it any
    more. When the last holder has left, it keeps its name and its contents until no page without a name is left: of the
    named ones, the one that was left first is handed out first.
    """

    def __init__(self, pages: int) -> None:
        self._blank = list(reversed(range(pages)))  # neither held nor named; taken from the end
        self._holders = [0] * pages
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}  # by name
        self._left: OrderedDict[int, None] = OrderedDict()  # named pages that nobody holds, the one left first first

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._blank) + len(self._left)

    def take(self) -> int:
        """A page for new tokens. Raises IndexError if all pages are held."""
        if self._blank:
            page = self._blank.pop()
        elif self._left:
            page, _ = self._left.popitem(last=False)
            del self._pages[self._names.pop(page)]
        else:
            raise IndexError("all pages are held")
        self._holders[page] = 1
        return page

    def give_name(self, page: int, name: bytes) -> None:
        """Lets others find a page that is held and full; of pages with the same tokens only the first is found."""
        if name not in self._pages and page not in self._names:
            self._pages[name] = page
            self._names[page] = name

    def find(self, name: bytes) -> int | None:
        """The page of this name, if there is one; it must be held or left alone."""
        return self._pages.get(name)

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def hold(self, page: int) -> None:
        """Holds a page that was found."""
        self._left.pop(page, None)
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """Ends one holding of a page. Of a text, the last page should be given back first: it is the least useful."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._names:
                self._left[page] = None
            else:
                self._blank.append(page)
