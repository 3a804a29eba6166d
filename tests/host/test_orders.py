# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release: nova-compute releases a claim, or says why it does not.

Orders are written as by the command, beside nova-compute.
"""

import contextlib
import time
from unittest import mock

import ddt

from nova_accel import exception
from nova_accel import model
from nova_accel.store import values
from tests.host import base

DISK = '0000:02:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'
State = values.OrderState


@ddt.ddt
class ReleaseTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': DISK}], drivers=('nvme',))
        self.server = self.boot()
        self.simulated.kernel.write_disk(DISK, 'a secret')
        self.claim, = self.host.holdings.all()

    def boot(self):
        return self.host.boot({f'resources1:{SSD}': '1'},
                              self.host.allocation(resource_class=SSD))

    def order(self, argument=DISK, verb='release'):
        """The answer of nova-compute, which runs."""
        number = self.host.command().give_order(verb, argument)
        ends = time.monotonic() + base.PATIENCE
        while True:
            self.assertLess(time.monotonic(), ends)
            order = self.host.command().withdraw_order(
                number, [State.DONE, State.REFUSED])
            if order.state in (State.DONE, State.REFUSED):
                return order
            time.sleep(0.05)

    def refused(self, *texts, **order):
        answer = self.order(**order)
        self.assertIs(State.REFUSED, answer.state)
        for text in texts:
            self.assertIn(text, answer.answer)
        # one sentence
        self.assertRegex(answer.answer, r'[^.]\.\Z')

    def assertKept(self):
        self.assertEqual([self.claim], self.host.holdings.all())
        self.assertEqual('a secret',
                         self.simulated.kernel.data_of_disk(DISK))

    def goes(self, guest=True, allocation=True, record=True):
        """The server is gone, and this host did not hear of it."""
        if guest:
            self.host.cloud.stop_guest(self.server, undefine=True)
        if allocation:
            self.host.cloud.allocate(self.server, None)
        if record:
            self.host.cloud.delete_server(self.server)

    def test_handle_that_waits(self):
        """Policy operator: the operator has cleaned it. It is offered at
        once, as it is."""
        self.config.config(handover=['operator'], group='accel')
        self.host.delete(self.server)
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        answer = self.order()
        self.assertEqual((State.DONE, f'{DISK} waited for you, and is free.'),
                         (answer.state, answer.answer))
        self.assertEqual('a secret',
                         self.simulated.kernel.data_of_disk(DISK))
        self.assertHas(self.boot(), DISK)
        self.refused('No claim on this host is called', argument='0000:77:00.0')

    @ddt.data(DISK, 'uuid')
    def test_nothing_stands_behind_it(self, name):
        self.goes()
        order = self.order(self.claim.uuid if name == 'uuid' else name)
        self.assertIs(State.DONE, order.state)
        for text in (f'No guest in libvirt has {DISK}',
                     f'allocated nothing of it to {self.server}',
                     f'Nova has no server {self.server}',
                     f'{DISK} is clean and free'):
            self.assertIn(text, order.answer)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('', self.simulated.kernel.data_of_disk(DISK))
        self.assertEqual((), self.host.command().orders())
        self.boot()

    @ddt.unpack
    @ddt.data(
        ('guest', 'the guest of server {} has the device'),
        ('allocation', 'Placement has it allocated'),
        ('record', 'Nova has the server on this host'))
    def test_something_stands_behind_it(self, part, text):
        self.goes(**{part: False})
        self.refused(text.format(self.server), self.server)
        self.assertKept()

    def test_guest_that_has_let_go(self):
        """A guest is there, which nova-compute gives its device again."""
        self.goes(guest=False)
        with self.host.cloud.state() as state:
            state['guests'][self.server]['devices'] = {}
        self.refused('libvirt has the guest of the server')
        self.assertKept()

    def test_guest_of_another_server(self):
        self.goes()
        with self.host.cloud.state() as state:
            state['guests']['strange'] = {
                'running': False, 'devices': {DISK: True}}
        self.refused('the guest of server strange has the device')
        self.assertKept()

    @ddt.data('placement_error', 'libvirt_error')
    def test_not_known(self, error):
        self.goes()
        setattr(self.host.cloud, error,
                exception.PlacementUnavailable('It did not answer.'))
        self.refused('It did not answer.')
        self.assertKept()

    def test_old_self_of_a_server_that_moves(self):
        self.host.migrate_away(self.server)
        self.claim, = self.host.holdings.all()
        self.refused('Placement has it allocated')
        self.assertKept()

    def test_cannot_be_cleaned(self):
        self.goes()
        self.simulated.kernel.set_fault(DISK, format='refused')
        self.refused('belongs to no server, and cannot be offered')
        self.assertEqual([model.ClaimState.DELETING],
                         self.host.states(self.server))
        self.simulated.kernel.set_fault(DISK, format=None)
        order = self.order()
        self.assertIs(State.DONE, order.state)
        self.assertIn('has released', order.answer)
        self.assertEqual('', self.simulated.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.all())

    def test_names_and_verbs_that_are_none(self):
        self.refused("No claim on this host is called '0000:99:00.0'",
                     argument='0000:99:00.0')
        self.refused('does not know melt', verb='melt')
        self.assertKept()

    def test_nova_compute_does_not_run(self):
        """What its command gave up waiting for is not done later."""
        self.goes()
        self.host.parts.close()
        command = self.host.command()
        late, fresh = (command.give_order('release', DISK) for _ in range(2))
        with self.host.command()._transaction() as db:
            since, = db.execute('SELECT since FROM orders WHERE number = ?',
                                (late,)).fetchone()
            boot, seconds = since.split()
            db.execute('UPDATE orders SET since = ? WHERE number = ?',
                       (f'{boot} {float(seconds) - 31}', late))
        taken = []
        self.restart()
        self.host.orders._handlers['release'] = (
            lambda argument: taken.append(argument) or 'done')
        ends = time.monotonic() + base.PATIENCE
        while command.withdraw_order(fresh, []).state is not State.DONE:
            self.assertLess(time.monotonic(), ends)
            time.sleep(0.05)
        self.assertEqual([DISK], taken)
        self.assertIsNone(command.withdraw_order(late, []))

    def test_killed_while_it_carries_one_out(self):
        self.host.orders.close()
        command = self.host.command()
        number = command.give_order('release', DISK)
        self.assertTrue(self.host.store.begin_order(number))
        self.restart()
        order = command.withdraw_order(number, [State.REFUSED])
        self.assertIs(State.REFUSED, order.state)
        self.assertIn('nova-compute ended', order.answer)
        self.assertKept()
        # and what was answered to a command that had ended is not kept
        number = command.give_order('release', DISK)
        command.answer_order(number, State.DONE, 'x')
        self.restart()
        self.assertEqual((), self.host.command().orders())

    def test_clock_is_set(self):
        """An order that a killed command left is void, whatever the clock
        and the boots of the host say, and a fresh one is none the less."""
        self.host.orders.close()
        command, store = self.host.command(), self.host.store
        for clock, boot, moved in (
                (3600, None, False), (-3600, None, False),
                (0, 'another boot', False), (-3600, None, True)):
            number = command.give_order('clean', DISK)
            with command._transaction() as db:
                since, = db.execute(
                    'SELECT since FROM orders WHERE number = ?',
                    (number,)).fetchone()
                own, seconds = since.split()
                if boot is not None or moved:
                    db.execute(
                        'UPDATE orders SET since = ? WHERE number = ?',
                        (f'{boot or own} {float(seconds) - 31 * moved}',
                         number))
            with mock.patch('time.time', return_value=time.time() + clock), (
                    # nova-compute starts soon after its host
                    mock.patch('time.monotonic', return_value=5.0) if boot
                    else contextlib.nullcontext()):
                self.assertEqual(boot is None and not moved,
                                 store.begin_order(number))
            command.withdraw_order(number, list(State))

    def test_withdrawn(self):
        self.host.orders.close()
        command = self.host.command()
        number = command.give_order('release', DISK)
        self.assertIs(State.NEW, command.withdraw_order(
            number, [State.NEW]).state)
        self.assertFalse(self.host.store.begin_order(number))
