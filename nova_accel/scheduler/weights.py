# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A weigher that prefers hosts with the wanted functions already loaded, with
devices that are close to each other, and fuller hosts."""

from nova.scheduler import utils
from nova.scheduler import weights

from nova_accel import conf
from nova_accel import log as logging
from nova_accel import naming
from nova_accel.scheduler import cost
from nova_accel.scheduler import filters

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class AcceleratorWeigher(weights.BaseHostWeigher):
    """Weighs a host by the cost of its first candidate, which Nova claims.

    The scale is absolute. Because of minval and maxval, Nova uses a weight as
    it is, even below 0 (nova.weights, 31 to 34). Without them, Nova would
    stretch the smallest difference between two hosts to 1.
    """

    minval = 0.0
    maxval = 1.0

    def __init__(self):
        # read once, when nova-scheduler starts, because reading an option
        # takes longer than computing the cost of a host
        self._multiplier = CONF.accel.weight_multiplier

    def weight_multiplier(self, host_state):
        """Return the multiplier of the host's aggregate, or else the option
        [accel] weight_multiplier."""
        if not host_state.aggregates:
            return self._multiplier
        return utils.get_weight_multiplier(
            host_state, 'accel_weight_multiplier', self._multiplier)

    def weigh_objects(self, weighed_obj_list, weight_properties):
        """Return the negative cost of each host."""
        try:
            return self._weigh(weighed_obj_list, weight_properties)
        # any error, as in the filter
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
        cost_of = scheduling.cost
        order = scheduling.near.order if scheduling.near else {}
        return [self._weigh_object(weighed.obj, cost_of)
                - cost.NEAR * order.get(weighed.obj.uuid, 0)
                for weighed in weighed_obj_list]

    @staticmethod
    def _without_accelerators(hosts, scheduling):
        if scheduling.packing != 'stack':
            return [0.0] * len(hosts)
        # providers stay in Placement when a host returns to Nova's driver
        having = [naming.STATISTIC in (host.stats or {}) for host in hosts]
        free = scheduling.facts.free_of_hosts() if any(having) else {}
        return [0.0 - cost.without_accelerators(
            free.get(host.uuid, 0) if has else 0)
            for host, has in zip(hosts, having)]

    def _weigh_object(self, host_state, cost_of):
        """Return the weight of a host, or 0 without candidates (rebuild).

        :param cost_of: callable of a candidate.
        """
        candidates = host_state.allocation_candidates
        # Nova logs weights, and -0.0 would puzzle
        return 0.0 - cost_of(candidates[0]) if candidates else 0.0
