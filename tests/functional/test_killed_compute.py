# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute is killed (SIGKILL) where Nova and we have done half each.

tests.host.test_killed kills at each point, without Nova. Here nova-compute is
Nova's own main(), which finds its own half-done work at its next start: what
is shown is that both halves fit.
"""

import os

import testtools

from tests.functional import base
from tests import threads

if threads.NOVA >= 34:
    from tests.functional import compute_process

CARD, OTHER = '0000:5e:00.0', '0000:5f:00.0'
FPGA = {'resources1:CUSTOM_ACCELERATOR_FPGA': '1'}
#: all cards of a host, with a function that they do not carry
BOTH = {**FPGA, 'resources2:CUSTOM_ACCELERATOR_FPGA': '1',
        'accel1:function_id': base.CRYPTO, 'accel2:function_id': base.CRYPTO,
        'accel:live_migration': 'detach'}
HERE, THERE = 'compute1', 'compute2'
RESIZE = {'resize': {'flavorRef': {**BOTH, 'hw:cpu_policy': 'shared'}}}
LIVE = {'os-migrateLive': {'host': None, 'block_migration': 'auto'}}
#: an operation; the nova-compute that is killed, and another one; the point;
#: hosts whose cards are held after the next start, and those whose guest has
#: them. The soak plays all of them
MOVES = (
    # it has claimed, and no guest has come
    (RESIZE, (THERE, HERE), ('store', 'add', 1), [HERE, THERE], []),
    (LIVE, (THERE, HERE), ('kernel', 'program_dfl_port', 1),
     [HERE, THERE], [HERE]),
    # the guest has ended
    (RESIZE, (HERE, THERE), ('guest', 'destroy', 1), [HERE], []),
    # the guest has gone, without devices
    (LIVE, (HERE, THERE), ('guest', 'migrateToURI3', 1), [HERE, THERE], []),
    ({'rebuild': {}}, (HERE, THERE), ('guest', 'destroy', 1), [HERE], []),
)
SOAK = 'NOVA_ACCEL_SOAK_MINUTES' in os.environ
NOTHING = {'servers': {}, 'guests': {}, 'claims': [], 'used': {}, 'fenced': []}


class KilledComputeTest(testtools.TestCase):

    #: each kill is two starts
    LIMIT = 600

    def setUp(self):
        super().setUp()
        if threads.NOVA < 34:
            self.skipTest('The databases of its harness are in memory.')
        self.compute = compute_process.Processes()
        self.addOnException(lambda _: compute_process.forget())

    def killed(self, *steps, at, **kwargs):
        self.assertRaises(compute_process.Killed, self.compute.run, *steps,
                          kill=at, **kwargs)

    def restart(self, *steps):
        """Start it again: the server, which is deleted at last, leaves
        nothing, and the next one runs.

        :param steps: come first.
        :returns: what is seen after them.
        """
        then, _, left, next_, seen, _, last = self.compute.run(
            *steps, ['seen'], ['delete_all'], ['seen'], ['server', FPGA],
            ['seen'], ['delete_all'], ['seen'])[len(steps):]
        self.assertEqual(NOTHING, left)
        self.assertEqual({next_: 'ACTIVE'}, seen['servers'])
        (server, handle), = seen['claims']
        self.assertEqual((next_, {next_: [handle]}), (server, seen['guests']))
        self.assertEqual(1, len(seen['used']))
        self.assertEqual(NOTHING, last)
        return then

    def boot_that_is_killed(self, *at):
        self.killed(['begin_server', FPGA], at=at)
        then = self.restart()
        # Nova does not take up a build
        self.assertEqual(['ERROR'], [*then['servers'].values()])
        return then

    def test_boot_claimed(self):
        """Nothing of the device is prepared."""
        self.assertEqual(
            {}, self.boot_that_is_killed('store', 'add', 1)['guests'])

    def test_boot_bound(self):
        """The guest is defined, with the device, and does not run."""
        self.assertEqual({}, self.boot_that_is_killed(
            'libvirt', 'defineXML', 1)['guests'])

    def test_boot_started(self):
        """The guest runs, and Nova does not know: it keeps its device."""
        then = self.boot_that_is_killed('guest', 'createWithFlags', 1)
        (server, handle), = then['claims']
        self.assertEqual({server: [handle]}, then['guests'])

    def deletion_that_is_killed(self, *at):
        self.killed(['server', FPGA], ['delete_all'], at=at)
        # Nova takes it up
        self.assertEqual(NOTHING, self.restart(['await_nothing']))

    def test_delete_ended(self):
        """The guest is gone, and its device is not released."""
        self.deletion_that_is_killed('guest', 'destroy', 1)

    def test_delete_released(self):
        """The device is released, and not cleaned."""
        self.deletion_that_is_killed('store', 'update', 1)

    def test_report(self):
        """A card is gone, and Placement is not told."""
        hears, names = self.compute.run(['hears_signals'], ['names'])
        self.assertTrue(hears)
        self.killed(['pull', OTHER], ['report'], ['report'],
                    at=('driver', 'update_provider_tree', 1))
        left, _, _, _, back, seen = self.compute.run(
            ['report'], ['report'], ['names'], ['put_back', OTHER],
            ['report'], ['report'], ['names'], ['seen'])[2:]
        self.assertEqual([], [name for name in left if OTHER in name])
        self.assertEqual((names, NOTHING), (back, seen))

    def test_moves(self):
        """A server leaves with all the cards of its host, or is rebuilt. The
        next server gets all of them."""
        steps = [['enable', THERE]]
        for action, hosts, at, *found in MOVES[:None if SOAK else 2]:
            self.killed(*steps, ['server', BOTH, HERE], ['begin', action],
                        at=at, hosts=hosts)
            steps = [['agree', *found], ['end_move']]
        *_, seen, _ = self.compute.run(
            *steps, ['server', BOTH, HERE], ['delete_all'], ['seen'],
            ['enable', THERE, 'disabled'], hosts=(HERE, THERE))
        self.assertEqual(NOTHING, seen)
