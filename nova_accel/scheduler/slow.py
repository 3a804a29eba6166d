# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Advice for requests that Placement answers slowly.

By default Placement tries each permutation of a host's regions that satisfies a
request: this takes seconds for five regions of eight, and minutes for six.
Three options of placement.conf make it fast (docs/source/operate/placement.rst,
"Hosts with many FPGAs").
"""

import collections
from collections.abc import Iterable

from nova_accel import request

#: seconds after which an answer is slow
SECONDS = 5
#: number of groups of one resource class from which their number is the cause
GROUPS = 4
#: assignments for placement.conf
OPTIONS = ('[workarounds] optimize_for_wide_provider_trees = true, '
           '[placement] max_allocation_candidates = 1000 and '
           'allocation_candidates_generation_strategy = breadth-first')


def advice(seconds: float, groups: Iterable[request.Group]) -> str:
    """Return a sentence that advises to set OPTIONS.

    :param seconds: duration of Placement's answer.
    :param groups: groups of the request that ask for accelerators.
    :returns: '' if the answer was not slow, or the groups are too few to be
        the cause.
    """
    counts = collections.Counter(
        name for group in groups for name, amount in group.resources.items()
        if amount)
    if seconds < SECONDS or max(counts.values(), default=0) < GROUPS:
        return ''
    return (f'Placement took {seconds:.0f} s for this request: set {OPTIONS} '
            f'in placement.conf.')
