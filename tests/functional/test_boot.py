# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A function reaches a guest, in every way that a flavor can ask for it."""

import json
import sys
import uuid

import fixtures
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel.cmd import orders
from nova_accel import model
from nova_accel import naming
from nova_accel.store import chain
from nova_accel.store import claim_store
from nova_accel.store import keys
from nova_accel.store import values
from tests.functional import base
from tests.functional import process

DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'


class BootTest(base.AcceleratorTestBase):

    def setUp(self):
        super().setUp()
        self.start = self.provider_tree()

    def assertAsAtStart(self):
        """Nothing claimed, nothing allocated, everything to be had again."""
        self.assertEqual([], self.claims())
        self.report()
        tree = self.provider_tree()
        self.assertEqual(self.start.keys(), tree.keys())
        for name, (totals, traits, usages) in tree.items():
            self.assertEqual(self.start[name][0], totals)
            self.assertFalse(any(usages.values()), name)
            if '_region' in name:
                self.assertIn(naming.PROGRAMMABLE, traits)

    def test_function_programmed_when_absent(self):
        function = str(uuid.uuid4())
        image = self.upload_bitstream(function)
        server = self.boot(base.fpga_flavor(function_id=function))
        host = server['OS-EXT-SRV-ATTR:host']
        self.assertEqual([VF], self.hostdevs(server))
        claim, = self.claims()
        self.assertEqual(
            (server['id'], model.ClaimState.BOUND, VF),
            (claim.instance_uuid, claim.state, claim.handle.address))
        # shown at once, without a periodic report
        region = f'{host}_accel_{DEVICE}_region0'
        traits = self.traits(region)
        spelled = function.upper().replace('-', '_')
        for trait in (f'CUSTOM_FPGA_INTEL_FUNCTION_{spelled}',
                      f'CUSTOM_FPGA_FUNCTION_INTEL_{spelled}',
                      naming.bitstream_trait(image)):
            self.assertIn(trait, traits)
        self.assertNotIn(naming.PROGRAMMABLE, traits)
        allocated = self._get_allocations_by_server_uuid(server['id'])
        self.assertEqual(
            {'CUSTOM_ACCELERATOR_FPGA': 1},
            allocated[self.provider(region)['uuid']]['resources'])
        self._delete_server(server)
        self.assertIn(naming.PROGRAMMABLE, self.traits(region))
        self.assertIn(naming.function_trait(function), self.traits(region))
        self.assertAsAtStart()

    def test_host_that_has_the_function_is_chosen(self):
        # compute1 carries NLB0 and compute2 NLB3; no image is needed
        for function, host in ((base.NLB3, 'compute2'),
                               (base.NLB0, 'compute1')):
            server = self.boot(base.fpga_flavor(function_id=function))
            self.assertEqual(host, server['OS-EXT-SRV-ATTR:host'])
            self._delete_server(server)
        self.assertAsAtStart()

    def test_function_there_already_required_by_trait(self):
        specs = base.fpga_flavor()
        specs[f'trait1:{naming.function_trait(base.NLB3)}'] = 'required'
        server = self.boot(specs)
        self.assertEqual('compute2', server['OS-EXT-SRV-ATTR:host'])
        self.assertEqual([VF], self.hostdevs(server))
        # there is one of it, and it is taken
        server = self.boot(specs, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(server))

    def test_bitstream_by_image(self):
        image = self.upload_bitstream(base.CRYPTO)
        specs = base.fpga_flavor(bitstream_id=image)
        server = self.boot(specs)
        region = f'{server["OS-EXT-SRV-ATTR:host"]}_accel_{DEVICE}_region0'
        self.assertIn(naming.function_trait(base.CRYPTO), self.traits(region))
        self._delete_server(server)
        # exactly that bitstream is there, though another image has the
        # same function
        first = self.boot(specs)
        self.assertEqual(server['OS-EXT-SRV-ATTR:host'],
                         first['OS-EXT-SRV-ATTR:host'])
        other = self.upload_bitstream(base.CRYPTO, size=8192)
        second = self.boot(base.fpga_flavor(bitstream_id=other))
        region = f'{second["OS-EXT-SRV-ATTR:host"]}_accel_{DEVICE}_region0'
        self.assertIn(naming.bitstream_trait(other), self.traits(region))

    def test_function_by_name(self):
        self.upload_bitstream(
            base.CRYPTO, properties={'accel:function_name': 'My crypto-1'})
        specs = base.fpga_flavor(function_name='My crypto-1')
        server = self.boot(specs)
        host = server['OS-EXT-SRV-ATTR:host']
        self.assertIn(naming.function_name_trait('My crypto-1'),
                      self.traits(f'{host}_accel_{DEVICE}_region0'))
        self._delete_server(server)
        self.assertEqual(
            host, self.boot(specs)['OS-EXT-SRV-ATTR:host'])

    def test_device_profile(self):
        self.write_profiles({'name': 'nlb3', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'trait:CUSTOM_FPGA_INTEL_PAC_ARRIA10': 'required',
            'accel:function_id': base.NLB3}]})
        server = self.boot({'accel:device_profile': 'nlb3'})
        self.assertEqual('compute2', server['OS-EXT-SRV-ATTR:host'])
        self.assertEqual([VF], self.hostdevs(server))
        self._delete_server(server)
        self.assertAsAtStart()

    def test_flavor_without_accelerators(self):
        server = self.boot({})
        self.assertEqual([], self.hostdevs(server))
        self.assertEqual([], self.claims())


class SeveralTest(base.AcceleratorTestBase):
    """Several regions on one host, several accelerators in one server."""

    HOSTS = {'compute1': {'cards': [
        base.card('0000:5e:00.0'), base.card('0000:af:00.0', [base.NLB3])]}}

    def test_each_group_has_its_own_function(self):
        self.upload_bitstream(base.CRYPTO)
        specs = {**base.fpga_flavor('1', function_id=base.CRYPTO),
                 **base.fpga_flavor('_B', function_id=base.NLB3)}
        server = self.boot(specs)
        self.assertEqual(['0000:5e:00.1', '0000:af:00.1'],
                         self.hostdevs(server))
        claims = {c.group: c.handle.address for c in self.claims()}
        # what was there is kept, the other was programmed
        self.assertEqual({'1': '0000:5e:00.1', '_B': '0000:af:00.1'}, claims)
        self.assertIn(naming.function_trait(base.CRYPTO),
                      self.traits('compute1_accel_0000:5e:00.0_region0'))
        self._delete_server(server)
        self.assertEqual([], self.claims())

    def test_two_servers_at_once_on_one_host(self):
        flavor = self._create_flavor(extra_spec=base.fpga_flavor(
            function_id=base.NLB0))
        self.upload_bitstream(base.NLB0)
        body = self._build_server(flavor_id=flavor, networks='none')
        body.update(min_count=2, max_count=2, return_reservation_id=True)
        self.api.post_server({'server': body})
        servers = [self._wait_for_state_change(s, 'ACTIVE')
                   for s in self.api.get_servers(detail=True)]
        self.assertEqual(
            [['0000:5e:00.1'], ['0000:af:00.1']],
            sorted(self.hostdevs(s) for s in servers))

    def test_memory_of_the_same_card(self):
        def flavor(mib):
            return {**base.fpga_flavor('1'), **base.fpga_flavor('2'),
                    f'resources2:{base.MEMORY}': mib}
        server = self.boot(flavor('8193'), expected_state='ERROR')
        self.assertIn('No valid host', self.fault(server))
        self._delete_server(server)
        server = self.boot(flavor('4096'))
        group = {c.group: c for c in self.claims()}
        allocated = self._get_allocations_by_server_uuid(server['id'])
        self.assertEqual(
            [{'CUSTOM_ACCELERATOR_FPGA': 1},
             {'CUSTOM_ACCELERATOR_FPGA': 1, base.MEMORY: 4096}],
            [allocated[group[name].provider_uuid]['resources']
             for name in '12'])


class NamedTest(base.AcceleratorTestBase):
    """A fixed card with its function from the flash, which the operator has
    named by an image."""

    # the name stays known
    FRESH_CLOUD = True
    HOSTS = {'compute1': {'cards': [base.card('0000:5e:00.0', [base.NLB0])]}}

    def build(self):
        self.flags(fixed_devices=['0000:5e:00.0'], group='accel')
        super().build()

    def give_name(self, device, name):
        known = claim_store.existing(self.parts('compute1').store.path)
        known.disable(values.Disabled(device, '', 'to be named', 'now'))
        orders.carry_out(known, 'program', f'{device} {name}', 120, sys.stderr)
        known.enable(known.disabled())
        process.until(lambda: self.assertEqual(
            {}, self.parts('compute1').inventory.table.disabled()))
        self.report()

    def test_by_name_and_by_alternatives(self):
        self.upload_bitstream(
            base.NLB0, properties={'accel:function_name': 'loopback',
                                   'accel:function_id': base.NLB0})
        self.give_name('0000:5e:00.0', 'loopback')
        drives, certificates = [], []
        self.useFixture(fixtures.MockPatchObject(
            libvirt_driver.LibvirtDriver, '_create_configdrive',
            lambda driver, context, instance, *args, **kwargs: drives.append(
                dict(instance.metadata))))
        key = 'accel1:function'
        for specs, told in (
                (base.fpga_flavor(function_name='loopback'), {}),
                (base.fpga_flavor(function_name='other,loopback'),
                 {key: 'loopback'}),
                (base.fpga_flavor(function_id=f'{base.CRYPTO},{base.NLB0}'),
                 {key: base.NLB0})):
            server = self._wait_for_state_change(self.api.post_server({
                'server': {**self._build_server(
                    image_uuid=self.glance.guest_image, networks='none',
                    flavor_id=self._create_flavor(extra_spec=specs)),
                    'metadata': {'mine': 'kept', **dict.fromkeys(told, 'x')},
                }}), 'ACTIVE')
            self.assertEqual(['0000:5e:00.1'], self.hostdevs(server))
            self.assertIn(naming.function_name_trait('loopback'),
                          self.traits('compute1_accel_0000:5e:00.0_region0'))
            # the owner is told, and the guest by its config drive
            metadata = self.api.get_server(server['id'])['metadata']
            self.assertEqual(metadata, drives[-1])
            self.assertEqual({'mine': 'kept', **told}, {
                name: text for name, text in metadata.items()
                if ':handover:' not in name})
            certificates.append(''.join(
                metadata.get(f'{key.removesuffix("function")}handover:1:{part}',
                             '') for part in (1, 2, 3)))
            self._delete_server(server)
        self.check_certificates(server, *certificates)

    def check_certificates(self, server, none, *texts):
        """What was done after the server before each."""
        self.assertEqual('', none)
        self.assertNotEqual(*texts)
        store = self.parts('compute1').store
        key = keys.load(store.path + keys.SUFFIX).public
        known = {chain.digest(one): one for one in store.handovers()}
        for text in texts:
            certificate = json.loads(text)
            signature = certificate.pop('signature')
            one = known.pop(certificate.pop('hash'))
            self.assertTrue(keys.is_signed(
                key, chain.spelled(certificate), signature))
            self.assertEqual(
                (one.time, 'port reset', 'clean, memory kept'),
                tuple(certificate[name]
                      for name in ('time', 'method', 'result')))
            for word in (one.server, 'compute1', '0000:', key,
                         server['tenant_id']):
                self.assertNotIn(word, text)
