# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A weigher that prefers hosts with the wanted functions already loaded, with
devices that are close to each other, and those that are full."""

import functools

from nova.scheduler import utils
from nova.scheduler import weights

from nova_accel import conf
from nova_accel import log as logging
from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import ranking

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class AcceleratorWeigher(weights.BaseHostWeigher):
    """Scores a host by its first candidate, which Nova claims.

    The scale is absolute: minval and maxval leave a score as it is, below 0 too
    (nova.weights, 31 to 34). Without them Nova would stretch the smallest
    difference between two hosts to a whole point.
    """

    minval = 0.0
    maxval = 1.0

    def __init__(self):
        # once, when nova-scheduler starts: reading an option takes longer
        # than the score of a host
        self._multiplier = CONF.accel.weight_multiplier

    def weight_multiplier(self, host_state):
        """Return the aggregate's multiplier or [accel] weight_multiplier."""
        return utils.get_weight_multiplier(
            host_state, 'accel_weight_multiplier', self._multiplier)

    def weigh_objects(self, weighed_obj_list, weight_properties):
        """Return ranking.score() of each host."""
        try:
            return self._weigh(weighed_obj_list, weight_properties)
        # as in the filter
        except Exception:
            LOG.exception(filters.UNTOLD)
            filters.SCHEDULINGS.give_up(weight_properties)
            return [0.0] * len(weighed_obj_list)

    def _weigh(self, weighed_obj_list, weight_properties):
        scheduling = filters.SCHEDULINGS.of(weight_properties)
        if scheduling is None:
            return [0.0] * len(weighed_obj_list)
        if not scheduling.requests:
            return self._without_accelerators(
                [weighed.obj for weighed in weighed_obj_list], scheduling)
        rank = ranking.ranker(scheduling)
        # many hosts, few ranks
        score = functools.cache(functools.partial(ranking.score, scheduling))

        def weigh(candidate):
            return score(rank(candidate))
        return [self._weigh_object(weighed.obj, weigh)
                for weighed in weighed_obj_list]

    @staticmethod
    def _without_accelerators(hosts, scheduling):
        if not (scheduling.packs_hosts and scheduling.packing == 'stack'):
            return [0.0] * len(hosts)
        # providers stay in Placement when a host returns to Nova's driver
        having = [naming.STATISTIC in (host.stats or {}) for host in hosts]
        free = scheduling.free_of_hosts() if any(having) else {}
        return [ranking.score_without_accelerators(
            free.get(host.uuid, 0) if has else 0)
            for host, has in zip(hosts, having)]

    def _weigh_object(self, host_state, weigh):
        """Return the score; 0 also for hosts without candidates (rebuild).

        :param weigh: callable of a candidate.
        """
        candidates = host_state.allocation_candidates
        return weigh(candidates[0]) if candidates else 0.0
