# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What Placement shows of a host, and what others did to it."""

import contextlib
import time
from unittest import mock

from nova.cmd import manage
from nova import context
from nova import objects
import os_resource_classes
from placement.objects import resource_provider

from nova_accel import naming
from tests.functional import base
from tests.functional import cloud
from tests.functional import process

DEVICE = '0000:5e:00.0'
FUNCTION = 'a9d4b7a2-6d9e-4f3b-8a47-31f0b5c0f9d1'


class ReportTest(base.AcceleratorTestBase):

    HOSTS = {'compute1': {'cards': [
        base.card(DEVICE), base.card('0000:af:00.0', [base.NLB3])]}}

    def setUp(self):
        super().setUp()
        self.device = f'compute1_accel_{DEVICE}'
        self.region = f'{self.device}_region0'
        # each report sees what others did to Placement since the last
        self.flags(resource_provider_association_refresh=1, group='compute')

    def report_afresh(self):
        client = self.computes['compute1'].driver.virtapi.reportclient
        client.clear_provider_cache()
        self.report()

    def test_tree(self):
        root = self.provider('compute1')
        device = self.provider(self.device)
        region = self.provider(self.region)
        self.assertEqual(root['uuid'], device['parent_provider_uuid'])
        self.assertEqual(device['uuid'], region['parent_provider_uuid'])
        tree = self.provider_tree()
        self.assertEqual(4, len(tree))
        self.assertEqual(base.REGION, tree[self.region][0])
        self.assertEqual({}, tree[self.device][0])
        self.assertEqual(
            {'CUSTOM_FPGA_INTEL', 'CUSTOM_FPGA_INTEL_PAC_ARRIA10',
             'CUSTOM_FPGA_INTEL_ARRIA10', 'OWNER_CYBORG',
             'CUSTOM_ACCELERATOR_PCIE_ROOT_0000_5E'}, tree[self.device][1])
        function = 'D8424DC4_A4A3_C413_F89E_433683F9040B'
        shell = '9926AB6D_6C92_5A68_AABC_A7D84C545738'
        self.assertEqual(tree[self.device][1] | {
            f'CUSTOM_FPGA_INTEL_REGION_{shell}',
            f'CUSTOM_FPGA_REGION_INTEL_{shell}',
            f'CUSTOM_FPGA_INTEL_FUNCTION_{function}',
            f'CUSTOM_FPGA_FUNCTION_INTEL_{function}',
            f'CUSTOM_FPGA_FUNCTION_{function}',
            'CUSTOM_PROGRAMMABLE'}, tree[self.region][1])

    def test_domains(self):
        """Traits of the host itself, and the same in its entry for the
        scheduler; stale ones go."""
        root = self.provider('compute1')['uuid']
        self._set_provider_traits(root, [
            *self._get_provider_traits(root), self.trait('CUSTOM_NEAR_ROW_1')])
        self.flags(near=['rack=CUSTOM_NEAR_RACK_R7'], group='accel')
        self.parts('compute1').domains.look()
        self.report_afresh()
        self.assertEqual({'CUSTOM_NEAR_RACK_R7'}, set(filter(
            naming.is_near, self._get_provider_traits(root))))
        with context.target_cell(
                context.get_admin_context(),
                self.cell_mappings['cell1']) as cell:
            node = objects.ComputeNode.get_by_host_and_nodename(
                cell, 'compute1', 'compute1')
        self.assertEqual('CUSTOM_NEAR_RACK_R7',
                         node.stats[naming.NEAR_STATISTIC])

    def trait(self, name):
        self.placement.put(f'/traits/{name}', {}, version='1.6')
        return name

    def test_find_providers(self):
        nova = self.computes['compute1'].driver.cloud
        mine = self.provider(self.region)['uuid']
        trait = naming.function_trait(base.NLB0)
        self.assertEqual({mine}, nova.find_providers(trait))
        self.assertEqual({mine}, nova.find_providers(trait, mine))
        # no provider ever had it
        self.assertEqual(set(), nova.find_providers(
            naming.function_trait(FUNCTION)))
        # or by its name
        self.assertEqual({self.provider(self.region)['uuid']},
                         nova.find_providers(name=self.region))
        self.assertEqual(set(), nova.find_providers(name='nobody & none'))

    @cloud.fresh
    def test_name_that_is_taken_elsewhere(self):
        """A provider of somebody else under one of our names costs that
        device, not the host: servers without accelerators are built."""
        other = 'compute3_accel_' + DEVICE
        self.placement.post('/resource_providers', {'name': other},
                            version='1.20')
        uuid = self.provider(other)['uuid']
        self.describe_host('compute3', {'cards': [
            base.card(DEVICE), base.card('0000:af:00.0')]})
        self.start_compute('compute3')
        self.report()
        tree = self.provider_tree()
        self.assertNotIn(f'{other}_region0', tree)
        self.assertIn('compute3_accel_0000:af:00.0_region0', tree)
        self.assertEqual(uuid, self.provider(other)['uuid'])
        said, = [line for line in self.stdlog.logger.output.splitlines()
                 if uuid in line and ' ERROR [nova_accel.' in line]
        self.assertIn('delete it', said)
        self.assertIsNotNone(self.provider('compute3'))
        server = self._build_server(
            networks='none', image_uuid=self.glance.guest_image,
            flavor_id=self._create_flavor(extra_spec={}))
        server.pop('availability_zone', None)
        server = self.admin_api.post_server(
            {'server': {**server, 'host': 'compute3'}})
        self._wait_for_state_change(server, 'ACTIVE')
        self._delete_server(server)
        # the operator deletes it
        self.placement.delete(f'/resource_providers/{uuid}')
        self.report()
        self.assertIn(f'{other}_region0', self.provider_tree())

    @cloud.fresh
    def test_what_others_set_survives(self):
        region = self.provider(self.region)['uuid']
        self.placement.put('/traits/CUSTOM_ROW_7', {}, version='1.6')
        self._set_provider_traits(region, [
            *self.traits(self.region), 'CUSTOM_ROW_7'])
        inventory = self.placement.get(
            f'/resource_providers/{region}/inventories/'
            f'CUSTOM_ACCELERATOR_FPGA').body
        self.placement.put(
            f'/resource_providers/{region}/inventories/'
            f'CUSTOM_ACCELERATOR_FPGA', {**inventory, 'reserved': 1},
            version='1.26')
        generation = self.provider(self.region)['generation']
        aggregate = '7f0a1f58-26c5-4a1a-a4ab-2a39cd4ccd03'
        self.placement.put(
            f'/resource_providers/{region}/aggregates',
            {'aggregates': [aggregate],
             'resource_provider_generation': generation}, version='1.19')
        # a change of our own, so that the provider is written
        self.flags(function_class=[f'COMPUTE:{base.NLB0}'], group='accel')
        self.restart_compute_service(self.region.partition('_')[0])
        self.report_afresh()
        totals, traits, _ = self.provider_tree()[self.region]
        self.assertEqual({**base.REGION, 'CUSTOM_ACCELERATOR_FPGA': (1, 1)},
                         totals)
        self.assertIn('CUSTOM_ROW_7', traits)
        self.assertIn('CUSTOM_FPGA_COMPUTE', traits)
        self.assertEqual([aggregate], self.placement.get(
            f'/resource_providers/{region}/aggregates', version='1.19',
        ).body['aggregates'])

    def test_no_change_writes_nothing(self):
        self.report()
        generations = {p['uuid']: p['generation'] for p in self.placement.get(
            '/resource_providers', version='1.14',
        ).body['resource_providers']}
        for _ in range(3):
            self.report()
        self.assertEqual(generations, {
            p['uuid']: p['generation'] for p in self.placement.get(
                '/resource_providers', version='1.14',
            ).body['resource_providers']})

    def test_change_after_a_server_was_scheduled(self):
        """Each allocation gives a provider another generation, and Nova's
        copy of it is older: the report is not refused all the same."""
        self.flags(resource_provider_association_refresh=3600, group='compute')
        for _ in range(2):
            server = self.boot(base.fpga_flavor(function_id=base.NLB0))
            self.report()
            self.assertNotIn(naming.PROGRAMMABLE, self.traits(self.region))
            self._delete_server(server)
            # at once, and after a report
            self.assertIn(naming.PROGRAMMABLE, self.traits(self.region))
            self.report()
            self.assertIn(naming.PROGRAMMABLE, self.traits(self.region))
        self.assertEqual([], [
            line for line in self.stdlog.logger.output.splitlines()
            if 'Failed to update' in line])

    def test_two_write_at_once(self):
        """Somebody changes a provider while Placement writes its traits."""
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        self.report()
        write, others = resource_provider.ResourceProvider.set_traits, [1]

        def late(provider, traits):
            if others:
                others.pop()
                provider.generation -= 1
            return write(provider, traits)
        with mock.patch.object(
                resource_provider.ResourceProvider, 'set_traits', late):
            self._delete_server(server)
        self.assertEqual([], others)
        self.assertIn(naming.PROGRAMMABLE, self.traits(self.region))
        self.assertEqual([], [
            line for line in self.stdlog.logger.output.splitlines()
            if 'is not shown' in line])

    def test_type_that_placement_has_not_yet(self):
        """Placement has the provider of a device, and lacks the class of what
        it offers: the first of an operator's own type was not offered at first.
        """
        nova = self.computes['compute1'].driver.cloud
        name = 'CUSTOM_ACCELERATOR_SOMETHING'
        nova.show(self.provider(self.device)['uuid'],
                  lambda inventory, traits: (
                      {name: {'total': 1}}, traits), self.fail)
        self.assertEqual({name: (1, 0)}, self.provider_tree()[self.device][0])

    def test_vanished_device(self):
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        inventory = self.parts('compute1').inventory
        self.kernel('compute1').set_fault(DEVICE, vanish=True)
        self.kernel('compute1').set_fault('0000:af:00.0', vanish=True)
        inventory.scanner.scan()
        self.report()
        # held: fenced; not held: fenced, then gone
        tree = self.provider_tree()
        self.assertEqual(base.FENCED_REGION, tree[self.region][0])
        self.report()
        self.assertEqual({self.device, self.region},
                         set(self.provider_tree()))
        # and the host still takes servers
        self.boot({})
        self._delete_server(server)
        self.report()
        self.report()
        self.assertEqual({}, self.provider_tree())
        # the card is back, probed anew, under the same uuids
        self.kernel('compute1').set_fault(DEVICE, vanish=None)
        self.kernel('compute1').rebind(base.vf(DEVICE), 'dfl-pci')
        inventory.scanner.scan()
        self.report()
        self.assertEqual(base.FENCED_REGION,
                         self.provider_tree()[self.region][0])
        # what its server left is taken away
        self.computes['compute1'].driver.parts.reconciler.run()
        process.until(lambda: self.assertEqual([], self.claims()))
        self.report()
        self.assertEqual(base.REGION, self.provider_tree()[self.region][0])

    @cloud.fresh
    def test_standard_resource_classes(self):
        self.flags(resource_classes='standard', group='accel')
        self.restart_compute_service('compute1')
        self.assertEqual(
            {os_resource_classes.FPGA: (1, 0), base.MEMORY: (8192, 0)},
            self.provider_tree()[self.region][0])
        # either spelling of a request is written as the one in force
        for name in ('FPGA', 'CUSTOM_ACCELERATOR_FPGA'):
            self._delete_server(self.boot({f'resources1:{name}': '1'}))


class ConflictTest(base.AcceleratorTestBase):

    FRESH_CLOUD = True
    HOSTS = {}

    def test_device_that_nova_owns_too(self):
        self.describe_host('compute1', {'cards': [base.card(DEVICE)]})
        self.flags(device_spec=['{"vendor_id": "8086", "product_id": "09c4"}'],
                   group='pci')
        self.assertRaises(base.Ended, self.start_compute, 'compute1')
        for word in (DEVICE, '[pci] device_spec', 'enabled_drivers'):
            self.assertIn(word, self.stdlog.logger.output)


class RequestsTest(base.AcceleratorTestBase):
    """What nova-compute asks Placement of each provider."""

    HOSTS = {'compute1': {'cards': [
        base.card(DEVICE, [base.NLB0] * 4),
        base.card('0000:af:00.0', [base.NLB3] * 4)]}}

    def setUp(self):
        super().setUp()
        self.client = self.computes['compute1'].manager.reportclient
        # after the first comparison of claims
        self.report()

    @contextlib.contextmanager
    def asked(self):
        """Paths that are about a provider."""
        found = []
        get = self.client.get

        def noted(url, *args, **kwargs):
            if url.startswith('/resource_providers/'):
                found.append(url)
            return get(url, *args, **kwargs)
        with mock.patch.object(self.client, 'get', noted):
            yield found

    def test_boot_and_periodic_report(self):
        for extra_spec in ({}, base.fpga_flavor()):
            with self.asked() as paths:
                server = self._create_server(
                    flavor_id=self._create_flavor(extra_spec=extra_spec),
                    image_uuid=self.glance.guest_image, networks='none')
                self.report()
            # those of a comparison of claims
            self.assertGreater(4, len([path for path in paths if
                                       path.endswith('/allocations')]), paths)
            self._delete_server(server)

    def test_copy_of_nova_is_old(self):
        """The host is read, and each provider that has changed."""
        for extra_spec, changed in (({}, 0), (base.fpga_flavor(), 1)):
            server = self._create_server(
                flavor_id=self._create_flavor(extra_spec=extra_spec),
                image_uuid=self.glance.guest_image, networks='none')
            times = self.client._association_refresh_time
            times |= dict.fromkeys(times, time.time() - 1000)
            with self.asked() as paths:
                self.report()
            self.assertEqual(1 + changed, len({
                path.split('/')[2] for path in paths
                if not path.endswith('/allocations')}), paths)
            self._delete_server(server)

    def test_allocations_are_healed(self):
        """As by nova-manage."""
        server = self._create_server(
            flavor_id=self._create_flavor(), networks='none',
            image_uuid=self.glance.guest_image)
        before = self._get_allocations_by_server_uuid(server['id'])
        self.placement.delete(f'/allocations/{server["id"]}')
        manage.PlacementCommands().heal_allocations(
            instance_uuid=server['id'])
        self.assertEqual(
            {provider: given['resources'] for provider, given
             in before.items()},
            {provider: given['resources'] for provider, given
             in self._get_allocations_by_server_uuid(server['id']).items()})
