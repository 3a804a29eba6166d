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


class XrtTestBase(base.AcceleratorTestBase):

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
        self.flags(enabled_drivers=['dfl', 'xrt'], group='accel')

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

    def region(self):
        return self.parts('compute1').inventory.devices[
            ALVEO].region(0)


class XrtTest(XrtTestBase):
    """The operator lets guests program the card, by the mailbox."""

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(whole_cards=[ALVEO], group='accel')

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

    def test_two_vendors_in_one_host(self):
        alveo = str(uuid.uuid4())
        self.upload_xclbin(alveo)
        self.upload_bitstream(self.function)
        # each file for the card of the other
        for vendor, function, part in (
                ('INTEL', alveo, 'is an xclbin file, for FPGAs of AMD'),
                ('XILINX', self.function, 'is a GBS file, for FPGAs of Inte')):
            server = self.boot(self.flavor(vendor, function_id=function),
                               expected_state='ERROR')
            self.assertIn(part, self.fault(server))
            self._delete_server(server)
        self.assertEqual('', self.loaded())
        servers = {
            vendor: self.boot(self.flavor(vendor, function_id=function))
            for vendor, function in (('XILINX', alveo),
                                     ('INTEL', self.function))}
        self.assertEqual({'XILINX': [USER], 'INTEL': [base.vf(INTEL)]}, {
            vendor: self.hostdevs(server)
            for vendor, server in servers.items()})
        self.assertIn(naming.function_trait(alveo), self.traits(REGION))
        self.assertIn(naming.function_trait(self.function), self.traits(
            f'compute1_accel_{INTEL}_region0'))


class FixedFunctionTest(XrtTestBase):
    """The mailbox lets no guest program the card."""

    def test_function_outlives_servers_but_not_the_power(self):
        self.flags(resume_guests_state_on_host_boot=True)
        self.upload_xclbin(self.function)
        specs = self.flavor(function_id=self.function)
        self._delete_server(self.boot(specs))
        self.assertIn(naming.function_trait(self.function),
                      self.traits(REGION))
        # it is not programmed again
        self.kernel('compute1').set_fault(ALVEO, program_error='EIO')
        server = self.boot(specs)
        self._reboot_server(server, hard=True)
        self.kernel('compute1').set_fault(ALVEO, program_error=None)

        compute = self.computes['compute1']
        compute.stop()
        for domain in compute.driver._host.get_connection()._vms.values():
            domain.destroy()
        self.simulated('compute1').power_cycle()
        self.assertEqual('', self.loaded())
        self.restart_compute_service('compute1')
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        self.assertEqual('vadd:vadd_1', self.loaded())
        self.assertEqual([USER], self.hostdevs(server))
        self.assertEqual(self.function.replace('-', ''),
                         self.region().function_uuid)
        self._delete_server(server)
        self.assertEqual([], self.claims())


class HbmTest(XrtTestBase):

    CARD = {**XrtTestBase.CARD, 'product': 'U50'}

    def test_memory_of_the_card(self):
        """One group asks for an FPGA and a part of its memory."""
        hbm = 'CUSTOM_ACCELERATOR_MEMORY_HBM'
        self.assertEqual(
            {'CUSTOM_ACCELERATOR_FPGA': (1, 0), hbm: (8192, 0)},
            self.provider_tree()[REGION][0])
        self.upload_xclbin(self.function)
        specs = self.flavor(function_id=self.function)
        failed = self.boot(specs | {f'resources1:{hbm}': '9000'},
                           expected_state='ERROR')
        self.assertIn('9000 MiB of MEMORY_HBM', self.fault(failed))
        server = self.boot(specs | {f'resources1:{hbm}': '4096'})
        self.assertEqual([USER], self.hostdevs(server))
        self.assertEqual({'CUSTOM_ACCELERATOR_FPGA': 1, hbm: 4096},
                         self.provider_tree()[REGION][2])
