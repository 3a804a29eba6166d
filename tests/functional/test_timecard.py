# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Time cards reach guests by how well they keep time."""

from nova_accel import naming
from tests.functional import operations

GOOD, OTHER = '0000:02:00.0', '0000:04:00.0'
CLASS = 'CUSTOM_ACCELERATOR_TIMECARD'
LOST = 'LOST @ 2026-11-21T04:12:09'
SYNC, SERIAL, ACCURATE = (
    naming.property_trait('TIMECARD', words) for words in (
        'GNSS_SYNC', 'SERIAL_3C_6D_89_00_12_FE', 'OFFSET_WITHIN_1US'))


class TimecardTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'timecards': [
        {'address': GOOD, 'serial': '3c:6d:89:00:12:fe', 'offset': 120},
        {'address': OTHER, 'gnss': LOST, 'offset': 70000}]}}
    RESOURCE_CLASS = CLASS

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['timecard'], group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def boot_with(self, *traits, **kwargs):
        return self.boot({f'resources1:{CLASS}': '1', **{
            f'trait1:{trait}': 'required' for trait in traits}}, **kwargs)

    def look(self):
        """As nova-compute does by itself, only now."""
        self.parts('compute1').inventory.scanner.scan()
        self.report()
        return self.traits(f'compute1_accel_{GOOD}')

    def test_accuracy_by_trait(self):
        for traits in ((SYNC, ACCURATE), (SERIAL,)):
            server = self.boot_with(*traits)
            self.assertEqual([('compute1', GOOD)], self.assertHas(server))
            # a guest has it: what it is stays, how it is nobody knows
            seen = self.look()
            self.assertIn(SERIAL, seen)
            self.assertFalse({SYNC, ACCURATE} & seen)
            self._reboot_server(server, hard=True)
            self.assertHas(server)
            failed = self.boot_with(*traits, expected_state='ERROR')
            self.assertIn('No valid host', self.fault(failed))
            self.delete_servers()
            self.assertLessEqual({SYNC, ACCURATE, SERIAL}, self.look())
        usages = [tree[2] for tree in self.provider_tree().values()]
        self.assertEqual([{CLASS: 0}] * 2, usages)
