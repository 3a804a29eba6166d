# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cards under XRT, beside an Intel card in the same host."""

import tempfile
import uuid

import fixtures

from nova_accel import naming
from nova_accel import sim
from nova_accel.sim import xrt
from tests.functional import base

INTEL = '0000:5e:00.0'
ALVEO = '0000:81:00.0'
USER = '0000:81:00.1'
REGION = f'compute1_accel_{ALVEO}_region0'
SHELL = str(uuid.UUID(xrt.DEFAULT_INTERFACES[-1]))


class XrtTest(base.AcceleratorTestBase):
    """The operator lets guests program the card, by the mailbox."""

    CARD = {'address': ALVEO, 'programming_seconds': 0}

    @property
    def HOSTS(self):
        return {'compute1': {'cards': [base.card(INTEL)],
                             'alveos': [self.CARD]}}

    def setUp(self):
        super().setUp()
        # files of guests, of which there are none here
        self.useFixture(fixtures.MockPatch(
            'nova.virt.libvirt.LibvirtDriver.'
            '_get_instance_disk_info_from_config', return_value=[]))
        self.function = str(uuid.uuid4())

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['dfl', 'xrt'], whole_cards=[ALVEO],
                   group='accel')

    def upload_xclbin(self, function, interface=SHELL, properties=None,
                      **xclbin):
        with tempfile.NamedTemporaryFile() as file:
            sim.make_xclbin(file.name, function, interface, **xclbin)
            return self.upload_bitstream(
                function, data=file.read(), properties=properties)

    @staticmethod
    def flavor(vendor='XILINX', **accel):
        return {**base.fpga_flavor(**accel),
                f'trait1:CUSTOM_FPGA_{vendor}': 'required'}

    def loaded(self):
        """Kernels that the management function shows."""
        top = f'bus/pci/devices/{ALVEO}'
        icap, = (name for name in self.simulated('compute1').listdir(top)
                 if name.startswith('icap'))
        text = self.simulated('compute1').read_bytes(
            f'{top}/{icap}/ip_layout', 4096)
        return text[24:].split(b'\0')[0].decode()

    def driver_of(self, function):
        return self.simulated('compute1').readlink(
            f'bus/pci/devices/{function}/driver').rpartition('/')[2]

    def test_boot(self):
        tree = self.provider_tree()
        self.assertEqual(
            ({'CUSTOM_ACCELERATOR_FPGA': (1, 0), base.MEMORY: (65536, 0)}, {}),
            (tree[REGION][0], tree[f'compute1_accel_{ALVEO}'][0]))
        spelled = SHELL.upper().replace('-', '_')
        self.assertLessEqual(
            {'CUSTOM_FPGA_XILINX', 'CUSTOM_FPGA_XILINX_U250',
             'CUSTOM_FPGA_XILINX_ALVEO', naming.PROGRAMMABLE,
             f'CUSTOM_FPGA_XILINX_REGION_{spelled}'}, tree[REGION][1])
        image = self.upload_xclbin(self.function)
        server = self.boot(self.flavor(function_id=self.function))
        # the management function stays with the host
        self.assertEqual([USER], self.hostdevs(server))
        self.assertEqual(('xclmgmt', 'vfio-pci'),
                         (self.driver_of(ALVEO), self.driver_of(USER)))
        self.assertEqual('vadd:vadd_1', self.loaded())
        traits = self.traits(REGION)
        self.assertLessEqual({naming.function_trait(self.function),
                              naming.bitstream_trait(image)}, traits)
        self.assertNotIn(naming.PROGRAMMABLE, traits)
        # the server keeps it while the host cannot see
        self.parts('compute1').inventory.scanner.scan()
        self.report()
        self.assertIn(naming.function_trait(self.function),
                      self.traits(REGION))
        self._delete_server(server)
        self.assertEqual(([], 'xocl'), (self.claims(), self.driver_of(USER)))
        # its guest may have loaded another through the mailbox; that was
        # replaced
        self.assertLessEqual(
            {naming.PROGRAMMABLE, naming.function_trait(self.function),
             naming.bitstream_trait(image)}, self.traits(REGION))
