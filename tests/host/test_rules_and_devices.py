# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the log says of rules and devices when nova-compute starts."""

import ddt

from nova_accel.drivers import rules
from tests.host import base
from tests.unit.host import A, B, vf

NPU = {'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci', 'total_vfs': 2}
NO_DRIVER = (f'matches {A}, which no driver of [accel] enabled_drivers has: '
             f'enable its driver, or name it in [accel] pci_devices.')
NOTHING = 'matches no device that the drivers find: correct or remove it.'


@ddt.ddt
class RulesTest(base.HostTestCase):

    def start(self, drivers, options, **kinds):
        self.start_host(drivers=drivers, **kinds)
        before = len(self.log.output)
        self.config.config(group='accel', **{
            'include_devices': [], **options})
        self.restart()
        return self.log.output[before:]

    # option, rule -> what is said if no driver has the card; the option
    # begins the sentence
    @ddt.data(
        ('include_devices', f'address={A}', NO_DRIVER),
        ('include_devices', 'vendor=19e5', NO_DRIVER),
        ('exclude_devices', 'product=d801', NO_DRIVER),
        ('device_traits', 'vendor=19e5 traits=CUSTOM_X', NO_DRIVER),
        ('handover', 'vendor=19e5=none', NO_DRIVER),
        ('include_devices', f'address={vf(A)}',
         f'matches only VFs, as {vf(A)} of {A}: name the function that has '
         f'them.'),
        ('include_devices', 'vendor=1002', NOTHING),
        ('device_traits', f'address={B} traits=CUSTOM_X', NOTHING),
        # addresses
        ('virtual_functions', f'{A}=2', 'enable its driver.'),
        ('handover', f'{A}=none', 'finds: enable its driver.'),
        ('whole_cards', A, 'finds: enable its driver.'),
        ('whole_cards', B, 'correct the address, or enable its driver.'))
    @ddt.unpack
    def test_card_that_no_driver_has(self, option, rule, said):
        log = self.start(['gpu'], {option: [rule]},
                         others=[{**NPU, 'address': A, 'vfs': 2}])
        line, = [line for line in log.splitlines()
                 if f'[accel] {option} ' in line]
        self.assertTrue(line.endswith(said), line)
        if said is not NOTHING:
            self.assertNotIn('remove', line)

    @ddt.data(
        ('device_traits', f'address={A} traits=CUSTOM_X'),
        ('handover', f'address={A}=none'),
        ('handover', f'{A}=none'))
    @ddt.unpack
    def test_card_that_other_rules_leave_out(self, option, rule):
        self.assertIn(
            f'{A}, which {rules.INCLUDE} and {rules.EXCLUDE} leave out',
            self.start(['qat'], {
                option: [rule], 'include_devices': [f'address={B}']},
                qats=[{'address': A}, {'address': B}]))

    def test_card_that_is_gone(self):
        """Its rule still leaves out the others of its driver, after any number
        of restarts."""
        self.start(['qat'], {'include_devices': [f'address={A}']},
                   qats=[{'address': A}, {'address': B}])
        self.assertEqual([A], [*self.host.inventory.devices])
        self.host.kernel.set_fault(A, vanish=True)
        for _ in range(3):
            self.restart()
            self.host.report()
            self.assertNotIn(B, self.host.inventory.devices)
            self.assertIn(A, self.host.inventory.table.reports.gone())
        self.config.config(group='accel', include_devices=[])
        for _ in range(2):
            self.restart()
            self.host.report()
        self.assertEqual([B], [*self.host.inventory.devices])

    @ddt.data(
        ('vendor=19e5 driver=vfio-pci type=AI',
         f'matches {A} but for its driver, which is davinci: bind the other '
         f'one, or correct the rule.'),
        (f'address={vf(A)} type=AI', f'matches only VFs, as {vf(A)} of {A}: '
                                     f'name the function that has them.'),
        ('vendor=1002 type=AI', 'matches no device of this host: correct or '
                                'remove it.'))
    @ddt.unpack
    def test_pci_devices(self, rule, said):
        self.assertIn(f'[accel] pci_devices = {rule} {said}', self.start(
            ['pci'], {'pci_devices': [rule]},
            others=[{**NPU, 'address': A, 'vfs': 2}]))


class LinesTest(base.HostTestCase):

    TWINS = 'report the same serial number'

    def disks(self, *subsystems):
        """Two with one serial number, on a new host."""
        self.start_host(drivers=['nvme'], nvmes=[
            {'address': address, 'subsystem': name}
            for address, name in zip((A, B), subsystems, strict=True)])
        for address in A, B:
            self.host.kernel.change_disk(address, serial='S1')
        self.lose_store()

    def test_ports_of_one_disk(self):
        """The driver says why it withholds them."""
        self.disks('nqn.one', 'nqn.one')
        self.assertNotIn(self.TWINS, self.log.output)
        self.assertIn('of the same NVM subsystem', self.log.output)

    def test_disks_with_one_serial_number(self):
        self.disks('nqn.one', 'nqn.two')
        self.assertEqual(1, self.log.output.count(self.TWINS))

    def test_withheld_for_one_reason(self):
        """One line for all devices of a board."""
        gpus = [f'0000:{n:02x}:00.0' for n in range(0x30, 0x40)]
        self.start_host(drivers=['gpu'], gpus=[
            {'address': a} for a in gpus])
        self.config.config(include_devices=[f'address={gpus[0]}'],
                           group='accel')
        self.restart()
        self.host.inventory.scanner.scan()
        self.config.config(include_devices=[], group='accel')
        before = self.log.output.count('is not given to servers, because')
        self.restart()
        lines = [line for line in self.log.output.splitlines()
                 if 'is not given to servers, because' in line][before:]
        line, = lines
        self.assertIn(f'Each of {", ".join(gpus)} is not given', line)
        self.assertIn('add address=<its address>, or', line)
