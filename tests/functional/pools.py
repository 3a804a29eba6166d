# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A host with eight GPUs that are alike, which share a provider."""

from tests.functional import operations

GPUS = [f'0000:{bus}:00.0' for bus in (
    '1a', '1b', '1c', '1d', '9a', '9b', '9c', '9d')]
CLASS = 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'


def gpus(addresses=GPUS, **more):
    """Half of them on each of two NUMA nodes."""
    return [{'address': address, 'numa_node': int(address[5] == '9'),
             'iommu_group': 10 + n, **more}
            for n, address in enumerate(addresses)]


def groups(*amounts):
    """A flavor with numbered groups."""
    return {key: value for n, amount in enumerate(amounts, 1) for key, value
            in ((f'resources{n}:{CLASS}', str(amount)),
                (f'trait{n}:{L40S}', 'required'))} | (
                    {'group_policy': 'none'} if len(amounts) > 1 else {})


class PoolsTestBase(operations.OperationsTestBase):

    HOSTS = {'compute1': {'gpus': gpus()}}
    RESOURCE_CLASS = CLASS
    POOLS = 'host'

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['gpu'], pools=self.POOLS, group='accel')

    def amounts(self):
        """Name of each provider -> (total, reserved, used)."""
        return {name: (*inventory.get(CLASS, (0, 0)), used.get(CLASS, 0))
                for name, (inventory, _, used)
                in self.provider_tree().items()}

    def counts(self):
        """The same without names."""
        return sorted(self.amounts().values())

    def assertServer(self, server, count):
        """The guest has as many devices; the claims, and Placement, say so.

        :returns: their addresses.
        """
        found = self.hostdevs(server)
        self.assertEqual(count, len(found))
        mine = [c for c in self.claims(self.host_of(server))
                if c.instance_uuid == server['id']]
        self.assertEqual(found, sorted(c.handle.address for c in mine))
        self.assertEqual(
            sorted(c.provider_uuid for c in mine),
            sorted(uuid for uuid, allocation
                   in self._get_allocations_by_server_uuid(
                       server['id']).items()
                   for _ in range(allocation['resources'].get(CLASS, 0))))
        return found
