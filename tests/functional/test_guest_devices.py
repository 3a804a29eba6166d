# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the metadata service and the config drive say of accelerators."""

from lxml import etree

from nova_accel import naming
from tests.functional import base
from tests.functional import guests
from tests.functional import pools

ONE, TWO = '0000:5e:00.0', '0000:81:00.0'


class GuestDevicesTest(guests.Reads, base.AcceleratorTestBase):

    HOSTS = {'compute1': {'cards': [base.card(ONE), base.card(TWO)]}}
    FLAVOR = {**base.fpga_flavor(function_id=base.NLB0),
              'resources2:CUSTOM_ACCELERATOR_FPGA': '1',
              'group_policy': 'none'}

    def test_which_is_which(self):
        server = self.boot(self.FLAVOR)
        claims = {claim.group: claim.handle.address for claim
                  in self.parts('compute1').holdings.of(server['id'])}
        places = self.places(server)
        told = {device['tags'][1]: device
                for device in self.devices(server)
                if device.get('tags', [''])[0] == 'accelerator'}
        self.assertEqual({
            f'accel{group}': {
                'type': 'disk', 'bus': 'pci', 'serial': None,
                'address': places[address],
                'tags': ['accelerator', f'accel{group}', 'FPGA',
                         told[f'accel{group}']['tags'][3]]}
            for group, address in claims.items()}, told)
        self.assertEqual(2, len({*places.values()}))
        self.assertNotEqual({*places.values()}, {*claims.values()})
        self._delete_server(server)


class TopologyFileTest(guests.Reads, pools.PoolsTestBase):
    """Of eight GPUs each four are below one switch."""

    HOSTS = {'compute1': {'gpus': [
        {**gpu, 'bridges': [
            f'pci0000:{gpu["address"][5]}7',
            *(f'0000:{gpu["address"][5]}{bus}:00.0' for bus in '78'),
            f'0000:{gpu["address"][5]}9:{n:02x}.0']}
        for n, gpu in enumerate(pools.gpus())]}}

    def test_file(self):
        server = self.boot(pools.groups(8))
        places = self.places(server)
        first, *others = self.devices(server)
        self.assertEqual(['accelerator', 'accel1', 'GPU'], first['tags'][:3])
        for device in others:
            self.assertEqual(3, len(device['tags']))
        file = etree.fromstring(first['tags'][3])
        self.assertEqual([
            [places[address] for address in half]
            for half in (pools.GPUS[:4], pools.GPUS[4:])], [
                sorted(device.get('busid') for device in switch)
                for switch in file.iterfind('./cpu/pci')])
        self._delete_server(server)
        alone = self.boot(pools.groups(1))
        self.assertEqual([['accelerator', 'accel1', 'GPU']], [
            device['tags'] for device in self.devices(alone)])


class SlotTest(guests.Reads, base.AcceleratorTestBase):
    """A region of several functions is one accelerator for Placement, and
    several devices of the guest."""

    HOSTS = {'compute1': {'cards': [{
        **base.card(ONE), 'product': 'N6001', 'vfs': 3, 'afu_vfs': 3}]}}

    def test_all_functions(self):
        self.upload_bitstream(base.CRYPTO)
        server = self.boot(base.fpga_flavor(function_id=base.CRYPTO))
        functions = [f'{ONE[:-1]}{number}' for number in (1, 2, 3)]
        self.assertEqual(functions, self.hostdevs(server))
        self.assertEqual(1, len(self.claims()))
        region = f'compute1_accel_{ONE}_region0'
        self.assertIn(naming.function_trait(base.CRYPTO), self.traits(region))
        allocated = self._get_allocations_by_server_uuid(server['id'])
        self.assertEqual(
            {'CUSTOM_ACCELERATOR_FPGA': 1},
            allocated[self.provider(region)['uuid']]['resources'])
        places = self.places(server)
        self.assertEqual(
            {places[function]: ['accelerator', 'accel1', 'FPGA']
             for function in functions},
            {device['address']: device['tags'][:3]
             for device in self.devices(server)})
        self._delete_server(server)
        self.assertEqual([], self.claims())
