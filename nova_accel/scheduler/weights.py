# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Prefers hosts whose FPGA regions already carry the wanted functions."""

from nova.scheduler import utils
from nova.scheduler import weights

from nova_accel import conf
from nova_accel.scheduler import filters
from nova_accel.scheduler import ranking

CONF = conf.CONF


class AcceleratorWeigher(weights.BaseHostWeigher):
    """Scores a host by the best of its candidates.

    The scale is absolute (minval, maxval): otherwise Nova would blow up the
    smallest difference between two hosts to a whole point.
    """

    minval = 0.0
    maxval = 1.0

    def weight_multiplier(self, host_state):
        """[accel] weight_multiplier, or that of the host's aggregate."""
        return utils.get_weight_multiplier(
            host_state, 'accel_weight_multiplier',
            CONF.accel.weight_multiplier)

    def _weigh_object(self, host_state, weight_properties):
        """0 to 1; 0 too for hosts without candidates (rebuild)."""
        known = filters.PLACEMENT.scheduling(weight_properties)
        candidates = host_state.allocation_candidates
        if not known.requests or not candidates:
            return 0.0
        if host_state.uuid in known.instances:
            # the filter has put the best one first
            candidates = candidates[:1]
        best = ranking.ranked(known.requests, candidates, known)[0][0]
        return ranking.score(known.requests, best)
