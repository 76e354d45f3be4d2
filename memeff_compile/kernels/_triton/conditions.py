"""The arguments by which attention implementations decide whether a query attends to a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a query attends to a key, and how the scores are computed."""

    key_mask: Tensor | None  # bool (B or 1, N): keys that at least one query may attend to, or None
    # (B or 1, M) and (B or 1, N): a query attends to a key only if both are equal; or both None
    query_ids: Tensor | None
    key_ids: Tensor | None
    ahead: int | None  # query m sees keys up to m + ahead, or None for no bound
    behind: int | None  # query m sees keys from m - behind on, or None for no bound
    scale: float  # factor of the scores
    softcap: float  # c > 0 makes a score c * tanh(score / c); 0 leaves it
    mean: bool  # a query without any visible key gets the mean of all values, not zeros
    # bool or floating (B or 1, H or 1, M or 1, N or 1): true where a key is visible, or the number
    # added to the score; with a mask, the fields above are not used. None for no mask.
    mask: Tensor | None = None
    mask_tiles: Tensor | None = None  # the result of `mask_tiles.classify` for the mask, or None

    @property
    def is_bias(self) -> bool:
        """Return whether the mask is a bias that is added to the scores."""
        return self.mask is not None and self.mask.dtype.is_floating_point

    def has_tables(self) -> bool:
        """Return whether a key mask or sequence ids, in addition to positions, decide which keys a
        query sees."""
        return self.key_mask is not None or self.query_ids is not None

    def positions_leave_a_key(self, queries: int, keys: int) -> bool:
        """Return whether every query sees at least one key if only bounds on the distance between
        a query and a key apply.

        The bound `ahead` says how far after a query its keys may be, and `behind` how far before.
        With `ahead=0` as the only bound, the result is true."""
        if not keys:
            return False
        ahead = keys if self.ahead is None else self.ahead
        behind = queries if self.behind is None else self.behind
        return ahead >= 0 and queries - 1 - behind <= keys - 1 and ahead + behind >= 0

    def has_empty_means(self, queries: int, keys: int) -> bool:
        """Return whether the kernel must read every key.

        If `mean` is set, a query without a visible key gets the mean of all values. The kernel must
        read every key if the call may have such a query.
        """
        return self.mean and (self.has_tables() or not self.positions_leave_a_key(queries, keys))

    def keys_of(self, first: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """Return the range of keys that the queries from `first` up to, not including, `stop`
        need."""
        if self.has_empty_means(queries, keys):
            return 0, keys
        low = 0 if self.behind is None else min(keys, max(0, first - self.behind))
        high = keys if self.ahead is None else min(keys, max(0, stop + self.ahead))
        return low, max(low, high)  # ahead=0, behind=2: queries 8 to 11 of many need keys 6 to 11

    def counts(self, first: int, stop: int, low: int, high: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to, as bool (B or 1, stop - first, high - low)."""
        query = torch.arange(first, stop, device=device)[:, None]
        key = torch.arange(low, high, device=device)[None, :]
        found = torch.ones(1, stop - first, high - low, dtype=torch.bool, device=device)
        if self.ahead is not None:
            found = found & (key - query <= self.ahead)
        if self.behind is not None:
            found = found & (query - key <= self.behind)
        if self.key_mask is not None:
            found = found & self.key_mask[:, None, low:high]
        if self.query_ids is not None and self.key_ids is not None:
            found = found & (self.query_ids[:, first:stop, None] == self.key_ids[:, None, low:high])
        return found
