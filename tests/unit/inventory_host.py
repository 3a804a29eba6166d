# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Small drivers that misbehave, and a host that has them, for tests of the
inventory."""

import os
import threading
import uuid

import fixtures
from nova.compute import provider_tree
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import kernel
from nova_accel import inventory
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel.inventory import providers
from nova_accel.inventory import tree as inventory_tree
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from nova_accel.store import values
from tests import limits

NODE = 'host'
CLASS = 'CUSTOM_ACCELERATOR_FPGA'
OK, QUARANTINED, GONE = 'ok', 'quarantined', 'gone'
A, B, C = (f'0000:0{n}:00.0' for n in (1, 2, 3))


def handle(address):
    return model.AttachHandle(model.HandleType.PCI, address)


def fpga(address, regions=1, driver='good', **more):
    return model.Device(
        address=address, type='FPGA', vendor='ACME', product='X1',
        vendor_id='1234', product_id='0001', driver=driver, regions=tuple(
            model.Region(index=i, region_type_uuid='a' * 32,
                         function_uuid='b' * 32,
                         handles=(handle(f'{address[:-1]}{i + 1}'),))
            for i in range(regions)), **more)


def loaded(function='c' * 32, name='new'):
    return model.Loaded(function, str(uuid.uuid4()), name, 'sha512-0',
                        model.OPERATOR)


class Driver(base.AcceleratorDriver):
    """A vendor's driver, which finds what it is told to.

    trouble maps a method, or a method and an address, to what happens there:
    an exception to raise or an Event to wait for.
    """

    def __init__(self, *devices):
        # one without devices
        super().__init__(kernel.Kernel(os.devnull))
        self.devices = devices
        self.trouble = {}
        self.calls = []

    def _call(self, method, address=None):
        self.calls.append((method, address))
        for key in (method, (method, address)):
            trouble = self.trouble.get(key)
            if isinstance(trouble, BaseException):
                raise trouble
            if trouble is not None:
                trouble.wait()

    def count(self, method, address=None):
        return sum(m == method and address in (None, a)
                   for m, a in self.calls)

    def configure(self):
        self._call('configure')

    def find(self):
        self._call('find')
        return [d.address for d in self.devices]

    def examine(self, address, before):
        self._call('examine', address)
        return {d.address: d for d in self.devices}.get(address)

    def fingerprint(self):
        self._call('fingerprint')
        return self.devices

    def state(self, address):
        self._call('state', address)
        return self.state_of(address)

    state_of = staticmethod(lambda address: None)

    def answers(self, device):
        self._call('answers', device.address)
        return True

    def recover(self, address):
        self._call('recover', address)


class Store(claim_store.ClaimStore):
    """Fails where it is told to; what it has in memory cannot."""

    MEMORY = frozenset((
        'claims', 'all_claims', 'by_uuid', 'loaded', 'keys', 'away',
        'unsettled', 'unclean', 'disabled', 'planned', 'orders', 'generation',
        'path', 'error', 'MEMORY'))

    def __init__(self, path):
        #: (method or None for all, exception)
        self.error = None
        super().__init__(path)
        # of a host that is as new
        self.settle(done=[values.EVERYTHING])

    def __getattribute__(self, name):
        get = super().__getattribute__
        if not name.startswith('_') and name not in get('MEMORY'):
            error = get('error')
            if error is not None and error[0] in (None, name):
                raise error[1]
        return get(name)


def unavailable(method=None):
    return method, exception.AcceleratorsUnavailable(
        'The claim store cannot be written (disk full): make room.')


class InventoryTestBase(limits.Waits, testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        self.store = self.open_store()
        self.driver = Driver(fpga(A))
        self.other = Driver(fpga(B, driver='other'))
        self.conflicts = {}
        self.inventory = self.make()
        self.tree = provider_tree.ProviderTree()
        self.root = str(uuid.uuid4())
        self.tree.new_root(NODE, self.root)
        #: names of providers from which something is allocated
        self.consumers = set()

    def open_store(self):
        return Store(os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.sqlite'))

    def make(self, **drivers):
        made = inventory.Inventory(
            drivers or {'good': self.driver, 'other': self.other}, self.store,
            lambda device: self.conflicts.get(device.address, ''))
        self.addCleanup(made.close)
        return made

    def hang(self, driver, *where):
        """A trouble that goes when the test ends, or it is set."""
        event = threading.Event()
        self.addCleanup(event.set)
        driver.trouble[where if len(where) > 1 else where[0]] = event
        return event

    def in_use(self, uuid_):
        return self.name(uuid_) in self.consumers

    def name(self, uuid_):
        return self.tree.data(uuid_).name

    def update(self, scan=True):
        if scan:
            self.inventory.scanner.scan()
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(self.in_use))
        self.check_known()
        return {self.name(u): self.tree.data(u)
                for u in self.tree.get_provider_uuids(NODE)}

    def check_known(self):
        """Providers are as if they were made of nothing that is known."""
        shown = self.inventory.shown
        if shown.root:
            found, known = shown.providers(), dict(shown._known)
            shown._known.clear()
            self.assertEqual(shown._make(
                self.inventory.table.offered(), *shown.root), found)
            shown._known.update(known)

    def claim(self, address, region=0, **more):
        claim = model.Claim(
            uuid=str(uuid.uuid4()), instance_uuid=str(uuid.uuid4()),
            consumer_uuid=str(uuid.uuid4()),
            provider_uuid=str(uuid.uuid4()),
            resource_class=CLASS, group='1', device_address=address,
            region_index=region, handle=handle(
                f'{address[:-1]}{(region or 0) + 1}'), **more)
        self.store.add([claim])
        return claim

    def fenced(self, data):
        return (naming.FENCED in data.traits
                and data.inventory[CLASS]['reserved']
                == data.inventory[CLASS]['total'])

    def why(self, address):
        return holds.reasons(self.inventory.table.withheld_by(address))

    def health(self, address):
        kinds = self.inventory.table.kinds(address)
        return (GONE if holds.Kind.GONE in kinds else QUARANTINED if kinds
                else OK)


def providers_of(devices, node, root, claims=(), lost=(), suspects=(),
                 more=(), sets=None, **options):
    """The providers of devices, each with the holds of its health.

    :param sets: name -> number of devices, of all that pool_of() calls so.
    """
    claims = tuple(claims)
    by_address = {device.address: device for device in devices}
    held = [hold for device in devices if device.regions != (None,)
            for hold in health_holds(device)]
    members = [tuple(by_address) + ('missing',) * (count - len(by_address))
               for count in (sets or {}).values()]
    return providers.providers(devices, offers.offers(by_address, claims, (
        *held, *more, *(holds.Hold(holds.Kind.SUSPECT, address, 'it may fail')
                        for address in suspects),
        *offers.of_claims(by_address, claims, lost)), members),
        node, root, sets=sets, **options)


def health_holds(device):
    return [holds.Hold(holds.Kind.UNUSABLE, device.address, part.reason, index)
            for (_, index), part in offers.parts(device)
            if part and part.health is not model.Health.OK]
