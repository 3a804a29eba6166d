# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How often functions are asked for: counts that decay, in this process.

Each scheduler counts the requests that it sees itself. Of several each sees a
sample, and samples have the proportions of the whole.
"""

import collections
from collections.abc import Iterable, Mapping
import heapq

from nova_accel import locks

#: Count of functions that were not asked for since the process started. It
#: only orders these among themselves.
_UNKNOWN = 0.01
#: The demand for a function is divided by this power of its idle copies: more
#: than 1, because the second of two is needed less often than the first.
#: tests.bench.reuse compares.
_COPIES = 2


class Demand:
    """Decayed counts of requests, by the trait that a request looks for.

    Counts decay with the requests that follow and not with time: they keep
    their proportions in a quiet cloud, and a busy one forgets sooner. Used by
    all threads of a process.
    """

    #: requests after which a request counts half
    HALF_LIFE = 1000
    #: traits that are remembered; the least wanted are forgotten first
    LIMIT = 10000

    def __init__(self) -> None:
        self._lock = locks.Lock('demand')
        #: what one request counts now. It grows: the earlier ones need no
        #: change
        self._unit = 1.0
        #: trait -> sum of the units of its requests
        self._sums: dict[str, float] = {}

    def add(self, traits: Iterable[str]) -> None:
        """Count one request for a region with one of some traits."""
        with self._lock:
            self._unit *= 2 ** (1 / self.HALF_LIFE)
            for trait in traits:
                self._sums[trait] = self._sums.get(trait, 0.0) + self._unit
            if self._unit > 2 ** 100 or len(self._sums) > self.LIMIT:
                self._shrink()

    def _shrink(self) -> None:
        kept = heapq.nlargest(self.LIMIT // 2, self._sums.items(),
                              key=lambda item: item[1])
        self._sums = {trait: units / self._unit for trait, units in kept}
        self._unit = 1.0

    def counts(self, traits: Iterable[str]) -> dict[str, float]:
        """Return the counts of traits; 0.0 for those not asked for."""
        with self._lock:
            return {trait: self._sums.get(trait, 0.0) / self._unit
                    for trait in traits}

    def losses(self, contents: Iterable[tuple[str, ...]],
               idle: Mapping[str, int]) -> dict[tuple[str, ...], float]:
        """Return what is lost where an idle region is programmed.

        It is the demand for what the region carries, for each idle copy of
        that, in requests. A region that carries nothing loses nothing.

        :param contents: traits of what idle regions carry
            (naming.is_content()), one tuple for each kind.
        :param idle: trait -> number of idle regions that have it, at least 1
            for each trait of contents.
        """
        contents = list(contents)
        wanted = self.counts({t for content in contents for t in content})
        return {content: sum((wanted[trait] + _UNKNOWN)
                             / idle[trait] ** _COPIES for trait in content)
                for content in contents}


def copies(contents: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """Return trait -> number of idle regions that have it.

    :param contents: traits of what idle regions carry -> number of those.
    """
    idle: collections.Counter[str] = collections.Counter()
    for content, regions in contents.items():
        for trait in content:
            idle[trait] += regions
    return idle
