# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that have to be near each other, and those that are only given
together, with Nova's scheduler and Placement."""

from xml.etree import ElementTree

import fixtures
from nova import context
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt

from tests.functional import pools
from tests.functional.pools import GPUS, groups

SET = 'CUSTOM_ACCELERATOR_SET'


class NumaPoolTest(pools.PoolsTestBase):
    """Placement shows where devices are, and Nova's scheduler how large the
    nodes of a host are."""

    POOLS = 'numa_node'

    def test_demanded(self):
        one = self.boot(groups(3))
        nodes = [GPUS[:4], GPUS[4:]]
        if self.assertServer(one, 3)[0] in GPUS[4:]:
            nodes.reverse()
        same = {'accel:same': 'numa'}
        two = self.boot(groups(1, 1) | same)
        self.assertLessEqual({*self.assertServer(two, 2)}, {*nodes[1]})
        # three are free, on two nodes
        failed = self.boot(groups(2, 1) | same, expected_state='ERROR')
        self.assertIn('No valid host was found. Accelerators: no host for '
                      'this server has all of them free on one NUMA node: ',
                      self.fault(failed))
        self.assertIn('needs all accelerators on one NUMA node, and no host '
                      'has that: compute1 offers them on CUSTOM_ACCELERATOR_'
                      'NUMA_0, CUSTOM_ACCELERATOR_NUMA_1.',
                      self.stdlog.logger.output)
        self._delete_server(failed)
        last = self.boot(groups(2, 1))
        self.assertServer(last, 3)
        for server in (one, two, last):
            self._delete_server(server)

    def test_where_the_guest_fits(self):
        node = objects.ComputeNode.get_by_host_and_nodename(
            context.get_admin_context(), 'compute1', 'compute1')
        sizes = [len(cell.cpuset) for cell in objects.NUMATopology
                 .obj_from_db_obj(node.numa_topology).cells]
        self.assertEqual(2, len(sizes))
        required = {'accel:numa_affinity': 'required', 'hw:numa_nodes': '1'}
        for size, status in ((max(sizes), 'ACTIVE'),
                             (max(sizes) + 1, 'ERROR')):
            server = self._create_server(
                flavor_id=self._create_flavor(
                    vcpu=size, extra_spec=groups(1) | required),
                image_uuid=self.glance.guest_image, networks='none',
                expected_state=status)
            if status == 'ERROR':
                self.assertIn(
                    'No valid host was found. Accelerators: no host has them '
                    'free on NUMA nodes where this server fits, too: ',
                    self.fault(server))
            self._delete_server(server)
        self.assertEqual([], self.claims())


class GuestNodesTest(pools.PoolsTestBase):
    """Guests that have NUMA nodes, on a host that has two."""

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(hw_machine_type=['x86_64=q35'], group='libvirt')

    def setUp(self):
        super().setUp()
        define, self.defined = fakelibvirt.Connection.defineXML, []
        # its own XMLDesc() has no controllers
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Connection, 'defineXML', lambda connection, xml: (
                self.defined.append(xml), define(connection, xml))[1]))

    def nodes(self):
        """Bus of each hostdev of the guest that was made last -> the host's
        NUMA node, as the guest sees it."""
        xml = ElementTree.fromstring(self.defined[-1])
        host = {memory.get('cellid'): int(memory.get('nodeset'))
                for memory in xml.iterfind('numatune/memnode')}
        controllers = {controller.get('index'): controller for controller
                       in xml.iterfind("devices/controller[@type='pci']")}

        def above(device):
            return controllers[str(int(device.find('address').get('bus'), 0))]
        return {hostdev.find('source/address').get('bus')[2:]: host[
            above(above(hostdev)).findtext('target/node')]
            for hostdev in xml.iterfind('devices/hostdev')}

    def test_told(self):
        server = self.boot(groups(4, 4) | {'hw:numa_nodes': '2'})
        self.assertServer(server, 8)
        told = {address[5:7]: int(address[5] == '9') for address in GPUS}
        self.assertEqual(told, self.nodes())
        self._reboot_server(server, hard=True)
        self.assertEqual(told, self.nodes())
        self.api.post_server_action(server['id'], {'suspend': {}})
        self._wait_for_state_change(server, 'SUSPENDED')
        self.api.post_server_action(server['id'], {'resume': {}})
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertServer(server, 8)
        self._delete_server(server)

    def test_guest_is_where_its_devices_are(self):
        """Also where Nova would take another node, by itself the first."""
        self.flags(allow_resize_to_same_host=True)
        required = {'accel:numa_affinity': 'required', 'hw:numa_nodes': '1'}
        other = self.boot(groups(4))
        self.assertEqual(GPUS[:4], self.assertServer(other, 4))
        one = self.boot(groups(1) | required)
        self.assertEqual(GPUS[4:5], self.assertServer(one, 1))
        self.assertEqual({'9a': 1}, self.nodes())
        two = self.boot({'hw:numa_nodes': '1'})
        self._resize_server(two, self._create_flavor(
            extra_spec=groups(2) | required))
        self._confirm_resize(two)
        self.assertLess({*self.assertServer(two, 2)}, {*GPUS[5:]})
        self.assertEqual({1}, {*self.nodes().values()})
        for server in (other, one, two):
            self._delete_server(server)


class SetsTest(pools.PoolsTestBase):

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(device_sets=[' '.join(GPUS[:4])], group='accel')

    def test_all_or_nothing(self):
        self.assertEqual([(4, 0, 0)] * 2, self.counts())
        of_set = {f'trait1:{SET}': 'required'}
        server = self.boot(groups(4) | of_set)
        self.assertEqual(GPUS[:4], self.assertServer(server, 4))
        self._reboot_server(server, hard=True)
        self.assertEqual(GPUS[:4], self.assertServer(server, 4))
        self._delete_server(server)
        failed = self.boot(groups(3) | of_set, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(failed))
        self._delete_server(failed)
        both = self.boot(groups(4, 4))
        self.assertEqual(GPUS, self.assertServer(both, 8))
        self._delete_server(both)
        one = self.boot(groups(1))
        self.assertIn(self.assertServer(one, 1)[0], GPUS[4:])
        self._delete_server(one)
