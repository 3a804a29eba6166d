# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A weigher that prefers hosts with the wanted functions already loaded."""

from nova.scheduler import utils
from nova.scheduler import weights

from nova_accel import conf
from nova_accel.scheduler import filters
from nova_accel.scheduler import ranking

CONF = conf.CONF


class AcceleratorWeigher(weights.BaseHostWeigher):
    """Scores a host by its best candidate.

    The scale is absolute (minval, maxval). Without it Nova would stretch the
    smallest difference between two hosts to a whole point.
    """

    minval = 0.0
    maxval = 1.0

    def weight_multiplier(self, host_state):
        """Return the aggregate's multiplier or [accel] weight_multiplier."""
        return utils.get_weight_multiplier(
            host_state, 'accel_weight_multiplier',
            CONF.accel.weight_multiplier)

    def _weigh_object(self, host_state, weight_properties):
        """Return 0 to 1; 0 also for hosts without candidates (rebuild)."""
        snapshot = filters.PLACEMENT.snapshot(weight_properties)
        candidates = host_state.allocation_candidates
        if not snapshot.requests or not candidates:
            return 0.0
        if host_state.uuid in snapshot.instances:
            # the filter has put the best one first
            candidates = candidates[:1]
        best = ranking.ranked(snapshot.requests, candidates, snapshot)[0][0]
        return ranking.score(snapshot.requests, best)
