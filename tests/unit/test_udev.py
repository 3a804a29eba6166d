# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The rules for disks of servers, as udev itself reads them."""

import glob
import os
import re
import shutil
import subprocess

import fixtures
import testtools

from nova_accel.host import pci

RULES = os.path.join(os.path.dirname(__file__), *'../../etc/nova_accel/'
                     '59-nova-accel-disks.rules'.split('/'))
EXAMPLE = '0000:41:00.0'
#: in a namespace of its own udevadm sees these rules, and writes into no file
#: of the machine's udev
PLAY = """
mount -t tmpfs none /run/udev && mount --bind "$1" /etc/udev/rules.d &&
exec udevadm test --action=change "$2"
"""


class UdevTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        if not shutil.which('udevadm'):
            self.skipTest('udevadm is not installed: install udev')
        self.directory = self.useFixture(fixtures.TempDir()).path

    def run_command(self, *command):
        return subprocess.run(command, capture_output=True, text=True,
                              errors='replace', timeout=60)

    def test_verified(self):
        """Also the line that is there to be used."""
        if self.run_command('udevadm', 'verify', '--help').returncode:
            self.skipTest('this udevadm is older than 254, and has no verify')
        with open(RULES) as file:
            text = file.read()
        for name, rules in (('as-shipped', text),
                            ('all', text.replace('#SUBSYSTEMS', 'SUBSYSTEMS'))):
            path = os.path.join(self.directory, f'{name}.rules')
            with open(path, 'w') as file:
                file.write(rules)
            done = self.run_command('udevadm', 'verify', path)
            self.assertEqual(0, done.returncode, done.stderr)

    def properties(self, disk, address):
        """What udev has of a disk of this machine, with the rules for the
        disks of a PCI function."""
        with open(RULES) as shipped, open(os.path.join(
                self.directory, os.path.basename(RULES)), 'w') as file:
            file.write(shipped.read().replace(EXAMPLE, address))
        done = self.run_command(
            'unshare', '--map-root-user', '--mount', 'sh', '-c', PLAY, 'sh',
            self.directory, disk)
        if done.returncode:
            self.skipTest(f'udevadm test cannot be run in a namespace here: '
                          f'{done.stderr.strip()[-200:]}')
        self.assertIn(os.path.basename(RULES), done.stderr + done.stdout)
        return dict(re.findall('^([A-Z_]+)=(.*)$', done.stdout, re.M))

    def test_disk(self):
        """Of the function it is left alone, and any other is not."""
        for disk in sorted(glob.glob('/sys/class/block/*')):
            at = [part for part in os.path.realpath(disk).split('/')
                  if pci.ADDRESS.fullmatch(part)]
            if at:
                break
        else:
            self.skipTest('no disk of this machine is behind a PCI function')
        found = self.properties(disk, at[-1])
        self.assertEqual(
            ('1', '1', '0', '1', '0'), tuple(found.get(name) for name in (
                'NOVA_ACCEL_DISK',
                'UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG', 'SYSTEMD_READY',
                'UDISKS_IGNORE', 'DM_MULTIPATH_DEVICE_PATH')))
        # what blkid would have found
        self.assertEqual([], [name for name in found if name.startswith(
            ('ID_FS_', 'ID_PART_TABLE_'))])
        other = self.properties(disk, '0000:ff:1f.7')
        self.assertNotIn('NOVA_ACCEL_DISK', other)
        self.assertNotEqual('0', other.get('SYSTEMD_READY'))

    def test_no_later_rule_watches_it(self):
        """Not even one of udev's own, in 60-block.rules."""
        with open(RULES) as file:
            self.assertIn('OPTIONS:="nowatch"', file.read().splitlines())
