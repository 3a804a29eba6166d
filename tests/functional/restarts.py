# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A server with a function and with a disk, whose guest starts again."""

from nova_accel import model
from tests.functional import base
from tests.functional import operations

FPGA, VF, DISK = '0000:5e:00.0', '0000:5e:00.1', '0000:02:00.0'
SECRET = 'data of the tenant'
#: what a claim may be when nova-compute ends at any point of a preparation
HALF_DONE = (model.ClaimState.UNKNOWN, model.ClaimState.PROVISIONING,
             model.ClaimState.INITIAL)


class RestartTestBase(operations.OperationsTestBase):
    """A server with a function and with a disk, which a release erases."""

    HOSTS = {'compute1': {'cards': [base.card(FPGA, [base.NLB0])],
                          'nvmes': [{'address': DISK}]}}
    FLAVOR = {**base.fpga_flavor(function_id=base.CRYPTO),
              'resources2:CUSTOM_ACCELERATOR_SSD': '1',
              'group_policy': 'none'}

    def setUp(self):
        super().setUp()
        self.server = self.boot(
            self.FLAVOR, image_uuid=self.glance.guest_image)
        self.before = self.held(self.server)
        self.assertEqual([('compute1', DISK), ('compute1', VF)],
                         self.before)
        self.simulated('compute1').write_disk(DISK, SECRET)

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['dfl', 'nvme'], group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def leave(self, state):
        """What a crash leaves of the claims."""
        store = self.parts('compute1').store
        store.update(store.claims(), state=state)

    def act(self, action, **more):
        """Ask for an operation; wait for its end, good or bad."""
        self.api.post_server_action(self.server['id'], {action: more or None})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})

    def assertKept(self):
        """The server holds what it held, and its data are there."""
        self.assertEqual(self.before, self.held(self.server))
        self.assertEqual(
            SECRET, self.simulated('compute1').data_of_disk(DISK))

    def assertDown(self):
        self.assertKept()
        self.assertEqual([], [
            d.UUIDString() for d in self.guests('compute1') if d.isActive()])

    def assertUp(self):
        """The guest runs, with all that the server holds."""
        self.assertKept()
        self.assertTrue(self.domain(self.server).isActive())
        self.assertEqual(sorted((VF, DISK)), self.hostdevs(self.server))
        self.assertFunction([('compute1', VF)], self.function)
        self.assertEqual(
            {model.ClaimState.BOUND}, {c.state for c in self.claims()})

    def mend(self):
        """What the owner does when Placement answers again."""
        self.act('reboot', type='HARD')
        self._wait_for_state_change(self.server, 'ACTIVE')
        self.assertUp()
