# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which devices guests take along, and why they leave others."""

import os

import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import pci_rule
from nova_accel.drivers import vgpu
from nova_accel.host import kernel as host_kernel
from nova_accel.host import vfio
from nova_accel import naming
from tests.unit import vgpus
from tests.unit.host import SimulatedHost

NIC = '0000:03:00.0'
CARD = {'address': NIC, 'vendor': '15b3', 'device': '101d', 'vf_device': '101e',
        'class': '0x020000', 'driver': 'mlx5_core', 'total_vfs': 2, 'vfs': 2,
        'firmware': '28.39.1002'}
VF = f'{NIC[:-1]}1'
#: of Linux, which has many more
ALIASES = """\
alias pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_core
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
alias vfio_pci:v00008086d00004941sv*sd*bc*sc*i* qat_vfio_pci
alias vfio_pci:v00001AF4d00001041sv00001AF4sd*bc*sc*i* virtio_vfio_pci
""".splitlines()


class VfioTest(testtools.TestCase):

    def device(self, **kinds):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            group='accel', pci_devices=['vendor=15b3 type=NIC'])
        kernel = self.useFixture(SimulatedHost(**kinds)).kernel
        driver = (pci_rule.PciRuleDriver if 'others' in kinds
                  else vgpu.VgpuDriver)(kernel)
        self.kernel, self.driver = kernel, driver
        device, = driver.discover().values()
        return device

    def test_functions(self):
        for variant, said in (
                ('mlx5_vfio_pci', ''), ('pds-vfio-pci', ''),
                ('qat_vfio_pci', 'qat_vfio_pci does not log'),
                ('xe-vfio-pci', 'and neither does the IOMMU'),
                ('vfio-pci', 'vfio_pci, which does not save'),
                ('nvgrace_gpu_vfio_pci', 'which does not save its state')):
            device = self.device(others=[{**CARD, 'vfio_driver': variant}])
            self.assertEqual(bool(said), not device.migrates_by, variant)
            self.assertIn(said, device.stays)
            self.assertEqual(
                not said, naming.MIGRATABLE in naming.place_traits(device))
            # while a guest has it as well, and as what is shown to people
            self.kernel.guest_takes(VF)
            now = self.driver.discover({NIC: device})[NIC]
            self.assertEqual((device.migrates_by, device.stays),
                             (now.migrates_by, now.stays))
            self.assertEqual((device.migrates_by, device.stays), (
                device.as_dict()['migrates-by'], device.as_dict()['stays']))

    def test_version(self):
        """What the other host must have, too."""
        self.assertEqual('mlx5_vfio_pci fw.version 28.39.1002', self.device(
            others=[{**CARD, 'vfio_driver': 'mlx5_vfio_pci'}]).migrates_by)
        for framework in ('mdev', 'sriov-mdev', 'vendor-vfio'):
            device = self.device(vgpus=[
                vgpus.gpu(framework, driver_version='570.1')])
            self.assertEqual('nvidia 570.1', device.migrates_by)
            # which the scheduler can be asked for, and which goes with it
            trait = 'CUSTOM_ACCELERATOR_MIGRATES_BY_NVIDIA_570_1'
            self.assertIn(trait, naming.place_traits(device))
            self.assertTrue(naming.is_volatile(trait))
        self.assertEqual('mtty', self.device(
            mdev_parents=[vgpus.MTTY]).migrates_by)

    def test_memory(self):
        """What has to be copied while the guest is paused."""
        gpu = vgpus.gpu('mdev')
        gpu['types'] = [{'id': f'nvidia-{number}', 'name': f'NVIDIA {name}',
                         'units': 1} for number, name in enumerate((
                             'A40-2Q', 'A100-4C', 'A100-3-20C', 'A100-1-5CME',
                             'A40 of our own'))]
        self.assertEqual([2048, 4096, 20480, 5120, 0], [
            type_.memory for type_ in self.device(vgpus=[gpu]).creatable])
        self.assertEqual((0, 2), tuple(
            vfio.seconds_to_copy(*of) for of in ((0, 0), (2048, 1024))))
        # 10 Gb/s
        self.assertAlmostEqual(1.0737, vfio.seconds_to_copy(1280, 0), 3)

    def test_kernel_that_logs_nothing(self):
        """As Debian 13's: QEMU would begin, and fail."""
        device = self.device(mdev_parents=[vgpus.MTTY], iova_bitmap=False)
        self.assertEqual('', device.migrates_by)
        self.assertIn('CONFIG_IOMMUFD_DRIVER', device.stays)

    def test_iommu_logs(self):
        """In place of the driver, for devices by iommufd."""
        device = self.device(iommufd=True, others=[
            {**CARD, 'vfio_driver': 'xe-vfio-pci'}])
        self.assertEqual('xe_vfio_pci fw.version 28.39.1002 iommufd',
                         device.migrates_by)
        self.assertTrue(vfio.is_by_iommu(device.migrates_by))
        self.assertFalse(vfio.is_by_iommu(self.device(iommufd=True, others=[
            {**CARD, 'vfio_driver': 'mlx5_vfio_pci'}]).migrates_by))

    def test_iommus(self):
        """What they show, and without iommufd."""
        for name, shown, logs in (
                # of Emerald Rapids, and without Scalable Mode
                ('intel-iommu/ecap', '3ee9e86f050df', True),
                ('intel-iommu/ecap', '200000f050df', False),
                ('intel-iommu/ecap', 'f020df', False),
                # of Linux 6.6 and earlier, and later
                ('amd-iommu/features', '10000000000000', True),
                ('amd-iommu/features', '0:10000000000000', True),
                ('amd-iommu/features', '10000000000000:254f77ef22294ada',
                 False),
                ('arm-smmu-v3/features', '1', False)):
            root = self.useFixture(fixtures.TempDir()).path
            function = f'{root}/bus/pci/devices/{VF}/iommu/{name}'
            os.makedirs(os.path.dirname(function))
            with open(function, 'w') as file:
                file.write(f'{shown}\n')
            kernel = host_kernel.Kernel(root)
            self.assertFalse(vfio._iommu_logs(kernel, VF))
            os.makedirs(f'{root}/class/misc/iommu')
            self.assertEqual(logs, vfio._iommu_logs(kernel, VF), shown)

    def test_bound_by_the_operator(self):
        """What is on plain vfio-pci stays there in a guest."""
        device = self.device(others=[{
            **CARD, 'vfio_driver': 'mlx5_vfio_pci', 'vf_driver': 'vfio-pci'}])
        self.assertIn('vfio_pci, which does not save', device.stays)

    def test_kept_without_handles(self):
        """While all is in use, a vGPU of another server included."""
        device = self.device(vgpus=[vgpus.gpu('vendor-vfio')])
        for handle in device.handles:
            self.driver.prepare(
                device, handle, vgpus.TRAIT['nvidia-557'], True,
                vgpu.base.Use())
        full = self.driver.discover({vgpus.GPU: device})[vgpus.GPU]
        self.assertEqual((), full.handles)
        self.assertEqual(device.migrates_by, full.migrates_by)

    def test_variant_of_libvirt(self):
        for ids, expected in (
                ('v000015B3d0000101Esv000015B3sd00000026bc02sc00i00',
                 'mlx5_vfio_pci'),
                ('v00001AF4d00001041sv00001AF4sd00000001bc02sc00i00',
                 'virtio_vfio_pci'),
                ('v000010DEd000026B9sv*sd*bc03sc02i00', 'vfio_pci')):
            self.assertEqual(expected, vfio.best_variant(
                [a for a in ALIASES if 'vfio_pci:' in a], f'pci:{ids}'))
        self.assertIsNone(vfio.best_variant([], 'pci:v0'))

    def test_kernel_of_this_machine(self):
        directory = self.useFixture(fixtures.TempDir()).path
        kernel = host_kernel.Kernel(root=directory, proc=directory)
        for text, expected in (
                ('0000000000000000 T iova_bitmap_for_each\t[vfio]\n', True),
                ('0000000000000000 T iova_magazine_alloc\n', False)):
            # it comes and goes with modules
            os.makedirs(os.path.join(directory, 'module', f'{expected}'))
            with open(os.path.join(directory, 'kallsyms'), 'w') as file:
                file.write(f'0000000000000000 T _stext\n{text}')
            self.assertEqual(expected, kernel.has_iova_bitmap())
