# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One device that does not do as it is told: servers get the others."""

import threading
from unittest import mock
import uuid

from nova_accel import exception
from nova_accel.inventory import offers
from tests.host import base
from tests.unit.host import A, B

AI = 'CUSTOM_ACCELERATOR_AI'
NPU = {'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci', 'total_vfs': 2}
RULE = 'vendor=19e5 product=d801 type=AI'
SPECS = {f'resources1:{AI}': '1'}


class TestCase(base.HostTestCase):

    def start(self, *cards):
        self.config.config(pci_devices=[RULE], group='accel')
        self.start_host(drivers=('pci',), others=[
            {**NPU, **card} for card in cards])
        self.driver = self.host.inventory._drivers['pci']

    def boot(self):
        return self.host.boot(SPECS, self.host.allocation(A, AI))


class PrepareTest(TestCase):
    """It cannot be made ready for the first server that gets it."""

    def setUp(self):
        super().setUp()
        self.config.config(health=['act'], device_timeout=1, group='accel')
        self.bad = None

    def replace_prepare(self, fails):
        prepare = self.driver.prepare

        def prepares(device, handle, *args):
            self.bad = self.bad or handle.address
            if handle.address == self.bad:
                fails()
            return prepare(device, handle, *args)
        self.driver.prepare = prepares

    def test_vf_hangs(self):
        self.start({'address': A, 'vfs': 2})
        goes_on = threading.Event()
        self.addCleanup(goes_on.set)
        self.replace_prepare(lambda: goes_on.wait(60))
        self.assertRaises(exception.DeviceTimeout, self.boot)
        self.host.report()
        self.assertNotEqual(
            [self.bad], self.host.devices_of(self.boot()))
        # it is free once the call has returned
        goes_on.set()
        self.wait_for(lambda: not self.host.inventory.cards.is_busy(
            f'PCI:{self.bad}'))
        self.host.reconciler.run()
        self.assertEqual([self.bad], self.host.devices_of(self.boot()))

    def test_one_of_a_pool_fails(self):
        self.start(*({'address': address, 'vfs': 0} for address in (A, B)))

        def fails():
            raise OSError(5, 'Input/output error')
        self.replace_prepare(fails)
        self.assertRaises(exception.DeviceError, self.boot)
        self.host.inventory.looks.run()
        self.assertNotEqual(
            [self.bad], self.host.devices_of(self.boot()))


class StartTest(TestCase):
    """libvirt does not start a guest with it."""

    ADDRESSES = [A, B, '0000:b1:00.0', '0000:b2:00.0']

    def refuse(self, *addresses, error='QEMU exited unexpectedly'):
        """Let guests with these not start."""
        takes = self.host.cloud._takes

        def refuses(handles, guest):
            for handle in handles:
                if handle.address in addresses:
                    raise RuntimeError(error.format(handle.address))
            takes(handles, guest)
        self.host.cloud._takes = refuses

        def accept():
            self.host.cloud._takes = takes
        return accept

    def failed(self, builds):
        """Build servers one after the other; return how many fail."""
        count = 0
        for _ in range(builds):
            try:
                self.host.delete(self.boot())
            except RuntimeError:
                count += 1
            self.host.inventory.looks.run()
            self.host.report()
        return count

    def start_whole(self):
        self.start(*({'address': address, 'vfs': 0}
                     for address in self.ADDRESSES))

    def test_default_options(self):
        self.start_whole()
        self.refuse(A)
        self.assertEqual(1, self.failed(5))

    def test_error_that_names_the_device(self):
        self.start_whole()
        self.refuse(A, error='vfio {}: no IRQ')
        self.assertEqual(1, self.failed(5))

    def test_health_off(self):
        self.config.config(health=['off'], group='accel')
        self.test_error_that_names_the_device()

    def test_health_act(self):
        self.config.config(health=['act'], group='accel')
        self.test_default_options()

    def test_vfs_of_one_card(self):
        """The handle counts, and not the card."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        bad, *well = (handle.address for handle in
                      self.host.inventory.devices[A].handles)
        self.refuse(bad)
        self.assertEqual(1, self.failed(5))
        self.assertIn(*self.host.devices_of(self.boot()), well)

    def test_with_others(self):
        """A build with two devices fails: the other one is tried before the
        bad one from then on."""
        self.start_whole()
        self.refuse(A)
        self.assertRaises(RuntimeError, self.host.boot, {
            f'resources1:{AI}': '2'}, self.host.allocation(A, AI, 2))
        self.assertEqual(0, self.failed(3))

    def test_none_is_better(self):
        """If guests start with none, each is tried in turn."""
        self.start_whole()
        tried = []

        def refuses(handles, guest):
            tried.extend(handle.address for handle in handles)
            raise RuntimeError('No memory')
        self.host.cloud._takes = refuses
        self.assertEqual(8, self.failed(8))
        self.assertEqual(self.ADDRESSES * 2, tried)

    def test_only_the_bad_one_is_near(self):
        """What a flavor demands counts more than failures."""
        self.start(*({'address': address, 'vfs': 0, 'numa_node': node}
                     for address, node in zip(self.ADDRESSES, (0, 1, 2, 2))))
        near = self.ADDRESSES[2:]
        servers = [self.boot(), self.boot()]
        accept = self.refuse(*near)
        self.assertEqual(1, self.failed(1))
        accept()
        for server in servers:
            self.host.delete(server)
        self.assertEqual(near, self.host.devices_of(self.host.boot(
            {f'resources1:{AI}': '2', 'accel:numa_affinity': 'required'},
            self.host.allocation(A, AI, 2))))

    def test_success_clears(self):
        self.start_whole()
        accept = self.refuse(A)
        self.assertEqual(1, self.failed(1))
        accept()
        servers = [self.boot() for _ in self.ADDRESSES]
        self.assertHas(servers[-1], A)
        for server in servers:
            self.host.delete(server)
        self.assertHas(self.boot(), A)

    def test_fails_after_the_start(self):
        """The guest runs: the device is not the cause."""
        self.start_whole()
        server = self.host.cloud.add_server(SPECS)
        self.host.cloud.allocate(server, self.host.allocation(A, AI))
        self.assertRaises(RuntimeError, self.host.spawn, server,
                          fails_after_start=RuntimeError('metadata'))
        self.host.delete(server)
        self.assertHas(self.boot(), A)


class InUseTest(TestCase):
    """A process of the host has it open through VFIO, and libvirt does not
    know of it."""

    def setUp(self):
        super().setUp()
        # looks are those of the test
        self.config.config(discovery_interval=3600, group='accel')

    def look(self):
        self.host.inventory.looks.run()
        self.host.report()

    def handles(self, address=A):
        return [handle.address for handle
                in self.host.inventory.devices[address].handles]

    def free(self):
        return sorted(
            offer.handle.address
            for offer in self.host.inventory.table.offered().all()
            if offer.state is offers.State.FREE)

    def total(self):
        """What Placement counts of all."""
        return sum(
            provider['inventory'][AI]['total'] -
            provider['inventory'][AI]['reserved'] for provider
            in self.host.cloud.read()['providers'].values()
            if AI in provider['inventory'])

    def resets(self):
        return self.host.kernel.resets(A)

    def test_vf(self):
        """Three of three builds use others; it is offered again when the
        process has closed it."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        used, *others = self.handles()
        self.host.kernel.guest_takes(used)
        self.look()
        self.assertEqual(others, self.free())
        self.assertEqual(3, self.total())
        self.assertIn(f'A handle of {A} is not given to servers, because '
                      f'{used} is open through VFIO: testpmd (process 4712) '
                      f'has /dev/vfio/', self.log.output)
        servers = [self.boot() for _ in others]
        self.assertEqual(others, sorted(
            address for server in servers
            for address in self.host.devices_of(server)))
        self.look()
        self.host.boot_that_fails(SPECS, self.host.allocation(A, AI))
        self.assertNotIn(used, [function for function, _ in self.resets()])
        self.host.kernel.guest_returns(used)
        self.look()
        self.assertHas(self.boot(), used)
        self.assertEqual(4, self.total())

    def test_without_nodes_of_groups(self):
        """As without CONFIG_VFIO_GROUP: the process has a node of the
        function."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        used, *others = self.handles()
        self.host.kernel.guest_takes(used)
        asked, ask = [], self.host.kernel.processes
        self.host.kernel.processes = lambda functions: (
            asked.append(functions), ask(functions))[1]
        with mock.patch.object(self.host.kernel, 'is_group_open',
                               side_effect=FileNotFoundError):
            self.look()
            self.assertEqual(others, self.free())
            self.host.kernel.guest_returns(used)
            asked.clear()
            self.look()
        self.assertEqual([used, *others], self.free())
        # nothing is searched for what no process has enabled
        self.assertEqual([], asked)

    def test_before_the_start(self):
        """Also what was open before nova-compute has started."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        used, *others = self.handles()
        self.host.kernel.guest_takes(used)
        self.restart()
        self.assertEqual(others, self.free())
        self.assertEqual(3, self.total())

    def test_opened_since_the_last_look(self):
        """A build asks again; each build succeeds."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        first, second, *others = self.handles()
        self.host.kernel.guest_takes(first)
        self.host.kernel.guest_takes(second)
        self.assertHas(self.boot(), others[0])
        self.assertHas(self.boot(), others[1])
        self.assertEqual([], self.free())

    def test_claimed_by_another_build_meanwhile(self):
        """While the kernel is asked about the handle that a build chose."""
        self.start({'address': A, 'vfs': 2, 'total_vfs': 2})
        first, second = self.handles()
        ask, others = self.host.inventory.ask_users, []

        def asks(chosen):
            ask(chosen)
            if not others:
                others.append(None)
                others[0] = self.boot()
        with mock.patch.object(self.host.inventory, 'ask_users', asks):
            server = self.boot()
        self.assertHas(others[0], first)
        self.assertHas(server, second)

    def test_claimed_in_the_last_moment(self):
        """After the last question, and before the lock for claims. A process
        has the next one open."""
        self.start({'address': A, 'vfs': 3, 'total_vfs': 3})
        first, used, second = self.handles()
        lock, others = self.host.inventory.claiming, []

        class Meanwhile:

            def __enter__(_):
                if not others:
                    others.append(None)
                    others[0] = self.boot()
                    self.host.kernel.guest_takes(used)
                lock.acquire()

            def __exit__(_, *error):
                lock.release()
        with mock.patch.object(
                self.host.inventory, 'claiming', Meanwhile()):
            server = self.boot()
        self.assertHas(others[0], first)
        self.assertHas(server, second)

    def test_whole_functions(self):
        self.start({'address': A, 'vfs': 0}, {'address': B, 'vfs': 0})
        self.host.kernel.guest_takes(A)
        self.look()
        self.assertEqual([B], self.free())
        self.host.delete(self.boot())
        self.assertEqual([], self.resets())
        self.host.kernel.guest_returns(A)
        self.look()
        self.assertEqual([A, B], self.free())

    def test_opened_while_it_is_released(self):
        """It is not reset before the process has closed it."""
        self.start({'address': A, 'vfs': 0})
        server = self.boot()
        before = self.resets()
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.kernel.guest_takes(A)
        self.host.delete(server)
        self.assertEqual(before, self.resets())
        claim, = self.host.holdings.being_released()
        self.assertIn(f'cannot be released, because {A} is open through '
                      f'VFIO: testpmd (process 4712)', claim.error)
        self.host.kernel.guest_returns(A)
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.being_released())
        self.assertEqual([A], self.free())

    def test_qat(self):
        """Three boots use others, and what is open is not reset."""
        self.start_host(qats=[{'address': A, 'vfs': 16}], drivers=('qat',))
        used, *others = self.handles()
        self.host.kernel.guest_takes(used)
        self.restart()
        name, = (name for provider
                 in self.host.cloud.read()['providers'].values()
                 for name in provider['inventory'])
        for _ in range(3):
            server = self.host.boot({f'resources1:{name}': '1'},
                                    self.host.allocation(A, name))
            self.assertIn(*self.host.devices_of(server), others)
            self.host.delete(server)
        self.assertNotIn(used, [function for function, _ in self.resets()])
        self.assertEqual(sorted(others), self.free())

    def test_set(self):
        """What is open withholds its set."""
        self.config.config(device_sets=[f'{A} {B}'], group='accel')
        self.start({'address': A, 'vfs': 0}, {'address': B, 'vfs': 0})
        self.host.kernel.guest_takes(A)
        self.look()
        self.assertEqual([], self.free())
        self.host.kernel.guest_returns(A)
        self.look()
        self.assertEqual([A, B], self.free())

    def test_left_enabled(self):
        """A driver of the host has left it enabled: no process has it."""
        self.start({'address': A, 'vfs': 0})
        self.host.kernel.rebind(A, 'vfio-pci')
        self.host.kernel.set_fault(A, attributes={'enable': '1'})
        self.look()
        self.assertEqual([A], self.free())
        self.assertHas(self.boot(), A)

    def test_cost(self):
        """Of a handle that is idle one attribute is read; of one that a server
        has, none; the privileged process is asked about neither."""
        self.start({'address': A, 'vfs': 4, 'total_vfs': 4})
        server = self.boot()
        mine, = self.host.devices_of(server)
        for handle in self.handles():
            if handle != mine:
                self.host.kernel.rebind(handle, 'vfio-pci')
        self.look()
        reads, read = [], self.host.kernel.read

        def reads_attribute(path):
            if path.endswith('/enable'):
                reads.append(path)
            return read(path)
        with mock.patch.object(self.host.kernel, 'read', reads_attribute), (
                mock.patch.object(self.host.kernel, 'is_group_open',
                                  side_effect=AssertionError)):
            self.host.inventory.users.ask(self.host.inventory.devices[A])
            self.assertEqual(3, len(reads))
            # a build, about the one handle that it chooses
            self.boot()
        self.assertEqual(4, len(reads))


class InAGuestTest(TestCase):
    """A guest has got it without a claim while a server was built."""

    def test_it_is_not_reset(self):
        self.start({'address': A, 'vfs': 0, 'total_vfs': 0})
        cloud, kernel = self.host.cloud, self.host.kernel
        stranger = str(uuid.uuid4())
        handles = self.host.inventory.devices[A].handles
        start, resets = cloud.start_guest, []

        def starts_first(*_args):
            start(stranger, handles)
            raise RuntimeError('in use by driver QEMU')
        reset = kernel.reset_function

        def resets_function(address, *args):
            resets.append(address)
            return reset(address, *args)
        kernel.reset_function = resets_function
        with mock.patch.object(cloud, 'start_guest', starts_first):
            self.assertRaises(RuntimeError, self.boot)
        self.host.reconciler.run()
        self.assertEqual([], resets)
        self.assertIn(f'cannot be released while a running guest has {A}',
                      self.log.output)
        # its guest has ended
        self.host.cloud.stop_guest(stranger, undefine=True)
        self.host.reconciler.run()
        self.assertEqual([A], self.host.devices_of(self.boot()))
