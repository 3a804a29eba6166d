# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Claims go through their states by name, and by no other way."""

import itertools
import os
import pathlib

import fixtures
import testtools

from nova_accel.attach import holdings
from nova_accel import exception
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import file as store_file
from tests.unit import tables
from tests.unit.claims import claim

State = model.ClaimState
#: of claims that callers see
SEEN = [state for state in State if state is not State.WAITING]
#: (name of the transition, how it is called)
CALLS = (
    ('provisioning', lambda h, c: h.provisioning([c])),
    ('bound', lambda h, c: h.bound([c], None)),
    ('bound', lambda h, c: h.bound_as_before([c])),
    ('doubt', lambda h, c: h.doubt([c], 'why')),
    ('not_ready', lambda h, c: h.not_ready([c], 'why')),
    ('releasing', lambda h, c: h.releasing([c])),
    ('released', lambda h, c: h.released([c])),
    ('waiting', lambda h, c: h.await_operator(c)),
)
PAGE = pathlib.Path(__file__).parents[2] / (
    'docs/source/contributor/architecture.rst')


class HoldingsTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(':memory:')
        self.holdings = holdings.Holdings(self.store)

    def test_transitions(self):
        for (name, go), state in itertools.product(CALLS, SEEN):
            leaves, leads = holdings.TRANSITIONS[name]
            one = claim(state=state)
            self.store.add([one])
            if state in leaves:
                go(self.holdings, one)
                self.assertEqual(
                    [] if leads is None else [leads], [
                        c.state for c in self.store.all_claims()])
            else:
                error = self.assertRaises(
                    exception.IllegalTransition, go, self.holdings, one)
                self.assertIn(state.value, str(error))
                self.assertEqual([one], self.store.claims())
            self.store.remove([one, *self.store.all_claims()])

    def test_the_page_has_the_same_table(self):
        def name(states):
            return ('any of those' if {*SEEN} == states else
                    ', '.join(s.name for s in State if s in states))
        self.assertEqual(
            [['claim', '', 'INITIAL'], *(
                [transition, name(leaves), to.name if to else 'the claim ends']
                for transition, (leaves, to) in holdings.TRANSITIONS.items())],
            tables.rows(PAGE.read_text(), 'Transition'))

    def test_cards_are_remembered_at_once(self):
        """By a commit of the file, which waits for the disk, for all claims
        of a host that starts."""
        statements = []
        connect = store_file.sqlite3.connect

        def watched(*args, **kwargs):
            connection = connect(*args, **kwargs)
            connection.set_trace_callback(statements.append)
            return connection
        self.useFixture(fixtures.MonkeyPatch(
            f'{store_file.__name__}.sqlite3.connect', watched))
        store = claim_store.ClaimStore(os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.db'))
        claims = [claim(handle=model.AttachHandle(
            model.HandleType.PCI, f'0000:{number:02x}:00.1'))
            for number in range(8)]
        store.add(claims)
        found = holdings.Holdings(store)
        del statements[:]
        found.remember_cards([(one, {'serial': f'S{number}'})
                              for number, one in enumerate(claims)])
        self.assertEqual(1, sum(text.startswith('COMMIT')
                                for text in statements), statements)
        self.assertEqual({one.uuid: f'S{number}' for number, one in
                          enumerate(claims)},
                         {one.uuid: one.serial for one in store.claims()})
        del statements[:]
        found.remember_cards([])
        self.assertEqual([], statements)

    def test_what_waits(self):
        """It is of no server, and nothing happens to it by its claim."""
        one = claim(state=State.DELETING, project_id='p', prepared=True)
        self.store.add([one])
        self.holdings.await_operator(one)
        waits, = self.store.all_claims()
        self.assertEqual(
            (State.WAITING, one.handle, one.part, '', '', None, False), (
                waits.state, waits.handle, waits.part, waits.instance_uuid,
                waits.consumer_uuid, waits.project_id, waits.prepared))
        # a second thread that released it comes too late
        for go in (self.holdings.await_operator, lambda c: (
                self.holdings.released([c]), self.holdings.releasing([c]),
                self.holdings.keep_error(c, 'why'))):
            go(one)
            self.assertEqual((waits,), self.store.all_claims())
        # no server gets it
        self.assertRaises(exception.ClaimConflict,
                          self.holdings.claim, [claim()])
        # until what was lost is found, or cleaned
        found = claim(state=State.BOUND)
        self.holdings.settle(claims=[found])
        self.assertEqual((found,), self.store.all_claims())

    def test_what_a_driver_remembers(self):
        """Its release() is called from then on; a claim that ends without a
        release takes nothing."""
        for state, prepared in itertools.product(SEEN, (False, True)):
            one = claim(state=state, prepared=prepared)
            self.store.add([one])
            if state is State.DELETING and not prepared:
                error = self.assertRaises(exception.DeviceUnavailable,
                                          self.holdings.remember, one, '1')
                self.assertIn('has released it meanwhile', str(error))
                self.assertEqual([one], self.store.claims())
            else:
                self.holdings.remember(one, '1')
                now, = self.store.claims()
                self.assertEqual(('1', True), (now.driver_memory, now.prepared))
            self.store.remove([one])
            self.assertRaises(exception.DeviceUnavailable,
                              self.holdings.remember, one, '1')

    def test_state_is_that_of_now(self):
        """What a caller read before does not count."""
        one = claim(state=State.BOUND)
        self.store.add([one])
        self.holdings.releasing([one])
        self.assertRaises(exception.IllegalTransition,
                          self.holdings.bound, [one], None)

    def test_claim_that_has_ended(self):
        one = claim()
        self.assertRaises(exception.IllegalTransition,
                          self.holdings.bound, [one], None)
        self.assertEqual([], self.holdings.releasing([one]))
        self.holdings.released([one])

    def test_all_or_none(self):
        two = [claim(state=State.BOUND), claim(
            state=State.DELETING, handle=model.AttachHandle(
                model.HandleType.PCI, '0000:af:00.0'))]
        self.store.add(two)
        self.assertRaises(exception.IllegalTransition,
                          self.holdings.doubt, two, 'why')
        self.assertEqual({State.BOUND, State.DELETING},
                         {c.state for c in self.store.claims()})

    def test_what_is_lost_is_not_held(self):
        one = claim(state=State.BOUND)
        self.store.add([one])
        self.assertEqual([one], self.holdings.of(one.instance_uuid))
        self.holdings.releasing([one])
        self.assertEqual([], self.holdings.of(one.instance_uuid))
        self.assertEqual(
            [one.uuid], [c.uuid for c in self.holdings.being_released()])

    def test_moves(self):
        one = claim(state=State.BOUND)
        server = one.instance_uuid
        self.store.add([one])
        self.holdings.set_aside(server, 'migration')
        self.assertEqual([], self.holdings.of(server))
        old, = self.holdings.of(server, model.Role.OLD)
        self.assertEqual('migration', old.consumer_uuid)
        self.assertEqual([], self.holdings.of_migration(server, 'other'))
        # in one step with the end of what it has got meanwhile
        two = claim(server, state=State.BOUND, handle=model.AttachHandle(
            model.HandleType.PCI, '0000:af:00.0'))
        self.store.add([two])
        lost = self.holdings.revert(
            server, self.holdings.of_migration(server, 'migration'))
        self.assertEqual([one], self.holdings.of(server))
        self.assertEqual([(two.uuid, State.DELETING)],
                         [(c.uuid, c.state) for c in lost])

    def test_kept_on_error(self):
        """What was bound stays so; what never was is in doubt."""
        for before, after in ((State.BOUND, State.BOUND),
                              (State.PROVISIONING, State.UNKNOWN)):
            one = claim(state=before)
            self.store.add([one])

            def fail():
                with self.holdings.kept_on_error([one]):
                    self.holdings.provisioning([one])
                    raise ValueError('the card is on fire')
            self.assertRaises(ValueError, fail)
            now, = self.store.claims()
            self.assertEqual((after, 'the card is on fire'),
                             (now.state, now.error))
            self.store.remove([one])
