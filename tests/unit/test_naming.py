# Licensed under the Apache License, Version 2.0. See LICENSE.

import uuid

from hypothesis import given
from hypothesis import strategies as st
import os_traits
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import naming

FUNCTION = 'd8424dc4a4a3c413f89e433683f9040b'
SPELLED = 'D8424DC4_A4A3_C413_F89E_433683F9040B'
TYPE = '69528db6eb31577a8c3668f9faa081f6'


def device(**more):
    return model.Device(**{
        'address': '0000:5e:00.0', 'type': 'FPGA', 'vendor': 'intel',
        'product': 'PAC-Arria 10', 'vendor_id': '8086', 'product_id': '09c4',
        'driver': 'dfl', **more})


class NamingTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = config_fixture.Config(conf.CONF)
        self.config.setUp()
        self.addCleanup(self.config.cleanUp)

    def set(self, **options):
        self.config.config(group='accel', **options)

    def test_function_traits_in_every_spelling(self):
        region = model.Region(0, FUNCTION[::-1], FUNCTION)
        traits = naming.region_traits(device(), region)
        for spelling in (f'CUSTOM_FPGA_INTEL_FUNCTION_{SPELLED}',
                         f'CUSTOM_FPGA_FUNCTION_INTEL_{SPELLED}',
                         f'CUSTOM_FPGA_FUNCTION_{SPELLED}'):
            self.assertIn(spelling, traits)
            self.assertEqual(FUNCTION, naming.function_of(spelling))
            self.assertTrue(naming.is_volatile(spelling))
        self.assertIn('CUSTOM_FPGA_INTEL_PAC_ARRIA_10', traits)
        self.assertIn('OWNER_CYBORG', traits)
        self.assertNotIn(naming.PROGRAMMABLE, traits)

    def test_default_owner_is_known_to_placement(self):
        # Placement refuses a trait that is neither CUSTOM_ nor standard
        self.assertIn(conf.CONF.accel.owner_trait, os_traits.get_traits())

    def test_no_function_no_trait(self):
        traits = naming.region_traits(device(), model.Region(0, None, None))
        self.assertEqual(naming.device_traits(device()), traits)
        self.assertFalse(any(map(naming.is_volatile, traits)))

    def test_origin(self):
        """Only what the operator put there is shown."""
        self.set(function_class=[f'network:{uuid.UUID(FUNCTION)}'])
        image = str(uuid.uuid4())
        bare = naming.region_traits(device(), model.Region(0, TYPE, None))

        def shown(**fields):
            return naming.region_traits(device(), model.Region(
                0, TYPE, **{'function_uuid': FUNCTION, 'bitstream_id': image,
                            'function_name': 'nlb', **fields})) - bare
        self.assertEqual(6, len(shown(origin=model.OPERATOR)))
        for origin in ('a project', None, ''):
            self.assertEqual(set(), shown(origin=origin))

    def test_function_that_does_not_identify(self):
        opencl = '18b79ffa2ee54aa096ef4230dafacb5f'
        image = str(uuid.uuid4())
        region = model.Region(0, TYPE, opencl, bitstream_id=image)
        bare = naming.region_traits(device(), model.Region(0, TYPE, None))
        self.assertEqual({naming.bitstream_trait(image)},
                         naming.region_traits(device(), region) - bare)

    def test_class_of_function(self):
        self.set(function_class=[f'network:{uuid.UUID(FUNCTION)}'])
        region = model.Region(0, None, FUNCTION)
        self.assertIn('CUSTOM_FPGA_NETWORK',
                      naming.region_traits(device(), region))
        # it goes with the function
        self.assertTrue(naming.is_volatile('CUSTOM_FPGA_NETWORK'))
        self.assertNotIn(
            'CUSTOM_FPGA_NETWORK', naming.region_traits(
                device(), model.Region(0, None, FUNCTION[::-1])))

    def test_class_of_function_malformed(self):
        self.set(function_class=['NETWORK'])
        with self.assertRaisesRegex(exception.ConfigurationError,
                                    "function_class has 'NETWORK'"):
            naming.region_traits(device(), model.Region(0, None, FUNCTION))

    def test_bad_vendor_names_the_device(self):
        for bad in ('Intel®', 'a/b', 'a.b', ''):
            with self.assertRaisesRegex(exception.InvalidName,
                                        'device 0000:5e:00.0'):
                naming.device_traits(device(vendor=bad))

    def test_too_long_names_the_device(self):
        # 'CUSTOM_FPGA_INTEL_' is 18 characters
        naming.device_traits(device(product='x' * 237))
        with self.assertRaisesRegex(exception.InvalidName,
                                    'device 0000:5e:00.0.* 256 characters'):
            naming.device_traits(device(product='x' * 238))

    def test_function_name_with_a_line_break(self):
        self.assertEqual('CUSTOM_FPGA_FUNCTION_NAME_OK',
                         naming.function_name_trait(' ok '))
        for name in 'ok\n', '\nok', 'ok\r', '\tok':
            self.assertRaises(exception.InvalidName,
                              naming.function_name_trait, name)

    def test_function_name_too_long(self):
        self.assertEqual(255, len(naming.function_name_trait('n' * 229)))
        with self.assertRaisesRegex(exception.InvalidName, 'function name'):
            naming.function_name_trait('n' * 230)

    @given(st.text(max_size=80))
    def test_normalized_is_fit_for_placement_or_refused(self, text):
        try:
            self.assertRegex(naming.normalize(text, 'it'), r'\A[A-Z0-9_]+\Z')
        except exception.InvalidName as error:
            self.assertIn(repr(text), str(error))

    @given(st.uuids())
    def test_function_trait_both_ways(self, function):
        self.assertEqual(
            function.hex,
            naming.function_of(naming.function_trait(function.hex)))

    def test_other_traits_are_no_functions(self):
        for other in ('CUSTOM_FPGA_INTEL', f'CUSTOM_FPGA_REGION_X_{SPELLED}',
                      'CUSTOM_FPGA_FUNCTION_NAME_NLB', naming.PROGRAMMABLE,
                      f'CUSTOM_GPU_FUNCTION_{SPELLED}', 'HW_CPU_X86_VMX'):
            self.assertIsNone(naming.function_of(other))

    def test_classes(self):
        self.assertEqual('CUSTOM_ACCELERATOR_FPGA',
                         naming.resource_class('FPGA'))
        self.assertFalse(naming.is_accelerator_class('VGPU'))
        self.assertFalse(
            naming.is_accelerator_class(naming.memory_class('DDR')))
        self.assertEqual('CUSTOM_ACCELERATOR_FPGA',
                         naming.class_in_force('FPGA'))
        # a flavor with resources:VGPU asks for Nova's own
        self.assertEqual('VGPU', naming.flavor_class('VGPU'))
        self.set(resource_classes='standard')
        self.assertEqual('FPGA', naming.resource_class('FPGA'))
        self.assertEqual('CUSTOM_ACCELERATOR_QAT', naming.resource_class('QAT'))
        self.assertTrue(naming.is_accelerator_class('VGPU'))
        self.assertEqual('VGPU', naming.flavor_class('CUSTOM_ACCELERATOR_VGPU'))

    def test_provider_made_again_is_the_same(self):
        root = str(uuid.uuid4())

        def made(node, address, index):
            return naming.provider_uuid(
                root, node, naming.region_provider_name(node, address, index))
        first = made('compute1', '0000:5e:00.0', 0)
        self.assertEqual(first, made('compute1', '0000:5e:00.0', 0))
        # also on a host that was given another name
        self.assertEqual(first, made('renamed', '0000:5e:00.0', 0))
        self.assertNotEqual(first, made('compute1', '0000:5e:00.0', 1))
