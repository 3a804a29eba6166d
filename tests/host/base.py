# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A compute host for tests, and the order in which Nova calls it."""

import logging
import os
import tempfile
import threading
import time
import uuid

import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.inventory import identity
from nova_accel import locks
from nova_accel import model
from nova_accel import service
from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.store import file as store_file
from nova_accel.store import values
from tests.host import cloud as clouds
from tests import limits
from tests import lock_order
from tests import simulated as kernels
from tests.unit import host as simulated

#: seconds in which a region is cleaned on a loaded machine
PATIENCE = 60
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
#: a flavor with one FPGA, as it is
ONE = {f'resources1:{FPGA}': '1'}


class Host:
    """nova-compute on a simulated host, as far as accelerators go."""

    def __init__(self, directory, path, taken_elsewhere=lambda device: ''):
        """
        :param directory: of the claim store and of the cloud.
        :param path: description of the simulated host.
        """
        self.directory = directory
        self.kernel = kernels.Kernel(path)
        self.cloud = clouds.Cloud(directory, self.kernel)
        self._taken_elsewhere = taken_elsewhere

    def start(self):
        """nova-compute starts, for the first time or again."""
        self.parts = service.initialize(
            clouds.NODE, self.directory, self.kernel, self.cloud,
            self._taken_elsewhere)
        vars(self).update(vars(self.parts))
        self.parts.begin()
        self.report(starting=True)
        return self

    def end(self):
        """nova-compute ends, and another process may use its store."""
        self.parts.close()
        os.close(store_file._LOCKS.pop(self.store.path))

    def report(self, starting=False):
        self.cloud.report(self.parts, starting)

    def allocation(self, address=None, resource_class=FPGA, amount=1):
        """Of one provider: the only one, or that of a device."""
        uuid_, = [p.uuid for p in self.inventory.shown.providers().values()
                  if resource_class in p.inventory
                  and address in (None, *p.addresses)]
        return {uuid_: {'resources': {resource_class: amount}}}

    # The order of Nova's calls

    def boot(self, specs, allocation, image_properties=None, uuid_=None,
             project=clouds.PROJECT, context=None):
        """A server is built; its uuid.

        :param context: of a user of another project, as an administrator's in
            an evacuation; by default one that sees all images.
        """
        uuid_ = self.cloud.add_server(specs, image_properties, uuid_, project)
        self.cloud.allocate(uuid_, allocation)
        self.spawn(uuid_, context=context)
        return uuid_

    def spawn(self, uuid_, rebuilt=False, fails_after_start=None,
              context=None):
        context = context or self.cloud.admin_context()
        try:
            with self.guests.plugged(
                    context, self.cloud.server(uuid_),
                    lambda: self.cloud.allocations(context, uuid_), rebuilt):
                self.start_guest(uuid_)
                if fails_after_start:
                    raise fails_after_start
        except Exception:
            self.settle()
            raise

    def start_guest(self, uuid_):
        self.cloud.start_guest(uuid_, self.guests.handles_to_start(
            self.cloud.admin_context(), self.cloud.server(uuid_)),
            self.carrying.text_of(uuid_))

    def boot_that_fails(self, *args):
        """:raises AssertionError: it does not."""
        try:
            self.boot(*args)
        except exception.AcceleratorError:
            return
        raise AssertionError('The server was built')

    def reboot(self, uuid_):
        """A hard reboot, a start, and what else begins a guest again."""
        self.cloud.stop_guest(uuid_, undefine=True)
        self.start_guest(uuid_)

    def rebuild(self, uuid_, image_properties=None):
        self.cloud.stop_guest(uuid_, undefine=True)
        self.cloud.set_server(uuid_, image_properties=image_properties or {})
        self.spawn(uuid_, rebuilt=True)

    def delete(self, uuid_, wait=True):
        self.cloud.stop_guest(uuid_, undefine=True)
        self.guests.unplug(uuid_, wait=wait)
        self.cloud.allocate(uuid_, None)
        if wait:
            self.settle()

    def settle(self):
        """Regions that are being cleaned are clean, or will not be."""
        ends = time.monotonic() + PATIENCE
        # of a process that was killed nothing is under way
        while time.monotonic() < ends and limits.at_work() and any(
                not claim.error for claim in self.holdings.being_released()):
            time.sleep(0.01)
        # and what comes after the end of a claim is done as well
        for address, device in self.inventory.devices.items():
            for region in device.regions:
                with self.releases._handles._releasing.held(
                        f'{address} region{region.index}'):
                    pass

    def migrate_away(self, uuid_, migration=None):
        """The source of a cold migration; the migration's uuid."""
        migration = migration or str(uuid.uuid4())
        self.cloud.move_allocation(uuid_, migration)
        self.cloud.stop_guest(uuid_)
        self.accelerators.set_aside(uuid_, migration)
        return migration

    def resize_here(self, uuid_, allocation, migration=None):
        """A resize that stays on this host; the migration's uuid."""
        migration = self.migrate_away(uuid_, migration)
        self.cloud.allocate(uuid_, allocation)
        self.spawn(uuid_)
        return migration

    def confirm(self, uuid_, migration, here=False):
        """:param here: the server was resized on this host, and runs."""
        if not here:
            self.cloud.stop_guest(uuid_, undefine=True)
        self.accelerators.confirm_move(uuid_, migration)
        self.settle()
        self.cloud.allocate(migration, None)

    def revert(self, uuid_, migration):
        self.cloud.move_allocation(migration, uuid_)
        self.accelerators.revert_move(uuid_, migration)
        self.start_guest(uuid_)

    def revert_here(self, uuid_, migration):
        """As Nova: destroy() of the new guest, the allocation, then
        finish_revert_migration(); the guest does not run yet."""
        self.cloud.stop_guest(uuid_, undefine=True)
        self.guests.unplug(uuid_)
        self.cloud.move_allocation(migration, uuid_)
        self.accelerators.revert_move(uuid_, migration)

    def come(self, uuid_, migration, specs, allocation):
        """The new host of a live migration, while the guest runs on the old
        one."""
        context = self.cloud.admin_context()
        self.cloud.add_server(specs, uuid_=uuid_)
        self.cloud.set_server(uuid_, is_here=False)
        self.cloud.allocate(uuid_, allocation)
        self.accelerators.plug(context, self.cloud.server(uuid_), allocation,
                               migration=migration)

    def guest_comes(self, uuid_):
        """Without its devices, as with accel:live_migration=detach."""
        self.cloud.start_guest(uuid_, [])

    def arrive(self, uuid_, migration):
        """The guest runs here."""
        self.accelerators.revert_move(uuid_, migration)
        self.cloud.attach(uuid_, self.guests.handles(uuid_))

    def is_here(self, uuid_):
        """Nova writes that a server is on this host now."""
        self.cloud.set_server(uuid_, is_here=True)

    def currents(self):
        """Servers that have something here."""
        return sorted(c.instance_uuid for c in self.holdings.all()
                      if c.role is model.Role.CURRENT)

    # What a test of killed processes does, in a process of its own

    def reconcile(self):
        self.reconciler.run()

    def scan(self):
        self.inventory.scanner.scan()

    def power_cut(self):
        """The host boots again; nova-compute has not started yet."""
        self.cloud.lose_power()
        self.kernel.power_cycle()

    def command(self):
        """The store as a command of nova-accel has it."""
        return claim_store.existing(self.store.path)

    def write_disabled(self, address, reason='it is hot'):
        """As nova-accel disable; nova-compute has not heard of it."""
        known = self.command()
        devices = known.devices()
        known.disable(values.Disabled(
            identity.named(address, devices), identity.serial_for_claim(
                address, devices, known.gone()),
            reason, '2026-11-22T02:17:43+00:00'))

    def disable(self, address):
        self.write_disabled(address)
        self.orders.poll()

    def write_enabled(self):
        """As nova-accel enable."""
        known = self.command()
        known.enable(known.disabled())

    def enable(self):
        self.write_enabled()
        self.orders.poll()

    def lose(self, uuid_):
        self.cloud.lose(uuid_)

    def order(self, verb, argument):
        """As a command of nova-accel; the answer to it, None for none."""
        command = self.command()
        number = command.give_order(verb, argument)
        self.orders.poll()
        done = values.OrderState.DONE, values.OrderState.REFUSED
        # a call that hangs goes on after the answer
        while limits.at_work() and not any(
                order.number == number and order.state in done
                for order in command.orders()):
            time.sleep(0.01)
            command.refresh()
        order = command.withdraw_order(number, done)
        return order.answer if order.state in done else None

    def start_again(self, uuid_):
        if uuid_ not in self.cloud.running():
            self.start_guest(uuid_)

    def _moves_of(self, uuid_):
        return [move for move, server in self.cloud.read().get(
            'moves', {}).items() if server == uuid_]

    def leave(self, uuid_):
        """The guest goes by a live migration, without its devices."""
        self.cloud.detach(uuid_, self.guests.handles(uuid_))

    def come_back(self, uuid_):
        """The operator takes a move back, wherever it stands."""
        for consumer in self._moves_of(uuid_):
            if consumer in self.cloud.read()['allocations']:
                self.cloud.move_allocation(consumer, uuid_)
        for consumer in {claim.consumer_uuid for claim
                         in self.holdings.of(uuid_, model.Role.OLD)}:
            self.accelerators.revert_move(uuid_, consumer)
        self.start_again(uuid_)

    def ask(self, uuid_, image):
        with self.cloud.state() as state:
            state['servers'][uuid_]['metadata'] = {
                'accel1:bitstream_id': image}

    def clean(self, name):
        self.maintenance.clean(name)

    def forget(self, address):
        """As if nothing had ever been programmed."""
        self.inventory.contents.forget(address, 0, model.OPERATOR)

    def run_runtime(self):
        self.runtime.run()

    def heal(self, address):
        """The operator takes power from a card that hung, and gives it."""
        self.kernel.set_fault(address, hang=None)
        self.kernel.power_cycle()

    def seen(self):
        """(server, address) of each claim, and the guests that run."""
        return ([(c.instance_uuid, c.handle.address)
                 for c in self.store.claims()],
                {uuid_: sorted(devices) for uuid_, devices
                 in self.cloud.running().items()})

    def fenced(self):
        return sorted(
            provider['name'] for provider
            in self.cloud.read()['providers'].values()
            if 'CUSTOM_ACCELERATOR_FENCED' in provider['traits']
            or any(i['reserved'] for i in provider['inventory'].values()))

    def withheld(self):
        """Why, by the addresses of handles."""
        return {offer.handle.address:
                [[hold.kind.value, hold.reason] for hold in offer.all_holds]
                for offer in self.inventory.table.offered().all()
                if offer.all_holds}

    def left(self):
        """What is claimed, runs or is fenced."""
        return [*self.seen(), self.fenced()]

    def reattach(self):
        """The operator lowers reserved of everything; nova-compute reports."""
        with self.cloud.state() as state:
            for provider in state['providers'].values():
                for item in provider['inventory'].values():
                    item['reserved'] = 0
        self.report()
        self.report()

    # What can be seen

    def devices_of(self, uuid_):
        """In the guest of a server; None where it does not run."""
        running = self.cloud.running()
        return sorted(running[uuid_]) if uuid_ in running else None

    def states(self, uuid_):
        return [c.state for c in self.store.claims(uuid_)]

    def carries(self, address, index=0):
        return self.inventory.devices[address].region(index).function_uuid

    def upload(self, function, image=None, interface=simulated.INTERFACE,
               **gbs):
        """A bitstream with its function as a property; the image's id.

        :param image: other attributes and properties of the image; it is
            public and the operator's.
        """
        with tempfile.NamedTemporaryFile() as file:
            sim.make_gbs(file.name, function, interface, **gbs)
            return self.cloud.upload(file.read(), **{
                'accel:function_id': str(uuid.UUID(function)),
                **(image or {})})


class HostTestCase(limits.Waits, testtools.TestCase):

    #: [accel] pools; 'none' where a test is about the provider of each device
    POOLS = 'host'

    def setUp(self):
        super().setUp()
        self.lock_order = self.useFixture(lock_order.LockOrder())
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))

    def start_host(self, *cards, drivers=('dfl',), **more):
        """A host with these devices, and nova-compute on it.

        :param cards: with a VF for each port, unless they say otherwise.
        """
        cards = [simulated.with_vfs(card) for card in cards]
        self.simulated = self.useFixture(
            simulated.SimulatedHost(*cards, **more))
        self.config.config(
            enabled_drivers=list(drivers), pools=self.POOLS,
            include_devices=['address=*'],
            virtual_functions=[f'{card["address"]}={card["vfs"]}'
                               for card in cards if card['vfs']],
            simulated_host=self.simulated.path,
            bitstream_cache=os.path.join(self.directory, 'cache'),
            group='accel')
        self.host = Host(self.directory, self.simulated.path)
        kernel = self.host.kernel
        self.addCleanup(lambda: self.assertEqual(
            [], kernel.disturbed(), 'what a process has open was reset'))
        return self.restart()

    def restart(self):
        """nova-compute ends in order and starts again."""
        if hasattr(self.host, 'parts'):
            self.host.parts.close()
        self.host.start()
        self.addCleanup(self.host.parts.close)
        return self.host

    def lose_store(self):
        """nova-compute starts again without its claim store."""
        self.host.parts.close()
        for name in os.listdir(self.directory):
            if name.startswith(claim_store.file_name(clouds.NODE)):
                os.unlink(os.path.join(self.directory, name))
        self.restart()
        self.host.reconcile()
        self.host.settle()
        self.host.report()

    def operate_on(self, server):
        """Begin an operation of a server, which has the server's lock; others
        wait for that a moment only.

        :returns: a function that ends it.
        """
        servers = self.host.servers
        self.useFixture(fixtures.MockPatchObject(
            servers, '_make', locks.Locks(
                'server', 'The accelerators of server {}',
                lambda: 0.05)._make))
        held, over = threading.Event(), threading.Event()

        def operation():
            with servers.held(server):
                held.set()
                over.wait(PATIENCE)
        operating = threading.Thread(target=operation)
        operating.start()

        def end():
            over.set()
            operating.join()
        self.addCleanup(end)
        held.wait(PATIENCE)
        return end

    def read_only(self, on):
        """The claim store cannot be written, or can be again."""
        self.host.store._db.execute(
            f'PRAGMA query_only = {int(on)}')

    def assertHas(self, server, *addresses):
        """The guest has these devices, with all that goes with them, and the
        claims say so."""
        handles = self.host.guests.handles(server)
        self.assertEqual(sorted(addresses), sorted(
            handle.address for handle in handles))
        self.assertEqual(
            sorted(a for h in handles for a in (h.address, *h.companions)),
            self.host.devices_of(server))


def wait_until_programmed(kernel, address):
    """Wait for a programming that hangs: the card has begun with it."""
    while not kernel._look()[1]['cards'][address]['program']:
        time.sleep(0.01)


def function_on_card(kernel, vf):
    """What the region behind a VF answers that no guest has."""
    function, = functions_on_card(kernel, vf)
    return function


def functions_on_card(kernel, address):
    """What the regions answer whose ports a PF or VF has."""
    top = pci.path(address, 'fpga_region')
    return [
        model.uuid_hex(kernel.read(f'{top}/{region}/{port}/afu_id'))
        for region in kernel.listdir(top)
        for port in kernel.listdir(f'{top}/{region}')
        if port.startswith('dfl-port')]


def asks(function=None, **more):
    """A flavor with one FPGA that carries a function."""
    return {**ONE, **({'accel1:function_id': function} if function else {}),
            **{f'accel1:{key}': value for key, value in more.items()}}
