# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Graphics cards for passthrough of the whole card.

Sources: boot_vga_show() in drivers/pci/pci-sysfs.c and resource_show() of Linux
7.2. No card was seen.
"""

import dataclasses

from nova_accel.sim import card
from nova_accel.sim import reader


@dataclasses.dataclass(frozen=True)
class GpuCard(card.Card):
    """The graphics function; other functions of the slot are `others`."""

    ids: tuple[str, str, str, str] = ('10de', '26b9', '10de', '0000')
    class_code: str = '0x030200'
    driver: str | None = 'nvidia'
    #: the attribute boot_vga; only VGA devices (0300) have it
    boot_vga: bool = False
    #: whether it has types of mediated devices, as under a vGPU host driver
    mdev: bool = False
    #: size of the largest memory region of each function in GiB; 0: `resource`
    #: has none
    bar_gib: int = 0

    @classmethod
    def describe(cls, item):
        vendor = item.take('vendor', reader.identifier, '10de')
        total = item.take('total_vfs', reader.natural, 0)
        return dict(
            cls.describe_any(item),
            ids=(vendor, item.take('device', reader.identifier, '26b9'),
                 item.take('subsystem_vendor', reader.identifier, vendor),
                 item.take('subsystem_device', reader.identifier, '0000')),
            class_code=item.take('class', reader.text, '0x030200'),
            total_vfs=total, vfs=item.take('vfs', reader.up_to(total), 0),
            boot_vga=item.take('boot_vga', reader.boolean, False),
            mdev=item.take('mdev', reader.boolean, False),
            bar_gib=item.take('bar_gib', reader.natural, 0))

    def add_physical(self, tree, mine, function):
        if self.class_code.startswith('0x0300'):
            function['boot_vga'] = '1' if self.boot_vga else '0'
        self._add_region(function)
        if self.mdev and mine['driver'] == self.driver:
            function['mdev_supported_types'] = {}

    def add_virtual(self, tree, mine, n, function):
        self._add_region(function)

    def _add_region(self, function):
        if self.bar_gib:
            # start, end and flags of each; a memory region of 64 bits that
            # can be prefetched (include/linux/ioport.h of Linux)
            start = 1 << 44
            function['resource'] = (
                f'0x{start:016x} 0x{start + (self.bar_gib << 30) - 1:016x} '
                f'0x{0x14220c:016x}')
