# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs: NVIDIA, AMD, Intel.

A guest gets the PCI function of a GPU, whatever driver of the host has it.
GPUs that are divided, by VFs or as mediated devices, belong to the driver
vgpu. If vgpu is not enabled, they are listed and not offered. Sources: the id
tables of amdgpu, i915 and xe in Linux for classes;
Documentation/ABI/testing/sysfs-bus-pci and pci-sysfs.c of Linux for boot_vga;
host.nvidia for reports of NVIDIA GPUs about their memory; the PCI ID repository
of 2026-08-22 for names and, for products that differ only by subsystem, the
product list of NVIDIA's driver.

The names are for traits and pools. They are never removed from the table,
because flavors and images request them. ``python -m tests.products FILE``
compares the table with a pci.ids file and shows missing products.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import json
import typing

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import slot
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import nvidia
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

VENDORS = {'10de': 'NVIDIA', '1002': 'AMD', '8086': 'INTEL'}
#: vendor -> classes of its GPUs, if other than displays. Instinct cards since
#: MI300 are processing accelerators; Intel's FPGAs have that class, too
_CLASSES = {'1002': pci.DISPLAYS | {0x1200}}
#: vendor -> why a GPU cannot show that its memory is clear. amdgpu assumes that
#: the memory is lost after most resets, which does not mean cleared
#: (amdgpu_device_check_vram_lost() of Linux); xe clears only the memory of VFs
#: (pf_sanitize_lmem() in xe_gt_sriov_pf_config.c)
UNKNOWN = {
    '10de': 'it is not known where this product of NVIDIA reports that it has '
            'cleared its memory',
    '1002': 'no document of AMD says that a reset clears the memory, or where '
            'the GPU reports it',
    '8086': 'no document of Intel says that a reset clears the memory, or '
            'where the GPU reports it'}
#: value of Use.memory: a driver of the host has the GPU between servers
_HOSTS = 'host'
#: mode -> command that sets it; {} is the address of the GPU
_SET_MODE = {
    'ECC': 'nvidia-smi -i {} -e 0 or 1, and a reset',
    'MIG': 'nvidia-smi -i {} -mig 0 or 1, and a reset',
    'CC': 'nvidia_gpu_tools.py --devices {} --set-cc-mode off, on or devtools '
          '--reset-after-cc-mode-switch'}

#: vendor -> family -> product -> device ids
_NAMES = {
    '10de': {
        'PASCAL': {
            'TESLA_P4': '1bb3', 'TESLA_P6': '1bb4', 'TESLA_P10': '1b39',
            'TESLA_P40': '1b38', 'TESLA_P100': '15f7 15f8 15f9'},
        'VOLTA': {
            'TESLA_V100': '1db1 1db3 1db4 1db5 1db6 1db8 1df5',
            'TESLA_V100S': '1df6'},
        'TURING': {
            'TESLA_T4': '1eb8', 'T4G': '1eb4', 'TESLA_T10': '1e35 1e37',
            'TESLA_T40': '1e38'},
        'AMPERE': {
            'A100': '20b0 20b1 20b2 20b3 20b5 20f1', 'A100X': '20b8',
            'A30': '20b7', 'A30X': '20b9', 'A800': '20bd 20f3 20f5 20f6',
            'AX800': '20fd', 'A40': '2235', 'A10': '2236', 'A10G': '2237',
            'A10M': '2238', 'RTX_A6000': '2230', 'RTX_A5000': '2231',
            'RTX_A4500': '2232', 'RTX_A5500': '2233'},
        'ADA': {
            'L40': '26b5', 'L40_CNX': '26f5', 'L40G': '26b8',
            'L40S': '26b9', 'L30': '26bb',
            'L20': '26b7 26ba', 'L16': '27b7', 'L4': '27b8', 'L2': '27b6',
            'RTX_6000_ADA': '26b1', 'RTX_5000_ADA': '26b2',
            'RTX_5880_ADA': '26b3'},
        'HOPPER': {
            'H100': '2330 2331 2336 2337 2338 2339 233d', 'H100L': '2321',
            'H100_CNX': '2313', 'H200': '2335', 'H200_NVL': '233b',
            'H800': '2322 2324', 'H800L': '233a', 'H20': '2329 232c',
            'H20B': '2328', 'H20_NVL16': '230c 230e', 'GH200': '2342 2348'},
        'BLACKWELL': {
            'B100': '2920 29bc', 'B200': '2901 2909', 'B300': '3182',
            'GB200': '2941', 'GB300': '31a1 31c2 31c3', 'GB10': '2e12',
            'RTX_PRO_6000': '2bb1 2bb5', 'RTX_PRO_6000D': '2bb2',
            'RTX_6000D': '2bb9', 'RTX_PRO_5000': '2bb3',
            'RTX_PRO_4500': '2c31 2c3a', 'RTX_PRO_4000': '2c33 2c34'},
    },
    '1002': {
        'INSTINCT': {
            'MI25': '6860', 'MI50': '66a1', 'MI60': '66a0',
            'MI100': '738c 738e', 'MI210': '740f', 'MI250': '740c',
            'MI250X': '7408', 'MI300A': '74a0', 'MI300X': '74a1',
            'MI300X_HF': '74a9 74bd', 'MI308X': '74a2', 'MI325X': '74a5',
            'MI350P': '75a8', 'MI350X': '75a0', 'MI355X': '75a3'},
        'RADEON_PRO': {
            'V340': '6864', 'V520': '7360 7362', 'V620': '73a1',
            'V710': '7460 7461', 'W7900': '7448 744a 744b',
            'W7800': '7449 745e', 'R9700': '7551'},
    },
    '8086': {
        'FLEX': {
            'FLEX_140': '56c1', 'FLEX_170': '56c0', 'FLEX_170V': '56c2'},
        'MAX': {
            'MAX_1100': '0bd9 0bda 0bdb', 'MAX_1100C': '0b6e',
            'MAX_1350': '0bd7 0bd8', 'MAX_1450': '0b69',
            'MAX_1550': '0bd5 0bd6', 'MAX_1550VG': '0bd4'},
        'ARC_PRO': {
            'ARC_PRO_A40': '56b1', 'ARC_PRO_A60': '56b3',
            'ARC_PRO_B50': 'e212', 'ARC_PRO_B60': 'e211',
            'ARC_PRO_B65': 'e222', 'ARC_PRO_B70': 'e223'},
        'SERVER_GPU': {'SG1': '4907'},
    },
}
#: (vendor, device) -> product, family
PRODUCTS: dict[tuple[str, ...], tuple[str, str]] = {
    (vendor, device): (product, family)
    for vendor, families in _NAMES.items()
    for family, products in families.items()
    for product, devices in products.items() for device in devices.split()}
#: (vendor, device, subsystem) -> product, family, if a device id has two names
BOARDS: dict[tuple[str, ...], tuple[str, str]] = {
    ('10de', '25b6', '10de:14a9'): ('A16', 'AMPERE'),
    ('10de', '25b6', '10de:157e'): ('A2', 'AMPERE'),
}


class GpuDriver(slot.SlotDriver):

    CONTRACT = base.CONTRACT
    NAME = 'gpu'
    POOLED = True
    NEEDS_RULE = True

    # Discovery

    def left_out(self, device):
        """Return the reason if the GPU is divided now; see the base class."""
        return ('it is shared out, and the driver vgpu has it'
                if self.is_there(device)
                and self.identify(device.address) is None else '')

    def fingerprint(self):
        return (*super().fingerprint(), self.names('class/mdev_bus'))

    def identify(self, address):
        vendor = pci.identifier(self.kernel, address, 'vendor')
        if (vendor not in VENDORS
                or not has_class(self.kernel, address, vendor)
                or 'vgpu' in CONF.accel.enabled_drivers
                and slot.is_shared(self.kernel, address)):
            return None
        device = pci.identifier(self.kernel, address, 'device')
        by_id = naming.device_trait('GPU', VENDORS[vendor], device,
                                    f'device {address}')
        product, family = _name(
            vendor, device, pci.subsystem(self.kernel, address))
        return model.Device(
            address=address, type='GPU', vendor=VENDORS[vendor],
            product=product, family=family, vendor_id=vendor,
            product_id=device, driver=self.NAME, traits=(by_id,))

    def recognize(self, address, before):
        device = self.identify(address)
        return device and fabric.recorded(self.kernel, device, before)

    def look(self, device, before):
        address = device.address
        if address in sriov.wanted() or pci.has_vfs(self.kernel, address):
            raise base.NotOffered(
                f'it is shared out by VFs: add vgpu to [accel] '
                f'enabled_drivers, or end that (see {sriov.OPTION}) if '
                f'servers must have it whole')
        self.check_whole(device, rules.INCLUDE, rules.DeviceRules().include)
        company, companions = self.checked_company(address)
        return dataclasses.replace(
            device, company=company,
            handles=self.function_handles(address, companions))

    def state(self, address):
        """Return a value that also changes when the GPU is divided; see the
        base class."""
        try:
            return (*super().state(address),
                    slot.failure(self.kernel, address),
                    slot.obstacle(self.kernel, address))
        except (OSError, ValueError) as error:
            return (*super().state(address), str(error))

    # Between two servers

    def unshowable(self, device):
        """Return why the GPU cannot report that its memory is clear, or '' for
        NVIDIA GPUs that host.nvidia knows; see the base class."""
        return '' if _family(device) else UNKNOWN[device.vendor_id]

    def reset_methods(self, device, handle, function):
        """Return the reset methods; see the base class. Under the policy
        clear, the bus reset is the first one if it makes the GPU clear its
        memory."""
        found = super().reset_methods(device, handle, function)
        if ('bus' in found and _family(device) and handover.policy(
                device, handle.address) is handover.Policy.CLEAR):
            return ('bus', *(method for method in found if method != 'bus'))
        return found

    def release(self, device, handle, created_type, use):
        """Reset the GPU, and compare its modes (ECC, MIG, CC) with the modes
        at the last hand-over; see the base class.

        :raises NotCleared: the memory is not clear, a mode has changed, or
            evidence that [accel] handover demands is missing.
        """
        address = handle.address
        is_hosts = use.memory == _HOSTS or (
            not pci.is_for_vfio(self.kernel, address))
        if is_hosts and self.reset_methods(
                device, handle, address)[:1] == ('bus',):
            # a killed call may have left it bound to vfio-pci
            use.remember(_HOSTS)
        done = super().release(device, handle, created_type, use)
        if is_hosts and pci.is_for_vfio(self.kernel, address):
            self.kernel.probe(address)
        facts = base.facts_of(done)
        if (facts.get('memory') == handover.NOT_SHOWN
                and handover.demands_proof(device, address)):
            raise exception.NotCleared(
                f'{address} was reset after its server, and '
                f'{handover.OPTION} demands that its memory is shown to be '
                f'clear, which it is not, because {facts["why"]}: nova-compute '
                f'tries again.')
        before = json.loads(use.last_shown() or '{}').get('modes', {})
        for name, value in facts.get('modes', {}).items():
            had = before.get(name, value)
            if had != value:
                raise exception.NotCleared(
                    f'{address} was reset after its server, which has '
                    f'left {name} {value} in place of {had}: restore it '
                    f'({_SET_MODE[name].format(address)}), and it is '
                    f'tried again.')
        return done

    def reset_function(self, device, function, methods):
        """Reset the function and, after a bus reset, check that the GPU has
        cleared its memory; see the base class.

        :raises NotCleared: the memory is not clear.
        """
        if function != device.address:
            return super().reset_function(device, function, methods)
        why = self.unshowable(device) or (
            '' if methods[:1] == ('bus',) else
            'the function was reset, and not its bus')
        if why:
            return not_shown(
                super().reset_function(device, function, methods), why)
        family, refused = _family(device), []
        for by in 'VFIO', 'sysfs':
            try:
                with self._readable(function, by):
                    watched = self.kernel.reset_gpu(
                        function, by, family,
                        # so that this error comes before that of the limit
                        CONF.accel.device_timeout * 500)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise
                refused.append(f'{by}: {error.strerror}')
            else:
                return self._judged(function, by, family, watched)
        return not_shown(
            super().reset_function(device, function, methods),
            f'its registers cannot be read ({"; ".join(refused)})')

    @contextlib.contextmanager
    def _readable(self, function, by) -> Iterator[None]:
        """Make the registers of a function readable inside the context: bind
        it to VFIO or to no driver. On exit, a function that was bound to VFIO
        is bound to it again.

        :param by: 'VFIO', or 'sysfs' for no driver.
        """
        was_for_vfio = pci.is_for_vfio(self.kernel, function)
        if by == 'VFIO':
            if not was_for_vfio:
                self.kernel.rebind(function, base.VFIO)
            yield
            return
        try:
            self.kernel.unbind(function)
            with self._resetting_by_bus(function):
                yield
        finally:
            if was_for_vfio:
                self.kernel.rebind(function, base.VFIO)

    def _judged(self, function, by, family, watched):
        if failed := nvidia.failure(family, watched):
            raise exception.NotCleared(
                f'{function} was reset after its server, and it has not '
                f'cleared its memory, because {failed}: nova-compute tries '
                f'again, and a power cycle may help.')
        facts: dict[str, typing.Any] = {
            'read_by': by, 'words': nvidia.words(family, watched),
            'milliseconds': watched.seen[-1][0],
            'modes': nvidia.modes(family, watched),
            'link': ' x'.join(filter(None, (
                self.attribute(function, f'current_link_{what}')
                for what in ('speed', 'width'))))}
        doubt = nvidia.doubt(family, watched)
        return (not_shown('reset bus', doubt, **facts) if doubt
                else base.Cleaned('reset bus', memory=handover.CLEARED,
                                  **facts))

    def goes_along(self, address, function):
        return (pci.class_code(self.kernel, function) >> 8
                in slot.COMPANIONS)


def has_class(kernel, address: str, vendor: str) -> bool:
    """Return whether a function has the PCI class of GPUs of a vendor.

    :raises OSError: the class cannot be read.
    """
    return (pci.class_code(kernel, address) >> 8
            in _CLASSES.get(vendor, pci.DISPLAYS))


def _name(vendor: str, device: str, subsystem: str,
          ) -> tuple[str, str | None]:
    """Return product and family of a GPU. For an unknown product, return the
    device id and None.

    :param vendor: PCI vendor id, four hex digits.
    :param device: PCI device id, four hex digits.
    :param subsystem: the result of pci.subsystem().
    """
    return (BOARDS.get((vendor, device, subsystem))
            or PRODUCTS.get((vendor, device)) or (device, None))


def _family(device: model.Device) -> str:
    return nvidia.family(device.vendor_id, device.family, device.product_id)


def not_shown(done: str, why: str, **facts: typing.Any) -> str:
    """Return the result of a reset that may not have cleared the memory.

    :param done: the reset, in a few words.
    :param why: the reason why nothing shows that the memory is clear, or ''.
    :param facts: further values that were read back.
    :returns: a base.Cleaned with done and why, or done itself if why is ''.
    """
    return base.Cleaned(done, memory=handover.NOT_SHOWN, why=why,
                        **facts) if why else done
