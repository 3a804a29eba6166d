# Licensed under the Apache License, Version 2.0. See LICENSE.

import re
import subprocess
import unittest

from nova_accel.host import address_space

GIB = 1 << 30


class AddressBits(unittest.TestCase):
    """Guests of QEMU beside the machine, with SeaBIOS. They are told bits of
    physical addresses as nova-compute has libvirt do it under KVM, and have
    regions of any size: of pci-testdev, which has nothing behind them."""

    def places(self, memory, bits, *regions):
        """Where the guest finds the region of each device.

        :param memory: of the guest, GiB; and so on.
        :returns: addresses that are above its memory.
        """
        command = [
            'qemu-system-x86_64', '-accel', 'tcg', '-nodefaults', '-display',
            'none', '-machine', 'q35,memory-backend=m0', '-object',
            f'memory-backend-ram,id=m0,size={memory}G,reserve=off', '-m',
            f'{memory}G', '-cpu', f'qemu64,phys-bits={bits}', '-serial',
            'stdio', '-kernel', '/image/probe.elf']
        for n, size in enumerate(regions, 1):
            command += [
                '-device', f'pcie-root-port,id=port{n},chassis={n},slot={n}',
                '-device', f'pci-testdev,membar={size}G,bus=port{n}']
        found = []
        with subprocess.Popen(['timeout', '120', *command], text=True,
                              errors='replace', stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE) as guest:
            for line in guest.stdout:
                if place := re.search('^TEST memory=1 bar2=([0-9a-f]+)', line):
                    found.append(int(place[1], 16))
                if 'PROBE DONE' in line:
                    break
            guest.terminate()
        self.assertEqual(len(regions), len(found))
        print(f'    {regions} GiB in {bits} bits are at',
              ', '.join(f'{at / GIB:.0f}' for at in found), 'GiB')
        return [at for at in found if at > memory * GIB]

    def test_1_large_regions(self):
        """A guest that is told 40 bits misses devices, and with 46 it does not.

        As nova-compute reckons it.
        """
        for memory, regions, seen in ((1, [128], 1), (1, [512], 0),
                                      (16, [128] * 3, 3), (16, [128] * 4, 3)):
            self.assertEqual(seen, len(self.places(memory, 40, *regions)))
            self.assertEqual(
                len(regions), len(self.places(memory, 46, *regions)))
            self.assertEqual('', address_space.unseen(
                memory * GIB, [size * GIB for size in regions], 46))
