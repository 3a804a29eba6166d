# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A card under XRT between two servers: what is done, in which order, and that
each step can fail."""

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests.host import handovers
from tests.unit.host import FUNCTION, OTHER, plain, SHELL

#: of the clearing images
BLANK = 'cccccccc-0000-4000-8000-000000000000'
RESET = 'reset of the dynamic region'
SECRET = 'the key of the tenant'


class HandOverTest(handovers.MailboxTestCase):

    WHOLE = False

    def setUp(self):
        super().setUp()
        #: what was done with the card: 'reset', or an UUID that was programmed
        self.done = []
        kernel = self.host.kernel
        program, write = kernel.program_xclbin, kernel.write_attribute

        def programs(*args):
            program(*args)
            self.done.append(kernel.loaded_xclbin(self.MANAGEMENT))

        def writes(address, attribute, value):
            write(address, attribute, value)
            if (address, attribute, value) == (
                    self.MANAGEMENT, 'mgmt_reset', '2'):
                self.done.append('reset')
        kernel.program_xclbin, kernel.write_attribute = programs, writes

    def clearing(self, what, **image):
        return self.upload(BLANK, **{
            'accel:clears': what, 'accel:region_type_id': SHELL, **image})

    def has(self, specs=base.ONE, image=None):
        """A server that has written into its region."""
        server = self.host.boot(
            specs, self.host.allocation(),
            {'accel:bitstream_id': image} if image else None)
        self.host.kernel.guest_writes(self.USER, registers=SECRET)
        self.done.clear()
        return server

    def tenants(self):
        """A server with an image of its project."""
        return self.has(base.asks(runtime_programming='true'), self.upload(
            OTHER, visibility='private', owner=clouds.PROJECT))

    def assertDone(self, result, method, *done):
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([*done], self.done)
        record = self.host.store.handovers()[-1]
        self.assertEqual((result, method), (record.result, record.method))
        self.host.boot(base.ONE, self.host.allocation())
        self.assertEqual({}, self.host.kernel.guest_reads(self.USER))

    def assertFenced(self, *words):
        """It is said once, however often it is tried."""
        for _ in range(2):
            claim, = self.host.holdings.being_released()
            for word in words:
                self.assertIn(word, claim.error)
            self.assertRaises(exception.DeviceUnavailable, self.host.boot,
                              base.ONE, self.host.allocation())
            self.assertEqual(0, self.host.reconciler.run())
        self.assertEqual(1, self.log.output.count('not given to another'))
        self.host.report()
        self.assertEqual(
            [f'host_accel_{self.MANAGEMENT}_region0'],
            [name for name in self.host.fenced() if 'region' in name])
        self.assertNotIn(
            'clean', [record.result for record
                      in self.host.store.handovers()])

    def heal(self, **fault):
        self.host.kernel.set_fault(
            self.MANAGEMENT, **dict.fromkeys(fault))
        self.host.inventory.scanner.scan()
        self.assertEqual(1, self.host.reconciler.run())

    def test_function_without_an_image_is_reset(self):
        self.host.delete(self.has())
        self.assertDone(values.MEMORY_KEPT, RESET, 'reset')

    def test_user_function_that_does_not_come_back(self):
        exists = self.host.kernel.exists
        self.host.kernel.exists = lambda path: exists(path) and not (
            self.done and path == pci.path(self.USER))
        self.host.delete(self.has())
        self.assertEqual(['reset'], self.done)
        self.assertFenced(f'its user function {self.USER} is missing')

    def test_versal_is_not_reset(self):
        """The attribute of XRT does nothing there, and is not counted."""
        versal = self.host.kernel.read

        def read(path):
            return '1' if path.endswith('/versal') else versal(path)
        self.host.kernel.read = read
        server = self.has()
        self.host.delete(server)
        self.assertEqual([], self.done)
        self.assertFenced('cannot reset the region of a Versal')
        self.clearing('registers')
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual(1, len(self.done))
        self.host.boot(base.ONE, self.host.allocation())
        self.assertEqual({}, self.host.kernel.guest_reads(self.USER))

    def test_gate_that_does_not_close(self):
        """The reset answers that all is well, and does nothing: only another
        function takes away what the server has left."""
        self.host.kernel.set_fault(self.MANAGEMENT, locked=True)
        self.host.delete(self.has())
        self.assertEqual(['reset'], self.done)
        self.host.report()
        second = self.host.boot(base.ONE, self.host.allocation())
        self.assertEqual({'registers': SECRET},
                         self.host.kernel.guest_reads(self.USER))
        self.clearing('memory')
        self.host.delete(second)
        self.host.report()
        self.host.boot(base.ONE, self.host.allocation())
        self.assertEqual({}, self.host.kernel.guest_reads(self.USER))

    def test_policy_reset(self):
        """What a project has loaded stays, and the record says so."""
        self.config.config(handover=['reset'], group='accel')
        self.clearing('registers')
        self.host.delete(self.tenants())
        self.assertEqual(plain(OTHER),
                         self.host.kernel.loaded_xclbin(self.MANAGEMENT))
        self.assertDone('reset only', RESET, 'reset')

    def test_memory_is_cleared_before_the_operators_image(self):
        clearing = self.clearing('memory')
        self.host.delete(self.has(base.asks(FUNCTION)))
        self.assertDone(
            'clean', f'memory cleared with image {clearing}, programmed again '
                     f'with image {self.image}', plain(BLANK), plain(FUNCTION))
        self.assertEqual(self.image, self.region().bitstream_id)

    def test_project_is_cleared(self):
        self.clearing('registers', visibility='private', owner=clouds.PROJECT)
        clearing = self.clearing('registers')
        self.host.delete(self.tenants())
        self.assertDone(values.MEMORY_KEPT, f'cleared with image {clearing}',
                        plain(BLANK))
        self.assertEqual(model.OPERATOR, self.region().origin)

    def test_card_that_does_not_come_back_from_its_reset(self):
        server = self.has()
        self.host.kernel.set_fault(self.MANAGEMENT, reset_kills=True)
        self.host.delete(server)
        self.assertFenced('had to be reset', 'does not answer')
        self.assertEqual(['reset'], self.done)
        self.heal(reset_kills=True, dead=True)
        self.assertDone(values.MEMORY_KEPT, RESET, 'reset', 'reset')

    def test_driver_that_is_offline_after_the_reset(self):
        server = self.has()
        write = self.host.kernel.write_attribute

        def writes(*args):
            write(*args)
            self.host.kernel.set_fault(
                self.MANAGEMENT, attributes={'dev_offline': '1'})
        self.host.kernel.write_attribute = writes
        self.host.delete(server)
        self.assertFenced('had to be reset', 'offline')
        self.host.kernel.write_attribute = write
        self.heal(attributes={})
        self.assertDone(values.MEMORY_KEPT, RESET, 'reset', 'reset')

    def test_clearing_that_fails(self):
        server = self.tenants()
        clearing = self.clearing('registers')
        self.host.kernel.set_fault(self.MANAGEMENT, program_error='EIO')
        self.host.delete(server)
        self.assertFenced('had to be programmed', 'the card failed (EIO)')
        self.heal(program_error='EIO')
        self.assertDone(values.MEMORY_KEPT, f'cleared with image {clearing}',
                        plain(BLANK))

    def test_memory_that_cannot_be_cleared(self):
        """The operator's image is not programmed before."""
        server = self.has(base.asks(FUNCTION))
        self.clearing('memory')
        self.host.kernel.set_fault(self.MANAGEMENT, program_error='EIO')
        self.host.delete(server)
        self.assertFenced('had to be programmed', 'the card failed (EIO)')
        self.assertEqual([], self.done)
        self.heal(program_error='EIO')
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([plain(BLANK), plain(FUNCTION)], self.done)

    def test_clearing_xclbin_for_another_shell(self):
        server = self.tenants()
        with open(f'{self.directory}/other', 'wb+') as file:
            base.sim.make_xclbin(file.name, BLANK, OTHER)
            self.host.cloud.upload(file.read(), **{
                'accel:clears': 'registers', 'accel:region_type_id': SHELL})
        self.host.delete(server)
        self.assertFenced(OTHER)
        self.assertEqual(plain(OTHER),
                         self.host.kernel.loaded_xclbin(self.MANAGEMENT))
