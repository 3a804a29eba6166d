# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A driver of another package that says nonsense costs its own devices.

Each kind of nonsense is beside a card of a driver that works: nova-compute
starts, a server gets that card, and Placement takes the report.
"""

import dataclasses
import importlib
import itertools
import types

import fixtures
from stevedore import named

from nova_accel import exception
from nova_accel import model
from tests import acme
from tests.host import base
from tests.unit.host import B, vf

AI = 'CUSTOM_ACCELERATOR_AI'
PCI = model.HandleType.PCI


class NoText(Exception):
    def __str__(self):
        raise ValueError('no text')
    __repr__ = __str__


class Odd:
    """Neither compared nor hashed."""
    def __eq__(self, other):
        raise ValueError('not compared')
    __hash__ = None


def gives(value):
    return lambda self, *args: value


def raises(error):
    def fail(self, *args):
        raise error
    return fail


def reports(**fields):
    """examine() with other fields of a good device."""
    return lambda cls: {'examine': lambda self, address, before: (
        dataclasses.replace(cls.examine(self, address, before), **fields))}


def method(name, function):
    return lambda cls: {name: function}


def region(**fields):
    return model.Region(**{'index': 0, 'region_type_uuid': None,
                           'function_uuid': None, **fields})


HANDLE = model.AttachHandle(PCI, '0000:aa:00.0')
ERRORS = {'an_error': KeyError('x'), 'exit': SystemExit(1),
          'interrupt': KeyboardInterrupt(), 'no_text': NoText(),
          'recursion': RecursionError('too deep')}
KINDS = {
    **{f'{name}_raises_{kind}': method(name, raises(error))
       for name in ('find', 'fingerprint', 'state', 'serial', 'examine',
                    'confine', 'configure', 'look', '__init__')
       for kind, error in ERRORS.items()
       if kind in ('exit', 'no_text') or name in ('find', 'examine')},
    **{f'find_gives_{kind}': method('find', gives(value)) for kind, value in {
        'nothing': None, 'a_number': 5, 'none': [None], 'bytes': [b'x'],
        'empty': [''], 'lists': [[]], 'surrogate': ['\ud800'],
        'unknown': ['0000:77:00.0'], 'no_address': ['nonsense']}.items()},
    'find_has_no_end': method('find', lambda self: itertools.repeat(B)),
    'fingerprint_gives_odd': method('fingerprint', gives(Odd())),
    'state_gives_odd': method('state', gives(Odd())),
    **{f'serial_gives_{kind}': method('serial', gives(value))
       for kind, value in {'bytes': b'x', 'a_number': 5, 'odd': Odd(),
                           'surrogate': '\ud800'}.items()},
    **{f'examine_gives_{kind}': method('examine', gives(value))
       for kind, value in {'text': 'x', 'a_dict': {}, 'odd': Odd()}.items()},
    'confine_gives_none': method('confine', gives(None)),
    'confine_gives_text': method('confine', gives('x')),
    **{f'reports_{kind}': reports(**fields) for kind, fields in {
        'other_address': {'address': B}, 'other_driver': {'driver': 'dfl'},
        'record_no_json': {'record': (('a', object()),)},
        'record_bytes': {'record': (('a', b'x'),)},
        'record_no_pairs': {'record': ('abc',)},
        'record_dict': {'record': {'a': 'b'}},
        'handles_text': {'handles': (B,)}, 'handles_none': {'handles': None},
        'handle_of_others': {'handles': (model.AttachHandle(PCI, vf(B)),)},
        'card_of_others': {'handles': (model.AttachHandle(PCI, B),)},
        'company_of_others': {'company': (B,)},
        'handle_twice': {'handles': (HANDLE, HANDLE)},
        'handle_without_address': {
            'handles': (model.AttachHandle(PCI, None),)},
        'health_text': {'health': 'fine'}, 'health_none': {'health': None},
        'trait_not_custom': {'traits': ('ACME_FIRMWARE_12',)},
        'trait_small': {'traits': ('CUSTOM_acme',)},
        'trait_long': {'traits': ('CUSTOM_' + 'A' * 249,)},
        'trait_number': {'traits': (5,)}, 'traits_text': {'traits': 'CUSTOM_A'},
        'type_empty': {'type': ''}, 'type_none': {'type': None},
        'type_long': {'type': 'A' * 300}, 'type_odd': {'type': 'ä/.;'},
        'memory_negative': {'memory': (('HBM', -1),)},
        'memory_huge': {'memory': (('HBM', 1 << 40),)},
        'memory_yes': {'memory': (('HBM', True),)},
        'memory_text': {'memory': (('HBM', '8'),)},
        'numa_node_text': {'numa_node': 'x'},
        'numa_node_huge': {'numa_node': 1 << 70},
        'bridges_odd': {'bridges': (Odd(),)},
        'product_surrogate': {'product': '\ud800'},
        'vendor_none': {'vendor': None}, 'ids_odd': {'vendor_id': 'zz'},
        'reason_bytes': {'reason': b'x'},
        'regions_alike': {'regions': (region(), region())},
        'region_without_handles': {'regions': (region(handles=None),)},
        'region_number_text': {'regions': (region(index='0'),)},
        'region_function_odd': {'regions': (region(function_uuid='x'),)},
        'creatable_text': {'creatable': ('x',)},
        'creatable_odd': {'creatable': (model.CreatableType(
            'x', 'not_custom', 1),)},
        'creatable_many': {'creatable': (model.CreatableType(
            'x', 'CUSTOM_X', 1 << 40),)}}.items()},
    **{f'prepare_raises_{kind}': method('prepare', raises(error))
       for kind, error in ERRORS.items()},
    **{f'release_raises_{kind}': method('release', raises(error))
       for kind, error in ERRORS.items()},
    **{f'release_gives_{kind}': method('release', gives(value))
       for kind, value in {'bytes': b'x', 'a_dict': {'a': 'b'},
                           'surrogate': '\ud800', 'odd': Odd()}.items()},
    'keys_none': lambda cls: {'KEYS': None},
    'keys_odd': lambda cls: {'KEYS': Odd()},
}


class NonsenseTest(base.HostTestCase):
    """One host with a driver of its own, and a card, for each kind."""

    POOLS = 'none'

    def install(self, kinds):
        """Have a driver for each kind; {kind: address of its card}."""
        self.useFixture(acme.Installed())
        good = importlib.import_module('acme_accel.driver').AcmeDriver
        cards = {kind: f'0000:{number:02x}:00.0' for number, kind in enumerate(
            kinds, 0x10)}
        self.assertNotIn(B, cards.values())
        plugins = {kind: type(kind, (good,), {
            'CONTRACT': 2, 'NAME': kind, 'identify': self.only(good, address),
            **kinds[kind](good)}) for kind, address in cards.items()}
        manager = named.NamedExtensionManager

        def load(namespace, names, **more):
            if names[0] not in plugins:
                return manager(namespace, names, **more)
            return types.SimpleNamespace(extensions=[types.SimpleNamespace(
                plugin=plugins[names[0]],
                entry_point=types.SimpleNamespace(
                    name=names[0], value='acme_accel:driver'))])
        self.useFixture(fixtures.MonkeyPatch(
            'stevedore.named.NamedExtensionManager', load))
        return cards

    @staticmethod
    def only(good, mine):
        def identify(self, address):
            return good.identify(self, address) if address == mine else None
        return identify

    def check(self, kinds):
        cards = self.install({'good': lambda cls: {}, **kinds})
        # vendors come first in the option
        self.start_host({'address': B}, drivers=(*cards, 'dfl'), acmes=[
            {'address': address} for address in cards.values()])
        host = self.host
        fpga = host.boot(base.ONE, host.allocation(B))
        self.assertHas(fpga, vf(B))
        shown = host.cloud.read()['providers']
        of = {address: uuid for uuid, provider
              in host.inventory.shown.providers().items()
              for address in provider.addresses}
        for kind, address in cards.items():
            uuid = of.get(address)
            if uuid not in shown or AI not in shown[uuid]['inventory']:
                continue
            # what can be had of it is had, or refused in words
            try:
                server = host.boot({f'resources1:{AI}': '1'},
                                   {uuid: {'resources': {AI: 1}}})
            # libvirt has no such device
            except (exception.AcceleratorError, FileNotFoundError):
                self.assertNotEqual('good', kind)
                continue
            host.delete(server, wait=False)
        host.inventory.scanner.scan()
        host.inventory.looks.run()
        host.reconcile()
        host.report()
        self.restart()
        host.reboot(fpga)
        self.assertHas(fpga, vf(B))
        host.delete(fpga)
        good = cards['good']
        self.assertFalse({B, good}.intersection(
            claim.device_address for claim in host.holdings.all()))
        for address in (B, good):
            self.assertEqual(set(), host.inventory.table.kinds(address))

    def test_each_costs_its_own_devices(self):
        self.check(KINDS)


class OptionTest(base.HostTestCase):

    def test_owner_trait_that_placement_refuses(self):
        """It would cost the host every server, also those without devices."""
        self.config.load_raw_values('accel', owner_trait='OWNER_ACME')
        error = self.assertRaises(
            exception.ConfigurationError, self.start_host, {'address': B})
        self.assertIn('[accel] owner_trait', str(error))
