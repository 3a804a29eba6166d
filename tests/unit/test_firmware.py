# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Files for guests' xclbins, in a directory as xclmgmt's."""

import fcntl
import os
import stat

import fixtures
import testtools

from nova_accel.host import firmware

A, B = '0000:5e:00.0', '0000:5f:00.0'
ONE, TWO = (firmware.file_name(n * 32, 'abcd' * 8) for n in '12')


class FirmwareTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.place = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'xilinx/xclbins')

    def found(self):
        return {name: self.read(name) for name in os.listdir(self.place)
                if name.endswith('.xclbin')}

    def read(self, name):
        with open(os.path.join(self.place, name), 'rb') as file:
            return file.read()

    def test_name(self):
        """As xclmgmt_xclbin_fetch_and_download() of XRT makes it."""
        self.assertEqual(
            '6250ec80-3f38-4be0-ac90-68bfd3c140a8_'
            '937ed70867cf3350bc06304053f4293c.xclbin',
            firmware.file_name('6250ec803f384be0ac9068bfd3c140a8',
                               '937ed70867cf3350bc06304053f4293c'))
        for function, interface in (('../etc', 'a'), ('1' * 32, '../a'),
                                    ('1' * 32, '')):
            self.assertRaises(ValueError, firmware.file_name, function,
                              interface)

    def test_one_card(self):
        firmware.withdraw(self.place, A)
        self.assertIsNone(firmware.layout(self.place, A))
        firmware.offer(self.place, A, ONE, b'one', b'\1')
        self.assertEqual({ONE: b'one'}, self.found())
        self.assertEqual(b'\1', firmware.layout(self.place, A))
        # other users of the host do not read a project's bitstream
        self.assertEqual(0o600, stat.S_IMODE(os.stat(
            os.path.join(self.place, ONE)).st_mode))
        firmware.offer(self.place, A, TWO, b'two', b'\2')
        self.assertEqual({TWO: b'two'}, self.found())
        firmware.withdraw(self.place, A)
        self.assertEqual({}, self.found())
        self.assertFalse(firmware.is_offered(self.place, TWO))

    def test_two_cards_with_one_file(self):
        for card in (A, B):
            firmware.offer(self.place, card, ONE, b'one', b'\1')
        firmware.offer(self.place, A, TWO, b'two', b'\2')
        self.assertEqual({ONE: b'one', TWO: b'two'}, self.found())
        firmware.withdraw(self.place, B)
        self.assertEqual({TWO: b'two'}, self.found())

    def test_files_of_the_operator(self):
        os.makedirs(self.place)
        for name in (ONE, 'notes.txt'):
            with open(os.path.join(self.place, name), 'wb') as file:
                file.write(b'mine')
        firmware.offer(self.place, A, ONE, b'one', b'\1')
        firmware.withdraw(self.place, A)
        self.assertEqual({ONE: b'mine'}, self.found())
        self.assertIn('notes.txt', os.listdir(self.place))

    def test_killed_between(self):
        """Whatever of a card's file was left, the next offer puts right."""
        firmware.offer(self.place, A, ONE, b'one', b'\1')
        own = os.path.join(self.place, 'nova_accel', A)
        os.unlink(os.path.join(own, ONE))
        with open(os.path.join(own, '.new'), 'wb') as file:
            file.write(b'half')
        self.assertFalse(firmware.is_offered(self.place, ONE))
        firmware.offer(self.place, B, TWO, b'two', b'\2')
        self.assertEqual({TWO: b'two'}, self.found())
        firmware.offer(self.place, A, ONE, b'one', b'\1')
        self.assertEqual({ONE: b'one', TWO: b'two'}, self.found())

    def test_another_process_keeps_the_lock(self):
        firmware.offer(self.place, A, ONE, b'1', b'')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.firmware._SECONDS', 0.1))
        other = os.open(os.path.join(self.place, 'nova_accel'), os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            self.assertRaises(TimeoutError, firmware.withdraw, self.place, A)
        finally:
            os.close(other)
        self.assertEqual({ONE: b'1'}, self.found())
        firmware.withdraw(self.place, A)
        self.assertEqual({}, self.found())
