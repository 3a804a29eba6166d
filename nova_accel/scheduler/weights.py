# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A weigher that prefers hosts with the wanted functions already loaded."""

from nova.scheduler import utils
from nova.scheduler import weights

from nova_accel import conf
from nova_accel.scheduler import filters
from nova_accel.scheduler import ranking

CONF = conf.CONF


class AcceleratorWeigher(weights.BaseHostWeigher):
    """Scores a host by its first candidate, which Nova claims.

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
        scheduling = filters.SCHEDULINGS.of(weight_properties)
        candidates = host_state.allocation_candidates
        if not scheduling.wishes or not candidates:
            return 0.0
        ordered = scheduling.first.get(host_state.uuid)
        if ordered and ordered[0] is candidates[0]:
            best = ordered[1]
        else:
            # hosts are forced, which skips filters; or another filter dropped
            # the first candidate
            best = ranking.rank(scheduling, candidates[0])
        return ranking.score(scheduling, best)
