# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Count how often functions are requested, to keep popular ones in regions.

Each scheduler counts, in memory, the requests that it handles. With several
schedulers, each counts a sample with about the same proportions.
"""

import collections
from collections.abc import Iterable, Mapping
import heapq

from nova_accel import locks

#: Count of functions without a request since the process started. It only
#: ranks them among each other.
_UNKNOWN = 0.01
#: The demand for a function is divided by this power of the number of its idle
#: copies: more than 1, because the second copy is needed less often than the
#: first. tests.bench.reuse compares values.
_COPIES = 2


class Demand:
    """Counts of requests by the wanted trait, in which old requests weigh
    less.

    A new request reduces the weight of earlier requests; time does not. Hence
    the counts keep their proportions in a quiet cloud, and follow changes in a
    busy one. Thread-safe.
    """

    #: number of later requests after which a request counts half
    HALF_LIFE = 1000
    #: number of traits to keep; the least requested ones are dropped first
    LIMIT = 10000

    def __init__(self) -> None:
        self._lock = locks.Lock('demand')
        #: the weight of a new request. It grows, instead of the weights of
        #: earlier requests being reduced
        self._unit = 1.0
        #: trait -> sum of the weights of its requests
        self._sums: dict[str, float] = {}

    def add(self, traits: Iterable[str]) -> None:
        """Count one request, which any of these traits would satisfy."""
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
        """Return trait -> weighted number of requests, at least 0.0."""
        with self._lock:
            return {trait: self._sums.get(trait, 0.0) / self._unit
                    for trait in traits}

    def losses(self, contents: Iterable[tuple[str, ...]],
               idle: Mapping[str, int]) -> dict[tuple[str, ...], float]:
        """Return content of a region -> the cost of overwriting it.

        The cost is the number of requests for the content, divided among the
        idle regions that have it. An empty region costs nothing.

        :param contents: the contents of idle regions, each as a tuple of its
            traits (naming.is_content()).
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

    :param contents: a content, as a tuple of its traits -> number of idle
        regions with it.
    """
    idle: collections.Counter[str] = collections.Counter()
    for content, regions in contents.items():
        for trait in content:
            idle[trait] += regions
    return idle
