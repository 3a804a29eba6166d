# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts of Nova's fake driver, whose devices a test writes into Placement.

Nova's scheduler has our filter and weigher.
"""

# chooses the threading mode, and so comes before the rest of Nova
from nova.tests.functional import integrated_helpers

import uuid

import fixtures
from nova.scheduler.client import report
from nova.virt import fake

from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling
from tests import functional
from tests import scheduling as options

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
WANTED = str(uuid.UUID('d8424dc4a4a3c413f89e433683f9040b'))
OTHER = str(uuid.UUID('f7df405cbd7acf7222f144b0b93acd18'))
THIRD = str(uuid.UUID('5b3a1c7e92d44f608e1bc07d64a2f935'))


class SchedulerTestBase(integrated_helpers.ProviderUsageBaseTestCase):

    compute_driver = 'fake.MediumFakeDriver'

    def setUp(self):
        self.flags(api_paste_config=functional.API_PASTE, group='wsgi')
        self.flags(**{**options.OPTIONS, 'enabled_filters': [
            'ComputeFilter', 'ServerGroupAntiAffinityFilter',
            'AcceleratorFilter']})
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.filters.SCHEDULINGS',
            scheduling.Schedulings(filters._get)))
        resources = fake.FakeDriver.get_available_resource
        # as our driver reports them
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.fake.FakeDriver.get_available_resource',
            lambda driver, nodename: {
                **resources(driver, nodename),
                'stats': {naming.STATISTIC: '1'}}))
        #: name -> uuid of each region
        self.regions = {}
        #: what the scheduler asked of Placement
        self.gets = []
        get = report.SchedulerReportClient.get

        def counted(client, url, *args, **kwargs):
            if url.startswith('/allocation_candidates?'):
                self.gets.append(url)
            elif '?' in url and 'CUSTOM_' in url:
                self.gets.append(url)
            return get(client, url, *args, **kwargs)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.client.report.SchedulerReportClient.get',
            counted))

    def host(self, name, *functions, gpus=0, **where):
        """A host with one region for each function, None for an empty one, and
        a pool of GPUs."""
        self._start_compute(name, **where)
        for index, function in enumerate(functions):
            self._provider(name, f'{name}/{index}', FPGA, 1)
            self.program(f'{name}/{index}', function)
        if gpus:
            self._provider(name, f'{name}/gpus', GPU, gpus)

    def _provider(self, host, name, resource_class, total):
        self.placement.put(
            f'/resource_classes/{resource_class}', {}, version='1.7')
        self.regions[name] = self.placement.post(
            '/resource_providers', version='1.20', body={
                'name': name, 'parent_provider_uuid':
                self._get_provider_uuid_by_host(host)}).body['uuid']
        self._set_inventory(self.regions[name], {
            'resource_class': resource_class, 'total': total})

    def program(self, region, function):
        """What nova-compute shows of a region."""
        traits = {'CUSTOM_FPGA_INTEL', naming.PROGRAMMABLE}
        if function:
            spelled = naming.function_trait(function)
            traits |= {spelled, spelled.replace('FPGA_', 'FPGA_INTEL_')}
        for trait in traits:
            self.placement.put(f'/traits/{trait}', {}, version='1.6')
        self._set_provider_traits(self.regions[region], sorted(traits))

    def flavor(self, *functions, gpus=0):
        specs = {'group_policy': 'isolate'} if (
            len(functions) + bool(gpus) > 1) else {}
        if gpus:
            specs[f'resources_GPUS:{GPU}'] = str(gpus)
        for index, function in enumerate(functions):
            specs[f'resources_A{index}:{FPGA}'] = '1'
            if function:
                specs[f'accel_A{index}:function_id'] = function
        return self._create_flavor(vcpu=1, memory_mb=64, disk=1,
                                   extra_spec=specs)

    def boot(self, *functions, gpus=0, expected_state='ACTIVE', **kwargs):
        """The providers of which a new server got something."""
        server = self._create_server(
            flavor_id=self.flavor(*functions, gpus=gpus), networks='none',
            expected_state=expected_state, **kwargs)
        return self.regions_of(server)

    def regions_of(self, server):
        allocated = self._get_allocations_by_server_uuid(server['id'])
        return sorted(name for name, rp in self.regions.items()
                      if rp in allocated)

    def boot_many(self, count, function, expected_state='ACTIVE', group=None,
                  gpus=0):
        """The same of each of the servers of one request."""
        return sorted(map(self.regions_of, self.request(
            self.flavor(function, gpus=gpus), count, expected_state, group)))

    def request(self, flavor, count, expected_state='ACTIVE', group=None):
        """Return the servers of one request."""
        server = self._build_server(flavor_id=flavor, networks='none')
        server.update(min_count=count, max_count=count,
                      return_reservation_id=True)
        body = {'server': server}
        if group:
            body['os:scheduler_hints'] = {'group': group}
        reservation = self.api.post_server(body)['reservation_id']
        return [self._wait_for_state_change(one, expected_state)
                for one in self.api.get_servers(
                    search_opts={'reservation_id': reservation})]

    def fill(self, host):
        """Make Nova's own weighers like the host least."""
        self._create_server(flavor_id=self._create_flavor(
            vcpu=1, memory_mb=2048, disk=1), networks='none', host=host)
