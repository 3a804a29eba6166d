# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts with devices of every kind, and servers with several of them."""

from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import operations

FPGA, ALVEO = '0000:5e:00.0', '0000:65:00.0'
GPU, MDEV, VENDOR = '0000:3b:00.0', '0000:41:00.0', '0000:42:00.0'
QAT, CLOCK, DISK = '0000:6b:00.0', '0000:06:00.0', '0000:02:00.0'
CARD = '0000:07:00.0'
SMALL = 'CUSTOM_NVIDIA_2235_A40_2Q'
LARGE = 'CUSTOM_NVIDIA_26B9_L40S_24Q'


def vgpus(address, device, framework, type_, name):
    vfs = 2 if framework == 'vendor-vfio' else 0
    return {'address': address, 'vendor': '10de', 'device': device,
            'units': 2, 'framework': framework, 'total_vfs': vfs, 'vfs': vfs,
            'types': [{'id': type_, 'name': name, 'units': 1}]}


HOST = {
    'cards': [base.card(FPGA, [base.NLB0])],
    'alveos': [{'address': ALVEO}],
    'gpus': [{'address': GPU}],
    'vgpus': [vgpus(MDEV, '2235', 'mdev', 'nvidia-558', 'NVIDIA A40-2Q'),
              vgpus(VENDOR, '26b9', 'vendor-vfio', '1155',
                    'NVIDIA L40S-24Q')],
    'qats': [{'address': QAT}],
    'timecards': [{'address': CLOCK}],
    'nvmes': [{'address': DISK}],
    'others': [{'address': CARD, 'vendor': '1da3', 'device': '1020',
                'class': '0x120000', 'driver': 'habanalabs'}],
}


class MixedTest(operations.OperationsTestBase):

    HOSTS = {'compute1': HOST, 'compute2': HOST}

    def setUp(self):
        super().setUp()
        self.flags(resume_guests_state_on_host_boot=True)
        self.write_profiles({'name': 'secure-stream', 'groups': [
            {'resources:FPGA': '1', 'trait:CUSTOM_FPGA_INTEL': 'required',
             'accel:function_id': base.CRYPTO},
            {'resources:VGPU': '1', f'trait:{SMALL}': 'required'},
            {'resources:VGPU': '1', f'trait:{LARGE}': 'required'},
            {'resources:CUSTOM_ACCELERATOR_QAT': '1',
             f'trait:{naming.property_trait("QAT", "SERVICE", "sym")}':
             'required'}]})
        self.profile = {'accel:device_profile': 'secure-stream',
                        'group_policy': 'none'}

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(
            enabled_drivers=['dfl', 'xrt', 'gpu', 'vgpu', 'qat', 'timecard',
                             'nvme', 'pci'],
            pci_devices=['vendor=1da3 type=AI'], qat_services=['sym;asym'],
            virtual_functions=[f'{QAT}=16', f'{FPGA}=1'], group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def has_all(self, server):
        """Four handles of three types, each as it was asked for.

        :returns: host and addresses.
        """
        host = self.host_of(server)
        claims = [c for c in self.claims(host)
                  if c.instance_uuid == server['id']
                  and c.role is model.Role.CURRENT]
        self.assertEqual(
            [(MDEV, SMALL), (VENDOR, LARGE), (FPGA, None), (QAT, None)],
            sorted((c.device_address, c.created_type) for c in claims))
        self.assertEqual(
            {(c.handle.address, c.handle.managed
              and c.handle.type is model.HandleType.PCI) for c in claims},
            base.hostdevs(self.guest_xml(server)))
        self.assertEqual(
            {c.provider_uuid for c in claims},
            {uuid for uuid, allocation in
             self._get_allocations_by_server_uuid(server['id']).items()
             if any(map(naming.is_accelerator_class,
                        allocation['resources']))})
        mine = {c.device_address: c.handle.address for c in claims}
        kernel = self.kernel(host)
        self.assertTrue(kernel.exists(f'bus/mdev/devices/{mine[MDEV]}'))
        self.assertEqual('1155', kernel.read(
            f'bus/pci/devices/{mine[VENDOR]}/nvidia/current_vgpu_type'))
        fpga, = (c for c in claims if c.device_address == FPGA)
        self.assertEqual(base.CRYPTO.replace('-', ''), fpga.restore_function)
        return host, mine

    def delete_servers(self):
        super().delete_servers()
        for host in self.HOSTS:
            kernel = self.kernel(host)
            self.assertEqual([], kernel.listdir('bus/mdev/devices'))
            for vf in range(2):
                self.assertEqual('0', kernel.read(
                    f'bus/pci/devices/{VENDOR}/virtfn{vf}/nvidia/'
                    f'current_vgpu_type'))

    def test_moves(self):
        """The same server, where it goes elsewhere and comes back."""
        server = self.boot(self.profile)
        before = self.has_all(server)
        self._migrate_server(server)
        there = self.has_all(server)
        self.assertNotEqual(before[0], there[0])
        self._revert_resize(server)
        self.assertEqual(before, self.has_all(server))
        self._migrate_server(server)
        self._confirm_resize(server)
        self.assertEqual(there[0], self.has_all(server)[0])
        self.assertEqual([], self.claims(before[0]))
        self._shelve_server(server)
        self.assertEqual([], self.claims())
        self._unshelve_server(server)
        self.has_all(server)
        plain = self._create_flavor(extra_spec={})
        self._resize_server(server, plain)
        self.assertEqual(set(), base.hostdevs(self.guest_xml(server)))
        self._revert_resize(server)
        self.has_all(server)
        self.delete_servers()
